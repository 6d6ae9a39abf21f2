//! A working set that fits, and scans through blocks that are used once: does it stay?

use kv_catalog::{BlockKey, PolicyKind};

use super::{
    eviction::{catalog, request},
    trace::key,
};

const FILES: u32 = 10_000;
/// Requests whose blocks are used again and again.
const REQUESTS: u32 = 500;
/// Blocks of each: together six tenths of the files.
const BLOCKS: u32 = 12;
/// Blocks used once between two uses of the working set.
const SCAN: u32 = 6_000;
const ROUNDS: u32 = 40;

/// Part of the working set's blocks found.
pub struct Found {
    /// Beside scans.
    pub scanned: f64,
    /// Without them.
    pub alone: f64,
}

/// Uses the working set again and again, with and without scans.
pub fn measure(policy: PolicyKind) -> Found {
    Found { scanned: rate(policy, SCAN), alone: rate(policy, 0) }
}

fn rate(policy: PolicyKind, scan: u32) -> f64 {
    let (mut catalog, namespace) = catalog(FILES, policy);
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
