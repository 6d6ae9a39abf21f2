//! The one place of this crate that names atomics.
//!
//! Rings are written once, against these names. A build with `--cfg loom` replaces them by loom's
//! model, which then tries every interleaving that the memory model allows. Memory shared with a
//! kernel cannot be modelled (its atomics live at addresses that are given), so [`raw`] is
//! always the machine's own.

#[cfg(all(test, not(loom)))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};

#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, fence};

/// How an access orders the accesses around it.
pub use std::sync::atomic::Ordering;

/// Atomics at addresses in shared memory.
pub(crate) mod raw {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};
}
