//! Scatter gather lists (Base, "Scatter Gather List").

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

open_enum! {
    /// SGL descriptor type (bits 7:4 of the last byte).
    SglKind: u8 {
        /// A contiguous range of data.
        DATA_BLOCK = 0,
        /// Data to discard (reads) or skip.
        BIT_BUCKET = 1,
        /// The next segment of descriptors; more follow after it.
        SEGMENT = 2,
        /// The last segment of descriptors.
        LAST_SEGMENT = 3,
        /// Keyed data block (fabrics).
        KEYED_DATA_BLOCK = 4,
        /// Transport data block (fabrics).
        TRANSPORT_DATA_BLOCK = 5,
    }
}

/// SGL descriptor, 16 bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C, align(8))]
pub struct SglDescriptor {
    /// Address of the data or of the next segment.
    pub address: u64,
    /// Length in bytes of the data or of the next segment.
    pub length: u32,
    /// Reserved.
    pub reserved: [u8; 3],
    /// Type in bits 7:4, subtype in bits 3:0 (0 = address).
    pub identifier: u8,
}

const _: () = assert!(size_of::<SglDescriptor>() == 16);

impl SglDescriptor {
    /// Creates a descriptor of `kind` with subtype 0.
    #[must_use]
    pub const fn new(kind: SglKind, address: u64, length: u32) -> Self {
        Self { address, length, reserved: [0; 3], identifier: kind.0 << 4 }
    }

    /// Describes `length` bytes of data at `address`.
    #[must_use]
    pub const fn data_block(address: u64, length: u32) -> Self {
        Self::new(SglKind::DATA_BLOCK, address, length)
    }

    /// Describes `length` bytes of data to discard.
    #[must_use]
    pub const fn bit_bucket(length: u32) -> Self {
        Self::new(SglKind::BIT_BUCKET, 0, length)
    }

    /// Describes a segment of `length` bytes of descriptors, whose last one is again a segment.
    #[must_use]
    pub const fn segment(address: u64, length: u32) -> Self {
        Self::new(SglKind::SEGMENT, address, length)
    }

    /// Describes the last segment: `length` bytes of data descriptors.
    #[must_use]
    pub const fn last_segment(address: u64, length: u32) -> Self {
        Self::new(SglKind::LAST_SEGMENT, address, length)
    }

    /// Returns the type.
    #[must_use]
    pub const fn kind(&self) -> SglKind {
        SglKind(self.identifier >> 4)
    }

    /// Returns the subtype: 0 = address.
    #[must_use]
    pub const fn subtype(&self) -> u8 {
        self.identifier & 0xf
    }
}
