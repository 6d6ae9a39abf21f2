//! The scheduler's state machine: events go in, decisions come out.

mod fair;
mod reads;
mod utilisation;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::Duration,
};

use crate::{
    cost::Direction,
    op::{BacklogFull, Cancelled, Decision, Kind, Op, OpId, StepId},
    table::{SlackTable, StepShape},
};
use fair::Shares;
use reads::Reads;
use utilisation::Utilisation;

/// Limits and settings of a scheduler.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Config {
    /// Maximum bytes of reads in flight, which bounds the wait of a more urgent one: enough to keep
    /// the devices busy. One read may always start.
    pub read_depth_bytes: u64,
    /// Maximum bytes of writes in flight, which a new read may have to wait for. One write may
    /// always start. A second one may start when an eighth of the first is left, if no read or
    /// prefetch waits or is in flight, and both together take no longer than `read_depth_bytes` of
    /// reads: the wait accepted for an urgent read.
    pub write_depth_bytes: u64,
    /// Maximum bytes of writes waiting or in flight: memory that the engine does not get back yet.
    pub backlog_bytes: u64,
    /// Utilisation of the devices by needed I/O above which nothing is prefetched (TierKV, section
    /// 3.4: 0.8). Prefetches do not count.
    pub high_water: f64,
    /// True when reads have priority over writes. If false, everything starts in order of arrival:
    /// layer-wise, as in other systems.
    pub reads_first: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            read_depth_bytes: 32 << 20,
            write_depth_bytes: 8 << 20,
            backlog_bytes: 1 << 30,
            high_water: 0.8,
            reads_first: true,
        }
    }
}

/// Counters of decisions since creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Bytes of started reads.
    pub read_bytes: u64,
    /// Bytes of started writes.
    pub write_bytes: u64,
    /// Bytes of started prefetches.
    pub prefetch_bytes: u64,
    /// Bytes of prefetches cancelled after their start.
    pub wasted_bytes: u64,
    /// Prefetches dropped because they could not be done in time.
    pub prefetches_dropped: u64,
    /// Writes refused.
    pub writes_refused: u64,
    /// Reads started so late that their layer waits for them.
    pub late_reads: u64,
}

/// A step of the engine.
#[derive(Debug, Clone, Copy)]
struct Step {
    shape: StepShape,
    /// Duration of one of its layers.
    window: Duration,
    /// The layer that computes, or the next one to.
    layer: u32,
    /// Time at which that layer began, or will begin.
    since: Duration,
    /// True while that layer computes.
    is_computing: bool,
}

impl Step {
    /// Returns when a layer begins to compute if nothing delays it.
    fn due(&self, layer: u32) -> Duration {
        let ahead = layer.saturating_sub(self.layer);
        self.since.saturating_add(self.window.saturating_mul(ahead))
    }
}

#[derive(Debug, Clone, Copy)]
struct InFlight {
    op: Op,
    since: Duration,
    /// True once it was cancelled.
    is_cancelled: bool,
}

/// Decides when operations start. All times are from one monotonic clock.
#[derive(Debug)]
pub struct Scheduler {
    config: Config,
    table: SlackTable,
    steps: BTreeMap<StepId, Step>,
    reads: Reads,
    writes: VecDeque<Op>,
    /// Keyed by deadline.
    prefetches: BTreeMap<(Duration, OpId), Op>,
    prefetch_times: HashMap<OpId, Duration>,
    in_flight: HashMap<OpId, InFlight>,
    /// The only operation in flight, if nothing else was since it started.
    alone: Option<OpId>,
    /// Bytes of needed reads, writes and prefetches in flight.
    moving: [u64; 3],
    waiting_writes: u64,
    shares: Shares,
    utilisation: Utilisation,
    counts: Counts,
}

fn lane(kind: Kind) -> usize {
    match kind {
        Kind::Layer { .. } | Kind::Soon => 0,
        Kind::Write => 1,
        Kind::Prefetch { .. } => 2,
    }
}

impl Scheduler {
    /// Makes a scheduler with nothing to do.
    #[must_use]
    pub fn new(config: Config, table: SlackTable) -> Self {
        Self {
            config,
            table,
            steps: BTreeMap::new(),
            reads: Reads::default(),
            writes: VecDeque::new(),
            prefetches: BTreeMap::new(),
            prefetch_times: HashMap::new(),
            in_flight: HashMap::new(),
            alone: None,
            moving: [0; 3],
            waiting_writes: 0,
            shares: Shares::default(),
            utilisation: Utilisation::default(),
            counts: Counts::default(),
        }
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the slack table, including learned values.
    #[must_use]
    pub fn table(&self) -> &SlackTable {
        &self.table
    }

    /// Returns the counters.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Announces a step that begins at about this time. Its reads may be added from now on.
    pub fn announce(&mut self, step: StepId, shape: StepShape, at: Duration) {
        // The window of an unseen shape is zero: its reads are urgent until it is known.
        let window = self.table.layer(shape).unwrap_or_default();
        self.steps.insert(step, Step { shape, window, layer: 0, since: at, is_computing: false });
    }

    /// Reports that a layer begins to compute: its reads have ended. Layers come in order.
    pub fn layer_begins(&mut self, step: StepId, layer: u32, now: Duration) {
        let Some(found) = self.steps.get_mut(&step) else { return };
        (found.layer, found.since, found.is_computing) = (layer, now, true);
    }

    /// Reports that the layer has ended, and learns its duration. Does nothing if none computed.
    pub fn layer_ends(&mut self, step: StepId, now: Duration) {
        let Some(found) = self.steps.get_mut(&step) else { return };
        if !std::mem::take(&mut found.is_computing) {
            return;
        }
        let took = now.saturating_sub(found.since);
        self.table.learn(found.shape, took);
        found.window = self.table.layer(found.shape).unwrap_or(took);
        (found.layer, found.since) = (found.layer + 1, now);
    }

    /// Ends a step, also one that never began. Its remaining reads become most urgent: cancel them
    /// if they are not needed.
    pub fn step_ends(&mut self, step: StepId) {
        self.steps.remove(&step);
    }

    /// Adds an operation. Its id must be unique among pending operations.
    ///
    /// # Errors
    /// Returns [`BacklogFull`] for a write that must be dropped.
    pub fn add(&mut self, op: Op, now: Duration) -> Result<(), BacklogFull> {
        match op.kind {
            Kind::Layer { step, layer } => self.reads.add_layer(step, layer, op),
            Kind::Soon => {
                let cost = self.table.costs.read.duration(op.bytes);
                let due = self.shares.due(op.flow, cost, now);
                self.reads.add_soon(due, op);
            }
            Kind::Prefetch { by } => {
                self.prefetches.insert((by, op.id), op);
                self.prefetch_times.insert(op.id, by);
            }
            Kind::Write => {
                let (waiting, limit) = (self.waiting_writes, self.config.backlog_bytes);
                if waiting.saturating_add(op.bytes) > limit {
                    self.counts.writes_refused += 1;
                    return Err(BacklogFull { waiting, bytes: op.bytes, limit });
                }
                self.waiting_writes += op.bytes;
                self.writes.push_back(op);
            }
        }
        Ok(())
    }

    /// Cancels an operation whose request was aborted or preempted.
    pub fn cancel(&mut self, id: OpId) -> Cancelled {
        if let Some(found) = self.in_flight.get_mut(&id) {
            let is_first = !std::mem::replace(&mut found.is_cancelled, true);
            if let (Kind::Prefetch { .. }, true) = (found.op.kind, is_first) {
                self.counts.wasted_bytes += found.op.bytes;
            }
            return Cancelled::InFlight;
        }
        if let Some(op) = self.reads.remove(id) {
            self.shares.leave(op);
            return Cancelled::Pending;
        }
        if let Some(at) = self.writes.iter().position(|op| op.id == id) {
            self.waiting_writes -= self.writes[at].bytes;
            self.writes.remove(at);
            return Cancelled::Pending;
        }
        match self.prefetch_times.remove(&id) {
            Some(by) => {
                self.prefetches.remove(&(by, id));
                Cancelled::Pending
            }
            None => Cancelled::Unknown,
        }
    }

    /// Ends a started operation, successful or not, of which the devices moved `moved` bytes. Its
    /// cost is learned if all were moved.
    pub fn ended(&mut self, id: OpId, moved: u64, now: Duration) {
        let Some(InFlight { op, since, .. }) = self.in_flight.remove(&id) else { return };
        let is_alone = self.alone.take_if(|alone| *alone == id).is_some();
        self.moving[lane(op.kind)] -= op.bytes;
        self.utilisation.set(self.is_needed(), now);
        let direction = match op.kind {
            Kind::Write => Direction::Write,
            _ => Direction::Read,
        };
        if direction == Direction::Write {
            self.waiting_writes -= op.bytes;
        }
        if is_alone && moved == op.bytes {
            self.table.costs.learn(direction, op.bytes, now.saturating_sub(since));
        }
    }

    /// Starts a waiting operation now, whatever else waits or is in flight: something needs its
    /// end. Returns false if it does not wait.
    pub fn demand(&mut self, id: OpId, now: Duration) -> bool {
        if let Some(op) = self.reads.remove(id) {
            self.start_read(now, op, now);
            return true;
        }
        let Some(at) = self.writes.iter().position(|op| op.id == id) else { return false };
        if let Some(op) = self.writes.remove(at) {
            self.start_write(op, now);
        }
        true
    }

    /// Returns the number of operations that wait or are in flight.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.reads.len() + self.writes.len() + self.prefetches.len() + self.in_flight.len()
    }

    /// Returns the next decision. Call it again until it returns `Wait`, and after every event.
    pub fn next(&mut self, now: Duration) -> Decision {
        let mut wake = None;
        if let Some((due, op)) = self.reads.first(&self.steps)
            && self.read_starts(op)
        {
            return self.start_read(due, op, now);
        }
        if let Some(decision) = self.next_prefetch(now) {
            return decision;
        }
        if let Some(op) = self.writes.front().copied() {
            match self.write_starts(op, now) {
                Ok(()) => {
                    self.writes.pop_front();
                    return self.start_write(op, now);
                }
                Err(until) => wake = wake.into_iter().chain(until).min(),
            }
        }
        Decision::Wait(wake.into_iter().chain(self.next_look(now)).min())
    }

    /// Returns when idle devices will have been idle long enough for a prefetch.
    fn next_look(&self, now: Duration) -> Option<Duration> {
        if !self.in_flight.is_empty() || self.prefetches.is_empty() {
            return None;
        }
        let time = self.utilisation.falls_to(self.config.high_water);
        (time > now).then_some(time)
    }

    /// Returns true when the most urgent read may start.
    fn read_starts(&self, op: Op) -> bool {
        let [reads, ..] = self.moving;
        reads == 0 || reads.saturating_add(op.bytes) <= self.config.read_depth_bytes
    }

    fn start_write(&mut self, op: Op, now: Duration) -> Decision {
        self.counts.write_bytes += op.bytes;
        self.start(op, now)
    }

    fn start_read(&mut self, due: Duration, op: Op, now: Duration) -> Decision {
        self.reads.remove(op.id);
        self.shares.leave(op);
        self.counts.read_bytes += op.bytes;
        let reads = self.moving[0];
        let is_late = now + self.table.costs.read.duration(op.bytes + reads) > due;
        self.counts.late_reads += u64::from(is_late && matches!(op.kind, Kind::Layer { .. }));
        self.start(op, now)
    }

    /// Decides whether the first waiting write starts; if not, returns when it may at the latest.
    fn write_starts(&self, op: Op, now: Duration) -> Result<(), Option<Duration>> {
        let Config { write_depth_bytes, reads_first, .. } = self.config;
        let [reads, writes, prefetches] = self.moving;
        let second = if writes > 0 && writes.saturating_add(op.bytes) > write_depth_bytes {
            self.second_write(op).ok_or(None)?
        } else {
            Duration::ZERO
        };
        // A read that waits has others in flight before it.
        let mixes = reads + prefetches == 0 || self.table.costs.mixes_well();
        if reads_first && !mixes {
            return Err(None);
        }
        if second <= now { Ok(()) } else { Err(Some(second)) }
    }

    /// Returns when a write may start beside a single one although both exceed the write depth: no
    /// read waits, and devices would be idle for a latency between the two.
    fn second_write(&self, op: Op) -> Option<Duration> {
        let costs = &self.table.costs;
        let first = self.in_flight.values().next().filter(|_| self.in_flight.len() == 1)?;
        let bound = costs.read.duration(self.config.read_depth_bytes);
        let nobody_reads = self.reads.is_empty() && self.prefetches.is_empty();
        let both = costs.write.duration(first.op.bytes.saturating_add(op.bytes));
        // A new read waits for little more than one write; an eighth, because devices vary.
        let took = costs.write.duration(first.op.bytes);
        (nobody_reads && both <= bound).then(|| first.since + took * 7 / 8)
    }

    /// Decides on the most urgent prefetch, if nothing else wants the devices.
    fn next_prefetch(&mut self, now: Duration) -> Option<Decision> {
        let (key, op) = self.prefetches.first_key_value().map(|(key, op)| (*key, *op))?;
        let ahead: u64 = self.moving.iter().sum();
        // A dropped prefetch is read on demand, which is later still.
        let cost = self.table.costs.read.duration(op.bytes + ahead);
        if now.saturating_add(cost) > key.0 {
            self.prefetches.remove(&key);
            self.prefetch_times.remove(&op.id);
            self.counts.prefetches_dropped += 1;
            return Some(Decision::Drop(op.id));
        }
        let [reads, writes, prefetches] = self.moving;
        let is_full = prefetches > 0 && prefetches + op.bytes > self.config.read_depth_bytes;
        // A prefetch has a deadline and a write has none; but memory for writes is limited.
        let presses = self.waiting_writes > self.config.backlog_bytes / 2;
        let is_held = presses && !self.writes.is_empty();
        let is_busy = reads + writes > 0 || is_held || !self.reads.is_empty();
        if is_busy || is_full || self.utilisation.at(now) > self.config.high_water {
            return None;
        }
        self.prefetches.remove(&key);
        self.prefetch_times.remove(&op.id);
        self.counts.prefetch_bytes += op.bytes;
        Some(self.start(op, now))
    }

    /// Returns true when something other than a prefetch is in flight.
    fn is_needed(&self) -> bool {
        let [reads, writes, _] = self.moving;
        reads + writes > 0
    }

    fn start(&mut self, op: Op, now: Duration) -> Decision {
        self.alone = self.in_flight.is_empty().then_some(op.id);
        self.in_flight.insert(op.id, InFlight { op, since: now, is_cancelled: false });
        self.moving[lane(op.kind)] += op.bytes;
        self.utilisation.set(self.is_needed(), now);
        Decision::Start(op.id)
    }
}

#[cfg(test)]
mod tests;
