//! The two rings between the caller and the warps.
//!
//! **Submission ring.** One producer (the caller); *every* warp reads *every* entry, because an
//! operation is one IOCB and each warp does its own part of it. An entry is
//! `(position + 1) << 32 | iocb`: a warp waiting for position p polls slot `p & mask` until the
//! high half is p + 1, so there is no shared tail to poll and zeroed memory is an empty ring.
//!
//! **Completion ring.** Many producers (the last warp to finish an operation) and one consumer (the
//! caller). A producer reserves a position by adding 1 to the shared tail and then writes an entry
//! of the same form; entries may be written out of order and are read in order.
//!
//! **Neither ring can overflow.** Both have as many entries as there are IOCBs, and an IOCB is
//! published again only after its completion was consumed. Position p overwrites position p - n of
//! n; of the n positions p - n .. p - 1 at least one (q) has completed, otherwise all n IOCBs would
//! be in flight and none left to publish. A warp takes entries in order, and q completed only after
//! every warp had taken it, so every warp has taken p - n <= q as well. In the completion ring at
//! most n completions are unconsumed, so the consumer has passed p - n.
//!
//! Ordering: three pairs.
//! 1. [`SubmitProducer::publish`] stores the entry with Release, [`Consumer::take`] (in the kernel:
//!    `gio_look`, or on a GPU `gio_refresh`, relaxed, and the fence behind it) loads it with
//!    Acquire: the IOCB, its contexts, and the pool are visible to the warp that sees the entry.
//! 2. [`CompleteProducer::complete`] stores the entry with Release, [`Consumer::take`] loads it
//!    with Acquire: results and statuses are visible to the caller, and so is the end of every
//!    warp's use of the IOCB, because the counter `warps_left` that chose the last warp is itself
//!    decremented with Acquire and Release.
//! 3. Reserving a completion position is also Acquire and Release. Position p may be reserved by a
//!    warp that has seen nothing newer than its own old IOCB; the chain consumer of p - n ->
//!    publication of a later IOCB -> reservation of an earlier position -> reservation of p orders
//!    the consumer's load of p - n before the store of p. With Relaxed the old store could be
//!    ordered after the new one, and position p would never be seen.
//!
//! The kernel implements its ends of both rings in C++. The Rust versions here serve the loom model
//! and the engine's tests, and are the reference for the C++ ones.

use crate::{shared::Region, sync::Ordering};

/// The 64-bit words of a ring.
pub(crate) trait Words {
    /// Loads word `slot`.
    fn load(&self, slot: u32, order: Ordering) -> u64;
    /// Stores word `slot`.
    fn store(&self, slot: u32, word: u64, order: Ordering);
}

/// Ring words in shared memory.
#[derive(Debug, Clone)]
pub(crate) struct SharedWords(pub(crate) Region);

impl Words for SharedWords {
    fn load(&self, slot: u32, order: Ordering) -> u64 {
        self.0.load64(slot as usize * size_of::<u64>(), order)
    }

    fn store(&self, slot: u32, word: u64, order: Ordering) {
        self.0.store64(slot as usize * size_of::<u64>(), word, order);
    }
}

/// Returns the entry that announces `iocb` at `position`.
fn entry(position: u32, iocb: u32) -> u64 {
    u64::from(position.wrapping_add(1)) << 32 | u64::from(iocb)
}

/// Returns the IOCB of `word`, if it is the entry of `position`.
fn decode(word: u64, position: u32) -> Option<u32> {
    ((word >> 32) as u32 == position.wrapping_add(1)).then_some(word as u32)
}

/// The caller's end of the submission ring.
#[derive(Debug)]
pub(crate) struct SubmitProducer<W> {
    words: W,
    mask: u32,
    tail: u32,
}

impl<W: Words> SubmitProducer<W> {
    /// Creates a producer over `mask + 1` zeroed words.
    pub(crate) fn new(words: W, mask: u32) -> Self {
        Self { words, mask, tail: 0 }
    }

    /// Makes `iocb` visible to every warp and returns the new tail. The caller must have at most
    /// `mask` other IOCBs in flight.
    pub(crate) fn publish(&mut self, iocb: u32) -> u32 {
        // Release: pair 1 of the module's `Ordering:`.
        self.words.store(self.tail & self.mask, entry(self.tail, iocb), Ordering::Release);
        self.tail = self.tail.wrapping_add(1);
        self.tail
    }

    /// Returns the position of the next entry.
    pub(crate) fn tail(&self) -> u32 {
        self.tail
    }
}

/// A reader's end of a ring: the caller's of the completion ring, or one warp's of the submission
/// ring.
#[derive(Debug)]
pub(crate) struct Consumer<W> {
    words: W,
    mask: u32,
    head: u32,
}

impl<W: Words> Consumer<W> {
    /// Creates a consumer over `mask + 1` zeroed words.
    pub(crate) fn new(words: W, mask: u32) -> Self {
        Self { words, mask, head: 0 }
    }

    /// Returns the IOCB of the next entry, if there is one.
    pub(crate) fn take(&mut self) -> Option<u32> {
        // Acquire: pair 1 (submission) or 2 (completion) of the module's `Ordering:`.
        let word = self.words.load(self.head & self.mask, Ordering::Acquire);
        let iocb = decode(word, self.head)?;
        self.head = self.head.wrapping_add(1);
        Some(iocb)
    }
}

#[cfg(test)]
mod testing;
#[cfg(test)]
pub(crate) use testing::CompleteProducer;
#[cfg(all(test, not(loom)))]
pub(crate) use testing::SharedTail;
#[cfg(test)]
use testing::Tail;

#[cfg(all(test, loom))]
#[path = "ring/loom_tests.rs"]
mod loom_tests;

#[cfg(all(test, not(loom)))]
#[path = "ring/model_tests.rs"]
mod model_tests;
