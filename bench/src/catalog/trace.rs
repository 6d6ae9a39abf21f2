//! A recorded trace as keys.

use std::{collections::HashMap, path::Path};

use anyhow::Result;
use kv_catalog::BlockKey;

/// Tokens per block: those of a block of Mooncake's trace.
pub const BLOCK_TOKENS: u64 = 512;

/// All requests, in order.
pub struct Trace {
    /// Full blocks of each request. A number stands for a block and all blocks before it.
    pub requests: Vec<Vec<u32>>,
    distinct: u32,
}

impl Trace {
    /// Reads a trace. Only full blocks count, as in a store.
    pub fn read(path: &Path) -> Result<Self> {
        // After another prefix, an ID is another block.
        let mut nodes: HashMap<(u32, u64), u32> = HashMap::new();
        let blocks = |request: ripieno::trace::Request| {
            let (mut before, mut blocks) = (0, Vec::new());
            request.cut(BLOCK_TOKENS as u32, request.input_tokens / BLOCK_TOKENS, |ids, _| {
                for id in ids {
                    let next = nodes.len() as u32 + 1;
                    before = *nodes.entry((before, *id)).or_insert(next);
                }
                blocks.push(before);
            });
            blocks
        };
        let requests = ripieno::trace::read(path, None)?.requests.into_iter().map(blocks).collect();
        Ok(Self { requests, distinct: nodes.len() as u32 })
    }

    /// Builds a trace from numbers as in [`Trace::requests`], starting at 1.
    pub fn of(requests: Vec<Vec<u32>>) -> Self {
        let distinct = requests.iter().flatten().max().copied().unwrap_or(0);
        Self { requests, distinct }
    }

    /// Returns the number of distinct blocks.
    pub fn distinct(&self) -> u64 {
        u64::from(self.distinct)
    }

    /// Returns the number of blocks of all requests.
    pub fn blocks(&self) -> u64 {
        self.requests.iter().map(|blocks| blocks.len() as u64).sum()
    }
}

/// Returns the key of part `part` of a block.
pub fn key(block: u32, part: u32) -> BlockKey {
    let mut digest = [0; 32];
    digest[..4].copy_from_slice(&block.to_le_bytes());
    digest[4..8].copy_from_slice(&part.to_le_bytes());
    BlockKey(digest)
}
