//! Signatures on a device: inactive members of RAIDs, volume groups and pools, and filesystems.
//! Read from the device, or else from udev's database.

use super::{Kind, Use};
use crate::drive::Block;
use crate::pci::Root;

/// The start of a device, long enough for the formats below.
const HEAD_BYTES: usize = 256 << 10;
/// Magic of an md superblock at the end (versions 0.90 and 1.0).
const MD_MAGIC: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();
/// Magic of a ZFS uberblock (`0x00bab10c`), in the byte order of its writer.
const UBERBLOCK: u64 = 0x00ba_b10c;

/// A format, the offset of its magic, and the magic.
const MARKS: &[(&str, usize, &[u8])] = &[
    ("md RAID", 0, &MD_MAGIC),
    ("md RAID", 4096, &MD_MAGIC),
    ("LVM", 0, b"LABELONE"),
    ("LVM", 512, b"LABELONE"),
    ("LVM", 1024, b"LABELONE"),
    ("LVM", 1536, b"LABELONE"),
    ("bcache", 4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    ("LUKS", 0, b"LUKS\xba\xbe"),
    ("btrfs", 0x1_0040, b"_BHRfS_M"),
    ("XFS", 0, b"XFSB"),
    ("ext4", 0x438, b"\x53\xef"),
    ("f2fs", 0x400, b"\x10\x20\xf5\xf2"),
    ("swap", 4086, b"SWAPSPACE2"),
    ("partition table", 512, b"EFI PART"),
    ("partition table", 4096, b"EFI PART"),
];

const MEMBERS: &[&str] = &["md RAID", "LVM", "ZFS", "bcache"];

/// Returns the signature found, or the reason why the device could not be read.
pub(super) fn uses(root: &Root, block: &Block) -> (Vec<Use>, Option<String>) {
    let (format, blind) = match format(root, block) {
        Ok(format) => (format, None),
        Err(error) => match from_udev(root, block) {
            Some(format) => (Some(format), None),
            None => (None, Some(format!("what /dev/{} holds: {error}", block.name))),
        },
    };
    let found = format.map(|(format, label)| {
        let pool = label.as_deref().filter(|_| format == "ZFS");
        let imported = pool.is_some_and(|pool| root.exists(format!("/proc/spl/kstat/zfs/{pool}")));
        let kind = match MEMBERS.contains(&format.as_str()) {
            true if imported => Kind::Zfs,
            true => Kind::Member,
            false => Kind::Data,
        };
        let label = label.map(|label| format!(" {label}")).unwrap_or_default();
        let by =
            if imported { label.trim_start().to_owned() } else { format!("({format}{label})") };
        Use::new(kind, block.name.clone(), by)
    });
    (found.into_iter().collect(), blind)
}

type Format = (String, Option<String>);

fn format(root: &Root, block: &Block) -> std::io::Result<Option<Format>> {
    let path = format!("/dev/{}", block.name);
    let head = root.bytes(&path, 0, HEAD_BYTES)?;
    if let Some(pool) = zfs_pool(&head) {
        return Ok(Some(("ZFS".into(), pool)));
    }
    let mark = MARKS.iter().find(|(_, at, mark)| head.get(*at..*at + mark.len()) == Some(*mark));
    if let Some((name, ..)) = mark {
        return Ok(Some(((*name).into(), None)));
    }
    // 0.90: at the last but one multiple of 64 KiB. 1.0: at 8 to 12 KiB from the end.
    let old = (block.bytes & !0xffff).checked_sub(64 << 10);
    let new = block.bytes.checked_sub(8 << 10).map(|at| at & !0xfff);
    for at in [old, new].into_iter().flatten() {
        if root.bytes(&path, at, 4)? == MD_MAGIC {
            return Ok(Some(("md RAID".into(), None)));
        }
    }
    Ok(None)
}

/// Returns `Some` for a ZFS label; the inner value is the pool's name, if readable.
fn zfs_pool(head: &[u8]) -> Option<Option<String>> {
    let ring = head.get(128 << 10..256 << 10)?;
    let is_uberblock = |slot: &[u8]| {
        let magic = slot.first_chunk().copied().unwrap_or_default();
        [u64::from_le_bytes(magic), u64::from_be_bytes(magic)].contains(&UBERBLOCK)
    };
    if !ring.chunks(1024).any(is_uberblock) {
        return None;
    }
    // An XDR list: a name with its length, then type, count, and the string with its length.
    let list = head.get(16 << 10..128 << 10)?;
    let key = b"\0\0\0\x04name";
    let at = list.windows(key.len()).position(|window| window == key);
    let value = at.and_then(|at| list.get(at + key.len() + 8..));
    let len = value.and_then(|value| Some(u32::from_be_bytes(*value.first_chunk()?) as usize));
    let text = value.zip(len).and_then(|(value, len)| value.get(4..len.checked_add(4)?));
    Some(text.filter(|text| text.len() <= 256).map(|text| String::from_utf8_lossy(text).into()))
}

fn from_udev(root: &Root, block: &Block) -> Option<Format> {
    let about = root.text(format!("/run/udev/data/b{}", block.number))?;
    let value =
        |key: &str| about.lines().find_map(|line| line.strip_prefix(key)).map(str::to_owned);
    let kind = value("E:ID_FS_TYPE=")?;
    let name = match kind.as_str() {
        "linux_raid_member" => "md RAID",
        "LVM2_member" => "LVM",
        "zfs_member" => "ZFS",
        other => other,
    };
    Some((name.to_owned(), value("E:ID_FS_LABEL=")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_known_by_its_label() {
        let mut head = vec![0; HEAD_BYTES];
        assert_eq!(zfs_pool(&head), None);
        head[(128 << 10) + 4096..][..8].copy_from_slice(&UBERBLOCK.to_le_bytes());
        assert_eq!(zfs_pool(&head), Some(None));
        let name = b"\0\0\0\x04name\0\0\0\x09\0\0\0\x01\0\0\0\x04tank";
        head[(16 << 10) + 40..][..name.len()].copy_from_slice(name);
        assert_eq!(zfs_pool(&head), Some(Some("tank".into())));
        assert_eq!(zfs_pool(&head[..1000]), None);
    }
}
