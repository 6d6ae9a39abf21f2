//! Shared helpers for the tests and benchmarks of several crates.
//!
//! # Architecture
//!
//! [`Drives`] are software controllers in one address space, in virtual or in real time.
//! [`KvMemory`] is the KV pool of an engine that knows the expected contents of each block.
//! Contents come from [`pattern`]: `rand` with a seed, so failures are reproducible.
//!
//! # Invariants
//!
//! There are no mocks of our own parts. A failure to build something panics, which fails the test.
//!
//! # Not implemented
//!
//! GPUs. Tests inside a crate's `src` cannot use this crate's types, because they see another copy
//! of their own crate.

mod drives;
mod kv;

use rand::{RngCore as _, SeedableRng as _, rngs::SmallRng};

pub use drives::{Drives, memory_drives, set_faults};
pub use kv::{KvMemory, blocks, format, host_executor, inline_executor, keys, object};

/// Returns `count` seeds from `first` on, times the environment variable `RIPIENO_SOAK`.
///
/// # Panics
/// Panics if that is not a number.
#[must_use]
pub fn seeds(first: u64, count: u64) -> std::ops::Range<u64> {
    let times = std::env::var("RIPIENO_SOAK").map_or(1, |times| times.parse().expect("a number"));
    first..first + count * times
}

/// Returns pseudo-random bytes, the same for the same `seed`.
#[must_use]
pub fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut pattern = vec![0; bytes];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut pattern);
    pattern
}
