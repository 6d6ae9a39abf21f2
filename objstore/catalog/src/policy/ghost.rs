//! Ghosts: a bounded memory of blocks that are not stored: evicted, or refused.

/// Words of a set: a counter, then ghosts. A new ghost replaces the oldest of its set.
const SET: usize = 64;

/// Ghosts per file of the store.
const PER_FILE: usize = 4;

/// Uses of a block count up to here.
pub const USES_MAX: u8 = 63;

/// The history of a block that is not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ghost {
    /// Uses: 1 to [`USES_MAX`].
    pub uses: u8,
    /// Time of the last use.
    pub stamp: u32,
}

/// The most recent evictions and refusals. Two blocks may be confused: 1 in a million.
#[derive(Debug)]
pub struct Ghosts {
    /// A ghost is `tag << 38 | uses << 32 | stamp`; 0 is empty.
    words: Vec<u64>,
    /// True once there was a ghost. Most of a journal is replayed without one.
    is_used: bool,
}

impl Ghosts {
    pub fn new(files: u32) -> Self {
        let sets = (files as usize * PER_FILE).div_ceil(SET - 1).max(1);
        Self { words: vec![0; sets * SET], is_used: false }
    }

    /// Returns the first word of a block's set, and its tag.
    fn at(&self, hash: u64) -> (usize, u64) {
        let sets = (self.words.len() / SET) as u64;
        ((((hash >> 32) * sets) >> 32) as usize * SET, hash & 0x03FF_FFFF)
    }

    fn find(&self, hash: u64) -> Option<usize> {
        if !self.is_used {
            return None;
        }
        let (set, tag) = self.at(hash);
        (set + 1..set + SET).find(|at| self.words[*at] != 0 && self.words[*at] >> 38 == tag)
    }

    /// Remembers a block that is not remembered yet.
    pub fn insert(&mut self, hash: u64, ghost: Ghost) {
        self.is_used = true;
        let (set, tag) = self.at(hash);
        let next = self.words[set];
        let word = tag << 38 | u64::from(ghost.uses) << 32 | u64::from(ghost.stamp);
        self.words[set + 1 + next as usize] = word;
        self.words[set] = (next + 1) % (SET as u64 - 1);
    }

    /// Returns the ghost of a block, if it is remembered.
    pub fn get(&self, hash: u64) -> Option<Ghost> {
        let word = self.words[self.find(hash)?];
        Some(Ghost { uses: (word >> 32) as u8 & USES_MAX, stamp: word as u32 })
    }

    /// Forgets a block.
    pub fn remove(&mut self, hash: u64) {
        if let Some(at) = self.find(hash) {
            self.words[at] = 0;
        }
    }
}
