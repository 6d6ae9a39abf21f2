//! All unsafe code of this crate: accessors of memory shared with a device.
//!
//! [`mmio`] has the raw accessors. [`ring`] and [`buffer`] are the safe types on top of them that
//! the rest of the crate uses; they check bounds and alignment once, on construction. [`window`]
//! does the same for memory of other devices, and [`p2p`] proves that a controller can access it.
//! [`threads`] is for files where io_uring is forbidden, [`passthrough`] for namespaces that the
//! kernel keeps. With the feature `vfio`, `vfio` has the controllers on PCIe.

pub mod buffer;
pub mod mmio;
pub mod p2p;
pub mod passthrough;
pub mod ring;
pub mod threads;
#[cfg(feature = "vfio")]
pub mod vfio;
pub mod window;
