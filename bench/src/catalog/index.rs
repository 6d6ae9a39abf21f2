//! Cost of the index by length of a context, against the same keys in a
//! `std::collections::HashMap`.
//!
//! The paper's figure 3 has a hash table on a GPU take 9 to 24 times (insert) and 26 to 50 times
//! (lookup) as long as one on the CPU. The index is on the CPU, where one lookup serves all layers.

use std::{collections::HashMap, hint::black_box};

use anyhow::{Result, ensure};
use kv_catalog::{BlockKey, Catalog, CatalogConfig, KeyChain, Namespace, NamespaceId, PolicyKind};
use rand::{Rng as _, RngCore as _, SeedableRng as _, rngs::SmallRng};

use crate::{
    report::{Ratio, Report},
    sample::{Samples, Sides, timed},
};

/// Lengths of contexts in tokens, and tokens of a block.
const TOKENS: [u32; 8] =
    [1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10];
const BLOCK: u32 = 16;
/// Rounds that count.
const ROUNDS: u32 = 15;
/// Blocks of a request while the catalog is filled.
const REQUEST: usize = 1000;
/// Bytes of records that a journal takes at a time.
const PIECE_BYTES: usize = 1 << 20;

/// Measures an index of `files` blocks.
pub fn measure(files: u32, report: &mut Report) -> Result<()> {
    let more = TOKENS.iter().map(|tokens| tokens / BLOCK).sum::<u32>() * (ROUNDS + 1);
    let mut index = Index::new(files, more)?;
    for tokens in TOKENS.into_iter().filter(|tokens| tokens / BLOCK <= files) {
        let (mut lookups, mut inserts) = (Sides::default(), Sides::default());
        let (mut hashes, mut holds) = (Samples::default(), Samples::default());
        for round in 0..=ROUNDS {
            let Times { hash, lookup, acquire, insert } = index.round(tokens)?;
            lookups.push(round, lookup);
            inserts.push(round, insert);
            if round > 0 {
                hashes.push(hash);
                holds.push(acquire);
            }
        }
        let of = |what: &str| format!("{what} {tokens} tokens of {files} blocks");
        report.ratios.push(Ratio::sides(of("lookup of"), "us", &lookups));
        report.ratios.push(Ratio::sides(of("insert of"), "us", &inserts));
        report.counts.push((of("us to hash"), hashes.median()));
        report.counts.push((of("us to hold and release"), holds.median()));
    }
    report.notes.push("lookups and inserts are held against a HashMap with the same keys".into());
    Ok(())
}

/// A catalog, and a map with the same keys.
struct Index {
    catalog: Catalog,
    namespace: NamespaceId,
    map: HashMap<[u8; 32], u32>,
    /// The blocks that were stored first, in order.
    keys: Vec<BlockKey>,
    random: SmallRng,
}

/// Microseconds of a round. Pairs have the map's second.
struct Times {
    hash: f64,
    lookup: (f64, f64),
    /// Of a lookup whose blocks are held and released, as a load does.
    acquire: f64,
    insert: (f64, f64),
}

impl Index {
    /// Returns an index of `files` blocks with room for `more`.
    fn new(files: u32, more: u32) -> Result<Self> {
        let mut catalog = Catalog::new(CatalogConfig {
            files: files + more,
            file_bytes: 1,
            ranks: 1,
            words_per_file: 0,
            namespaces_max: 1,
            journal: true,
            files_ahead: 0,
            seed: 1,
            policy: PolicyKind::default(),
            write_budget: None,
        });
        let namespace = catalog.namespace(&Namespace::default())?;
        let map = HashMap::with_capacity((files + more) as usize);
        let random = SmallRng::seed_from_u64(1);
        let mut index = Self { catalog, namespace, map, keys: Vec::new(), random };
        index.keys = index.new_keys(files as usize);
        for keys in index.keys.clone().chunks(REQUEST) {
            index.insert(keys)?;
            index.insert_into_map(keys);
        }
        Ok(index)
    }

    /// Returns keys that nothing has, as random as digests.
    fn new_keys(&mut self, count: usize) -> Vec<BlockKey> {
        let mut keys = vec![BlockKey([0; 32]); count];
        keys.iter_mut().for_each(|key| self.random.fill_bytes(&mut key.0));
        keys
    }

    /// Stores blocks, and makes the journal's records of that.
    fn insert(&mut self, keys: &[BlockKey]) -> Result<()> {
        let write = self.catalog.begin(self.namespace, keys)?;
        self.catalog.written(write.id, 0, &[])?;
        self.catalog.commit(write.id)?;
        while self.catalog.pending(PIECE_BYTES).is_some() {}
        Ok(())
    }

    fn insert_into_map(&mut self, keys: &[BlockKey]) {
        let first = self.map.len() as u32;
        self.map.extend((first..).zip(keys).map(|(file, key)| (key.0, file)));
    }

    /// Measures a context once, and checks that all of its blocks are found.
    fn round(&mut self, tokens: u32) -> Result<Times> {
        let count = (tokens / BLOCK) as usize;
        let text: Vec<u32> = (0..tokens).map(|_| self.random.next_u32()).collect();
        let (_, hash) = timed(|| black_box(KeyChain::new(b"bench").keys(&text, BLOCK)));
        let first = self.random.random_range(0..=self.keys.len() - count);
        let stored = &self.keys[first..first + count];
        let (found, lookup) = timed(|| self.catalog.lookup(self.namespace, stored));
        let (in_map, map_lookup) =
            timed(|| stored.iter().take_while(|key| self.map.contains_key(&key.0)).count());
        let (held, acquire) = timed(|| {
            let prefix = self.catalog.acquire(self.namespace, stored)?;
            self.catalog.release(prefix.id)?;
            anyhow::Ok(prefix.files.len())
        });
        let found = [found?, in_map, held?];
        ensure!(found == [count; 3], "{found:?} of {count} stored blocks were found");
        let new = self.new_keys(count);
        let (inserted, insert) = timed(|| self.insert(&new));
        inserted?;
        let ((), map_insert) = timed(|| self.insert_into_map(&new));
        let [hash, lookup, map_lookup, acquire, insert, map_insert] =
            [hash, lookup, map_lookup, acquire, insert, map_insert]
                .map(|it| it.as_secs_f64() * 1e6);
        Ok(Times { hash, lookup: (lookup, map_lookup), acquire, insert: (insert, map_insert) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_the_index_has_are_measured() {
        let mut report = Report::new("catalog");
        measure(150, &mut report).unwrap();
        let names: Vec<&str> = report.ratios.iter().map(|ratio| &*ratio.name).collect();
        let of = |what, tokens| format!("{what} of {tokens} tokens of 150 blocks");
        assert_eq!(
            names,
            [of("lookup", 1024), of("insert", 1024), of("lookup", 2048), of("insert", 2048)]
        );
        assert!(report.ratios.iter().all(|ratio| ratio.value > 0.0 && ratio.against > 0.0));
    }
}
