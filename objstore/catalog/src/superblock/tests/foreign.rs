//! Devices with other formats.

use super::*;

/// The signatures by which `blkid` recognises each format, on a blank device.
const SIGNATURES: &[(i64, &[u8], &str)] = &[
    (510, b"\x55\xaa", "MBR"),
    (512, b"EFI PART", "GPT"),
    (4096, b"EFI PART", "GPT"),
    (-512, b"EFI PART", "GPT"),
    (-4096, b"EFI PART", "GPT"),
    (0x438, b"\x53\xef", "ext4"),
    (0, b"XFSB", "XFS"),
    (0x1_0040, b"_BHRfS_M", "btrfs"),
    (0x400, b"\x10\x20\xf5\xf2", "f2fs"),
    (4086, b"SWAPSPACE2", "swap"),
    (0, b"LUKS\xba\xbe", "LUKS"),
    (512, b"LABELONE", "LVM"),
    (4096, b"\xfc\x4e\x2b\xa9", "RAID"),
    (-(64 << 10), b"\xfc\x4e\x2b\xa9", "RAID"),
    (-(8 << 10), b"\xfc\x4e\x2b\xa9", "RAID"),
    (128 << 10, b"\x0c\xb1\xba\x00\x00\x00\x00\x00", "ZFS"),
    ((128 << 10) + 7 * 1024, b"\x00\x00\x00\x00\x00\xba\xb1\x0c", "ZFS"),
    (4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", "bcache"),
    (300 << 10, b"text", "unknown kind"),
    // Only at the end.
    (-1024, b"Intel Raid ISM Cfg Sig. ", "IMSM"),
    (-8192, b"Intel Raid ISM Cfg Sig. ", "IMSM"),
    (-512, b"\xde\x11\xde\x11", "DDF"),
    (-4096, b"\xde\x11\xde\x11", "DDF"),
    (-257 * 512, b"\xde\x11\xde\x11", "DDF"),
    (-4096 + 60, b"\x83\x74\x02\x6b", "DRBD"),
    (-4096 + 60, b"\x83\x74\x02\x6d", "DRBD"),
    (-1024, b"NVIDIA  ", "NVIDIA"),
    (-991 * 512, b"Promise Technology, Inc.", "Promise"),
    (-(512 << 10) + (128 << 10), b"\x0c\xb1\xba\x00\x00\x00\x00\x00", "ZFS"),
    (-(256 << 10) + (255 << 10), b"\x0c\xb1\xba\x00\x00\x00\x00\x00", "ZFS"),
    (-4096 + 4, b"text", "unknown kind"),
    (-(1 << 20), b"text", "unknown kind"),
    // In the journal's first group.
    ((1 << 20) + (60 << 10), b"text", "unknown kind"),
    (1 << 20, b"\x0d\xd0\x01\xc0", "VMFS"),
    (516, b"!Stra0tis\x86\xff\x02^\x41rh", "Stratis"),
    (3, b"NTFS    ", "NTFS"),
    (128 << 10, b"SKUL\xba\xbe", "LUKS"),
    (65_526, b"SWAPSPACE2", "swap"),
];

fn put(medium: &Medium, at: i64, bytes: &[u8]) {
    let at = if at < 0 { (8 << 20) + at } else { at };
    medium.corrupt(at as u64, |to| to[..bytes.len()].copy_from_slice(bytes));
}

/// A member of a mirror begins like the filesystem on the mirror.
#[test]
fn a_member_is_named_and_not_what_is_on_the_whole() {
    for (at, bytes, name) in SIGNATURES
        .iter()
        .filter(|(_, _, name)| ["RAID", "IMSM", "DDF", "DRBD", "NVIDIA", "Promise"].contains(name))
    {
        let device = medium(0);
        put(&device, 0x438, b"\x53\xef");
        put(&device, 510, b"\x55\xaa");
        put(&device, *at, bytes);
        match read(&device) {
            Ok(OnDevice::Foreign(what)) => assert!(what.contains(name), "{name}: {what}"),
            other => panic!("{name} at {at}: {other:?}"),
        }
    }
}

#[test]
fn blank_is_all_zero_or_all_ones() {
    for (bytes, is) in [
        (&[][..], true),
        (&[0, 0], true),
        (&[0xff, 0xff], true),
        (&[0, 0xff], false),
        (&[1, 1], false),
    ] {
        assert_eq!(is_blank(bytes), is, "{bytes:?}");
    }
}

#[test]
fn what_a_device_holds_is_named() {
    assert_eq!(read(&medium(0)), Ok(OnDevice::Blank));
    let erased = medium(0);
    erased.corrupt(0, |bytes| bytes.fill(0xff));
    assert_eq!(read(&erased), Ok(OnDevice::Blank));
    for (at, bytes, name) in SIGNATURES {
        // md 0.90 is found at a multiple of 64 KiB, which a device need not end at.
        let device = medium(0);
        put(&device, *at, bytes);
        match read(&device) {
            Ok(OnDevice::Foreign(what)) => assert!(what.contains(name), "{name}: {what}"),
            other => panic!("{name} at {at}: {other:?}"),
        }
    }
}

/// Formatting removes every signature, including our own.
#[test]
fn formatting_removes_signatures() {
    for (at, bytes, name) in SIGNATURES {
        let (media, mut superblocks) = formatted(1);
        put(&media[0], *at, bytes);
        write(&media, &mut superblocks).unwrap();
        let found = read(&media[0]);
        assert_eq!(found, Ok(OnDevice::Ours(Box::new(superblocks.remove(0)))), "{name}");
        media[0].corrupt(0, |bytes| bytes[..SUPERBLOCK_BYTES].fill(0));
        media[0].corrupt(512 << 10, |bytes| bytes[..SUPERBLOCK_BYTES].fill(0));
        media[0].corrupt(1 << 20, |bytes| bytes[..512].fill(0));
        assert_eq!(read(&media[0]), Ok(OnDevice::Blank), "{name}");
    }
}

/// A filesystem made over a store, which left a copy of the superblock intact.
#[test]
fn a_filesystem_over_a_store_is_seen() {
    for (at, bytes, name) in SIGNATURES.iter().filter(|(at, ..)| (0..256 << 10).contains(at)) {
        let (media, _) = formatted(1);
        put(&media[0], *at, bytes);
        match read(&media[0]) {
            Ok(OnDevice::Foreign(what)) => assert!(what.contains(name), "{name}: {what}"),
            other => panic!("{name}: {other:?}"),
        }
    }
    // Objects may hold anything.
    let (media, superblocks) = formatted(1);
    put(&media[0], -512, b"EFI PART");
    assert_eq!(read(&media[0]), Ok(OnDevice::Ours(Box::new(superblocks[0].clone()))));
}
