//! What was evicted: names without files.

/// Names that share a cache line; one more replaces the oldest.
const WAYS: usize = 8;

/// Names that are kept for each file of the store.
const PER_FILE: usize = 2;

/// What is remembered of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ghost {
    /// When it was used last.
    pub stamp: u32,
    /// Whether it was used again after it was inserted.
    pub reused: bool,
}

/// The most recent evictions. A name may be forgotten early, and two may be taken for one: 1 in
/// millions.
#[derive(Debug)]
pub struct Ghosts {
    /// `tag << 33 | reused << 32 | stamp`; tag 0 is empty.
    ways: Vec<u64>,
}

impl Ghosts {
    pub fn new(files: u32) -> Self {
        Self { ways: vec![0; (files as usize * PER_FILE).next_multiple_of(WAYS).max(WAYS)] }
    }

    fn set(&mut self, hash: u64) -> (&mut [u64], u64) {
        let sets = (self.ways.len() / WAYS) as u64;
        let at = ((hash >> 32) * sets) >> 32;
        let set = &mut self.ways[at as usize * WAYS..][..WAYS];
        (set, (hash & 0x7FFF_FFFF).max(1))
    }

    /// Remembers a file, and says which one is forgotten for it.
    pub fn insert(&mut self, hash: u64, ghost: Ghost, now: u32) -> Option<Ghost> {
        let (set, tag) = self.set(hash);
        let age = |way: &u64| match way >> 33 {
            0 => u64::MAX,
            _ => u64::from(now.wrapping_sub(*way as u32)),
        };
        let oldest = set.iter_mut().max_by_key(|way| age(way)).expect("a set has ways");
        let new = tag << 33 | u64::from(ghost.reused) << 32 | u64::from(ghost.stamp);
        let before = std::mem::replace(oldest, new);
        (before >> 33 != 0).then(|| unpack(before))
    }

    /// Forgets a file that is back, and says what was remembered.
    pub fn take(&mut self, hash: u64) -> Option<Ghost> {
        let (set, tag) = self.set(hash);
        let way = set.iter_mut().find(|way| **way >> 33 == tag)?;
        Some(unpack(std::mem::take(way)))
    }
}

fn unpack(way: u64) -> Ghost {
    Ghost { stamp: way as u32, reused: way >> 32 & 1 == 1 }
}
