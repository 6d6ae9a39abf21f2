//! The step machine: what happened goes in, what to do comes out.

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

/// Numbers of a scheduler.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Config {
    /// Bytes of reads that are in flight at the most, so that a more urgent one waits for no more:
    /// enough to keep the devices busy. One read is always let go.
    pub read_depth_bytes: u64,
    /// Bytes of writes that are in flight at the most: what a read that comes may find in its way.
    /// One write is always let go. So is a second one when an eighth of the first is left, if
    /// nothing is or waits to be read, and both together take no longer than `read_depth_bytes` of
    /// reads: what an urgent read may wait for.
    pub write_depth_bytes: u64,
    /// Bytes of writes that wait or are in flight: memory that the engine does not get back.
    pub backlog_bytes: u64,
    /// What part of a layer's window the I/O kernel may use of SMs that are not its own; `None`
    /// where it has its own, and no window is too small (green contexts).
    pub window_share: Option<f64>,
    /// How much longer I/O may take than was predicted.
    pub margin: f64,
    /// Part of the time that the devices are busy with what is needed above which nothing is
    /// prefetched (TierKV, section 3.4: 0.8). What is prefetched itself does not count.
    pub high_water: f64,
    /// Whether writes wait for reads. Without, and with no `window_share`, everything starts in the
    /// order in which it came: layer-wise as others do it.
    pub is_slack_aware: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            read_depth_bytes: 32 << 20,
            write_depth_bytes: 8 << 20,
            backlog_bytes: 1 << 30,
            window_share: None,
            margin: 1.25,
            high_water: 0.8,
            is_slack_aware: true,
        }
    }
}

/// What was decided since the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Bytes of reads that were started.
    pub read_bytes: u64,
    /// Bytes of writes that were started.
    pub write_bytes: u64,
    /// Bytes of prefetches that were started.
    pub prefetch_bytes: u64,
    /// Bytes of prefetches that nobody wanted any more when they had started.
    pub wasted_bytes: u64,
    /// Prefetches that could not be done in time.
    pub prefetches_dropped: u64,
    /// Writes that were not taken.
    pub writes_refused: u64,
    /// Reads that were started so late that their layer waits for them.
    pub late_reads: u64,
}

/// A step of the engine.
#[derive(Debug, Clone, Copy)]
struct Step {
    shape: StepShape,
    /// How long a layer of it computes.
    window: Duration,
    /// The layer that computes, or is the first to.
    layer: u32,
    /// When it began, or will.
    since: Duration,
    /// Whether that one has begun, and has not ended.
    is_computing: bool,
}

impl Step {
    /// When a layer begins to compute, if nothing holds it up.
    fn due(&self, layer: u32) -> Duration {
        let ahead = layer.saturating_sub(self.layer);
        self.since.saturating_add(self.window.saturating_mul(ahead))
    }
}

#[derive(Debug, Clone, Copy)]
struct InFlight {
    op: Op,
    since: Duration,
    /// Whether nobody wants it any more.
    is_cancelled: bool,
}

/// Decides when operations start. Times are those of any clock that never goes back.
#[derive(Debug)]
pub struct Scheduler {
    config: Config,
    table: SlackTable,
    steps: BTreeMap<StepId, Step>,
    reads: Reads,
    writes: VecDeque<Op>,
    /// By when they are of use.
    prefetches: BTreeMap<(Duration, OpId), Op>,
    prefetch_times: HashMap<OpId, Duration>,
    in_flight: HashMap<OpId, InFlight>,
    /// The one in flight, if nothing else was since it started.
    alone: Option<OpId>,
    /// Bytes of needed reads, writes and prefetches in flight.
    moving: [u64; 3],
    waiting_writes: u64,
    /// Bytes that may still start in this layer's window.
    budget: u64,
    /// Whether something has started in it.
    is_used: bool,
    shares: Shares,
    utilisation: Utilisation,
    is_draining: bool,
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
    /// One without anything to do.
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
            budget: u64::MAX,
            is_used: false,
            shares: Shares::default(),
            utilisation: Utilisation::default(),
            is_draining: false,
            counts: Counts::default(),
        }
    }

    /// Its numbers.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What it goes by, and what was learned.
    #[must_use]
    pub fn table(&self) -> &SlackTable {
        &self.table
    }

    /// What was decided.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// A step is going to begin at about this time. Its reads may be added from now on.
    pub fn announce(&mut self, step: StepId, shape: StepShape, at: Duration) {
        // Of a shape never seen: its reads are urgent, until it is known.
        let window = self.table.layer(shape).unwrap_or_default();
        self.steps.insert(step, Step { shape, window, layer: 0, since: at, is_computing: false });
    }

    /// A layer of a step begins to compute: its reads have ended. Layers come in order.
    pub fn layer_begins(&mut self, step: StepId, layer: u32, now: Duration) {
        let Some(found) = self.steps.get_mut(&step) else { return };
        (found.layer, found.since, found.is_computing) = (layer, now, true);
        self.is_used = false;
        self.budget = match self.config.window_share {
            // Reads have the window; writes may have what they leave.
            Some(share) => self.table.costs.read.fits(found.window.mul_f64(share)),
            None => u64::MAX,
        };
    }

    /// The layer that computed has ended: how long it takes is learned. Without one, nothing is.
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

    /// A step has ended, or will never begin. Its reads that are still there are as urgent as can
    /// be: cancel them if nobody waits.
    pub fn step_ends(&mut self, step: StepId) {
        self.steps.remove(&step);
        if !self.steps.values().any(|step| step.is_computing) {
            self.budget = u64::MAX;
        }
    }

    /// Takes an operation on. A name is used once at a time.
    ///
    /// # Errors
    /// [`BacklogFull`] for a write that has to be dropped.
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

    /// Nobody wants an operation any more: its request was aborted, or preempted.
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

    /// An operation that was started has ended, well or not: the devices moved so many bytes of it.
    /// What it cost is learned if those are all.
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

    /// From now on writes do not wait for windows, until nothing waits: the engine goes down.
    pub fn drain(&mut self) {
        self.is_draining = true;
    }

    /// Operations that wait or are in flight.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.reads.len() + self.writes.len() + self.prefetches.len() + self.in_flight.len()
    }

    /// What to do now. To be asked again until it says to wait, and after everything that happens.
    pub fn next(&mut self, now: Duration) -> Decision {
        self.is_draining &= self.pending() > 0;
        let mut wake = None;
        if let Some((due, op)) = self.reads.first(&self.steps) {
            match self.read_starts(op, now) {
                Ok(()) => return self.start_read(due, op, now),
                Err(until) => wake = until,
            }
        }
        if let Some(decision) = self.next_prefetch(now) {
            return decision;
        }
        if let Some(op) = self.writes.front().copied() {
            match self.write_starts(op, now) {
                Ok(()) => {
                    self.writes.pop_front();
                    self.counts.write_bytes += op.bytes;
                    self.spend(op.bytes);
                    return self.start(op, now);
                }
                Err(until) => wake = wake.into_iter().chain(until).min(),
            }
        }
        Decision::Wait(wake.into_iter().chain(self.next_look(now)).min())
    }

    /// When devices that are idle have been so for long enough for a prefetch.
    fn next_look(&self, now: Duration) -> Option<Duration> {
        if !self.in_flight.is_empty() || self.prefetches.is_empty() {
            return None;
        }
        let time = self.utilisation.falls_to(self.config.high_water);
        (time > now).then_some(time)
    }

    /// Whether the most urgent read starts; if not, when it does at the latest.
    fn read_starts(&self, op: Op, now: Duration) -> Result<(), Option<Duration>> {
        let [reads, ..] = self.moving;
        if reads > 0 && reads.saturating_add(op.bytes) > self.config.read_depth_bytes {
            return Err(None);
        }
        if op.bytes <= self.budget {
            return Ok(());
        }
        // Those behind it have to be in time, too.
        let mut bytes = reads;
        let latest = self.reads.by_deadline(&self.steps).into_iter().map(|(due, more)| {
            bytes += more;
            let cost = self.table.costs.read.duration(bytes).mul_f64(self.config.margin);
            due.saturating_sub(cost)
        });
        let latest = latest.min().unwrap_or_default();
        // What will be late anyway starts at once: it would only wait longer (paper, section 3.3).
        if latest <= now { Ok(()) } else { Err(Some(latest)) }
    }

    fn start_read(&mut self, due: Duration, op: Op, now: Duration) -> Decision {
        self.reads.remove(op.id);
        self.shares.leave(op);
        self.counts.read_bytes += op.bytes;
        let reads = self.moving[0];
        let is_late = now + self.table.costs.read.duration(op.bytes + reads) > due;
        self.counts.late_reads += u64::from(is_late && matches!(op.kind, Kind::Layer { .. }));
        self.spend(op.bytes);
        self.start(op, now)
    }

    fn spend(&mut self, bytes: u64) {
        self.budget = self.budget.saturating_sub(bytes);
        self.is_used = true;
    }

    /// Whether the first write that waits starts; if not, when it may, whatever happens.
    fn write_starts(&self, op: Op, now: Duration) -> Result<(), Option<Duration>> {
        let Config { write_depth_bytes, is_slack_aware, .. } = self.config;
        let [reads, writes, prefetches] = self.moving;
        let second = if writes > 0 && writes.saturating_add(op.bytes) > write_depth_bytes {
            self.second_write(op).ok_or(None)?
        } else {
            Duration::ZERO
        };
        if !is_slack_aware {
            return if second <= now { Ok(()) } else { Err(Some(second)) };
        }
        let mixes = reads + prefetches == 0 || self.table.costs.mixes_well();
        // What is larger than any window has one for itself.
        let is_whole = !self.is_used && reads == 0 && self.reads.is_empty();
        let fits = self.is_draining || op.bytes <= self.budget || is_whole;
        if !mixes || !fits || !(self.reads.is_empty() || self.has_slack(op, now)) {
            return Err(None);
        }
        if second <= now { Ok(()) } else { Err(Some(second)) }
    }

    /// When a write may start beside a single one though both are more than a read should find in
    /// its way: nobody reads, and devices would be idle for a latency between the two.
    fn second_write(&self, op: Op) -> Option<Duration> {
        let costs = &self.table.costs;
        let first = self.in_flight.values().next().filter(|_| self.in_flight.len() == 1)?;
        let bound = costs.read.duration(self.config.read_depth_bytes);
        let nobody_reads = self.reads.is_empty() && self.prefetches.is_empty();
        let both = costs.write.duration(first.op.bytes.saturating_add(op.bytes));
        // A read that comes waits for little more than for one; an eighth, as devices vary.
        let took = costs.write.duration(first.op.bytes);
        (nobody_reads && both <= bound).then(|| first.since + took * 7 / 8)
    }

    /// Whether all reads that wait are in time even if `write` goes first.
    fn has_slack(&self, write: Op, now: Duration) -> bool {
        let [reads, writes, _] = self.moving;
        let costs = &self.table.costs;
        let before = costs.write.duration(write.bytes + writes) + costs.read.duration(reads);
        let mut bytes = 0;
        self.reads.by_deadline(&self.steps).into_iter().all(|(due, more)| {
            bytes += more;
            let took = (before + costs.read.duration(bytes)).mul_f64(self.config.margin);
            now.saturating_add(took) <= due
        })
    }

    /// The most urgent prefetch, if nothing else wants the devices.
    fn next_prefetch(&mut self, now: Duration) -> Option<Decision> {
        let (key, op) = self.prefetches.first_key_value().map(|(key, op)| (*key, *op))?;
        let ahead: u64 = self.moving.iter().sum();
        // Without the margin: what is dropped is read when it is wanted, which is later still.
        let cost = self.table.costs.read.duration(op.bytes + ahead);
        if now.saturating_add(cost) > key.0 {
            self.prefetches.remove(&key);
            self.prefetch_times.remove(&op.id);
            self.counts.prefetches_dropped += 1;
            return Some(Decision::Drop(op.id));
        }
        let [reads, writes, prefetches] = self.moving;
        let is_full = prefetches > 0 && prefetches + op.bytes > self.config.read_depth_bytes;
        // A prefetch has a time, and a write has none; but memory for writes comes to an end.
        let presses = self.is_draining || self.waiting_writes > self.config.backlog_bytes / 2;
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

    /// Whether something is in flight that is no prefetch.
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
