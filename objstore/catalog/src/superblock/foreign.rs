//! Detection of other formats: filesystems, partition tables, members of RAIDs and pools.
//!
//! One list for all that looks at a device: formatting, `nvme-bind` and `doctor`. The formats are
//! those that `blkid` knows and that can be on a whole drive or a partition of one; each is known
//! by its published layout.

/// Data on a device that is not a store's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Foreign {
    /// Its name, with an article: `an ext4 filesystem`.
    pub what: &'static str,
    /// True for a part of something that may be on other devices, too: a RAID, a volume group, a
    /// pool. The whole may begin on this device: a member can look like a filesystem at its head.
    pub is_member: bool,
}

/// Bytes at the start of a region that formatting clears, and that must be blank before: those of
/// the superblocks, and the journal's first group, which has no records and takes one LBA of at
/// most 64 KiB.
pub const FORMAT_HEAD_BYTES: u64 = super::HEAD_BYTES + (64 << 10);

/// Bytes at the end of a region that formatting clears, and that must be blank before: other
/// formats keep metadata there, ZFS in the last 512 KiB of a multiple of 256 KiB.
pub const FORMAT_TAIL_BYTES: u64 = 1 << 20;

const UNKNOWN: Foreign = Foreign { what: "data of an unknown kind", is_member: false };

/// Place of a signature on a device.
#[derive(Debug, Clone, Copy)]
enum At {
    /// Bytes from the start.
    Head(u64),
    /// {alignment, back, more}: the end of the device rounded down to a multiple of `alignment`,
    /// then `back` bytes before that, then `more` bytes after.
    Tail(u64, u64, u64),
}

use At::{Head, Tail};

/// A format, and the signatures of which it has one.
struct Format {
    foreign: Foreign,
    places: &'static [At],
    marks: &'static [&'static [u8]],
}

const fn member(
    what: &'static str,
    places: &'static [At],
    marks: &'static [&'static [u8]],
) -> Format {
    Format { foreign: Foreign { what, is_member: true }, places, marks }
}

const fn data(
    what: &'static str,
    places: &'static [At],
    marks: &'static [&'static [u8]],
) -> Format {
    Format { foreign: Foreign { what, is_member: false }, places, marks }
}

const KIB: u64 = 1 << 10;

/// Members come first. A partition table comes after filesystems, whose boot sectors have the
/// same last bytes.
const FORMATS: &[Format] = &[
    member(
        "a member of a RAID (md)",
        // Versions 1.1, 1.2, 0.90 and 1.0.
        &[Head(0), Head(4 * KIB), Tail(64 * KIB, 64 * KIB, 0), Tail(4 * KIB, 8 * KIB, 0)],
        // In the byte order of the machine that made it.
        &[&0xa92b_4efc_u32.to_le_bytes(), &0xa92b_4efc_u32.to_be_bytes()],
    ),
    member(
        "a member of a RAID (Intel VROC, IMSM)",
        // The last but one LBA.
        &[Tail(512, 2 * 512, 0), Tail(4 * KIB, 8 * KIB, 0)],
        &[b"Intel Raid ISM Cfg Sig. "],
    ),
    member(
        "a member of a RAID (DDF)",
        // The last LBA; controllers of one maker put it before 257 sectors.
        &[Tail(512, 512, 0), Tail(4 * KIB, 4 * KIB, 0), Tail(512, 257 * 512, 0)],
        &[b"\xde\x11\xde\x11", b"\x11\xde\x11\xde"],
    ),
    member(
        "a device of DRBD",
        &[Tail(4 * KIB, 4 * KIB, 60)],
        &[b"\x83\x74\x02\x6b", b"\x83\x74\x02\x6c", b"\x83\x74\x02\x6d"],
    ),
    member(
        "a member of a RAID (Promise, AMD)",
        &[
            Tail(512, 63 * 512, 0),
            Tail(512, 255 * 512, 0),
            Tail(512, 256 * 512, 0),
            Tail(512, 16 * 512, 0),
            Tail(512, 399 * 512, 0),
            Tail(512, 591 * 512, 0),
            Tail(512, 675 * 512, 0),
            Tail(512, 735 * 512, 0),
            Tail(512, 911 * 512, 0),
            Tail(512, 951 * 512, 0),
            Tail(512, 974 * 512, 0),
            Tail(512, 991 * 512, 0),
        ],
        &[b"Promise Technology, Inc."],
    ),
    member("a member of a RAID (NVIDIA)", &[Tail(512, 2 * 512, 0)], &[b"NVIDIA  "]),
    member("a member of a RAID (LSI)", &[Tail(512, 512, 0)], &[b"$XIDE$"]),
    member(
        "a member of a RAID (HighPoint)",
        &[Head(9 * 512 + 32), Tail(512, 11 * 512, 0)],
        &[b"\xf0\x16\x78\x5a", b"\xf3\x16\x78\x5a", b"\xfd\x16\x78\x5a"],
    ),
    member("an LVM physical volume", &[Head(0), Head(512), Head(1024), Head(1536)], &[b"LABELONE"]),
    member(
        "a bcache device",
        &[Head(4 * KIB + 24)],
        &[b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"],
    ),
    member(
        "a member of a Stratis pool",
        &[Head(512 + 4), Head(9 * 512 + 4)],
        &[b"!Stra0tis\x86\xff\x02^\x41rh"],
    ),
    member("a VDO volume", &[Head(0)], &[b"dmvdo001"]),
    member("a Ceph OSD (BlueStore)", &[Head(0)], &[b"bluestore block device"]),
    member("a disk of Oracle ASM", &[Head(32)], &[b"ORCLDISK"]),
    member("a disk of a Windows volume (LDM)", &[Head(6 * 512)], &[b"PRIVHEAD"]),
    member("a member of a VMFS volume", &[Head(1 << 20)], &[b"\x0d\xd0\x01\xc0"]),
    data(
        "a bcachefs filesystem",
        &[Head(4 * KIB + 24)],
        &[b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"],
    ),
    data("a LUKS volume", &[Head(0)], &[b"LUKS\xba\xbe"]),
    data(
        "a LUKS volume (its second header)",
        &[
            Head(16 * KIB),
            Head(32 * KIB),
            Head(64 * KIB),
            Head(128 * KIB),
            Head(256 * KIB),
            Head(512 * KIB),
            Head(1024 * KIB),
        ],
        &[b"SKUL\xba\xbe"],
    ),
    data("a BitLocker volume", &[Head(3)], &[b"-FVE-FS-"]),
    data("a volume with checksums (dm-integrity)", &[Head(0)], &[b"integrt\0"]),
    data("a volume with a hash tree (dm-verity)", &[Head(0)], &[b"verity\0\0"]),
    data("a snapshot of a volume", &[Head(0)], &[b"SnAp"]),
    data("a btrfs filesystem", &[Head(64 * KIB + 64)], &[b"_BHRfS_M"]),
    data("an XFS filesystem", &[Head(0)], &[b"XFSB"]),
    data("an ext4 filesystem", &[Head(0x438)], &[b"\x53\xef"]),
    data("an f2fs filesystem", &[Head(1024)], &[b"\x10\x20\xf5\xf2"]),
    data("an NTFS filesystem", &[Head(3)], &[b"NTFS    "]),
    data("an exFAT filesystem", &[Head(3)], &[b"EXFAT   "]),
    data("a ReFS filesystem", &[Head(3)], &[b"ReFS\0"]),
    data("a FAT filesystem", &[Head(54)], &[b"FAT12   ", b"FAT16   "]),
    data("a FAT filesystem", &[Head(82)], &[b"FAT32   "]),
    data("an APFS container", &[Head(32)], &[b"NXSB"]),
    data("an HFS filesystem", &[Head(1024)], &[b"H+\0\x04", b"HX\0\x05"]),
    data("a JFS filesystem", &[Head(32 * KIB)], &[b"JFS1"]),
    data("a ReiserFS filesystem", &[Head(64 * KIB + 52), Head(8 * KIB + 52)], &[b"ReIsEr"]),
    data("a Reiser4 filesystem", &[Head(64 * KIB)], &[b"ReIsEr4"]),
    data("a GFS2 filesystem", &[Head(64 * KIB)], &[b"\x01\x16\x19\x70"]),
    data(
        "an OCFS2 filesystem",
        &[Head(KIB), Head(2 * KIB), Head(4 * KIB), Head(8 * KIB)],
        &[b"OCFSV2"],
    ),
    data("a NILFS2 filesystem", &[Head(1024 + 6), Tail(4 * KIB, 4 * KIB, 6)], &[b"\x34\x34"]),
    data("an ISO 9660 or UDF filesystem", &[Head(32 * KIB + 1)], &[b"CD001", b"BEA01", b"NSR0"]),
    data("a SquashFS image", &[Head(0)], &[b"hsqs"]),
    data("an EROFS image", &[Head(1024)], &[b"\xe2\xe1\xf5\xe0"]),
    data("a zonefs filesystem", &[Head(0)], &[b"SFOZ"]),
    data(
        "swap space",
        // The last 10 bytes of the first page, of 4 to 64 KiB.
        &[Head(4086), Head(8182), Head(16_374), Head(32_758), Head(65_526)],
        &[b"SWAPSPACE2", b"SWAP-SPACE", b"S1SUSPEND", b"S2SUSPEND", b"ULSUSPEND"],
    ),
    data("a partition table (GPT)", &[Head(512), Head(4 * KIB)], &[b"EFI PART"]),
    data("a partition table or boot sector (MBR)", &[Head(510)], &[b"\x55\xaa"]),
    data(
        "the backup of a partition table (GPT)",
        &[Tail(512, 512, 0), Tail(4 * KIB, 4 * KIB, 0)],
        &[b"EFI PART"],
    ),
];

const ZFS: Foreign = Foreign { what: "a member of a ZFS pool", is_member: true };

/// Magic of a ZFS uberblock (`0x00bab10c`), in the byte order of its writer.
const UBERBLOCK: u64 = 0x00ba_b10c;

/// Bytes of a ZFS label. Two are at the start of a device, two at its end, both from a multiple of
/// this on; a ring of uberblocks is the second half of each.
const LABEL_BYTES: u64 = 256 * KIB;

/// A device's first and last bytes.
struct Ends<'a> {
    head: &'a [u8],
    tail: &'a [u8],
    bytes: u64,
}

impl<'a> Ends<'a> {
    /// Returns `len` bytes from `at` on; `None` if they were not read.
    fn bytes(&self, at: u64, len: u64) -> Option<&'a [u8]> {
        let slice = |from: &'a [u8], start: u64| {
            let start = usize::try_from(start).ok()?;
            from.get(start..start.checked_add(len as usize)?)
        };
        let tail_at = self.bytes.checked_sub(self.tail.len() as u64);
        let in_tail = || slice(self.tail, at.checked_sub(tail_at?)?);
        slice(self.head, at).or_else(in_tail)
    }

    fn has(&self, at: At, mark: &[u8]) -> bool {
        let at = match at {
            Head(at) => Some(at),
            Tail(alignment, back, more) => {
                let end = self.bytes / alignment * alignment;
                // Without a tail, what was read of the head may reach a small device's end.
                end.checked_sub(back).map(|at| at + more).filter(|_| !self.tail.is_empty())
            }
        };
        at.and_then(|at| self.bytes(at, mark.len() as u64)) == Some(mark)
    }

    fn is_zfs(&self) -> bool {
        let end = self.bytes / LABEL_BYTES * LABEL_BYTES;
        let last = [2, 1].map(|labels| end.checked_sub(labels * LABEL_BYTES));
        let labels = [Some(0), Some(LABEL_BYTES)].into_iter().chain(last).flatten();
        let rings = labels.filter_map(|at| self.bytes(at + LABEL_BYTES / 2, LABEL_BYTES / 2));
        rings.flat_map(|ring| ring.chunks_exact(1024)).any(|slot| {
            let magic = slot.first_chunk().copied().unwrap_or_default();
            [u64::from_le_bytes(magic), u64::from_be_bytes(magic)].contains(&UBERBLOCK)
        })
    }
}

/// Returns the known format of a device of `bytes` bytes by its first and last ones; `None` if it
/// has no known signature. [`FORMAT_HEAD_BYTES`] and [`FORMAT_TAIL_BYTES`] have them all. A tail
/// that was not read may be empty.
#[must_use]
pub fn foreign_signature(head: &[u8], tail: &[u8], bytes: u64) -> Option<Foreign> {
    let ends = Ends { head, tail, bytes };
    if ends.is_zfs() {
        return Some(ZFS);
    }
    let has = |format: &&Format| {
        let mut places = format.places.iter();
        places.any(|at| format.marks.iter().any(|mark| ends.has(*at, mark)))
    };
    FORMATS.iter().find(has).map(|format| format.foreign)
}

/// Returns what the first and last bytes of a device of `bytes` bytes show; `None` if they are
/// blank: all zero, or all ones, as some drives read after an erase.
#[must_use]
pub fn foreign_data(head: &[u8], tail: &[u8], bytes: u64) -> Option<Foreign> {
    let is_blank = is_blank(head) && is_blank(tail);
    (!is_blank).then(|| foreign_signature(head, tail, bytes).unwrap_or(UNKNOWN))
}

/// Returns true if all bytes are zero, or all ones.
#[must_use]
pub fn is_blank(bytes: &[u8]) -> bool {
    let first = bytes.first().copied().unwrap_or(0);
    [0, 0xff].contains(&first) && bytes.iter().all(|byte| *byte == first)
}
