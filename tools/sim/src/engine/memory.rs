//! Contents of the host memory cache, and its prefetches.

use std::{fmt::Debug, hash::Hash, time::Duration};

use kv_schedule::{OpId, Scheduler};
use kv_tier::{Lookahead, LookaheadConfig, Missing, RequestId, Tier, TierConfig, When};

/// Contents of the cache and the lookahead.
#[derive(Debug)]
pub(crate) struct Memory<K> {
    pub(crate) tier: Tier<K>,
    pub(crate) ahead: Lookahead<K>,
    /// Time to read a block from the drives.
    pub(crate) reload_cost: Duration,
}

impl<K: Copy + Eq + Hash + Debug> Memory<K> {
    pub(crate) fn new(config: TierConfig, ahead: LookaheadConfig, reload_cost: Duration) -> Self {
        Self { tier: Tier::new(config), ahead: Lookahead::new(ahead), reload_cost }
    }

    /// Announces a request, whose blocks are prefetched.
    pub(crate) fn announce(&mut self, id: RequestId, keys: &[K], when: When, now: Duration) {
        self.ahead.prefetch(id, keys, when, &mut self.tier, now);
    }

    /// Passes the prefetches of both hops to their schedulers.
    pub(crate) fn plan(&mut self, drives: &mut Scheduler, link: &mut Scheduler, now: Duration) {
        self.ahead.plan(&mut self.tier, drives, Some(link), now);
    }

    /// Ends the prefetching for a request that now runs. Returns the blocks that are missing;
    /// `None` if it was not announced.
    pub(crate) fn run(
        &mut self,
        id: RequestId,
        drives: &mut Scheduler,
        link: &mut Scheduler,
    ) -> Option<Missing<K>> {
        self.ahead.run(id, &mut self.tier, drives, Some(link))
    }

    /// Cancels the prefetching for a request.
    pub(crate) fn cancel(&mut self, id: RequestId, drives: &mut Scheduler, link: &mut Scheduler) {
        self.ahead.cancel(id, &mut self.tier, drives, Some(link));
    }

    /// Starts a batch. Returns its bytes and blocks, or `None` if nothing has to move.
    pub(super) fn start(&mut self, id: OpId) -> Option<(u64, u64)> {
        let batch = self.ahead.start(id, self.reload_cost, &mut self.tier)?;
        let blocks = batch.blocks.len() as u64;
        if blocks == 0 {
            self.ended(id);
            return None;
        }
        Some((blocks * self.tier.config().block_bytes, blocks))
    }

    /// Ends a batch. Returns its bytes.
    pub(super) fn ended(&mut self, id: OpId) -> u64 {
        self.ahead.ended(id, true, &mut self.tier)
    }
}
