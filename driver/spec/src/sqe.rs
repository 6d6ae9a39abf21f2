//! The submission queue entry (Base, "Common Command Format").

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    ids::{Cid, Nsid},
    sgl::SglDescriptor,
};

/// DPTR: two PRP entries or one SGL descriptor, depending on [`Sqe::psdt`].
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct DataPointer {
    /// PRP entry 1.
    pub prp1: u64,
    /// PRP entry 2: the second page, or the first PRP list page.
    pub prp2: u64,
}

const _: () = assert!(size_of::<DataPointer>() == 16);

impl DataPointer {
    /// Creates a data pointer of two PRP entries.
    #[must_use]
    pub const fn from_prps(prp1: u64, prp2: u64) -> Self {
        Self { prp1, prp2 }
    }

    /// Creates a data pointer of one SGL descriptor.
    #[must_use]
    pub fn from_sgl(descriptor: SglDescriptor) -> Self {
        zerocopy::transmute!(descriptor)
    }

    /// Reinterprets the bytes as an SGL descriptor.
    #[must_use]
    pub fn as_sgl(self) -> SglDescriptor {
        zerocopy::transmute!(self)
    }
}

open_enum! {
    /// PRP or SGL for Data Transfer (CDW0 bits 15:14).
    Psdt: u8 {
        /// DPTR holds PRP entries.
        PRP = 0,
        /// DPTR is an SGL descriptor; MPTR is an address.
        SGL_MPTR_ADDRESS = 1,
        /// DPTR is an SGL descriptor; MPTR is the address of one.
        SGL_MPTR_SGL = 2,
    }
}

/// Submission queue entry, 64 bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C, align(64))]
pub struct Sqe {
    /// Opcode; its command set depends on the queue.
    pub opcode: u8,
    /// FUSE in bits 1:0, PSDT in bits 7:6.
    pub flags: u8,
    /// Command identifier.
    pub cid: u16,
    /// Namespace identifier.
    pub nsid: u32,
    /// Command specific.
    pub cdw2: u32,
    /// Command specific.
    pub cdw3: u32,
    /// Metadata pointer.
    pub mptr: u64,
    /// Data pointer.
    pub dptr: DataPointer,
    /// Command specific.
    pub cdw10: u32,
    /// Command specific.
    pub cdw11: u32,
    /// Command specific.
    pub cdw12: u32,
    /// Command specific.
    pub cdw13: u32,
    /// Command specific.
    pub cdw14: u32,
    /// Command specific.
    pub cdw15: u32,
}

const _: () = assert!(size_of::<Sqe>() == 64);

impl Sqe {
    /// Creates an entry with all other fields zero.
    #[must_use]
    pub fn new(opcode: u8, cid: Cid, nsid: Nsid) -> Self {
        Self { opcode, cid: cid.0, nsid: nsid.0, ..Self::default() }
    }

    /// Returns the command identifier.
    #[must_use]
    pub const fn cid(&self) -> Cid {
        Cid(self.cid)
    }

    /// Returns the namespace identifier.
    #[must_use]
    pub const fn nsid(&self) -> Nsid {
        Nsid(self.nsid)
    }

    /// Returns the interpretation of the data pointer.
    #[must_use]
    pub const fn psdt(&self) -> Psdt {
        Psdt(self.flags >> 6)
    }

    /// Returns the fused operation: 0 = none.
    #[must_use]
    pub const fn fuse(&self) -> u8 {
        self.flags & 3
    }

    /// Returns this entry with PSDT replaced.
    #[must_use]
    pub const fn with_psdt(mut self, psdt: Psdt) -> Self {
        self.flags = (self.flags & 0x3f) | psdt.0 << 6;
        self
    }

    /// Returns this entry with two PRP entries for its data.
    #[must_use]
    pub const fn with_prps(mut self, prp1: u64, prp2: u64) -> Self {
        self.dptr = DataPointer::from_prps(prp1, prp2);
        self.with_psdt(Psdt::PRP)
    }

    /// Returns this entry with an SGL descriptor for its data.
    #[must_use]
    pub fn with_sgl(mut self, descriptor: SglDescriptor) -> Self {
        self.dptr = DataPointer::from_sgl(descriptor);
        self.with_psdt(Psdt::SGL_MPTR_ADDRESS)
    }
}
