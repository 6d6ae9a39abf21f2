//! All of this crate's unsafe code: accessors of memory that a device also uses.
//!
//! [`mmio`] has the raw accessors. [`ring`] and [`buffer`] are the safe types over them that the
//! rest of the crate uses: they check bounds and alignment once, when they are made. [`window`] is
//! the same for memory of other devices, and [`p2p`] proves that a controller reaches it. With the
//! feature `vfio`, `vfio` has the controllers on PCIe.

pub mod buffer;
pub mod mmio;
pub mod p2p;
pub mod ring;
#[cfg(feature = "vfio")]
pub mod vfio;
pub mod window;
