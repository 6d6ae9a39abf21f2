//! Detection of other formats: filesystems, partition tables, members of RAIDs and pools.

/// Magic of an md superblock, in the byte order that Linux writes on a little-endian machine.
const MD_MAGIC: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();

/// Magic of a ZFS uberblock (`0x00bab10c`), in the byte order of its writer.
const UBERBLOCK: u64 = 0x00ba_b10c;

/// A format, the offset of its signature, and the signature.
const MARKS: &[(&str, usize, &[u8])] = &[
    ("a member of a RAID (md)", 0, &MD_MAGIC),
    ("a member of a RAID (md)", 4096, &MD_MAGIC),
    ("an LVM physical volume", 0, b"LABELONE"),
    ("an LVM physical volume", 512, b"LABELONE"),
    ("an LVM physical volume", 1024, b"LABELONE"),
    ("an LVM physical volume", 1536, b"LABELONE"),
    (
        "a bcache device",
        4096 + 24,
        b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81",
    ),
    (
        "a bcachefs filesystem",
        4096 + 24,
        b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef",
    ),
    ("a LUKS volume", 0, b"LUKS\xba\xbe"),
    ("a btrfs filesystem", 0x1_0040, b"_BHRfS_M"),
    ("an XFS filesystem", 0, b"XFSB"),
    ("an ext4 filesystem", 0x438, b"\x53\xef"),
    ("an f2fs filesystem", 0x400, b"\x10\x20\xf5\xf2"),
    ("swap space", 4086, b"SWAPSPACE2"),
    ("a partition table (GPT)", 512, b"EFI PART"),
    ("a partition table (GPT)", 4096, b"EFI PART"),
    ("a partition table or boot sector (MBR)", 510, b"\x55\xaa"),
];

/// Returns the format of a region of `region_bytes` bytes by its `head` and `tail`; `None` if no
/// known signature is found. A tail that was not read may be empty.
#[must_use]
pub fn foreign_signature(head: &[u8], tail: &[u8], region_bytes: u64) -> Option<&'static str> {
    if is_zfs(head) {
        return Some("a member of a ZFS pool");
    }
    let mark = MARKS.iter().find(|(_, at, mark)| head.get(*at..*at + mark.len()) == Some(*mark));
    if let Some((name, ..)) = mark {
        return Some(name);
    }
    let in_tail = |offset: u64, mark: &[u8]| {
        let from_end = usize::try_from(region_bytes.checked_sub(offset)?).ok()?;
        let at = tail.len().checked_sub(from_end)?;
        (tail.get(at..at + mark.len())? == mark).then_some(())
    };
    // md 0.90: at the last multiple of 64 KiB but one. 1.0: at 8 to 12 KiB from the end.
    let old = (region_bytes & !0xffff).saturating_sub(64 << 10);
    let new = region_bytes.saturating_sub(8 << 10) & !0xfff;
    if [old, new].into_iter().any(|at| in_tail(at, &MD_MAGIC).is_some()) {
        return Some("a member of a RAID (md)");
    }
    let backup = [512, 4096].map(|lba_bytes| region_bytes.saturating_sub(lba_bytes));
    let found = backup.into_iter().any(|at| in_tail(at, b"EFI PART").is_some());
    found.then_some("the backup of a partition table (GPT)")
}

/// Checks for a ZFS label: a ring of uberblocks at 128 to 256 KiB.
fn is_zfs(head: &[u8]) -> bool {
    let ring = head.get(128 << 10..256 << 10).unwrap_or_default();
    ring.chunks_exact(1024).any(|slot| {
        let magic = slot.first_chunk().copied().unwrap_or_default();
        [u64::from_le_bytes(magic), u64::from_be_bytes(magic)].contains(&UBERBLOCK)
    })
}
