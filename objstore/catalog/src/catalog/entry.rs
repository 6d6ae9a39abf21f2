//! What the catalog knows of one file: a cache line.

use crate::key::BlockKey;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// In the pool, or in limbo on the way there.
    Free,
    /// Has a key that no lookup sees yet.
    Writing,
    /// Lookups find it, and no record tells of it: it is not where it survives a crash. The write
    /// refers to it until it is committed or given up, so that nobody else gets the file.
    Published,
    /// Committed.
    Stored,
    /// Has lost its key; goes as soon as nobody uses it.
    Doomed,
}

#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub struct Entry {
    pub key: BlockKey,
    /// The namespace between two clears: what tells equal keys apart.
    pub space: u32,
    pub refs: u32,
    pub state: State,
    pub pinned: bool,
}

const _: () = assert!(size_of::<Entry>() == 64, "one cache line each");

impl Entry {
    pub const FREE: Self =
        Self { key: BlockKey([0; 32]), space: 0, refs: 0, state: State::Free, pinned: false };
}

/// A namespace between two clears. Its number is a part of every key, so a new one makes all files
/// of the old one misses at once; they are swept later.
#[derive(Debug, Clone, Copy, Default)]
pub struct Space {
    pub namespace: u32,
    pub stored: u32,
    /// Of these, not committed.
    pub published: u32,
    pub writing: u32,
    pub doomed: u32,
    /// Stored and in use.
    pub active: u32,
    pub pinned: u32,
    /// Stored, not in use, not pinned.
    pub evictable: u32,
}

impl Space {
    /// Counts `entry` in or out.
    pub fn count(&mut self, entry: &Entry, add: bool) {
        let stored = matches!(entry.state, State::Stored | State::Published);
        let step = |count: &mut u32, holds: bool| {
            *count = if add { *count + u32::from(holds) } else { *count - u32::from(holds) };
        };
        step(&mut self.stored, stored);
        step(&mut self.published, entry.state == State::Published);
        step(&mut self.writing, entry.state == State::Writing);
        step(&mut self.doomed, entry.state == State::Doomed);
        step(&mut self.active, stored && entry.refs > 0);
        step(&mut self.pinned, stored && entry.pinned);
        step(&mut self.evictable, stored && entry.refs == 0 && !entry.pinned);
    }

    /// Files that a namespace cannot get rid of although this space is over.
    pub fn in_use(&self) -> u32 {
        self.writing + self.active + self.doomed
    }

    pub fn is_empty(&self) -> bool {
        self.stored + self.writing + self.doomed == 0
    }
}
