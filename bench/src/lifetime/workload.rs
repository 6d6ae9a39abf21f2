//! Workloads of the store.

use std::ops::RangeInclusive;

use objstore::BlockKey;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

/// The namespaces of a workload, and their lifetimes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// One namespace that fills the store. Half of the requests are for recurring documents, some
    /// far more often than others; the rest are for documents requested only once.
    Steady,
    /// Four namespaces with a quarter of the store each; each writes twice as much as the previous
    /// one. One of them starts a new epoch with every drive write.
    Turnover,
}

impl Workload {
    /// All workloads.
    pub const ALL: [Self; 2] = [Self::Steady, Self::Turnover];

    /// Returns its name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Steady => "one namespace",
            Self::Turnover => "four namespaces",
        }
    }

    /// Returns the number of namespaces.
    pub fn namespaces(self) -> usize {
        match self {
            Self::Steady => 1,
            Self::Turnover => 4,
        }
    }
}

/// A request for a document.
pub struct Request {
    /// Index of its namespace.
    pub namespace: usize,
    /// All of its blocks.
    pub keys: Vec<BlockKey>,
}

/// Request generator; deterministic for a seed.
pub struct Requests {
    workload: Workload,
    rng: SmallRng,
    /// Range of a document's blocks.
    blocks: RangeInclusive<u32>,
    /// Recurring documents per namespace, with 1.5 times as many blocks as it has files.
    known: u32,
    /// Documents requested once so far.
    once: u32,
}

impl Requests {
    /// Creates requests for a store of `files` files, with documents of up to `blocks_max` blocks.
    pub fn new(workload: Workload, files: u32, blocks_max: u32, seed: u64) -> Self {
        let blocks = blocks_max.div_ceil(8)..=blocks_max;
        let mean = blocks.start().midpoint(blocks_max);
        let known = files / workload.namespaces() as u32 * 3 / 2 / mean;
        Self { workload, rng: SmallRng::seed_from_u64(seed), blocks, known, once: 0 }
    }

    /// Returns the next request.
    pub fn next(&mut self) -> Request {
        // 1, 2 to 3, 4 to 7 and 8 to 15.
        let namespace = self.rng.random_range(1..1u32 << self.workload.namespaces()).ilog2();
        let namespace = namespace as usize;
        let document = if self.rng.random_bool(0.5) {
            // The first tenth of them gets nearly half of the requests.
            (f64::from(self.known) * self.rng.random::<f64>().powi(3)) as u32
        } else {
            self.once += 1;
            self.known + self.once
        };
        // Equal for requests of the same document.
        let blocks = SmallRng::seed_from_u64(document.into()).random_range(self.blocks.clone());
        Request { namespace, keys: (0..blocks).map(|block| key(document, block)).collect() }
    }
}

/// Returns the key of a block of a document.
fn key(document: u32, block: u32) -> BlockKey {
    let mut digest = [0; 32];
    digest[..4].copy_from_slice(&document.to_le_bytes());
    digest[4..8].copy_from_slice(&block.to_le_bytes());
    BlockKey(digest)
}
