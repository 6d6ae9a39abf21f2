//! Shared helpers for the tests and benchmarks of several crates.
//!
//! # Architecture
//!
//! [`Drives`] are software controllers in one address space, in virtual or in real time.
//! [`KvMemory`] is the KV pool of an engine that knows the expected contents of each block.
//! Contents come from [`pattern`]: `rand` with a seed, so failures are reproducible.
//! [`without_io_uring`] starts a program as in a container that forbids it.
//! [`until`] waits for an event that no handle tells of.
//!
//! # Invariants
//!
//! There are no mocks of our own parts. A failure to build something panics, which fails the test.
//! No verdict depends on the speed of the machine: only a hang takes as long as [`WATCHDOG`].
//!
//! # Not implemented
//!
//! GPUs. Tests inside a crate's `src` cannot use this crate's types, because they see another copy
//! of their own crate.

mod drives;
mod forbidden;
mod kv;

use std::{
    thread,
    time::{Duration, Instant},
};

use nvme_driver::Nanos;
use rand::{RngCore as _, SeedableRng as _, rngs::SmallRng};

pub use drives::{Drives, memory_drives, set_faults};
pub use forbidden::{is_without_io_uring, without_io_uring};
pub use kv::{KvMemory, blocks, format, host_executor, inline_executor, keys, object, useful};

/// Time after which a wait of a test is a hang, on any machine.
pub const WATCHDOG: Duration = Duration::from_secs(600);
/// The same, for deadlines of a clock.
pub const WATCHDOG_NS: Nanos = Nanos::from_millis(600_000);

/// Waits until something is so.
///
/// # Panics
/// Panics with `what` if it is not so within [`WATCHDOG`].
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    const YIELDS: u32 = 64;
    let since = Instant::now();
    for turn in 0.. {
        if is_so() {
            return;
        }
        assert!(since.elapsed() < WATCHDOG, "it never was so: {what}");
        match turn < YIELDS {
            true => thread::yield_now(),
            false => thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// Returns `count` seeds from `first` on, times the environment variable `RIPIENO_SOAK`.
///
/// # Panics
/// Panics if that is not a number.
#[must_use]
pub fn seeds(first: u64, count: u64) -> std::ops::Range<u64> {
    let times = std::env::var("RIPIENO_SOAK").map_or(1, |times| times.parse().expect("a number"));
    first..first + count * times
}

/// Returns the seed of what a test does at random, such as kills: `RIPIENO_SEED`, or 1.
///
/// # Panics
/// Panics if that is not a number.
#[must_use]
pub fn seed() -> u64 {
    std::env::var("RIPIENO_SEED").map_or(1, |seed| seed.parse().expect("a number"))
}

/// Returns pseudo-random bytes, the same for the same `seed`.
#[must_use]
pub fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut pattern = vec![0; bytes];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut pattern);
    pattern
}
