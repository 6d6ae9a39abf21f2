//! Host memory cache above the drives: its contents, fills, and prefetches.

use std::time::Duration;

use kv_catalog::BlockKey;
use kv_schedule::Kind;
use kv_tier::{Admission, Block, HostBlock, Pace, RequestId, TierConfig, When};

use super::{Setup, link::Link, memory::Memory, numbered::Numbered, tiers::Purpose};
use crate::{lane::LaneModel, policy::HostMemory};

/// Blocks being copied to host memory.
#[derive(Debug)]
pub(super) struct Filling {
    blocks: Vec<HostBlock>,
    /// Layers that are not copied yet.
    left: u32,
}

#[derive(Debug)]
pub(super) struct Host {
    pub(super) memory: Memory<BlockKey>,
    pub(super) link: Link,
    /// Bandwidth and latency of the link.
    pub(super) lane: LaneModel,
    pub(super) filling: Numbered<Filling>,
    /// Steps ahead of which blocks are prefetched.
    pub(super) steps_ahead: Option<u32>,
    pace: Pace,
}

impl Host {
    pub(super) fn new(
        host: &HostMemory,
        setup: &Setup<'_>,
        drives: &LaneModel,
        unit_layer_bytes: u64,
        layers: u32,
    ) -> Self {
        let block_bytes = unit_layer_bytes * u64::from(layers);
        let blocks = u32::try_from(setup.storage.host_bytes / block_bytes).unwrap_or(u32::MAX - 2);
        let config = TierConfig { blocks, block_bytes, policy: host.eviction };
        let read = Duration::from_secs_f64(block_bytes as f64 / drives.read);
        let memory = Memory::new(config, host.lookahead.unwrap_or_default(), drives.latency + read);
        let lane = setup.storage.host;
        let link = Link::new(lane, (host.schedule, lane.table()), unit_layer_bytes, 1);
        Self {
            memory,
            link,
            lane,
            filling: Numbered::new(),
            steps_ahead: host.lookahead.map(|ahead| ahead.drives_window),
            pace: Pace::default(),
        }
    }

    /// Returns the number of leading `units` in the cache.
    pub(super) fn find(&self, units: &[BlockKey]) -> usize {
        units.iter().take_while(|unit| self.memory.tier.contains(**unit)).count()
    }

    /// Pins those of `units` that are in the cache, until they are released.
    pub(super) fn take(&mut self, units: &[BlockKey]) -> Vec<HostBlock> {
        units.iter().filter_map(|unit| self.memory.tier.get(*unit)).collect()
    }

    pub(super) fn release(&mut self, blocks: Vec<HostBlock>) {
        blocks.into_iter().for_each(|block| self.memory.tier.release(block));
    }

    /// Reserves room for absent `units` that are admitted. Returns the number of the fill.
    pub(super) fn begin_fill(&mut self, units: &[BlockKey], layers: u32) -> Option<u64> {
        let again = self.memory.reload_cost;
        let admitted = units.iter().filter_map(|key| {
            let block = Block { key: *key, again, by: None };
            match self.memory.tier.admit(block) {
                Admission::Fill(memory) => Some(memory),
                Admission::Present | Admission::Refused => None,
            }
        });
        let blocks: Vec<HostBlock> = admitted.collect();
        let filling = Filling { blocks, left: layers };
        (!filling.blocks.is_empty()).then(|| self.filling.push(filling))
    }

    /// Copies a computed layer of a fill.
    pub(super) fn fill(&mut self, number: u64, layer: u32, request: usize, now: Duration) {
        let Some(filling) = self.filling.get_mut(number) else { return };
        let units = filling.blocks.len() as u64;
        let purpose = Purpose::Store { number, layer };
        if !self.link.add(purpose, Kind::Write, request, (units, 1), now) {
            self.end_fill(number, false);
        }
    }

    /// Completes a layer of a fill.
    pub(super) fn filled(&mut self, number: u64) {
        let Some(filling) = self.filling.get_mut(number) else { return };
        filling.left -= 1;
        if filling.left == 0 {
            self.end_fill(number, true);
        }
    }

    fn end_fill(&mut self, number: u64, is_good: bool) {
        let Some(Filling { blocks, .. }) = self.filling.remove(number) else { return };
        blocks.into_iter().for_each(|block| self.memory.tier.filled(block, is_good));
    }

    /// Announces that a waiting request needs these units, `after` steps after the time `next`.
    pub(super) fn announce(
        &mut self,
        number: usize,
        units: &[BlockKey],
        (next, after): (Duration, u32),
        now: Duration,
    ) {
        let by = When::At(next + self.pace.of(after).unwrap_or_default());
        self.memory.announce(RequestId(number as u64), units, by, now);
    }

    pub(super) fn iteration(&mut self, took: Duration) {
        self.pace.iteration(took);
        self.memory.ahead.iteration(took);
    }
}
