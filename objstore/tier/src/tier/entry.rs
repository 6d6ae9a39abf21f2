//! What a tier keeps about a block.

use std::time::Duration;

use super::HostBlock;

/// Whether a block can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Filling,
    Ready,
}

#[derive(Debug)]
pub(super) struct Entry<K> {
    pub(super) key: K,
    pub(super) memory: HostBlock,
    /// The octave of the time that it takes to get again: the policy's namespace.
    pub(super) cost: u32,
    pub(super) phase: Phase,
    pub(super) readers: u32,
    /// When it is wanted.
    pub(super) by: Option<Duration>,
    /// Nobody is going to want it, since this turn.
    pub(super) evictable: Option<u64>,
    /// It is not found any more.
    pub(super) is_removed: bool,
    /// It was read ahead, and nobody has used it.
    pub(super) is_unused_prefetch: bool,
}

impl<K> Entry<K> {
    pub(super) fn new(key: K, memory: HostBlock, cost: u32, by: Option<Duration>) -> Self {
        Self {
            key,
            memory,
            cost,
            phase: Phase::Filling,
            readers: 0,
            by,
            evictable: None,
            is_removed: false,
            is_unused_prefetch: by.is_some(),
        }
    }

    /// Whether it cannot go now.
    pub(super) fn is_active(&self) -> bool {
        self.readers > 0 || self.phase == Phase::Filling
    }
}
