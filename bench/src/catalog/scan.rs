//! Scan resistance: hit rate of a working set that fits, next to scans of blocks used once.

use kv_catalog::{BlockKey, PolicyKind};
use ripieno_sim::plain_catalog;

use super::{eviction::request, trace::key};

const FILES: u32 = 10_000;
/// Requests of the working set.
const REQUESTS: u32 = 500;
/// Blocks per request: together six tenths of the files.
const BLOCKS: u32 = 12;
/// Blocks scanned between two uses of the working set.
const SCAN: u32 = 6_000;
const ROUNDS: u32 = 40;

/// Uses the working set repeatedly, with or without scans. Returns the fraction of its blocks that
/// is found.
pub fn hit_rate(policy: PolicyKind, scans: bool) -> f64 {
    let scan = if scans { SCAN } else { 0 };
    let (mut catalog, namespace) = plain_catalog(FILES, 1, policy);
    let keys =
        |request: u32| -> Vec<BlockKey> { (0..BLOCKS).map(|block| key(request, block)).collect() };
    let (mut hits, mut once) = (0, REQUESTS);
    for round in 0..ROUNDS {
        for number in 0..REQUESTS {
            let (found, _) = request(&mut catalog, namespace, &keys(number));
            if round > 0 {
                hits += found.len();
            }
            for _ in 0..scan / REQUESTS / BLOCKS {
                request(&mut catalog, namespace, &keys(once));
                once += 1;
            }
        }
    }
    hits as f64 / f64::from((ROUNDS - 1) * REQUESTS * BLOCKS)
}
