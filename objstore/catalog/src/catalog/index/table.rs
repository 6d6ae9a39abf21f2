//! From key to file: a hash table of file numbers, sized once for all files.
//!
//! Linear probing over slots of 8 bytes, each the entry's hash and its file. The hash gives the
//! first slot and tells nearly all other keys apart, so a lookup reads one cache line here and one
//! of the entry itself. Removal moves later slots back, so there are no tombstones. hashbrown would
//! read one line more for each key (its control bytes), and its lookups cannot be split into steps
//! that overlap the cache misses of many keys.

use crate::{ids::FileId, key::BlockKey};

/// Maps (space, key) to a file. Holds no keys: the caller compares them.
#[derive(Debug)]
pub struct KeyTable {
    /// Upper half: hash; lower half: `file + 1`. 0 is empty.
    slots: Vec<u64>,
    seed: [u64; 4],
}

impl KeyTable {
    /// Makes an empty table for at most `files` files. The seed makes collisions unpredictable.
    pub fn new(files: u32, seed: u64) -> Self {
        // At most two thirds full. Zeroed pages cost nothing until used.
        let slots = files as usize + files as usize / 2 + 8;
        let mut state = seed;
        Self { slots: vec![0; slots], seed: std::array::from_fn(|_| split_mix(&mut state) | 1) }
    }

    /// Returns the hash of a key; the table uses its upper half. Keys are digests, so folding them
    /// with secret numbers is enough.
    pub fn hash(&self, space: u32, key: &BlockKey) -> u64 {
        let (words, _) = key.0.as_chunks::<8>();
        let word = |at: usize| u64::from_le_bytes(words[at]) ^ self.seed[at];
        let mixed = fold(word(0) ^ u64::from(space), word(1)) ^ fold(word(2), word(3));
        fold(mixed, self.seed[0])
    }

    /// Returns the slot at which probing for `hash` begins.
    fn home(&self, hash: u64) -> usize {
        (((hash >> 32) * self.slots.len() as u64) >> 32) as usize
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }

    /// Returns the first file with this hash that is `wanted`.
    pub fn find(&self, hash: u64, wanted: impl Fn(FileId) -> bool) -> Option<FileId> {
        let mut at = self.home(hash);
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                return None;
            }
            if slot >> 32 == hash >> 32 && wanted(file_of(slot)) {
                return Some(file_of(slot));
            }
            at = self.next(at);
        }
    }

    /// Adds a file.
    pub fn insert(&mut self, hash: u64, file: FileId) {
        let mut at = self.home(hash);
        while self.slots[at] != 0 {
            at = self.next(at);
        }
        self.slots[at] = slot(hash, file);
    }

    /// Removes a file that was added with this hash.
    pub fn remove(&mut self, hash: u64, file: FileId) {
        let wanted = slot(hash, file);
        let mut hole = self.home(hash);
        while self.slots[hole] != wanted {
            assert_ne!(self.slots[hole], 0, "file {file} is not in the table");
            hole = self.next(hole);
        }
        // Later slots move into the hole, unless their own probing begins behind it.
        let len = self.slots.len();
        let mut at = self.next(hole);
        while self.slots[at] != 0 {
            let home = self.home(self.slots[at]);
            if (at + len - home) % len >= (at + len - hole) % len {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
            at = self.next(at);
        }
        self.slots[hole] = 0;
    }
}

fn slot(hash: u64, file: FileId) -> u64 {
    hash & !u64::from(u32::MAX) | u64::from(file.0 + 1)
}

fn file_of(slot: u64) -> FileId {
    FileId(slot as u32 - 1)
}

/// Xors the two halves of a product: each bit depends on all bits of both factors.
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// Returns the next number of the SplitMix64 generator.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Few distinct hashes, so that probing collides and wraps around.
        #[test]
        fn against_a_map(
            files in 1u32..40,
            steps in proptest::collection::vec((any::<bool>(), any::<u32>(), 0u32..6), 0..300),
        ) {
            let mut table = KeyTable::new(files, 7);
            let mut map = BTreeMap::new();
            for (insert, file, hash) in steps {
                let (file, hash) = (file % files, u64::from(hash) * (u64::MAX / 5));
                match (insert, map.get(&file).copied()) {
                    (true, None) => {
                        table.insert(hash, FileId(file));
                        map.insert(file, hash);
                    }
                    (false, Some(hash)) => {
                        table.remove(hash, FileId(file));
                        map.remove(&file);
                    }
                    _ => {}
                }
                for file in 0..files {
                    for hash in (0..6).map(|hash| hash * (u64::MAX / 5)) {
                        let found = table.find(hash, |found| found == FileId(file));
                        prop_assert_eq!(found.is_some(), map.get(&file) == Some(&hash));
                    }
                }
            }
        }
    }

    #[test]
    fn hashes_are_spread_and_differ_by_seed_and_space() {
        let key = |number: u64| {
            let mut digest = [0; 32];
            digest[..8].copy_from_slice(&number.to_le_bytes());
            BlockKey(digest)
        };
        let (table, other) = (KeyTable::new(1 << 16, 1), KeyTable::new(1 << 16, 2));
        let mut homes = std::collections::BTreeSet::new();
        for number in 0..1 << 16 {
            let hash = table.hash(0, &key(number));
            assert_ne!(hash, table.hash(1, &key(number)));
            assert_ne!(hash, other.hash(0, &key(number)));
            homes.insert(table.home(hash));
        }
        // Of 65,536 balls in 98,312 boxes, about 47,800 boxes get one.
        assert!((47_000..48_600).contains(&homes.len()), "{}", homes.len());
    }
}
