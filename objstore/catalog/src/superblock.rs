//! What a device says of the store that it belongs to. docs/on-disk-format.md has the byte map.
//!
//! A superblock is kept twice. Both copies are written one after the other with FUA, so that power
//! loss damages one of them at most; of two that are whole, the one with the higher sequence
//! number counts.

mod check;
mod error;
mod foreign;
mod plan;
mod wire;

use crate::{
    block_io::{BlockError, BlockIo},
    ids::DeviceIndex,
    layout::{Geometry, Region},
    planted::{PlantedBug, planted},
    shape::KvShape,
};

use self::plan::HEAD_BYTES;
pub use self::{
    check::{Expected, Member, check_set},
    error::{CopyFault, FormatError},
    foreign::foreign_signature,
    plan::{Plan, SCRATCH, format_devices},
    wire::DEVICES_MAX,
};

/// The version of the format that this code writes, and the only one that it reads.
pub const FORMAT_VERSION: u32 = 1;

/// Bytes of a superblock; what a copy takes up is padded to the LBA size.
pub const SUPERBLOCK_BYTES: usize = 8192;

/// Where the two copies are, from the region's start.
const COPY_OFFSETS: [u64; COPIES] = [0, 512 << 10];

/// How many there are.
pub(crate) const COPIES: usize = 2;

/// Bytes at the end of a region that other formats keep something in.
const TAIL_BYTES: u64 = 128 << 10;

/// How many sequence numbers [`Superblock::skip_sequence`] skips: fewer than this.
const SKIPPED: u64 = 1 << 16;

/// Names a store: drawn at random when it is formatted, so that nothing of an earlier one on the
/// same devices is taken for its own.
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

/// What tells one device from another.
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
    /// Whether both are the same namespace: by the first of NGUID, EUI64 and {model, serial number,
    /// NSID} that both have.
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

/// How far formatting got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Other devices, or the journal, may not be written yet.
    Formatting,
    /// All of the store was written.
    Ready,
}

/// A half of the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// The first.
    A,
    /// The second.
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

/// What a store is made for: the same on all ranks and devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLayout {
    /// The shape of a KV block on each rank.
    pub shape: KvShape,
    /// Files.
    pub files: u32,
    /// Checksums of a file, `ranks * rows`; 0 when the store keeps none.
    pub words_per_file: u32,
    /// Namespaces that it may have.
    pub namespaces_max: u32,
}

/// Where the objects are: the same on all devices of a rank.
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

/// Where the journal is, and which part of it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JournalArea {
    /// First byte of half A, from the region's start. Half B follows it.
    pub offset: u64,
    /// Length of a half in bytes: a multiple of `group_bytes_max`.
    pub half_bytes: u64,
    /// Bytes of a group at most, with its header and padding: a power of two.
    pub group_bytes_max: u32,
    /// The half that counts.
    pub active: Half,
    /// The generation of its groups. No other writing of either half had the same.
    pub generation: u64,
    /// Bytes from the start of the active half that were permanent when this was written.
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

/// What a device says of the store that it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Counts how often the device's superblock was written.
    pub sequence: u64,
    /// The store.
    pub store: StoreId,
    /// How far formatting got.
    pub state: State,
    /// The rank that the device belongs to.
    pub rank: u32,
    /// Ranks of the store.
    pub ranks: u32,
    /// The device's place among those of its rank.
    pub device: DeviceIndex,
    /// All devices of the rank, in order.
    pub devices: Vec<DeviceIdentity>,
    /// The part of this device that belongs to the store.
    pub region: Region,
    /// What the store is made for.
    pub layout: StoreLayout,
    /// Where objects are; `None` on the device of a catalog without data.
    pub data: Option<DataArea>,
    /// Where the journal is; `None` on a device that does not carry the catalog.
    pub journal: Option<JournalArea>,
}

/// What is on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OnDevice {
    /// Nothing.
    Blank,
    /// Something else: what it is, as far as it is known.
    Foreign(&'static str),
    /// A store's.
    Ours(Box<Superblock>),
}

impl Superblock {
    /// What is on the device. Writes nothing.
    ///
    /// # Errors
    /// [`FormatError`] when the device cannot be read, is too small to carry a store, or carries
    /// one whose superblock cannot be used.
    pub fn read(io: &mut dyn BlockIo) -> Result<OnDevice, FormatError> {
        let device = || io.name().to_owned();
        if io.bytes() < HEAD_BYTES {
            let (device, bytes) = (device(), io.bytes());
            return Err(FormatError::TooSmall { device, bytes, needed: HEAD_BYTES });
        }
        let mut head = vec![0; HEAD_BYTES as usize];
        io.read(0, &mut head)?;
        let copies = copies_in(&head);
        let valid = copies.each_ref().map(Result::is_ok);
        // What this version does not understand may be the newer one.
        let newer = |fault: &CopyFault| !matches!(fault, CopyFault::None | CopyFault::Checksum);
        let faults = || copies.iter().filter_map(|copy| copy.as_ref().err());
        let refused = faults().find(|fault| newer(fault)).or_else(|| {
            faults().find(|fault| **fault == CopyFault::Checksum).filter(|_| valid == [false; 2])
        });
        if let Some(fault) = refused {
            return Err(FormatError::Copy { device: io.name().to_owned(), fault: fault.clone() });
        }
        // A filesystem made over the store may have left a copy alone.
        for (offset, valid) in COPY_OFFSETS.iter().zip(valid) {
            if valid {
                head[*offset as usize..][..SUPERBLOCK_BYTES].fill(0);
            }
        }
        let tail_bytes = if valid == [false; 2] { TAIL_BYTES } else { 0 };
        let mut tail = vec![0; tail_bytes as usize];
        io.read(io.bytes() - tail_bytes, &mut tail)?;
        if let Some(what) = foreign_signature(&head, &tail, io.bytes()) {
            return Ok(OnDevice::Foreign(what));
        }
        match copies {
            [Ok(a), Ok(b)] if a.store != b.store => Err(FormatError::TwoStores {
                device: io.name().to_owned(),
                stores: [a.store, b.store],
            }),
            [Ok(a), Ok(b)] => Ok(OnDevice::Ours(Box::new(newest(a, b)))),
            [Ok(copy), Err(_)] | [Err(_), Ok(copy)] => Ok(OnDevice::Ours(Box::new(copy))),
            [Err(_), Err(_)] => {
                let first = head[0];
                let blank = [0, 0xff].contains(&first) && head.iter().all(|byte| *byte == first);
                Ok(if blank {
                    OnDevice::Blank
                } else {
                    OnDevice::Foreign("data of an unknown kind")
                })
            }
        }
    }

    /// Both copies, each as it is: what `inspect` shows. Writes nothing.
    ///
    /// # Errors
    /// [`BlockError`] when the device cannot be read.
    pub fn read_copies(io: &mut dyn BlockIo) -> Result<[Result<Self, CopyFault>; 2], BlockError> {
        let mut head = vec![0; HEAD_BYTES as usize];
        io.read(0, &mut head)?;
        Ok(copies_in(&head))
    }

    /// Writes both copies, one after the other. They are permanent on return.
    ///
    /// # Errors
    /// [`BlockError`]: at least one copy is whole, and nobody knows which.
    pub fn write(&self, io: &mut dyn BlockIo) -> Result<(), BlockError> {
        self.write_copies(io, COPIES)
    }

    /// Writes one of the two copies, 0 or 1: a damaged one, from the other. It is permanent on
    /// return.
    ///
    /// # Errors
    /// [`BlockError`]: this copy is damaged, the other one is not touched.
    ///
    /// # Panics
    /// When there is no such copy.
    pub fn write_copy(&self, io: &mut dyn BlockIo, copy: usize) -> Result<(), BlockError> {
        io.write(COPY_OFFSETS[copy], &self.padded(io.lba_bytes()), true)
    }

    /// Skips as many sequence numbers as the low 16 bits of `chance` say, for the next writing.
    ///
    /// A device that loses the latest writing of both copies goes back to an earlier sequence
    /// number. Without this, the store that opens it would give the journal a generation that one
    /// of the halves already has groups of.
    pub fn skip_sequence(&mut self, chance: u64) {
        self.sequence += chance % SKIPPED;
    }

    fn padded(&self, lba_bytes: u32) -> Vec<u8> {
        let mut bytes = self.encode();
        bytes.resize(bytes.len().next_multiple_of(lba_bytes as usize), 0);
        bytes
    }

    pub(crate) fn write_copies(
        &self,
        io: &mut dyn BlockIo,
        copies: usize,
    ) -> Result<(), BlockError> {
        let bytes = self.padded(io.lba_bytes());
        COPY_OFFSETS.iter().take(copies).try_for_each(|offset| io.write(*offset, &bytes, true))
    }

    /// The layout of the data area; `None` without one.
    #[must_use]
    pub fn geometry(&self) -> Option<Geometry> {
        let data = self.data?;
        let lba_bytes = self.devices.iter().map(|device| device.lba_bytes).max()?;
        Geometry::new(&self.layout.shape, self.devices.len() as u32, data.group, lba_bytes).ok()
    }

    /// The data area as a region of the namespace; `None` without one.
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
    let b_is_newer = b.sequence > a.sequence;
    if b_is_newer != planted(PlantedBug::StaleSuperblock) { b } else { a }
}

#[cfg(test)]
mod tests;
