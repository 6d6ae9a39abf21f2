//! Mounts, in all visible mount namespaces.

use std::collections::BTreeSet;

use crate::Root;

/// One line of mountinfo, or of /proc/mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    /// `major:minor`; an anonymous number for btrfs and similar, empty if unknown.
    pub(super) number: String,
    pub(super) source: String,
    /// Further devices that its options name, such as an external log.
    pub(super) others: Vec<String>,
    pub(super) target: String,
    pub(super) fs: String,
    /// A process in its namespace, if that is not our own.
    pub(super) pid: Option<u32>,
}

/// Returns the mounts of our namespace, then those found only in others.
pub(super) fn read(root: &Root) -> Vec<Mount> {
    let mut mounts = match root.text("/proc/self/mountinfo") {
        Some(text) => text.lines().filter_map(mountinfo).collect(),
        None => Vec::new(),
    };
    // Copies of /proc contain this one more often.
    let plain = ["/proc/self/mounts", "/proc/mounts"].iter().find_map(|path| root.text(path));
    for mount in plain.iter().flat_map(|text| text.lines()).filter_map(plain_mount) {
        let known = |other: &Mount| other.source == mount.source && other.target == mount.target;
        if !mounts.iter().any(known) {
            mounts.push(mount);
        }
    }
    let mut seen: BTreeSet<String> = root.link("/proc/self/ns/mnt").into_iter().collect();
    for pid in root.names("/proc").iter().filter_map(|name| name.parse::<u32>().ok()) {
        let Some(namespace) = root.link(format!("/proc/{pid}/ns/mnt")) else { continue };
        if !seen.insert(namespace) {
            continue;
        }
        let text = root.text(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
        for mount in text.lines().filter_map(mountinfo) {
            let known =
                |other: &Mount| other.number == mount.number && other.source == mount.source;
            if !mounts.iter().any(known) {
                mounts.push(Mount { pid: Some(pid), ..mount });
            }
        }
    }
    mounts
}

/// Parses `36 35 98:0 /sub /mnt rw,noatime shared:1 - ext3 /dev/root rw`.
fn mountinfo(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let left: Vec<&str> = left.split(' ').collect();
    let mut right = right.split(' ');
    Some(Mount {
        number: (*left.get(2)?).to_owned(),
        target: unescaped(left.get(4)?),
        fs: right.next()?.to_owned(),
        source: unescaped(right.next()?),
        others: right.next().map(devices).unwrap_or_default(),
        pid: None,
    })
}

/// Parses `/dev/sda1 / ext4 rw 0 0`.
fn plain_mount(line: &str) -> Option<Mount> {
    let mut fields = line.split(' ');
    Some(Mount {
        number: String::new(),
        source: unescaped(fields.next()?),
        target: unescaped(fields.next()?),
        fs: fields.next()?.to_owned(),
        others: fields.next().map(devices).unwrap_or_default(),
        pid: None,
    })
}

/// Returns the devices that options name: `rw,logdev=/dev/nvme0n1p2`.
fn devices(options: &str) -> Vec<String> {
    let values = options.split(',').filter_map(|option| Some(option.split_once('=')?.1));
    values.filter(|value| value.starts_with("/dev/")).map(unescaped).collect()
}

impl Mount {
    /// Returns the paths of its devices. The source of a bcachefs is all of them: `/dev/a:/dev/b`.
    pub(super) fn devices(&self) -> impl Iterator<Item = String> + '_ {
        let parts = self.source.split(":/").enumerate();
        let parts = parts.map(|(at, part)| match at {
            0 => part.to_owned(),
            _ => format!("/{part}"),
        });
        parts.chain(self.others.iter().cloned())
    }
}

/// Decodes octal escapes: a space is `\040` in these files.
pub(super) fn unescaped(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let octal = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(byte) => {
                whole.push(char::from(byte));
                whole.push_str(&part[3..]);
            }
            None => {
                whole.push('\\');
                whole.push_str(part);
            }
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_mounts() {
        let line = r"36 35 259:2 / /mnt/a\040b rw shared:1 master:2 - ext4 /dev/nvme0n1p1 rw";
        let mount = mountinfo(line).unwrap();
        assert_eq!((mount.number.as_str(), mount.target.as_str()), ("259:2", "/mnt/a b"));
        assert_eq!((mount.fs.as_str(), mount.source.as_str()), ("ext4", "/dev/nvme0n1p1"));
        assert_eq!(plain_mount("/dev/sda1 / ext4 rw 0 0").unwrap().target, "/");
        let devices = |line: &str| plain_mount(line).unwrap().devices().collect::<Vec<_>>();
        assert_eq!(devices("/dev/a:/dev/b / bcachefs rw 0 0"), ["/dev/a", "/dev/b"]);
        let path = "/dev/disk/by-path/pci-0000:65:00.0-nvme-1";
        assert_eq!(devices(&format!("{path} / xfs rw,logdev=/dev/c 0 0")), [path, "/dev/c"]);
        assert_eq!((mountinfo("x"), plain_mount("x")), (None, None));
        assert_eq!(unescaped(r"a\b\040"), r"a\b ");
    }
}
