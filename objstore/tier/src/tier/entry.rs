//! A tier's entry of a block.

use std::time::Duration;

/// Fill state of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Filling,
    Ready,
}

#[derive(Debug)]
pub(super) struct Entry<K> {
    pub(super) key: K,
    /// Octave of its reload time: the policy's namespace.
    pub(super) cost: u32,
    pub(super) phase: Phase,
    pub(super) readers: u32,
    /// Deadline of the request that wants it.
    pub(super) by: Option<Duration>,
    /// Turn at which it became evictable, if it is.
    pub(super) evictable: Option<u64>,
    /// Set when lookups do not find it any more.
    pub(super) is_removed: bool,
    /// Set while it is prefetched and unused.
    pub(super) is_unused_prefetch: bool,
}

impl<K> Entry<K> {
    pub(super) fn new(key: K, cost: u32, by: Option<Duration>) -> Self {
        Self {
            key,
            cost,
            phase: Phase::Filling,
            readers: 0,
            by,
            evictable: None,
            is_removed: false,
            is_unused_prefetch: by.is_some(),
        }
    }

    /// Returns true when it must not be evicted now.
    pub(super) fn is_active(&self) -> bool {
        self.readers > 0 || self.phase == Phase::Filling
    }
}
