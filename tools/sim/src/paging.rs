//! Movement of scheduled requests' blocks to the GPU: from drives to host memory, and from there
//! over the link. The store's own code decides what moves when.

mod decode;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use kv_catalog::PolicyKind;
use kv_schedule::{
    Config, Curve, Decision, Direction, Flow, IoCosts, Kind, Op, OpId, Scheduler, Setting,
    SlackTable,
};
use kv_tier::{
    Admission, Block, Hop, Lookahead, LookaheadConfig, RequestId, Tier, TierConfig, When,
};

use crate::lane::{Lane, LaneModel};

pub(crate) use decode::{Decode, Found, Hbm};

/// The tiers below the GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Below {
    pub block_bytes: u64,
    /// Blocks of host memory.
    pub host_blocks: u32,
    pub drives: LaneModel,
    pub link: LaneModel,
}

/// Returns a FIFO channel with equal bandwidth in both directions.
pub(crate) const fn way(latency: Duration, bytes_per_second: f64) -> LaneModel {
    let (read, write, object) = (bytes_per_second, bytes_per_second, Duration::ZERO);
    LaneModel { read, write, latency, object, mixed: 1.0, window: usize::MAX }
}

/// Settings of the lookahead.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead {
    /// Window in iterations, and blocks per batch. With a window of 0, blocks are read on demand.
    pub lookahead: LookaheadConfig,
    /// Scheduler settings of both hops.
    pub schedule: Config,
}

/// A hop: its scheduler and its transfers.
#[derive(Debug)]
struct Channel {
    scheduler: Scheduler,
    lane: Lane,
}

impl Channel {
    fn new(config: Config, model: LaneModel) -> Self {
        let curve = |bandwidth| Curve::line(model.latency, bandwidth).expect("it rises");
        let costs = IoCosts { read: curve(model.read), write: curve(model.write), mixed: 1.0 };
        let [name, gpu, engine] = ["", "", "ripieno sim"].map(str::to_owned);
        let setting = Setting { model: name, gpu, engine, drives: Vec::new() };
        let scheduler = Scheduler::new(config, SlackTable::new(setting, costs));
        Self { scheduler, lane: Lane::new(model) }
    }
}

/// A read that a request waits for.
#[derive(Debug)]
struct Urgent {
    request: RequestId,
    blocks: u64,
}

/// Host memory, drives, the link, and their transfers.
#[derive(Debug)]
pub(crate) struct Paging {
    below: Below,
    batch_blocks: u64,
    tier: Tier<u64>,
    drives: Channel,
    link: Channel,
    ahead: Lookahead<u64>,
    urgent: BTreeMap<OpId, Urgent>,
    named: u64,
    /// Operations that the next iteration waits for.
    awaited: BTreeSet<OpId>,
    now: Duration,
    /// Bytes transferred to the GPU.
    arrived: u64,
}

impl Paging {
    pub(crate) fn new(below: Below, ahead: Ahead) -> Self {
        let Below { block_bytes, host_blocks, drives, link } = below;
        let tier = TierConfig { blocks: host_blocks, block_bytes, policy: PolicyKind::Lru };
        Self {
            below,
            batch_blocks: u64::from(ahead.lookahead.batch_blocks),
            tier: Tier::new(tier),
            drives: Channel::new(ahead.schedule, drives),
            link: Channel::new(ahead.schedule, link),
            ahead: Lookahead::new(ahead.lookahead),
            urgent: BTreeMap::new(),
            named: 0,
            awaited: BTreeSet::new(),
            now: Duration::ZERO,
            arrived: 0,
        }
    }

    /// Puts a block into host memory if there is room.
    pub(crate) fn keep(&mut self, key: u64) {
        let again = self.again();
        if let Admission::Fill(memory) = self.tier.admit(Block { key, again, by: None }) {
            self.tier.filled(memory, true);
        }
    }

    /// Removes a block that is not needed any more.
    pub(crate) fn forget(&mut self, key: u64) {
        self.tier.remove(key);
    }

    /// Announces that a request runs in `iterations` iterations, where the next one is 1.
    pub(crate) fn announce(&mut self, id: RequestId, keys: &[u64], iterations: u32) {
        self.ahead.prefetch(id, keys, When::In(iterations), &mut self.tier, self.now);
    }

    /// Records that a request has blocks on the GPU.
    pub(crate) fn allocated(&mut self, id: RequestId) {
        self.ahead.allocated(id);
    }

    /// Cancels an announced request.
    pub(crate) fn cancel(&mut self, id: RequestId) {
        let Self { tier, drives, link, ahead, .. } = self;
        ahead.cancel(id, tier, &mut drives.scheduler, &mut link.scheduler);
    }

    /// Runs a request that was announced with these blocks, in the next iteration.
    pub(crate) fn run(&mut self, id: RequestId, keys: &[u64]) {
        let Self { tier, drives, link, ahead, .. } = self;
        // Announcements before the first iteration were ignored.
        match ahead.run(id, tier, &mut drives.scheduler, &mut link.scheduler) {
            None => self.read(id, keys),
            Some(missing) => {
                self.awaited.extend(missing.in_flight);
                self.read(id, &missing.blocks);
            }
        }
    }

    /// Reads blocks that the next iteration waits for.
    pub(crate) fn read(&mut self, id: RequestId, keys: &[u64]) {
        let near = keys.iter().filter(|key| self.tier.contains(**key)).count() as u64;
        self.read_from(Hop::Link, id, near);
        self.read_from(Hop::Drives, id, keys.len() as u64 - near);
    }

    fn read_from(&mut self, hop: Hop, request: RequestId, mut blocks: u64) {
        while blocks > 0 {
            let part = blocks.min(self.batch_blocks);
            blocks -= part;
            self.named += 1;
            let id = OpId(self.named);
            let flow = Flow { tenant: 0, request: request.0 };
            let op = Op { id, flow, bytes: part * self.below.block_bytes, kind: Kind::Soon };
            self.urgent.insert(id, Urgent { request, blocks: part });
            self.awaited.insert(id);
            let channel = match hop {
                Hop::Drives => &mut self.drives,
                Hop::Link => &mut self.link,
            };
            channel.scheduler.add(op, self.now).expect("only writes are refused");
        }
    }

    /// Waits for all reads. Returns the time waited.
    pub(crate) fn wait(&mut self) -> Duration {
        let since = self.now;
        while !self.awaited.is_empty() {
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
        self.ahead.iteration(waited + took);
    }

    fn plan(&mut self) {
        let Self { tier, drives, link, ahead, now, .. } = self;
        ahead.plan(tier, &mut drives.scheduler, &mut link.scheduler, *now);
    }

    /// Returns the reload cost: the time to read a block from the drives.
    fn again(&self) -> Duration {
        self.drives.scheduler.table().costs.read.duration(self.below.block_bytes)
    }

    /// Advances to the next event up to `limit`. Returns false if there is none.
    fn advance(&mut self, limit: Duration) -> bool {
        let wake = self.decide();
        let events = [&self.drives, &self.link].map(|channel| channel.lane.next_event());
        let next = events.into_iter().flatten().chain(wake).min();
        let Some(next) = next.filter(|next| *next <= limit) else { return false };
        self.now = self.now.max(next);
        for hop in [Hop::Drives, Hop::Link] {
            let channel = match hop {
                Hop::Drives => &mut self.drives,
                Hop::Link => &mut self.link,
            };
            let arrived = channel.lane.arrived(self.now);
            let from_drives = hop == Hop::Drives && !arrived.is_empty();
            arrived.into_iter().for_each(|(id, _)| self.ended(hop, id));
            // Blocks that came from the drives may move on over the link.
            if from_drives {
                self.plan();
            }
        }
        true
    }

    fn ended(&mut self, hop: Hop, id: OpId) {
        self.awaited.remove(&id);
        let scheduler = match hop {
            Hop::Drives => &mut self.drives.scheduler,
            Hop::Link => &mut self.link.scheduler,
        };
        if Lookahead::<u64>::owns(id) {
            let moved = self.ahead.ended(id, true, &mut self.tier);
            scheduler.ended(id, moved, self.now);
            return;
        }
        let Urgent { request, blocks } = self.urgent.remove(&id).expect("it was started");
        scheduler.ended(id, blocks * self.below.block_bytes, self.now);
        match hop {
            Hop::Drives => self.read_from(Hop::Link, request, blocks),
            Hop::Link => self.arrived += blocks * self.below.block_bytes,
        }
    }

    /// Starts all operations that may start. Returns the time of the next decision.
    fn decide(&mut self) -> Option<Duration> {
        let again = self.again();
        let Self { below, tier, drives, link, ahead, urgent, now, .. } = self;
        let mut wake = None;
        for channel in [drives, link] {
            loop {
                match channel.scheduler.next(*now) {
                    Decision::Start(id) => {
                        let blocks = match urgent.get(&id) {
                            Some(read) => read.blocks,
                            None => {
                                ahead.start(id, again, tier).map_or(0, |it| it.blocks.len() as u64)
                            }
                        };
                        let bytes = blocks * below.block_bytes;
                        channel.lane.push(*now, id, Direction::Read, bytes, blocks);
                    }
                    Decision::Drop(id) => ahead.dropped(id),
                    Decision::Wait(until) => {
                        wake = wake.into_iter().chain(until.filter(|until| until > now)).min();
                        break;
                    }
                }
            }
        }
        wake
    }

    /// Returns the totals so far.
    pub(crate) fn counts(&self) -> Moved {
        let counts = self.ahead.counts();
        Moved {
            ready: counts.ready_blocks,
            late: counts.late_blocks,
            ahead: counts.drives_bytes + counts.link_bytes,
            wasted: counts.wasted_link_bytes + self.tier.counts().wasted_bytes,
            link: counts.link_bytes + self.arrived,
            now: self.now,
        }
    }
}

/// Totals since the beginning.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Moved {
    /// Blocks of announced requests that were on the GPU in time; the next field: too late.
    pub ready: u64,
    pub late: u64,
    /// Bytes prefetched over both hops; the next field counts those never used.
    pub ahead: u64,
    pub wasted: u64,
    /// Bytes over the link.
    pub link: u64,
    pub now: Duration,
}

impl Moved {
    /// Returns the difference to earlier totals.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            ready: self.ready - before.ready,
            late: self.late - before.late,
            ahead: self.ahead - before.ahead,
            wasted: self.wasted - before.wasted,
            link: self.link - before.link,
            now: self.now - before.now,
        }
    }
}

#[cfg(test)]
mod tests;
