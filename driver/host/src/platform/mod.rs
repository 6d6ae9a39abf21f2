//! All of this crate's unsafe code: accessors of memory that a device also uses.

pub mod mmio;
