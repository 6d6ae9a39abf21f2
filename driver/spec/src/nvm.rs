//! NVM command set: read, write, flush, write zeroes, dataset management.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    ids::{Lba, Lbas},
    sqe::Sqe,
};

open_enum! {
    /// Opcodes of an I/O queue.
    NvmOpcode: u8 {
        /// Commit volatile data to the media.
        FLUSH = 0x00,
        /// Write.
        WRITE = 0x01,
        /// Read.
        READ = 0x02,
        /// Mark blocks invalid.
        WRITE_UNCORRECTABLE = 0x04,
        /// Compare.
        COMPARE = 0x05,
        /// Set blocks to zero without a data transfer.
        WRITE_ZEROES = 0x08,
        /// Hints about ranges; deallocate.
        DATASET_MANAGEMENT = 0x09,
        /// Verify.
        VERIFY = 0x0c,
    }
}

/// Which way a data transfer goes, as the host sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the namespace to memory.
    Read,
    /// From memory to the namespace.
    Write,
}

/// The dwords that read, write, write zeroes and compare share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockRange {
    /// First LBA (CDW10, CDW11).
    pub slba: u64,
    /// Number of LBAs, zero-based (CDW12 15:0).
    pub nlb_z: u16,
    /// Deallocate (write zeroes, CDW12 bit 25).
    pub deac: bool,
    /// Force Unit Access (CDW12 bit 30).
    pub fua: bool,
    /// Limited Retry (CDW12 bit 31).
    pub lr: bool,
}

impl BlockRange {
    /// `lbas` blocks from `lba` on; `None` when the count is 0 or over 65,536.
    #[must_use]
    pub const fn new(lba: Lba, lbas: Lbas) -> Option<Self> {
        if lbas.0 == 0 || lbas.0 > 0x1_0000 {
            return None;
        }
        Some(Self { slba: lba.0, nlb_z: (lbas.0 - 1) as u16, deac: false, fua: false, lr: false })
    }

    /// Reads the dwords of `sqe`.
    #[must_use]
    pub const fn from_sqe(sqe: &Sqe) -> Self {
        Self {
            slba: sqe.cdw10 as u64 | (sqe.cdw11 as u64) << 32,
            nlb_z: sqe.cdw12 as u16,
            deac: sqe.cdw12 & 1 << 25 != 0,
            fua: sqe.cdw12 & 1 << 30 != 0,
            lr: sqe.cdw12 & 1 << 31 != 0,
        }
    }

    /// Writes the dwords into `sqe`.
    pub const fn write_to(self, sqe: &mut Sqe) {
        sqe.cdw10 = self.slba as u32;
        sqe.cdw11 = (self.slba >> 32) as u32;
        sqe.cdw12 = self.nlb_z as u32
            | (self.deac as u32) << 25
            | (self.fua as u32) << 30
            | (self.lr as u32) << 31;
    }

    /// Number of LBAs, not zero-based.
    #[must_use]
    pub const fn lbas(self) -> Lbas {
        Lbas(self.nlb_z as u32 + 1)
    }
}

/// Dataset management dwords: CDW10 7:0 number of ranges, CDW11 attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DatasetManagement {
    /// Number of ranges, zero-based.
    pub nr_z: u8,
    /// Deallocate (AD, CDW11 bit 2).
    pub deallocate: bool,
}

impl DatasetManagement {
    /// Reads the dwords of `sqe`.
    #[must_use]
    pub const fn from_sqe(sqe: &Sqe) -> Self {
        Self { nr_z: sqe.cdw10 as u8, deallocate: sqe.cdw11 & 4 != 0 }
    }

    /// Writes the dwords into `sqe`.
    pub const fn write_to(self, sqe: &mut Sqe) {
        sqe.cdw10 = self.nr_z as u32;
        sqe.cdw11 = (self.deallocate as u32) << 2;
    }
}

/// One range of a dataset management command, 16 bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct DatasetRange {
    /// Context attributes.
    pub attributes: u32,
    /// Length in LBAs, not zero-based.
    pub lbas: u32,
    /// First LBA.
    pub slba: u64,
}

const _: () = assert!(size_of::<DatasetRange>() == 16);
