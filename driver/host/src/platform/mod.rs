//! All of this crate's unsafe code: accessors of memory that a device also uses.
//!
//! [`mmio`] has the raw accessors. [`ring`] and [`buffer`] are the safe types over them that the
//! rest of the crate uses: they check bounds and alignment once, when they are made.

pub mod buffer;
pub mod mmio;
pub mod ring;
