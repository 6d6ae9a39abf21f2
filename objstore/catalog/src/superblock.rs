//! Superblocks: a device's description of its store. docs/reference/on-disk-format.md has the
//! byte map.
//!
//! A superblock has two copies, written one after the other with FUA, so that power loss damages at
//! most one of them; of two whole copies, the one with the higher sequence number is valid.

mod check;
mod error;
mod foreign;
mod wire;

use crate::{
    block_io::{BlockError, BlockIo},
    codec::Codec,
    ids::DeviceIndex,
    layout::{Geometry, Region},
    shape::KvShape,
};

pub(crate) use self::wire::{GROUP_BYTES_MAX, GROUP_HEADER_BYTES};
pub use self::{
    check::{Expected, Member, check_set},
    error::{CopyFault, FormatError},
    foreign::{
        FORMAT_HEAD_BYTES, FORMAT_TAIL_BYTES, Foreign, foreign_data, foreign_signature, is_blank,
    },
    wire::{DEVICES_MAX, SUPERBLOCK_MAGIC},
};

/// The format version that this code writes, and the only one that it reads.
pub const FORMAT_VERSION: u32 = 3;

/// Bytes of a superblock; each copy is padded to the LBA size.
pub const SUPERBLOCK_BYTES: usize = 8192;

/// Offsets of the two copies, from the region's start.
const COPY_OFFSETS: [u64; COPIES] = [0, 512 << 10];

/// Number of copies.
pub(crate) const COPIES: usize = 2;

/// Bytes reserved for the copies at the start of a region.
pub(crate) const HEAD_BYTES: u64 = 1 << 20;

/// [`Superblock::skip_sequence`] skips fewer sequence numbers than this.
const SKIPPED: u64 = 1 << 16;

/// Id of a store: random, drawn by formatting, so that remains of an earlier store on the same
/// devices are not taken for its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct StoreId(pub [u8; 16]);

impl std::fmt::Display for StoreId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for StoreId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StoreId({self})")
    }
}

/// The identity of a device's namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceIdentity {
    /// Model number (Identify Controller, MN), padded with spaces.
    pub model: [u8; 40],
    /// Serial number (Identify Controller, SN), padded with spaces.
    pub serial: [u8; 20],
    /// The namespace.
    pub nsid: u32,
    /// Globally unique identifier of the namespace; zeroes when there is none.
    pub nguid: [u8; 16],
    /// IEEE extended unique identifier of the namespace; zeroes when there is none.
    pub eui64: [u8; 8],
    /// LBA size in bytes.
    pub lba_bytes: u32,
    /// Size of the namespace in LBAs.
    pub namespace_lbas: u64,
}

impl DeviceIdentity {
    /// Returns true when both are the same namespace: by the first of NGUID, EUI64 and {model,
    /// serial number, NSID} that both have.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        if self.nguid != [0; 16] && other.nguid != [0; 16] {
            return self.nguid == other.nguid;
        }
        if self.eui64 != [0; 8] && other.eui64 != [0; 8] {
            return self.eui64 == other.eui64;
        }
        (self.model, self.serial, self.nsid) == (other.model, other.serial, other.nsid)
    }
}

impl std::fmt::Display for DeviceIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [model, serial] =
            [self.model.as_slice(), &self.serial].map(|text| String::from_utf8_lossy(text));
        write!(f, "{}, serial number {}", model.trim(), serial.trim())?;
        write!(f, ", namespace {}", self.nsid)
    }
}

/// Progress of formatting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Other devices, or the journal, may be unwritten.
    Formatting,
    /// The store is completely written.
    Ready,
}

/// A half of the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// The first half.
    A,
    /// The second half.
    B,
}

impl Half {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

impl std::fmt::Display for Half {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::A => "A",
            Self::B => "B",
        })
    }
}

/// Parameters of a store, the same on all ranks and devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLayout {
    /// The shape of a KV block on each rank.
    pub shape: KvShape,
    /// The codec of the objects.
    pub codec: Codec,
    /// Files.
    pub files: u32,
    /// Checksums of a file, `ranks * rows`; 0 when the store keeps none.
    pub words_per_file: u32,
    /// Maximum number of namespaces.
    pub namespaces_max: u32,
}

impl StoreLayout {
    /// Returns the shape of a block on the devices.
    ///
    /// # Panics
    /// If the codec has none ([`Codec::stored`]): no such superblock is written, or read.
    #[must_use]
    pub fn stored(&self) -> KvShape {
        self.codec.stored(&self.shape).expect("it was checked with the superblock")
    }
}

/// The area of the objects, the same on all devices of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataArea {
    /// First byte, from the region's start: a multiple of 1 MiB.
    pub offset: u64,
    /// Length in bytes: whole groups.
    pub bytes: u64,
    /// Files of a group, G.
    pub group: u32,
    /// Bytes of an object on a device.
    pub slot_bytes: u32,
}

/// The area of the journal, and its active half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JournalArea {
    /// First byte of half A, from the region's start. Half B follows it.
    pub offset: u64,
    /// Length of a half in bytes: a multiple of `group_bytes_max`.
    pub half_bytes: u64,
    /// Maximum bytes of a group, with its header and padding: a power of two.
    pub group_bytes_max: u32,
    /// The active half.
    pub active: Half,
    /// The generation of its groups, unique among all generations of both halves.
    pub generation: u64,
    /// Durable bytes from the start of the active half when this was written.
    pub certain_bytes: u64,
}

impl JournalArea {
    pub(crate) fn half_offset(&self, half: Half) -> u64 {
        match half {
            Half::A => self.offset,
            Half::B => self.offset + self.half_bytes,
        }
    }
}

/// A device's description of its store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Number of times the device's superblock was written.
    pub sequence: u64,
    /// The store.
    pub store: StoreId,
    /// Progress of formatting.
    pub state: State,
    /// The rank of the device.
    pub rank: u32,
    /// Ranks of the store.
    pub ranks: u32,
    /// The device's index within its rank.
    pub device: DeviceIndex,
    /// All devices of the rank, in order.
    pub devices: Vec<DeviceIdentity>,
    /// The part of this device that belongs to the store.
    pub region: Region,
    /// Parameters of the store.
    pub layout: StoreLayout,
    /// The area of the objects; `None` on the device of a catalog without data.
    pub data: Option<DataArea>,
    /// The area of the journal; `None` on a device that does not carry the catalog.
    pub journal: Option<JournalArea>,
}

/// Contents of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OnDevice {
    /// The device is blank.
    Blank,
    /// Foreign data: its format.
    Foreign(&'static str),
    /// A store's superblock.
    Ours(Box<Superblock>),
}

impl OnDevice {
    /// Identifies the contents of a device of `bytes` bytes by its first [`FORMAT_HEAD_BYTES`] and
    /// last [`FORMAT_TAIL_BYTES`]. `device` is its name, for errors.
    ///
    /// # Errors
    /// Returns [`FormatError`] if it carries a store whose superblock cannot be used.
    pub fn of(device: &str, head: &[u8], tail: &[u8], bytes: u64) -> Result<Self, FormatError> {
        let copies = copies_in(head);
        let valid = copies.each_ref().map(Result::is_ok);
        // A copy of an unknown version may be the newer one.
        let newer = |fault: &CopyFault| !matches!(fault, CopyFault::None | CopyFault::Checksum);
        let faults = || copies.iter().filter_map(|copy| copy.as_ref().err());
        let refused = faults().find(|fault| newer(fault)).or_else(|| {
            faults().find(|fault| **fault == CopyFault::Checksum).filter(|_| valid == [false; 2])
        });
        if let Some(fault) = refused {
            return Err(FormatError::Copy { device: device.to_owned(), fault: fault.clone() });
        }
        let found = match valid {
            [false, false] => foreign_data(head, tail, bytes),
            _ => over_store(head, valid, bytes),
        };
        if let Some(found) = found {
            return Ok(Self::Foreign(found.what));
        }
        match copies {
            [Ok(a), Ok(b)] if a.store != b.store => Err(FormatError::TwoStores {
                device: device.to_owned(),
                stores: [a.store, b.store],
            }),
            [Ok(a), Ok(b)] => Ok(Self::Ours(Box::new(newest(a, b)))),
            [Ok(copy), Err(_)] | [Err(_), Ok(copy)] => Ok(Self::Ours(Box::new(copy))),
            [Err(_), Err(_)] => Ok(Self::Blank),
        }
    }
}

/// Returns the format of a filesystem made over a store, which may have left one copy of the
/// superblock intact. The rest of the device has the store's own journal and objects.
fn over_store(head: &[u8], valid: [bool; COPIES], bytes: u64) -> Option<Foreign> {
    let mut head = head[..HEAD_BYTES as usize].to_vec();
    for (offset, valid) in COPY_OFFSETS.iter().zip(valid) {
        if valid {
            head[*offset as usize..][..SUPERBLOCK_BYTES].fill(0);
        }
    }
    foreign_signature(&head, &[], bytes)
}

impl Superblock {
    /// Identifies the contents of a device. Writes nothing.
    ///
    /// # Errors
    /// Returns [`FormatError`] if the device cannot be read, is too small to carry a store, or
    /// carries one whose superblock cannot be used.
    pub fn read(io: &mut dyn BlockIo) -> Result<OnDevice, FormatError> {
        let bytes = io.bytes();
        if bytes < HEAD_BYTES {
            return Err(FormatError::too_small(io.name(), bytes, HEAD_BYTES));
        }
        let (mut head, mut tail) = (vec![0; HEAD_BYTES as usize], Vec::new());
        io.read(0, &mut head)?;
        // A store's own data there need not be readable to open it.
        if copies_in(&head).iter().all(Result::is_err) {
            head.resize(FORMAT_HEAD_BYTES.min(bytes) as usize, 0);
            tail.resize(FORMAT_TAIL_BYTES.min(bytes - head.len() as u64) as usize, 0);
            let tail_at = bytes - tail.len() as u64;
            let rest = (HEAD_BYTES, &mut head[HEAD_BYTES as usize..]);
            for (at, part) in [rest, (tail_at, &mut tail)] {
                if !part.is_empty() {
                    io.read(at, part)?;
                }
            }
        }
        OnDevice::of(io.name(), &head, &tail, bytes)
    }

    /// Reads both copies as they are, for `inspect`. Writes nothing.
    ///
    /// # Errors
    /// Returns [`BlockError`] if the device cannot be read.
    pub fn read_copies(io: &mut dyn BlockIo) -> Result<[Result<Self, CopyFault>; 2], BlockError> {
        let mut head = vec![0; HEAD_BYTES as usize];
        io.read(0, &mut head)?;
        Ok(copies_in(&head))
    }

    /// Writes both copies, one after the other. They are durable on return.
    ///
    /// # Errors
    /// Returns [`BlockError`]: at least one copy is whole, but it is unknown which.
    pub fn write(&self, io: &mut dyn BlockIo) -> Result<(), BlockError> {
        let bytes = self.padded(io.lba_bytes());
        COPY_OFFSETS.iter().try_for_each(|offset| io.write(*offset, &bytes, true))
    }

    /// Writes one of the two copies, 0 or 1: repairs a damaged one from the other. It is durable on
    /// return.
    ///
    /// # Errors
    /// Returns [`BlockError`]: this copy is damaged, the other one is untouched.
    ///
    /// # Panics
    /// Panics if there is no such copy.
    pub fn write_copy(&self, io: &mut dyn BlockIo, copy: usize) -> Result<(), BlockError> {
        io.write(COPY_OFFSETS[copy], &self.padded(io.lba_bytes()), true)
    }

    /// Skips a random count of sequence numbers before the next write: the low 16 bits of `chance`.
    ///
    /// A device that loses the latest write of both copies goes back to an earlier sequence number.
    /// Without this, the store that opens it would give the journal a generation that already has
    /// groups in one of the halves.
    pub fn skip_sequence(&mut self, chance: u64) {
        self.sequence += chance % SKIPPED;
    }

    fn padded(&self, lba_bytes: u32) -> Vec<u8> {
        let mut bytes = self.encode();
        bytes.resize(bytes.len().next_multiple_of(lba_bytes as usize), 0);
        bytes
    }

    /// Returns the layout of the data area; `None` without one.
    #[must_use]
    pub fn geometry(&self) -> Option<Geometry> {
        let data = self.data?;
        let lba_bytes = self.devices.iter().map(|device| device.lba_bytes).max()?;
        Geometry::new(&self.layout.stored(), self.devices.len() as u32, data.group, lba_bytes).ok()
    }

    /// Returns the data area as a region of the namespace; `None` without one.
    #[must_use]
    pub fn data_region(&self) -> Option<Region> {
        let (data, shift) = (self.data?, self.region.lba_shift);
        let first = nvme_spec::ids::Lba(self.region.first.0 + (data.offset >> shift));
        Some(Region { first, lbas: data.bytes >> shift, lba_shift: shift })
    }
}

fn copies_in(head: &[u8]) -> [Result<Superblock, CopyFault>; 2] {
    COPY_OFFSETS.map(|offset| Superblock::decode(&head[offset as usize..][..SUPERBLOCK_BYTES]))
}

fn newest(a: Superblock, b: Superblock) -> Superblock {
    if b.sequence > a.sequence { b } else { a }
}

#[cfg(test)]
mod tests;
