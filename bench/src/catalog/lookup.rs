//! Prefix lookups, against a plain hash map from key to number.

use std::{collections::HashMap, convert::Infallible, hint::black_box};

use kv_catalog::{BlockKey, Catalog, NamespaceId, PolicyKind};
use rand::{RngCore as _, SeedableRng as _, rngs::SmallRng, seq::SliceRandom as _};

use super::eviction::catalog;
use crate::sample::{Sides, timed};

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

/// Looks up the same prefixes on both sides, alternately. Returns millions of keys a second.
pub fn measure(files: u32, order: Order, rounds: u32) -> Sides {
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
    let sides = Sides::measure(rounds, |_| {
        prefixes.shuffle(&mut random);
        let chosen = &prefixes[..PREFIXES.min(prefixes.len())];
        let ours = rate(chosen, |keys| catalog.lookup(namespace, keys).expect("registered"));
        let theirs =
            rate(chosen, |keys| keys.iter().take_while(|key| map.contains_key(&key.0)).count());
        Ok::<_, Infallible>((ours, theirs))
    });
    sides.unwrap_or_else(|never| match never {})
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
