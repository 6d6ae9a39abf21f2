//! The files that bind a drive again at each boot.
//!
//! A systemd unit runs `nvme-bind bind` with all its checks and the serial number of the drive.
//! Only the kernel's driver can read that number from the drive, so it owns the drive first: if a
//! different drive is in the slot, even of the same model, that driver keeps it. A udev rule starts
//! the unit as soon as the kernel's driver reports the drive with that number.
//!
//! Root runs the unit's program at each boot, so only root may be able to change it.

use crate::drive::Drive;
use crate::journal::Record;
use crate::owner::Owner;
use crate::pci::Root;
use crate::pci::{PciAddress, VFIO};
use crate::plan::Step;
use crate::problem::{Problem, Result};

const MODULES: &str = "/etc/modules-load.d/nvme-bind.conf";
const RULES: &str = "/etc/udev/rules.d";
const UNITS: &str = "/etc/systemd/system";
const HEADER: &str = "# Written by nvme-bind; `nvme-bind restore --persist` removes it.";

/// Arguments of the unit's command other than the drive.
#[derive(Debug)]
pub(crate) struct Boot<'a> {
    pub(crate) exe: &'a str,
    pub(crate) state_dir: Option<&'a str>,
    pub(crate) serial: &'a str,
    pub(crate) owner: Option<Owner>,
    pub(crate) whole_group: bool,
}

/// Rejects a program that anyone but root can change or replace: the file, or a parent directory.
///
/// # Errors
/// Returns [`Problem`] with the first path that is not under root's control.
pub(crate) fn check_program(root: &Root, exe: &str) -> Result<()> {
    // In a copy of a machine, everything belongs to the user who made the copy.
    let ours = if root.is_real() { Some(0) } else { root.owner("/").map(|owner| owner.0) };
    let refused = |path: &str, why: String| {
        Problem::usage(
            format!("--persist: root would run {exe} at each boot, and {path} {why}"),
            "copy the program to where only root can write, such as /usr/local/sbin, and run that",
        )
    };
    if !exe.starts_with('/') {
        return Err(refused(exe, "is not an absolute path".to_owned()));
    }
    let mut path = String::new();
    for part in exe.split('/') {
        path = if path.ends_with('/') { path + part } else { format!("{path}/{part}") };
        let Some((uid, gid, mode)) = root.owner(&path) else {
            return Err(refused(&path, "is not there".to_owned()));
        };
        if Some(uid) != ours {
            return Err(refused(&path, format!("belongs to user {uid}")));
        }
        if mode & 0o002 != 0 || (mode & 0o020 != 0 && gid != 0) {
            return Err(refused(&path, format!("can be written to by others (mode {mode:04o})")));
        }
    }
    Ok(())
}

/// Returns the steps that write all files for `drive`.
pub(crate) fn files(drive: &Drive, boot: &Boot<'_>) -> Vec<Step> {
    let bdf = drive.function.bdf;
    let put = |path: String, body: String| Step::Put {
        path,
        contents: format!("{HEADER}\n{body}"),
        mode: 0o644,
    };
    let rule = format!(
        "ACTION==\"add\", SUBSYSTEM==\"nvme\", KERNELS==\"{bdf}\", ATTR{{serial}}==\"{}\", \
         TAG+=\"systemd\", ENV{{SYSTEMD_WANTS}}+=\"{}.service\"\n",
        pattern(boot.serial),
        stem(bdf)
    );
    vec![
        put(MODULES.into(), format!("{VFIO}\nvfio_iommu_type1\n")),
        put(format!("{RULES}/60-{}.rules", stem(bdf)), rule),
        put(format!("{UNITS}/{}.service", stem(bdf)), unit(bdf, boot)),
        Step::Link {
            path: format!("{UNITS}/multi-user.target.wants/{}.service", stem(bdf)),
            target: format!("../{}.service", stem(bdf)),
        },
    ]
}

/// Returns steps to remove the files of `paths` that no other record needs.
pub(crate) fn unshared(paths: Vec<String>, bdf: PciAddress, records: &[Record]) -> Vec<Step> {
    let others = records.iter().filter(|record| record.bdf != bdf);
    let others: Vec<String> = others.flat_map(Record::kept).collect();
    let mut own = paths;
    own.retain(|path| !others.contains(path));
    // The link is removed before the unit it points to.
    own.sort_by_key(|path| !path.contains(".wants/"));
    own.into_iter().map(|path| Step::Remove { path }).collect()
}

/// Returns a file and unit name without colons, which systemd would require to be escaped.
fn stem(bdf: PciAddress) -> String {
    format!("nvme-bind-{}", bdf.to_string().replace([':', '.'], "-"))
}

fn unit(bdf: PciAddress, boot: &Boot<'_>) -> String {
    let option = |name: &str, value: Option<String>| match value {
        Some(value) => format!(" --{name} {value}"),
        None => String::new(),
    };
    let id = |id: Option<u32>| id.map(|id| id.to_string());
    let mut arguments = format!("bind {bdf}");
    arguments += &option("expect-serial", Some(quoted(boot.serial)));
    arguments += &option("user", id(boot.owner.and_then(|owner| owner.uid)));
    arguments += &option("group", id(boot.owner.and_then(|owner| owner.gid)));
    if boot.whole_group {
        arguments += " --whole-group";
    }
    arguments += &option("state-dir", boot.state_dir.map(quoted));
    // After the mounts: a drive mounted by fstab is then in use, and left alone.
    format!(
        "[Unit]\n\
         Description=Hand the NVMe drive {bdf} to VFIO\n\
         After=systemd-modules-load.service systemd-udev-settle.service local-fs.target\n\
         \n\
         [Service]\n\
         Type=oneshot\n\
         RemainAfterExit=yes\n\
         ExecStart={} {arguments}\n\
         \n\
         [Install]\n\
         WantedBy=multi-user.target\n",
        quoted(boot.exe)
    )
}

/// Formats text for udev, whose values are patterns: characters that could be special become `?`.
/// The unit compares the exact value.
fn pattern(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.: ".contains(&byte);
    let shown = |byte: u8| if plain(byte) { char::from(byte) } else { '?' };
    text.bytes().map(shown).collect()
}

/// Quotes text for systemd, which expands `%` and `$` and parses quotes, backslashes and `\xHH` as
/// C does. A line break in a drive's serial number must not start a new line of the unit.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:+".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    let mut quoted = String::new();
    for c in text.chars() {
        match c {
            '\\' | '"' => quoted.extend(['\\', c]),
            '%' | '$' => quoted.extend([c, c]),
            c if c.is_control() => {
                for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                    quoted += &format!("\\x{byte:02x}");
                }
            }
            c => quoted.push(c),
        }
    }
    format!("\"{quoted}\"")
}
