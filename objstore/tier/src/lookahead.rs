//! Prefetch of blocks for requests that will run soon.

mod request;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt::Debug,
    hash::Hash,
    time::Duration,
};

use kv_schedule::{Cancelled, Flow, Kind, Op, OpId, Scheduler};

use crate::{
    pace::Pace,
    tier::{Admission, Block, HostBlock, Tier},
};
use request::{Place, Request};

/// Set in the ids of a lookahead's operations; the caller's ids must leave it clear.
const OURS: u64 = 1 << 63;

/// Id of an engine's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Start time of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// After this many unfinished iterations; 1: after the one that runs now.
    In(u32),
    /// At this time.
    At(Duration),
}

/// A hop of the data path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hop {
    /// From the drives to host memory.
    Drives,
    /// From host memory to the GPU.
    Link,
}

/// Prefetch distance and batch size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookaheadConfig {
    /// Iterations before a request runs in which its blocks go to the GPU (TierKV: K, 4).
    pub window: u32,
    /// Iterations before a request runs in which its blocks are read from the drives (K_SSD, 8).
    pub drives_window: u32,
    /// Blocks of a batch.
    pub batch_blocks: u32,
}

impl Default for LookaheadConfig {
    fn default() -> Self {
        Self { window: 4, drives_window: 8, batch_blocks: 8 }
    }
}

/// Blocks of a request that move together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch<K> {
    /// The hop.
    pub hop: Hop,
    /// The request: the first one that asked for the blocks.
    pub request: RequestId,
    /// The blocks and their source or destination in host memory. If empty, nothing needs to move
    /// any more, but the batch must still be ended.
    pub blocks: Vec<(K, HostBlock)>,
}

/// Blocks that are not on the GPU when a request runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing<K> {
    /// Blocks to read now.
    pub blocks: Vec<K>,
    /// Batches to the GPU that are in flight and will end.
    pub in_flight: Vec<OpId>,
}

/// Counters since creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LookaheadCounts {
    /// Bytes read from the drives.
    pub drives_bytes: u64,
    /// Bytes copied to the GPU.
    pub link_bytes: u64,
    /// Of those, bytes for requests that were aborted or preempted before they ran. Wasted reads
    /// from the drives are counted by the tier: its blocks may still be used.
    pub wasted_link_bytes: u64,
    /// Blocks on the GPU when their request ran.
    pub ready_blocks: u64,
    /// Blocks not on the GPU when their request ran.
    pub late_blocks: u64,
    /// Batches dropped because they could not be done in time.
    pub dropped: u64,
}

#[derive(Debug)]
struct Moving<K> {
    batch: Batch<K>,
    /// True once it was started.
    is_started: bool,
    /// Set when its request was aborted or preempted.
    is_aborted: bool,
}

/// Prefetches blocks for announced requests.
///
/// The caller owns the schedulers of both hops, and passes on their decisions about its batches
/// ([`Lookahead::owns`]). Without one for the link, blocks go to host memory only.
#[derive(Debug)]
pub struct Lookahead<K> {
    config: LookaheadConfig,
    pace: Pace,
    requests: BTreeMap<RequestId, Request<K>>,
    /// Requests that want a block, by time.
    wanted: HashMap<K, BTreeSet<(Duration, RequestId)>>,
    moving: BTreeMap<OpId, Moving<K>>,
    named: u64,
    counts: LookaheadCounts,
}

impl<K: Copy + Eq + Hash + Debug> Lookahead<K> {
    /// Makes a lookahead without requests.
    #[must_use]
    pub fn new(config: LookaheadConfig) -> Self {
        Self {
            config,
            pace: Pace::default(),
            requests: BTreeMap::new(),
            wanted: HashMap::new(),
            moving: BTreeMap::new(),
            named: 0,
            counts: LookaheadCounts::default(),
        }
    }

    /// Returns the counters.
    #[must_use]
    pub fn counts(&self) -> LookaheadCounts {
        self.counts
    }

    /// Returns the number of announced requests that have not run, plus unfinished batches.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.requests.len() + self.moving.len()
    }

    /// Returns true when an operation is a batch of a lookahead.
    #[must_use]
    pub fn owns(id: OpId) -> bool {
        id.0 & OURS != 0
    }

    /// Adds the duration of an engine iteration.
    pub fn iteration(&mut self, took: Duration) {
        self.pace.iteration(took);
    }

    /// Announces a request that needs these blocks, which are stored and not on the GPU. Calling it
    /// again updates the time, adds new blocks, and retries blocks that were left: too late,
    /// failed, or refused by the tier.
    ///
    /// Ignores a request if its time is unknown because no iteration has ended.
    pub fn prefetch(
        &mut self,
        id: RequestId,
        keys: &[K],
        when: When,
        tier: &mut Tier<K>,
        now: Duration,
    ) {
        let by = match when {
            When::At(time) => time,
            When::In(iterations) => match self.pace.of(iterations) {
                Some(span) => now.saturating_add(span),
                None => return,
            },
        };
        let request = self.requests.entry(id).or_insert_with(|| Request::new(by));
        request.add(keys);
        let before = std::mem::replace(&mut request.by, by);
        request.is_changed |= before != by;
        request.retry();
        let keys: Vec<K> = request.keys().collect();
        for key in keys {
            let wants = self.wanted.entry(key).or_default();
            wants.remove(&(before, id));
            wants.insert((by, id));
            tier.expect(key, wants.first().expect("this one").0);
        }
    }

    /// Marks that the request's blocks on the GPU are allocated and may be filled.
    pub fn allocated(&mut self, id: RequestId) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.is_allocated = true;
        }
    }

    /// Schedules all batches that may begin, the most urgent first. Call it after an announcement,
    /// after the end of a batch, and once per iteration. Returns when the window of another request
    /// begins, if nothing happens before.
    pub fn plan(
        &mut self,
        tier: &mut Tier<K>,
        drives: &mut Scheduler,
        mut link: Option<&mut Scheduler>,
        now: Duration,
    ) -> Option<Duration> {
        self.take_back(drives, link.as_deref_mut());
        let mut urgent: Vec<(Duration, RequestId)> =
            self.requests.iter().map(|(id, request)| (request.by, *id)).collect();
        urgent.sort_unstable();
        let LookaheadConfig { window, drives_window, .. } = self.config;
        let mut next = None;
        for (by, id) in urgent {
            // Without a pace, requests have absolute times, which are enough.
            let span = |window| self.pace.of(window).unwrap_or(Duration::MAX);
            let is_near = |window| by <= now.saturating_add(span(window));
            let hops = [(Hop::Drives, is_near(drives_window)), (Hop::Link, is_near(window))];
            let far = [drives_window, window].into_iter().filter(|window| !is_near(*window));
            next = far.map(|window| by.saturating_sub(span(window))).chain(next).min();
            if hops.iter().all(|(_, is_near)| !is_near) {
                // All later requests are farther away.
                break;
            }
            self.look(id, tier);
            for (hop, _) in hops.into_iter().filter(|(_, is_near)| *is_near) {
                let request = &self.requests[&id];
                let by = match hop {
                    // The second hop comes after the first.
                    Hop::Drives => {
                        let bytes = request.len() as u64 * tier.config().block_bytes;
                        let costs = |link: &&mut Scheduler| link.table().costs.read.duration(bytes);
                        by.saturating_sub(link.as_ref().map(costs).unwrap_or_default())
                    }
                    Hop::Link => by,
                };
                let due = request.due(hop, tier);
                let Some(scheduler) = lane(hop, drives, link.as_deref_mut()) else { continue };
                for part in due.chunks(self.config.batch_blocks.max(1) as usize) {
                    let op = self.schedule(id, hop, part);
                    let bytes = part.len() as u64 * tier.config().block_bytes;
                    let flow = Flow { tenant: 0, request: id.0 };
                    let kind = Kind::Prefetch { by };
                    let added = scheduler.add(Op { id: op, flow, bytes, kind }, now);
                    assert!(added.is_ok(), "only writes are refused");
                }
            }
        }
        next
    }

    /// Starts a batch that a scheduler has released: returns the blocks to move now. `again` is the
    /// time to reload a block from the drives.
    pub fn start(&mut self, id: OpId, again: Duration, tier: &mut Tier<K>) -> Option<Batch<K>> {
        let Moving { mut batch, .. } = self.take_planned(id)?;
        let keys: Vec<K> = batch.blocks.drain(..).map(|(key, _)| key).collect();
        for key in keys {
            let by = self.wanted.get(&key).and_then(BTreeSet::first).map(|(by, _)| *by);
            let found = match batch.hop {
                Hop::Drives => match tier.admit(Block { key, again, by }) {
                    Admission::Fill(memory) => Ok(memory),
                    Admission::Present => Err(Place::Elsewhere),
                    Admission::Refused => Err(Place::Left),
                },
                Hop::Link if tier.contains(key) => tier.get(key).ok_or(Place::Elsewhere),
                Hop::Link => Err(Place::Elsewhere),
            };
            match found {
                Ok(memory) => batch.blocks.push((key, memory)),
                Err(place) => self.set(batch.request, key, id, place),
            }
        }
        let bytes = tier.config().block_bytes * batch.blocks.len() as u64;
        match batch.hop {
            Hop::Drives => self.counts.drives_bytes += bytes,
            Hop::Link => self.counts.link_bytes += bytes,
        }
        let moving = Moving { batch: batch.clone(), is_started: true, is_aborted: false };
        self.moving.insert(id, moving);
        Some(batch)
    }

    /// Drops a batch that a scheduler has found too late.
    pub fn dropped(&mut self, id: OpId) {
        if let Some(Moving { batch, .. }) = self.take_planned(id) {
            self.counts.dropped += 1;
            for (key, _) in batch.blocks {
                self.set(batch.request, key, id, Place::Left);
            }
        }
    }

    /// Ends a started batch, successful or not. Returns the bytes moved, which the caller passes to
    /// the scheduler.
    pub fn ended(&mut self, id: OpId, is_good: bool, tier: &mut Tier<K>) -> u64 {
        if self.moving.get(&id).is_none_or(|moving| !moving.is_started) {
            return 0;
        }
        let Some(Moving { batch, is_aborted, .. }) = self.moving.remove(&id) else { return 0 };
        let blocks = if is_good { batch.blocks.len() } else { 0 };
        for (key, memory) in batch.blocks {
            let place = match batch.hop {
                Hop::Drives => {
                    tier.filled(memory, is_good);
                    if is_aborted && !self.wanted.contains_key(&key) {
                        tier.discard(key);
                    }
                    if is_good { Place::Elsewhere } else { Place::Left }
                }
                Hop::Link => {
                    tier.release(memory);
                    if is_good { Place::Gpu } else { Place::Left }
                }
            };
            self.set(batch.request, key, id, place);
        }
        blocks as u64 * tier.config().block_bytes
    }

    /// Cancels an aborted or preempted request: nothing more moves for it, and blocks prefetched
    /// only for it become the first victims. Batches in flight end as usual.
    pub fn cancel(
        &mut self,
        id: RequestId,
        tier: &mut Tier<K>,
        drives: &mut Scheduler,
        link: Option<&mut Scheduler>,
    ) {
        let Some(request) = self.requests.remove(&id) else { return };
        self.cancel_batches(id, true, drives, link);
        for (key, place) in request.blocks() {
            let is_wasted = match place {
                Place::Gpu => true,
                Place::OnLink(op) => self.moving.contains_key(&op),
                _ => false,
            };
            if is_wasted {
                self.counts.wasted_link_bytes += tier.config().block_bytes;
            }
            // Blocks that other requests announced earlier may be requested again.
            if self.unwant(key, request.by, id, tier) && tier.is_unused(key) {
                tier.discard(key);
            }
        }
    }

    /// Runs a request. Returns the blocks that it must read itself; `None` if it was not announced
    /// or was ignored, so it must read all of them.
    pub fn run(
        &mut self,
        id: RequestId,
        tier: &mut Tier<K>,
        drives: &mut Scheduler,
        link: Option<&mut Scheduler>,
    ) -> Option<Missing<K>> {
        let request = self.requests.remove(&id)?;
        let mut missing = Missing { blocks: Vec::new(), in_flight: Vec::new() };
        self.cancel_batches(id, false, drives, link);
        for (key, place) in request.blocks() {
            match place {
                Place::Gpu => self.counts.ready_blocks += 1,
                Place::OnLink(op) if self.moving.contains_key(&op) => missing.in_flight.push(op),
                _ => missing.blocks.push(key),
            }
            self.counts.late_blocks += u64::from(place != Place::Gpu);
            self.unwant(key, request.by, id, tier);
        }
        missing.in_flight.dedup();
        Some(missing)
    }

    fn take_planned(&mut self, id: OpId) -> Option<Moving<K>> {
        self.moving.get(&id).filter(|moving| !moving.is_started)?;
        self.moving.remove(&id)
    }

    /// Finds a request's blocks that are in host memory, and protects them.
    fn look(&mut self, id: RequestId, tier: &mut Tier<K>) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        for key in request.look(tier) {
            if let Some((by, _)) = self.wanted.get(&key).and_then(BTreeSet::first) {
                tier.expect(key, *by);
            }
        }
    }

    /// Creates a batch of a request's blocks.
    fn schedule(&mut self, id: RequestId, hop: Hop, part: &[usize]) -> OpId {
        self.named += 1;
        let op = OpId(OURS | self.named);
        let request = self.requests.get_mut(&id).expect("it was announced");
        let keys = part.iter().map(|at| request.schedule(*at, hop, op));
        // The memory is known when the batch starts.
        let blocks = keys.map(|key| (key, HostBlock(u32::MAX))).collect();
        let batch = Batch { hop, request: id, blocks };
        self.moving.insert(op, Moving { batch, is_started: false, is_aborted: false });
        op
    }

    /// Withdraws the waiting batches of requests with a new time: they are planned again.
    fn take_back(&mut self, drives: &mut Scheduler, mut link: Option<&mut Scheduler>) {
        let Self { requests, moving, .. } = self;
        if !requests.values().any(|request| request.is_changed) {
            return;
        }
        moving.retain(|op, Moving { batch, is_started, .. }| {
            let request = requests.get_mut(&batch.request).filter(|it| it.is_changed);
            let Some(request) = request.filter(|_| !*is_started) else { return true };
            let place = match batch.hop {
                Hop::Drives => Place::Elsewhere,
                Hop::Link => Place::Host,
            };
            if let Some(scheduler) = lane(batch.hop, drives, link.as_deref_mut()) {
                scheduler.cancel(*op);
            }
            batch.blocks.iter().for_each(|(key, _)| request.set(*key, *op, place));
            false
        });
        requests.values_mut().for_each(|request| request.is_changed = false);
    }

    /// Withdraws a request's batches that have not started; if the request does not run, cancels
    /// the others.
    fn cancel_batches(
        &mut self,
        id: RequestId,
        is_aborted: bool,
        drives: &mut Scheduler,
        mut link: Option<&mut Scheduler>,
    ) {
        self.moving.retain(|op, moving| {
            if moving.batch.request != id || moving.is_started && !is_aborted {
                return true;
            }
            moving.is_aborted = is_aborted;
            let scheduler = lane(moving.batch.hop, drives, link.as_deref_mut());
            scheduler.is_some_and(|scheduler| scheduler.cancel(*op) == Cancelled::InFlight)
        });
    }

    /// Removes a request's interest in a block. Returns true when no request wants it.
    fn unwant(&mut self, key: K, by: Duration, id: RequestId, tier: &mut Tier<K>) -> bool {
        let Some(wants) = self.wanted.get_mut(&key) else { return true };
        wants.remove(&(by, id));
        if let Some((by, _)) = wants.first() {
            tier.expect(key, *by);
            return false;
        }
        self.wanted.remove(&key);
        tier.forget(key);
        true
    }

    fn set(&mut self, id: RequestId, key: K, op: OpId, place: Place) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.set(key, op, place);
        }
    }
}

/// Returns the scheduler of a hop.
fn lane<'a>(
    hop: Hop,
    drives: &'a mut Scheduler,
    link: Option<&'a mut Scheduler>,
) -> Option<&'a mut Scheduler> {
    match hop {
        Hop::Drives => Some(drives),
        Hop::Link => link,
    }
}

#[cfg(test)]
mod tests;
