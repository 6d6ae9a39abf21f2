//! What the tests and benchmarks of several crates share.
//!
//! # Architecture
//!
//! [`Drives`] are software controllers in one address space, in virtual or in real time.
//! [`KvMemory`] is the KV pool of an engine that knows what each block should contain. Contents
//! come from [`pattern`]: `rand` with a seed, so a failure repeats.
//!
//! # Invariants
//!
//! Nothing here stands in for one of our own parts. What cannot be built panics: that is a failed
//! test.
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

/// `count` seeds from `first` on, times what the environment variable `RIPIENO_SOAK` says.
///
/// # Panics
/// When that is no number.
#[must_use]
pub fn seeds(first: u64, count: u64) -> std::ops::Range<u64> {
    let times = std::env::var("RIPIENO_SOAK").map_or(1, |times| times.parse().expect("a number"));
    first..first + count * times
}

/// Pseudo-random bytes, the same for the same `seed`.
#[must_use]
pub fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut pattern = vec![0; bytes];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut pattern);
    pattern
}
