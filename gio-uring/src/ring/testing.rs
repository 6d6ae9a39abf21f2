//! The warps' end of the completion ring: the kernel's C++ in Rust, for the models and the engine's
//! tests.

use super::{Words, entry};
#[cfg(not(loom))]
use crate::shared::Region;
use crate::sync::Ordering;

/// A 32-bit word that producers increment.
pub(crate) trait Tail {
    /// Adds 1 and returns the previous value.
    fn next(&self, order: Ordering) -> u32;
}

/// The completion ring's tail in shared memory.
#[cfg(not(loom))]
#[derive(Debug, Clone)]
pub(crate) struct SharedTail(pub(crate) Region);

#[cfg(not(loom))]
impl Tail for SharedTail {
    fn next(&self, order: Ordering) -> u32 {
        self.0.add32(0, 1, order)
    }
}

/// The warps' end of the completion ring.
#[derive(Debug)]
pub(crate) struct CompleteProducer<W, T> {
    words: W,
    tail: T,
    mask: u32,
}

impl<W: Words, T: Tail> CompleteProducer<W, T> {
    /// Creates a producer over the consumer's words.
    pub(crate) fn new(words: W, tail: T, mask: u32) -> Self {
        Self { words, tail, mask }
    }

    /// Makes the completion of `iocb` visible to the caller.
    pub(crate) fn complete(&self, iocb: u32) {
        // Acquire and Release: pair 3 of the module's `Ordering:`.
        let position = self.tail.next(Ordering::AcqRel);
        // Release: pair 2.
        self.words.store(position & self.mask, entry(position, iocb), Ordering::Release);
    }
}
