//! Blocks on their way to requests that will run soon.

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

/// Set in the names of a lookahead's operations; the caller names others without it.
const OURS: u64 = 1 << 63;

/// Names a request of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// When a request runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// After so many iterations that are not over yet; 1: after the one that runs now.
    In(u32),
    /// At this time.
    At(Duration),
}

/// A part of the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hop {
    /// From the drives to host memory.
    Drives,
    /// From host memory to the GPU.
    Link,
}

/// How far ahead, and in what pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookaheadConfig {
    /// Iterations before a request runs in which its blocks go to the GPU (TierKV: K, 4).
    pub window: u32,
    /// The same for the drives (TierKV: K_SSD, 8).
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
    /// From where to where.
    pub hop: Hop,
    /// Of which request: the first one that asked for them.
    pub request: RequestId,
    /// The blocks, and where they are, or go to, in host memory. If there are none, nothing has to
    /// move any more; the batch has to be ended all the same.
    pub blocks: Vec<(K, HostBlock)>,
}

/// What is not on the GPU when a request runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing<K> {
    /// Blocks to be read now.
    pub blocks: Vec<K>,
    /// Batches to the GPU that end by themselves.
    pub in_flight: Vec<OpId>,
}

/// What was done since the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LookaheadCounts {
    /// Bytes that were read from the drives.
    pub drives_bytes: u64,
    /// Bytes that were copied to the GPU.
    pub link_bytes: u64,
    /// Of those: of requests that were aborted or preempted before they ran. What was read from the
    /// drives for nothing, the tier counts: it may be used yet.
    pub wasted_link_bytes: u64,
    /// Blocks that were on the GPU when their request ran.
    pub ready_blocks: u64,
    /// Blocks that were not.
    pub late_blocks: u64,
    /// Batches that could not be done in time.
    pub dropped: u64,
}

#[derive(Debug)]
struct Moving<K> {
    batch: Batch<K>,
    /// Whether it was started.
    is_started: bool,
    /// Its request was aborted or preempted.
    is_aborted: bool,
}

/// Brings blocks to requests that were announced.
///
/// The caller owns both schedulers, and passes on what they decide about batches that are
/// [`Lookahead::owns`].
#[derive(Debug)]
pub struct Lookahead<K> {
    config: LookaheadConfig,
    pace: Pace,
    requests: BTreeMap<RequestId, Request<K>>,
    /// Who wants a block, and when.
    wanted: HashMap<K, BTreeSet<(Duration, RequestId)>>,
    moving: BTreeMap<OpId, Moving<K>>,
    named: u64,
    counts: LookaheadCounts,
}

impl<K: Copy + Eq + Hash + Debug> Lookahead<K> {
    /// One without requests.
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

    /// What was done.
    #[must_use]
    pub fn counts(&self) -> LookaheadCounts {
        self.counts
    }

    /// Requests that have been announced and have not run, and batches that have not ended.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.requests.len() + self.moving.len()
    }

    /// Whether an operation is a batch of a lookahead.
    #[must_use]
    pub fn owns(id: OpId) -> bool {
        id.0 & OURS != 0
    }

    /// An iteration of the engine took so long.
    pub fn iteration(&mut self, took: Duration) {
        self.pace.iteration(took);
    }

    /// A request is going to run, and needs these blocks, which are stored and not on the GPU. Said
    /// again, the time is another one, blocks that are new are needed too, and what was left is
    /// tried again: what could not be done in time, was not read well, or found no room in the
    /// tier.
    ///
    /// A request for which no time is known, because no iteration has ended, is ignored.
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

    /// The request has blocks on the GPU: they may be filled.
    pub fn allocated(&mut self, id: RequestId) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.is_allocated = true;
        }
    }

    /// Hands what may begin to the schedulers, the most urgent first. To be called when something
    /// was announced or has ended, and once an iteration. Says when the window of another request
    /// begins, if nothing happens before.
    pub fn plan(
        &mut self,
        tier: &mut Tier<K>,
        drives: &mut Scheduler,
        link: &mut Scheduler,
        now: Duration,
    ) -> Option<Duration> {
        self.take_back(drives, link);
        let mut urgent: Vec<(Duration, RequestId)> =
            self.requests.iter().map(|(id, request)| (request.by, *id)).collect();
        urgent.sort_unstable();
        let LookaheadConfig { window, drives_window, .. } = self.config;
        let mut next = None;
        for (by, id) in urgent {
            // Without a pace, requests have times of their own, and those are enough.
            let span = |window| self.pace.of(window).unwrap_or(Duration::MAX);
            let is_near = |window| by <= now.saturating_add(span(window));
            let hops = [(Hop::Drives, is_near(drives_window)), (Hop::Link, is_near(window))];
            let far = [drives_window, window].into_iter().filter(|window| !is_near(*window));
            next = far.map(|window| by.saturating_sub(span(window))).chain(next).min();
            if hops.iter().all(|(_, is_near)| !is_near) {
                // Nor is a later one.
                break;
            }
            self.look(id, tier);
            for (hop, _) in hops.into_iter().filter(|(_, is_near)| *is_near) {
                let request = &self.requests[&id];
                let by = match hop {
                    // The second hop comes after the first.
                    Hop::Drives => {
                        let bytes = request.len() as u64 * tier.config().block_bytes;
                        by.saturating_sub(link.table().costs.read.duration(bytes))
                    }
                    Hop::Link => by,
                };
                let due = request.due(hop, tier);
                let scheduler = match hop {
                    Hop::Drives => &mut *drives,
                    Hop::Link => &mut *link,
                };
                for part in due.chunks(self.config.batch_blocks.max(1) as usize) {
                    let op = self.schedule(id, hop, part);
                    let bytes = part.len() as u64 * tier.config().block_bytes;
                    let flow = Flow { tenant: 0, request: id.0 };
                    let kind = Kind::Prefetch { by };
                    let added = scheduler.add(Op { id: op, flow, bytes, kind }, now);
                    debug_assert!(added.is_ok(), "only writes are refused");
                }
            }
        }
        next
    }

    /// A scheduler says to start a batch: these blocks have to move now. `again`: how long a block
    /// takes to get from the drives.
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

    /// A scheduler says that a batch cannot be done in time.
    pub fn dropped(&mut self, id: OpId) {
        if let Some(Moving { batch, .. }) = self.take_planned(id) {
            self.counts.dropped += 1;
            for (key, _) in batch.blocks {
                self.set(batch.request, key, id, Place::Left);
            }
        }
    }

    /// A batch that was started has ended, well or not. Says how many bytes moved: the caller tells
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

    /// A request was aborted or preempted: nothing more moves for it, and what was read ahead only
    /// for it is the first to go. Batches in flight end as usual.
    pub fn cancel(
        &mut self,
        id: RequestId,
        tier: &mut Tier<K>,
        drives: &mut Scheduler,
        link: &mut Scheduler,
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
            // What others asked for before, they may ask for again.
            if self.unwant(key, request.by, id, tier) && tier.is_unused(key) {
                tier.discard(key);
            }
        }
    }

    /// A request runs now. What is not there, it has to read itself: all of it where the request is
    /// none that was announced, or was ignored (`None`).
    pub fn run(
        &mut self,
        id: RequestId,
        tier: &mut Tier<K>,
        drives: &mut Scheduler,
        link: &mut Scheduler,
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

    /// Finds out what of a request is in host memory, and keeps it there.
    fn look(&mut self, id: RequestId, tier: &mut Tier<K>) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        for key in request.look(tier) {
            if let Some((by, _)) = self.wanted.get(&key).and_then(BTreeSet::first) {
                tier.expect(key, *by);
            }
        }
    }

    /// Names a batch of a request's blocks.
    fn schedule(&mut self, id: RequestId, hop: Hop, part: &[usize]) -> OpId {
        self.named += 1;
        let op = OpId(OURS | self.named);
        let request = self.requests.get_mut(&id).expect("it was announced");
        let keys = part.iter().map(|at| request.schedule(*at, hop, op));
        // Which memory, is known when it starts.
        let blocks = keys.map(|key| (key, HostBlock(u32::MAX))).collect();
        let batch = Batch { hop, request: id, blocks };
        self.moving.insert(op, Moving { batch, is_started: false, is_aborted: false });
        op
    }

    /// Forgets what waits for requests that have another time now: it is planned anew.
    fn take_back(&mut self, drives: &mut Scheduler, link: &mut Scheduler) {
        let Self { requests, moving, .. } = self;
        if !requests.values().any(|request| request.is_changed) {
            return;
        }
        moving.retain(|op, Moving { batch, is_started, .. }| {
            let request = requests.get_mut(&batch.request).filter(|it| it.is_changed);
            let Some(request) = request.filter(|_| !*is_started) else { return true };
            let (scheduler, place) = match batch.hop {
                Hop::Drives => (&mut *drives, Place::Elsewhere),
                Hop::Link => (&mut *link, Place::Host),
            };
            scheduler.cancel(*op);
            batch.blocks.iter().for_each(|(key, _)| request.set(*key, *op, place));
            false
        });
        requests.values_mut().for_each(|request| request.is_changed = false);
    }

    /// Forgets the batches of a request that have not been started; the others it cancels when the
    /// request does not run.
    fn cancel_batches(
        &mut self,
        id: RequestId,
        is_aborted: bool,
        drives: &mut Scheduler,
        link: &mut Scheduler,
    ) {
        self.moving.retain(|op, moving| {
            if moving.batch.request != id || moving.is_started && !is_aborted {
                return true;
            }
            moving.is_aborted = is_aborted;
            let scheduler = match moving.batch.hop {
                Hop::Drives => &mut *drives,
                Hop::Link => &mut *link,
            };
            scheduler.cancel(*op) == Cancelled::InFlight
        });
    }

    /// A request does not want a block any more. Whether nobody does.
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

#[cfg(test)]
mod tests;
