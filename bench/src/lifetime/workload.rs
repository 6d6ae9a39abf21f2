//! What is asked of the store.

use std::ops::RangeInclusive;

use objstore::BlockKey;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

/// Who asks, and how often things end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// One namespace that fills the store. Half of the requests are for documents that come again,
    /// some far more often than others; the rest are for documents that never do.
    Steady,
    /// Four namespaces with a quarter of the store each, of which each writes twice as much as the
    /// one before. One of them starts a new epoch with every drive write.
    Turnover,
}

impl Workload {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Steady, Self::Turnover];

    /// As the report names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Steady => "one namespace",
            Self::Turnover => "four namespaces",
        }
    }

    /// Namespaces.
    pub fn namespaces(self) -> usize {
        match self {
            Self::Steady => 1,
            Self::Turnover => 4,
        }
    }
}

/// A document that is asked for.
pub struct Request {
    /// By the number of its namespace.
    pub namespace: usize,
    /// All of its blocks.
    pub keys: Vec<BlockKey>,
}

/// Makes requests: the same ones with the same seed.
pub struct Requests {
    workload: Workload,
    rng: SmallRng,
    /// Blocks of a document.
    blocks: RangeInclusive<u32>,
    /// Documents of each namespace that come again: half as many blocks again as it has files.
    known: u32,
    /// Documents that came once.
    once: u32,
}

impl Requests {
    /// For a store with so many files; documents of up to so many blocks.
    pub fn new(workload: Workload, files: u32, blocks_max: u32, seed: u64) -> Self {
        let blocks = blocks_max.div_ceil(8)..=blocks_max;
        let mean = blocks.start().midpoint(blocks_max);
        let known = files / workload.namespaces() as u32 * 3 / 2 / mean;
        Self { workload, rng: SmallRng::seed_from_u64(seed), blocks, known, once: 0 }
    }

    /// The next one.
    pub fn next(&mut self) -> Request {
        // 1, 2 to 3, 4 to 7 and 8 to 15.
        let namespace = self.rng.random_range(1..1u32 << self.workload.namespaces()).ilog2();
        let namespace = namespace as usize;
        let document = if self.rng.random_bool(0.5) {
            // The first tenth of them has nearly half of the requests.
            (f64::from(self.known) * self.rng.random::<f64>().powi(3)) as u32
        } else {
            self.once += 1;
            self.known + self.once
        };
        // The same for the same document.
        let blocks = SmallRng::seed_from_u64(document.into()).random_range(self.blocks.clone());
        Request { namespace, keys: (0..blocks).map(|block| key(document, block)).collect() }
    }
}

/// The key of a block of a document.
fn key(document: u32, block: u32) -> BlockKey {
    let mut digest = [0; 32];
    digest[..4].copy_from_slice(&document.to_le_bytes());
    digest[4..8].copy_from_slice(&block.to_le_bytes());
    BlockKey(digest)
}
