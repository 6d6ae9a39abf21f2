//! Movement of scheduled requests' blocks to the GPU: from drives to host memory, and from there
//! over the link. The store's own code decides what moves when.

mod decode;

use std::{collections::BTreeSet, time::Duration};

use kv_catalog::PolicyKind;
use kv_schedule::{Config, Kind, OpId};
use kv_tier::{Admission, Block, Hop, LookaheadConfig, RequestId, TierConfig, When};
use serde::Deserialize;

use crate::{
    engine::{Ended, Link, Memory, Purpose},
    lane::LaneModel,
};

pub(crate) use decode::{Decode, Decoded};

/// A FIFO channel with equal bandwidth in both directions.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Channel {
    /// Bytes a second.
    pub bandwidth: f64,
    /// Latency after the transfer of the last byte.
    pub latency_us: f64,
    /// Time per block beside its transfer.
    #[serde(default)]
    pub set_up_us: f64,
}

/// The tiers below the GPU.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LowerTiers {
    pub block_bytes: u64,
    /// Blocks of host memory.
    pub host_blocks: f64,
    pub drives: Channel,
    pub link: Channel,
}

impl Channel {
    pub(crate) fn lane(self) -> LaneModel {
        let (read, write) = (self.bandwidth, self.bandwidth);
        let [latency, set_up] =
            [self.latency_us, self.set_up_us].map(|us| Duration::from_secs_f64(us * 1e-6));
        LaneModel { read, write, latency, set_up, ..LaneModel::INSTANT }
    }
}

/// Host memory, drives, the link, and their transfers.
#[derive(Debug)]
pub(crate) struct Paging {
    block_bytes: u64,
    batch_blocks: u64,
    memory: Memory<u64>,
    drives: Link,
    link: Link,
    /// Reads that the next iteration waits for, beside prefetches.
    reading: u32,
    /// Prefetches that it waits for.
    awaited: BTreeSet<OpId>,
    now: Duration,
    /// Bytes transferred to the GPU.
    arrived: u64,
}

impl Paging {
    /// With a window of 0, blocks are read on demand.
    pub(crate) fn new(lower: &LowerTiers, ahead: LookaheadConfig, schedule: Config) -> Self {
        let LowerTiers { block_bytes, host_blocks, drives, link } = *lower;
        let blocks = host_blocks as u32;
        let tier = TierConfig { blocks, block_bytes, policy: PolicyKind::Lru };
        let [drives, link] = [drives, link].map(|channel| {
            let lane = channel.lane();
            Link::new(lane, (schedule, lane.table()), block_bytes, 1)
        });
        let reload_cost = drives.scheduler.table().costs.read.duration(block_bytes);
        Self {
            block_bytes,
            batch_blocks: u64::from(ahead.batch_blocks),
            memory: Memory::new(tier, ahead, reload_cost),
            drives,
            link,
            reading: 0,
            awaited: BTreeSet::new(),
            now: Duration::ZERO,
            arrived: 0,
        }
    }

    /// Puts a block into host memory if there is room.
    pub(crate) fn keep(&mut self, key: u64) {
        let Memory { tier, reload_cost, .. } = &mut self.memory;
        if let Admission::Fill(memory) = tier.admit(Block { key, again: *reload_cost, by: None }) {
            tier.filled(memory, true);
        }
    }

    /// Removes a block that is not needed any more.
    pub(crate) fn forget(&mut self, key: u64) {
        self.memory.tier.remove(key);
    }

    /// Announces that a request runs in `iterations` iterations, where the next one is 1.
    pub(crate) fn announce(&mut self, id: RequestId, keys: &[u64], iterations: u32) {
        self.memory.announce(id, keys, When::In(iterations), self.now);
    }

    /// Records that a request has blocks on the GPU.
    pub(crate) fn allocated(&mut self, id: RequestId) {
        self.memory.ahead.allocated(id);
    }

    /// Cancels an announced request.
    pub(crate) fn cancel(&mut self, id: RequestId) {
        self.memory.cancel(id, &mut self.drives.scheduler, &mut self.link.scheduler);
    }

    /// Runs a request that was announced with these blocks, in the next iteration.
    pub(crate) fn run(&mut self, id: RequestId, keys: &[u64]) {
        // Announcements before the first iteration were ignored.
        match self.memory.run(id, &mut self.drives.scheduler, &mut self.link.scheduler) {
            None => self.read(id, keys),
            Some(missing) => {
                self.awaited.extend(missing.in_flight);
                self.read(id, &missing.blocks);
            }
        }
    }

    /// Reads blocks that the next iteration waits for.
    pub(crate) fn read(&mut self, id: RequestId, keys: &[u64]) {
        let tier = &self.memory.tier;
        let near = keys.iter().filter(|key| tier.contains(**key)).count() as u64;
        self.read_from(Hop::Link, id.0 as usize, near);
        self.read_from(Hop::Drives, id.0 as usize, keys.len() as u64 - near);
    }

    fn read_from(&mut self, hop: Hop, request: usize, mut blocks: u64) {
        while blocks > 0 {
            let part = blocks.min(self.batch_blocks);
            blocks -= part;
            self.reading += 1;
            let now = self.now;
            self.hop(hop).add(Purpose::Whole, Kind::Soon, request, (part, 1), now);
        }
    }

    fn hop(&mut self, hop: Hop) -> &mut Link {
        match hop {
            Hop::Drives => &mut self.drives,
            Hop::Link => &mut self.link,
        }
    }

    /// Waits for all reads. Returns the time waited.
    pub(crate) fn wait(&mut self) -> Duration {
        let since = self.now;
        while self.reading > 0 || !self.awaited.is_empty() {
            assert!(self.advance(Duration::MAX), "what is read arrives");
        }
        self.now - since
    }

    /// Computes for `took`; together with the wait this is an iteration.
    pub(crate) fn compute(&mut self, waited: Duration, took: Duration) {
        self.plan();
        let then = self.now + took;
        while self.advance(then) {}
        self.now = then;
        self.memory.ahead.iteration(waited + took);
    }

    fn plan(&mut self) {
        self.memory.plan(&mut self.drives.scheduler, &mut self.link.scheduler, self.now);
    }

    /// Advances to the next event up to `limit`. Returns false if there is none.
    fn advance(&mut self, limit: Duration) -> bool {
        let Self { drives, link, memory, now, .. } = self;
        let links = [drives, link];
        let next = links.map(|link| {
            link.pump(*now, Some(memory));
            link.next_event()
        });
        let Some(next) = next.into_iter().flatten().min().filter(|next| *next <= limit) else {
            return false;
        };
        self.now = self.now.max(next);
        for hop in [Hop::Drives, Hop::Link] {
            let Self { drives, link, memory, now, .. } = self;
            let link = if hop == Hop::Drives { drives } else { link };
            let ended = link.ended(*now, Some(memory));
            let from_drives = hop == Hop::Drives && !ended.is_empty();
            ended.into_iter().for_each(|(id, ended)| self.ended(hop, id, ended));
            // Blocks that came from the drives may move on over the link.
            if from_drives {
                self.plan();
            }
        }
        true
    }

    fn ended(&mut self, hop: Hop, id: OpId, Ended { purpose, request, bytes, .. }: Ended) {
        self.awaited.remove(&id);
        if purpose == Purpose::Ahead {
            return;
        }
        self.reading -= 1;
        match hop {
            Hop::Drives => self.read_from(Hop::Link, request, bytes / self.block_bytes),
            Hop::Link => self.arrived += bytes,
        }
    }

    /// Returns totals since the beginning: blocks of announced requests that were on the GPU in
    /// time (`ready`), and too `late`; bytes prefetched over both hops (`ahead`), and those
    /// `wasted`; and all bytes over the `link`.
    pub(crate) fn totals(&self) -> [(&'static str, u64); 5] {
        let counts = self.memory.ahead.counts();
        [
            ("ready", counts.ready_blocks),
            ("late", counts.late_blocks),
            ("ahead", counts.drives_bytes + counts.link_bytes),
            ("wasted", counts.wasted_link_bytes + self.memory.tier.counts().wasted_bytes),
            ("link", counts.link_bytes + self.arrived),
        ]
    }
}

#[cfg(test)]
mod tests;
