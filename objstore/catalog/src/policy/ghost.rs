//! Ghosts: a bounded memory of evicted files.

/// Words of a set: a counter, then ghosts. A new ghost replaces the oldest of its set.
const SET: usize = 64;

/// Ghosts per file of the store.
const PER_FILE: usize = 2;

/// The history of an evicted file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ghost {
    /// Time of its last use.
    pub stamp: u32,
    /// True when it was used again after its insertion.
    pub reused: bool,
}

/// The most recent evictions. Two files may be confused: 1 in millions.
#[derive(Debug)]
pub struct Ghosts {
    /// A ghost is `tag << 33 | reused << 32 | stamp`; tag 0 is empty.
    words: Vec<u64>,
    /// True once there was a ghost. Most of a journal is replayed without one.
    is_used: bool,
}

impl Ghosts {
    pub fn new(files: u32) -> Self {
        let sets = (files as usize * PER_FILE).div_ceil(SET - 1).max(1);
        Self { words: vec![0; sets * SET], is_used: false }
    }

    fn set(&mut self, hash: u64) -> (&mut u64, &mut [u64], u64) {
        let sets = (self.words.len() / SET) as u64;
        let at = ((hash >> 32) * sets) >> 32;
        let set = &mut self.words[at as usize * SET..][..SET];
        let (next, names) = set.split_first_mut().expect("a set has a counter");
        (next, names, (hash & 0x7FFF_FFFF).max(1))
    }

    /// Remembers a file, and returns the ghost that it replaces.
    pub fn insert(&mut self, hash: u64, ghost: Ghost) -> Option<Ghost> {
        self.is_used = true;
        let (next, names, tag) = self.set(hash);
        let name = tag << 33 | u64::from(ghost.reused) << 32 | u64::from(ghost.stamp);
        let before = std::mem::replace(&mut names[*next as usize], name);
        *next = (*next + 1) % names.len() as u64;
        (before != 0).then(|| unpack(before))
    }

    /// Removes and returns the ghost of a file that is inserted again.
    pub fn take(&mut self, hash: u64) -> Option<Ghost> {
        if !self.is_used {
            return None;
        }
        let (_, names, tag) = self.set(hash);
        let name = names.iter_mut().find(|name| **name >> 33 == tag)?;
        Some(unpack(std::mem::take(name)))
    }
}

fn unpack(name: u64) -> Ghost {
    Ghost { stamp: name as u32, reused: name >> 32 & 1 == 1 }
}
