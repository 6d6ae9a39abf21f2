//! Physical region pages (Base, "Physical Region Page Entry and List").

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A PRP entry: an address. Its offset within a page must be 0, except in a command's first entry.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(transparent)]
pub struct PrpEntry(pub u64);

const _: () = assert!(size_of::<PrpEntry>() == 8);

impl PrpEntry {
    /// Returns the offset in bytes within a page of `page_bytes` (a power of two).
    #[must_use]
    pub const fn offset(self, page_bytes: u32) -> u32 {
        (self.0 & (page_bytes as u64 - 1)) as u32
    }

    /// Returns the address of the page.
    #[must_use]
    pub const fn page(self, page_bytes: u32) -> u64 {
        self.0 & !(page_bytes as u64 - 1)
    }
}
