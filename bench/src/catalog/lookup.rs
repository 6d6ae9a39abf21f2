//! Prefix lookups, against a plain hash map from key to number.

use std::{collections::HashMap, hint::black_box};

use kv_catalog::{BlockKey, Catalog, NamespaceId, PolicyKind};
use rand::{RngCore as _, SeedableRng as _, rngs::SmallRng, seq::SliceRandom as _};

use super::eviction::catalog;
use crate::sample::{Samples, timed};

/// Blocks per prefix.
const PREFIX: usize = 1000;
/// Prefixes per round, taken from all over the store.
const PREFIXES: usize = 200;
const SEED: u64 = 1;

/// Location of a prefix's files.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Adjacent, as one request allocated them.
    Runs,
    /// Scattered over the store.
    Scattered,
}

/// Millions of keys a second.
pub struct Found {
    pub catalog: Samples,
    pub map: Samples,
    pub ratio: Samples,
}

/// Looks up the same prefixes on both sides, alternately.
pub fn measure(files: u32, order: Order, rounds: u32) -> Found {
    let mut random = SmallRng::seed_from_u64(SEED);
    let keys: Vec<BlockKey> = (0..files)
        .map(|_| {
            let mut digest = [0; 32];
            random.fill_bytes(&mut digest);
            BlockKey(digest)
        })
        .collect();
    let mut stored: Vec<u32> = (0..files).collect();
    if order == Order::Scattered {
        stored.shuffle(&mut random);
    }
    let (catalog, namespace) = filled(&keys, &stored);
    let map: HashMap<[u8; 32], u32> = stored.iter().map(|at| (keys[*at as usize].0, *at)).collect();
    let mut prefixes: Vec<&[BlockKey]> = keys.chunks_exact(PREFIX).collect();
    let mut found =
        Found { catalog: Samples::default(), map: Samples::default(), ratio: Samples::default() };
    // The first round is a warm-up.
    for round in 0..=rounds {
        prefixes.shuffle(&mut random);
        let chosen = &prefixes[..PREFIXES.min(prefixes.len())];
        let ours = rate(chosen, |keys| catalog.lookup(namespace, keys).expect("registered"));
        let theirs =
            rate(chosen, |keys| keys.iter().take_while(|key| map.contains_key(&key.0)).count());
        if round > 0 {
            found.catalog.push(ours);
            found.map.push(theirs);
            found.ratio.push(ours / theirs);
        }
    }
    found
}

fn rate(prefixes: &[&[BlockKey]], lookup: impl Fn(&[BlockKey]) -> usize) -> f64 {
    let (hits, time) = timed(|| prefixes.iter().map(|keys| black_box(lookup(keys))).sum::<usize>());
    assert_eq!(hits, prefixes.len() * PREFIX, "all of them are stored");
    hits as f64 / time.as_secs_f64() / 1e6
}

fn filled(keys: &[BlockKey], order: &[u32]) -> (Catalog, NamespaceId) {
    let (mut catalog, namespace) = catalog(keys.len() as u32, PolicyKind::default());
    for part in order.chunks(PREFIX) {
        let part: Vec<BlockKey> = part.iter().map(|at| keys[*at as usize]).collect();
        let write = catalog.begin(namespace, &part).expect("it is registered");
        catalog.written(write.id, 0, &[]).expect("it has begun");
        catalog.commit(write.id).expect("its rank has reported");
    }
    (catalog, namespace)
}
