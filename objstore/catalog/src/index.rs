//! Which key is stored in which file, how many requests use it, and which file is evicted first.
//!
//! Every operation on one key costs O(1): a hash table from key to file, one entry per file in an
//! array, and a doubly linked list through that array for the order of eviction.
//!
//! The list holds exactly the files that may be evicted: stored and not referenced. Requests give
//! their files back from tail to head, so a block is always evicted before the blocks it follows:
//! evicting a head first would leave tails that no lookup can reach.

use std::collections::HashMap;

use crate::{ids::FileId, key::BlockKey};

/// The end of the list.
const NONE: u32 = u32::MAX;

/// Entries of the hash table reserved at once; beyond that it grows as it fills.
const RESERVED: u32 = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In the file pool.
    Free,
    /// Has a key that no lookup sees yet.
    Writing,
    /// Committed.
    Stored,
    /// Has lost its key; free as soon as it has no reference.
    Doomed,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    key: BlockKey,
    refs: u32,
    newer: u32,
    older: u32,
    state: State,
}

/// What the index holds, in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexCounts {
    /// Committed: what lookups see.
    pub stored: u32,
    /// Being written.
    pub writing: u32,
    /// Invalidated, and only kept for those that still refer to them.
    pub doomed: u32,
    /// With at least one reference, in any state.
    pub referenced: u32,
    /// That eviction may take.
    pub evictable: u32,
}

/// Where a key is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Committed in this file.
    Stored(FileId),
    /// Being written to this file.
    Writing(FileId),
}

impl Found {
    /// The file, in either case.
    #[must_use]
    pub fn file(self) -> FileId {
        match self {
            Self::Stored(file) | Self::Writing(file) => file,
        }
    }
}

/// One position of a request that is being stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The file that holds the key.
    pub file: FileId,
    /// Whether this request writes it. Otherwise it was there (or on its way) and is referenced.
    pub own: bool,
}

/// Keys, files, references and the order of eviction.
#[derive(Debug)]
pub struct Index {
    entries: Vec<Entry>,
    files: HashMap<BlockKey, FileId>,
    newest: u32,
    oldest: u32,
    counts: IndexCounts,
}

impl Index {
    /// An empty index over `files` files.
    ///
    /// # Panics
    /// When `files` is `u32::MAX`, which stands for "none".
    #[must_use]
    pub fn new(files: u32) -> Self {
        assert_ne!(files, NONE, "one number is needed for the end of the list");
        let entry =
            Entry { key: BlockKey([0; 32]), refs: 0, newer: NONE, older: NONE, state: State::Free };
        Self {
            entries: vec![entry; files as usize],
            files: HashMap::with_capacity(files.min(RESERVED) as usize),
            newest: NONE,
            oldest: NONE,
            counts: IndexCounts::default(),
        }
    }

    /// How many files are in which state.
    #[must_use]
    pub fn counts(&self) -> IndexCounts {
        self.counts
    }

    /// Where `key` is, if it is known.
    #[must_use]
    pub fn find(&self, key: BlockKey) -> Option<Found> {
        let &file = self.files.get(&key)?;
        Some(match self.entry(file).state {
            State::Writing => Found::Writing(file),
            _ => Found::Stored(file),
        })
    }

    /// Whether `file` is committed: its bytes are what its key promises.
    #[must_use]
    pub fn is_stored(&self, file: FileId) -> bool {
        self.entry(file).state == State::Stored
    }

    /// The longest run of leading `keys` that are stored. Appends their files to `out`, each
    /// referenced once.
    pub fn lookup(&mut self, keys: &[BlockKey], out: &mut Vec<FileId>) -> usize {
        for (i, key) in keys.iter().enumerate() {
            let Some(Found::Stored(file)) = self.find(*key) else { return i };
            self.reference(file);
            out.push(file);
        }
        keys.len()
    }

    /// Refers to `file`: it is neither evicted nor reused until it is released.
    ///
    /// # Panics
    /// When the file is free.
    pub fn reference(&mut self, file: FileId) {
        assert_ne!(self.entry(file).state, State::Free, "file {file} is free");
        self.change(file, |entry| entry.refs += 1);
    }

    /// Gives back the references of one request, tail first. Appends to `freed` what has no key
    /// any more and no reference now.
    ///
    /// # Panics
    /// When a file has no reference.
    pub fn release(&mut self, files: &[FileId], freed: &mut Vec<FileId>) {
        for file in files.iter().rev() {
            self.release_one(*file, freed);
        }
    }

    /// Gives `key` to `file`. No lookup sees it before [`Index::settle`].
    ///
    /// # Panics
    /// When the file is not free or the key is known.
    pub fn begin(&mut self, key: BlockKey, file: FileId) {
        let entry = self.entry(file);
        assert!(entry.state == State::Free && entry.refs == 0, "file {file} is in use");
        assert!(self.files.insert(key, file).is_none(), "key {key} is known");
        self.change(file, |entry| {
            entry.key = key;
            entry.state = State::Writing;
        });
    }

    /// Commits the files that a request wrote and releases those it found, tail first.
    ///
    /// # Panics
    /// When an own file was not begun.
    pub fn settle(&mut self, positions: &[Position], freed: &mut Vec<FileId>) {
        for position in positions.iter().rev() {
            if position.own {
                let state = self.entry(position.file).state;
                assert_eq!(state, State::Writing, "file {} is not being written", position.file);
                self.change(position.file, |entry| entry.state = State::Stored);
            } else {
                self.release_one(position.file, freed);
            }
        }
    }

    /// Takes back the files that a request was to write and releases those it found.
    pub fn abandon(&mut self, positions: &[Position], freed: &mut Vec<FileId>) {
        for position in positions.iter().rev() {
            if position.own {
                self.invalidate(position.file, freed);
            } else {
                self.release_one(position.file, freed);
            }
        }
    }

    /// Takes the key from `file`: a miss from now on. Appends it to `freed` unless it
    /// has references. Does nothing to a file without a key.
    pub fn invalidate(&mut self, file: FileId, freed: &mut Vec<FileId>) {
        let entry = *self.entry(file);
        if !matches!(entry.state, State::Writing | State::Stored) {
            return;
        }
        self.files.remove(&entry.key);
        self.change(file, |entry| {
            entry.state = if entry.refs == 0 { State::Free } else { State::Doomed };
        });
        if entry.refs == 0 {
            freed.push(file);
        }
    }

    /// Takes the file that was not used for the longest time out of the index, if any may go.
    pub fn evict(&mut self) -> Option<FileId> {
        if self.oldest == NONE {
            return None;
        }
        let file = FileId(self.oldest);
        let key = self.entry(file).key;
        self.files.remove(&key);
        self.change(file, |entry| entry.state = State::Free);
        Some(file)
    }

    fn release_one(&mut self, file: FileId, freed: &mut Vec<FileId>) {
        assert!(self.entry(file).refs > 0, "file {file} is released too often");
        self.change(file, |entry| {
            entry.refs -= 1;
            if entry.refs == 0 && entry.state == State::Doomed {
                entry.state = State::Free;
            }
        });
        if self.entry(file).state == State::Free {
            freed.push(file);
        }
    }

    fn entry(&self, file: FileId) -> &Entry {
        &self.entries[file.at()]
    }

    /// Every change of an entry goes through here, so that the list and the counts follow from it.
    fn change(&mut self, file: FileId, change: impl FnOnce(&mut Entry)) {
        let before = self.entries[file.at()];
        change(&mut self.entries[file.at()]);
        let after = self.entries[file.at()];
        count(&mut self.counts, &before, false);
        count(&mut self.counts, &after, true);
        match (before.evictable(), after.evictable()) {
            (false, true) => self.push_newest(file.0),
            (true, false) => self.unlink(file.0),
            _ => {}
        }
    }

    fn push_newest(&mut self, at: u32) {
        let second = std::mem::replace(&mut self.newest, at);
        let entry = &mut self.entries[at as usize];
        (entry.newer, entry.older) = (NONE, second);
        match second {
            NONE => self.oldest = at,
            _ => self.entries[second as usize].newer = at,
        }
    }

    fn unlink(&mut self, at: u32) {
        let Entry { newer, older, .. } = self.entries[at as usize];
        match newer {
            NONE => self.newest = older,
            _ => self.entries[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            _ => self.entries[older as usize].newer = newer,
        }
        let entry = &mut self.entries[at as usize];
        (entry.newer, entry.older) = (NONE, NONE);
    }
}

impl Entry {
    fn evictable(&self) -> bool {
        self.state == State::Stored && self.refs == 0
    }
}

fn count(counts: &mut IndexCounts, entry: &Entry, add: bool) {
    let step = |count: &mut u32, holds: bool| {
        let by = u32::from(holds);
        *count = if add { *count + by } else { *count - by };
    };
    step(&mut counts.stored, entry.state == State::Stored);
    step(&mut counts.writing, entry.state == State::Writing);
    step(&mut counts.doomed, entry.state == State::Doomed);
    step(&mut counts.referenced, entry.refs > 0);
    step(&mut counts.evictable, entry.evictable());
}

#[cfg(test)]
mod tests;
