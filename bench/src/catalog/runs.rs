//! Run lengths of the files that requests allocate and find, after long churn: blocks of 16 tokens,
//! so that each block of the trace is 32 files.

use std::collections::{BTreeMap, HashMap};

use kv_catalog::{BlockKey, FileId, PolicyKind};
use ripieno_sim::plain_catalog;

use super::{
    eviction::request,
    trace::{BLOCK_TOKENS, Trace, key},
};

/// Tokens per block.
const TOKENS: u32 = 16;
/// Capacity in percent of the distinct blocks.
const PERCENT: u64 = 25;

/// Mean lengths, in files.
pub struct Found {
    pub allocated: f64,
    pub found: f64,
    pub hit_rate: f64,
}

#[derive(Default)]
struct Tally {
    files: u64,
    runs: u64,
}

impl Tally {
    fn add(&mut self, files: &[FileId]) {
        self.files += files.len() as u64;
        self.runs += files.chunk_by(|a, b| a.0 + 1 == b.0).count() as u64;
    }

    fn mean(&self) -> f64 {
        self.files as f64 / self.runs as f64
    }
}

/// Replays the trace; only the second half counts.
pub fn measure(trace: &Trace, policy: PolicyKind) -> Found {
    let (mut catalog, namespace) = plain_catalog(files(trace), 1, policy);
    replay(trace, |keys| request(&mut catalog, namespace, keys))
}

/// Replays the trace with LRU and a LIFO stack of free files.
pub fn without(trace: &Trace) -> Found {
    let mut store = Stack { free: (0..files(trace)).rev().collect(), ..Stack::default() };
    replay(trace, |keys| store.request(keys))
}

fn files(trace: &Trace) -> u32 {
    (trace.distinct() * BLOCK_TOKENS / u64::from(TOKENS) * PERCENT / 100) as u32
}

fn replay(
    trace: &Trace,
    mut request: impl FnMut(&[BlockKey]) -> (Vec<FileId>, Vec<FileId>),
) -> Found {
    let parts = BLOCK_TOKENS as u32 / TOKENS;
    let (mut allocated, mut found) = (Tally::default(), Tally::default());
    let (mut hits, half) = (0, trace.requests.len() / 2);
    for (number, blocks) in trace.requests.iter().enumerate() {
        let keys = blocks.iter().flat_map(|block| (0..parts).map(|part| key(*block, part)));
        let (prefix, own) = request(&keys.collect::<Vec<BlockKey>>());
        hits += prefix.len();
        if number >= half {
            found.add(&prefix);
            allocated.add(&own);
        }
    }
    let hit_rate = hits as f64 / (trace.blocks() * u64::from(parts)) as f64;
    Found { allocated: allocated.mean(), found: found.mean(), hit_rate }
}

/// A store that ignores the location of files.
#[derive(Default)]
struct Stack {
    files: HashMap<BlockKey, (FileId, u64)>,
    by_use: BTreeMap<u64, BlockKey>,
    free: Vec<u32>,
    uses: u64,
}

impl Stack {
    fn request(&mut self, keys: &[BlockKey]) -> (Vec<FileId>, Vec<FileId>) {
        let prefix = keys.iter().map_while(|key| Some(self.files.get(key)?.0)).collect();
        let missing = keys.iter().filter(|key| !self.files.contains_key(key)).count();
        // The request's blocks become the newest first, so that it does not evict them.
        for key in keys.iter().rev() {
            if let Some((file, last)) = self.files.get(key).copied() {
                self.by_use.remove(&last);
                self.place(*key, file);
            }
        }
        while self.free.len() < missing {
            let (_, key) = self.by_use.pop_first().expect("a request is smaller than the store");
            let (file, _) = self.files.remove(&key).expect("it is stored");
            self.free.push(file.0);
        }
        let mut own = Vec::new();
        for key in keys {
            if !self.files.contains_key(key) {
                let file = FileId(self.free.pop().expect("there is room now"));
                self.place(*key, file);
                own.push(file);
            }
        }
        (prefix, own)
    }

    fn place(&mut self, key: BlockKey, file: FileId) {
        self.uses += 1;
        self.by_use.insert(self.uses, key);
        self.files.insert(key, (file, self.uses));
    }
}
