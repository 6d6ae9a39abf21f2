//! NVM command set: read, write, flush, write zeroes, dataset management.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::ids::{Lba, Lbas};

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
        /// Attributes of ranges; deallocate.
        DATASET_MANAGEMENT = 0x09,
        /// Verify.
        VERIFY = 0x0c,
        /// I/O Management Receive.
        IO_MANAGEMENT_RECEIVE = 0x12,
    }
}

/// Direction of a data transfer, from the host's view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the namespace to memory.
    Read,
    /// From memory to the namespace.
    Write,
}

command_dwords! {
    /// Dwords common to read, write, write zeroes and compare.
    BlockRange {
        /// First LBA (CDW10, CDW11).
        slba: u64 = cdw10[0, 32] cdw11[0, 32];
        /// Number of LBAs, zero-based.
        nlb_z: u16 = cdw12[0, 16];
        /// Deallocate (write zeroes).
        deac: bool = cdw12[25, 1];
        /// Force Unit Access.
        fua: bool = cdw12[30, 1];
        /// Limited Retry.
        lr: bool = cdw12[31, 1];
    }
}

impl BlockRange {
    /// Creates a range of `lbas` blocks from `lba` on; `None` if the count is 0 or over 65,536.
    #[must_use]
    pub const fn new(lba: Lba, lbas: Lbas) -> Option<Self> {
        if lbas.0 == 0 || lbas.0 > 0x1_0000 {
            return None;
        }
        Some(Self { slba: lba.0, nlb_z: (lbas.0 - 1) as u16, deac: false, fua: false, lr: false })
    }

    /// Returns the number of LBAs, not zero-based.
    #[must_use]
    pub const fn lbas(self) -> Lbas {
        Lbas(self.nlb_z as u32 + 1)
    }
}

open_enum! {
    /// Directive types.
    DirectiveType: u8 {
        /// The command has no directive.
        NONE = 0,
        /// Streams.
        STREAMS = 1,
        /// Data Placement: DSPEC is a Placement Identifier.
        DATA_PLACEMENT = 2,
    }
}

command_dwords! {
    /// The directive of a write.
    Directive {
        /// Directive type (DTYPE).
        kind: DirectiveType = cdw12[20, 4];
        /// Directive specific (DSPEC).
        specific: u16 = cdw13[16, 16];
    }
}

command_dwords! {
    /// Dataset management.
    DatasetManagement {
        /// Number of ranges, zero-based.
        nr_z: u8 = cdw10[0, 8];
        /// Deallocate (AD).
        deallocate: bool = cdw11[2, 1];
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
