//! The only module of this crate that names atomics.
//!
//! Rings are written once, against these names. A build with `--cfg loom` replaces them with loom's
//! model, which tries every interleaving that the memory model allows. Memory shared with a kernel
//! cannot be modelled (its atomics live at given addresses), so [`raw`] is always the machine's
//! own.

#[cfg(all(test, not(loom)))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};

#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, fence};

/// Memory ordering of an access.
pub use std::sync::atomic::Ordering;

/// Atomics at addresses in shared memory.
pub(crate) mod raw {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};
}
