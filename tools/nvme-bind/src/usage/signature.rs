//! Data on a device that nothing uses: members of RAIDs, volume groups and pools, filesystems,
//! stores. Read from the device, by the list that formatting a store has, or else from udev's
//! database.

use kv_catalog::{FORMAT_HEAD_BYTES, FORMAT_TAIL_BYTES, SUPERBLOCK_MAGIC, foreign_data};

use crate::pci::{Block, Root, Use, UseKind};

/// Offsets of a store's superblock: of one that has the whole device, and of one that leaves room
/// for other formats' metadata.
const STORES: [usize; 2] = [0, 1 << 20];

/// Formats that udev knows under a name that does not end in `_member`.
const MEMBERS: &[&str] = &["drbd", "bcache", "ceph_bluestore", "oracleasm", "vdo", "stratis"];

struct Found {
    what: String,
    is_member: bool,
    /// The name of a ZFS pool.
    pool: Option<String>,
}

/// Returns what was found, or the reason why the device could not be read.
pub(super) fn uses(root: &Root, block: &Block) -> (Vec<Use>, Option<String>) {
    let (found, blind) = match read(root, block) {
        Ok(found) => (found, None),
        Err(error) => match from_udev(root, block) {
            Some(found) => (Some(found), None),
            None => (None, Some(format!("what /dev/{} holds: {error}", block.name))),
        },
    };
    let found = found.map(|Found { what, is_member, pool }| {
        let is_imported = |pool: &String| root.exists(format!("/proc/spl/kstat/zfs/{pool}"));
        if let Some(pool) = pool.as_ref().filter(|pool| is_imported(pool)) {
            return Use::new(UseKind::Zfs, block.name.clone(), pool.clone());
        }
        let kind = if is_member { UseKind::Member } else { UseKind::Data };
        let pool = pool.map(|pool| format!(" ({pool})")).unwrap_or_default();
        Use::new(kind, block.name.clone(), format!("{what}{pool}"))
    });
    (found.into_iter().collect(), blind)
}

fn read(root: &Root, block: &Block) -> std::io::Result<Option<Found>> {
    let path = format!("/dev/{}", block.name);
    let head = root.bytes(&path, 0, FORMAT_HEAD_BYTES as usize)?;
    let tail_bytes = FORMAT_TAIL_BYTES.min(block.bytes.saturating_sub(head.len() as u64));
    let mut tail = root.bytes(&path, block.bytes - tail_bytes, tail_bytes as usize)?;
    if (tail.len() as u64) < tail_bytes {
        // The device is shorter than the kernel said: in a copy of a machine.
        tail.clear();
    }
    if STORES.iter().any(|at| head.get(*at..).is_some_and(|at| at.starts_with(&SUPERBLOCK_MAGIC))) {
        let what = "a store of ripieno".to_owned();
        return Ok(Some(Found { what, is_member: false, pool: None }));
    }
    let found = foreign_data(&head, &tail, block.bytes);
    Ok(found.map(|found| Found {
        what: found.what.to_owned(),
        is_member: found.is_member,
        pool: if found.what.contains("ZFS") { zfs_pool(&head) } else { None },
    }))
}

/// Returns the name of the pool in a ZFS label, if it is readable.
fn zfs_pool(head: &[u8]) -> Option<String> {
    // An XDR list: a name with its length, then type, count, and the string with its length.
    let list = head.get(16 << 10..128 << 10)?;
    let key = b"\0\0\0\x04name";
    let at = list.windows(key.len()).position(|window| window == key);
    let value = at.and_then(|at| list.get(at + key.len() + 8..));
    let len = value.and_then(|value| Some(u32::from_be_bytes(*value.first_chunk()?) as usize));
    let text = value.zip(len).and_then(|(value, len)| value.get(4..len.checked_add(4)?));
    text.filter(|text| text.len() <= 256).map(|text| String::from_utf8_lossy(text).into())
}

fn from_udev(root: &Root, block: &Block) -> Option<Found> {
    let about = root.text(format!("/run/udev/data/b{}", block.number))?;
    let value =
        |key: &str| about.lines().find_map(|line| line.strip_prefix(key)).map(str::to_owned);
    let what = value("E:ID_FS_TYPE=")?;
    let is_member = what.ends_with("_member") || MEMBERS.contains(&what.to_lowercase().as_str());
    let pool = value("E:ID_FS_LABEL=").filter(|_| what == "zfs_member");
    Some(Found { what, is_member, pool })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_known_by_its_label() {
        let mut head = vec![0; 256 << 10];
        assert_eq!(zfs_pool(&head), None);
        let name = b"\0\0\0\x04name\0\0\0\x09\0\0\0\x01\0\0\0\x04tank";
        head[(16 << 10) + 40..][..name.len()].copy_from_slice(name);
        assert_eq!(zfs_pool(&head).as_deref(), Some("tank"));
        assert_eq!(zfs_pool(&head[..1000]), None);
    }
}
