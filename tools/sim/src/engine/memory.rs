//! Contents of the host memory cache, and its prefetches.

use std::{fmt::Debug, hash::Hash, time::Duration};

use kv_schedule::{OpId, Scheduler};
use kv_tier::{Lookahead, LookaheadConfig, Missing, RequestId, Tier, TierConfig, When};

/// Contents of the cache and the lookahead.
#[derive(Debug)]
pub(crate) struct Memory<K> {
    pub(crate) tier: Tier<K>,
    pub(crate) ahead: Option<Lookahead<K>>,
    /// Time to read a block from the drives.
    pub(crate) reload_cost: Duration,
}

impl<K: Copy + Eq + Hash + Debug> Memory<K> {
    pub(crate) fn new(
        config: TierConfig,
        ahead: Option<LookaheadConfig>,
        reload_cost: Duration,
    ) -> Self {
        Self { tier: Tier::new(config), ahead: ahead.map(Lookahead::new), reload_cost }
    }

    /// Announces a request, whose blocks are prefetched.
    pub(crate) fn announce(&mut self, id: RequestId, keys: &[K], when: When, now: Duration) {
        if let Some(ahead) = &mut self.ahead {
            ahead.prefetch(id, keys, when, &mut self.tier, now);
        }
    }

    /// Passes the prefetches of both hops to their schedulers.
    pub(crate) fn plan(&mut self, drives: &mut Scheduler, link: &mut Scheduler, now: Duration) {
        if let Some(ahead) = &mut self.ahead {
            ahead.plan(&mut self.tier, drives, Some(link), now);
        }
    }

    /// Ends the prefetching for a request that now runs. Returns the blocks that are missing;
    /// `None` if it was not announced.
    pub(crate) fn run(
        &mut self,
        id: RequestId,
        drives: &mut Scheduler,
        link: &mut Scheduler,
    ) -> Option<Missing<K>> {
        self.ahead.as_mut()?.run(id, &mut self.tier, drives, Some(link))
    }

    /// Cancels the prefetching for a request.
    pub(crate) fn cancel(&mut self, id: RequestId, drives: &mut Scheduler, link: &mut Scheduler) {
        if let Some(ahead) = &mut self.ahead {
            ahead.cancel(id, &mut self.tier, drives, Some(link));
        }
    }

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
