//! The catalog's entry of one file: a cache line.

use crate::key::BlockKey;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// In the pool, or in limbo on the way there.
    Free,
    /// Has a key that lookups do not find yet.
    Writing,
    /// Committed.
    Stored,
    /// Has lost its key; freed with its last reference.
    Doomed,
}

#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub struct Entry {
    pub key: BlockKey,
    /// The namespace's current space: tells equal keys of different namespaces apart.
    pub space: u32,
    /// As many as no caller can make: a file whose count wrapped would be evicted while in use.
    pub refs: u64,
    pub state: State,
}

const _: () = assert!(size_of::<Entry>() == 64, "one cache line each");

impl Entry {
    pub const FREE: Self = Self { key: BlockKey([0; 32]), space: 0, refs: 0, state: State::Free };
}

/// A namespace between two clears. Its number is part of every key, so a new space makes all files
/// of the old one misses immediately; they are swept later.
#[derive(Debug, Clone, Copy, Default)]
pub struct Space {
    pub slot: u32,
    pub stored: u32,
    pub writing: u32,
    pub doomed: u32,
    /// Stored and in use.
    pub active: u32,
}

impl Space {
    /// Adds `entry` to the counts, or subtracts it.
    pub fn count(&mut self, entry: &Entry, add: bool) {
        let stored = entry.state == State::Stored;
        let step = |count: &mut u32, holds: bool| {
            *count = if add { *count + u32::from(holds) } else { *count - u32::from(holds) };
        };
        step(&mut self.stored, stored);
        step(&mut self.writing, entry.state == State::Writing);
        step(&mut self.doomed, entry.state == State::Doomed);
        step(&mut self.active, stored && entry.refs > 0);
    }

    /// Returns the stored files that are not in use.
    pub fn evictable(&self) -> u32 {
        self.stored - self.active
    }

    /// Returns the files that still count for the namespace after this space was cleared.
    pub fn in_use(&self) -> u32 {
        self.writing + self.active + self.doomed
    }

    pub fn is_empty(&self) -> bool {
        self.stored + self.writing + self.doomed == 0
    }
}
