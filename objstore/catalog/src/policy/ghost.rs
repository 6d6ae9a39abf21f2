//! What was evicted: names without files.

/// Words that belong together: a counter, then names. One more name replaces the one that was
/// evicted first.
const SET: usize = 64;

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

/// The most recent evictions. Two names may be taken for one: 1 in millions.
#[derive(Debug)]
pub struct Ghosts {
    /// A name is `tag << 33 | reused << 32 | stamp`; tag 0 is empty.
    words: Vec<u64>,
    /// True if there ever was a name. Most of a journal is replayed without one.
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

    /// Remembers a file, and says which one is forgotten for it.
    pub fn insert(&mut self, hash: u64, ghost: Ghost) -> Option<Ghost> {
        self.is_used = true;
        let (next, names, tag) = self.set(hash);
        let name = tag << 33 | u64::from(ghost.reused) << 32 | u64::from(ghost.stamp);
        let before = std::mem::replace(&mut names[*next as usize], name);
        *next = (*next + 1) % names.len() as u64;
        (before != 0).then(|| unpack(before))
    }

    /// Forgets a file that is back, and says what was remembered.
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
