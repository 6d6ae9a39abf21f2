//! Contents of the host memory cache, and its prefetches.

use std::time::Duration;

use kv_catalog::BlockKey;
use kv_schedule::OpId;
use kv_tier::{Lookahead, Tier};

/// Contents of the cache and the lookahead.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) tier: Tier<BlockKey>,
    pub(super) ahead: Option<Lookahead<BlockKey>>,
    /// Time to read a block from the drives.
    pub(super) reload_cost: Duration,
}

impl Memory {
    /// Starts a batch. Returns its bytes and blocks, or `None` if nothing has to move.
    pub(super) fn start(&mut self, id: OpId) -> Option<(u64, u64)> {
        let ahead = self.ahead.as_mut()?;
        let batch = ahead.start(id, self.reload_cost, &mut self.tier)?;
        let blocks = batch.blocks.len() as u64;
        if blocks == 0 {
            ahead.ended(id, true, &mut self.tier);
            return None;
        }
        Some((blocks * self.tier.config().block_bytes, blocks))
    }

    pub(super) fn dropped(&mut self, id: OpId) {
        if let Some(ahead) = &mut self.ahead {
            ahead.dropped(id);
        }
    }

    /// Ends a batch. Returns its bytes.
    pub(super) fn ended(&mut self, id: OpId) -> u64 {
        self.ahead.as_mut().map_or(0, |ahead| ahead.ended(id, true, &mut self.tier))
    }
}
