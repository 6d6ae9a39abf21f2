//! A channel: drives or a link. FIFO in each direction.

use std::{collections::VecDeque, time::Duration};

use kv_schedule::{Curve, Direction, IoCosts, OpId, Setting, SlackTable};

/// Bytes a second of a link of 1 Gbps.
pub(crate) const GBPS: f64 = 1e9 / 8.0;

/// Parameters of a channel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LaneModel {
    /// Bandwidth of reads alone, in bytes a second.
    pub read: f64,
    /// Bandwidth of writes alone, in bytes a second.
    pub write: f64,
    /// Latency after the transfer of the last byte.
    pub latency: Duration,
    /// Minimum time per object.
    pub object: Duration,
    /// Time per object beside its transfer: a message's, or a copy's.
    pub set_up: Duration,
    /// Fraction of the bandwidth left for both directions together while reads and writes mix: 0.4
    /// for drives, or [`Self::FULL_DUPLEX`].
    pub mixed: f64,
    /// Maximum number of operations in progress; others wait in FIFO order.
    pub window: usize,
}

impl LaneModel {
    /// Both directions have their full bandwidth, as on a PCIe link, which has separate lanes for
    /// each.
    pub const FULL_DUPLEX: f64 = 2.0;

    /// A channel that takes no time.
    pub(crate) const INSTANT: Self = Self {
        read: 1e18,
        write: 1e18,
        latency: Duration::from_nanos(1),
        object: Duration::ZERO,
        set_up: Duration::ZERO,
        mixed: 1.0,
        window: usize::MAX,
    };

    /// Returns a link on which so many objects together are one message.
    pub(crate) fn by_messages(self, objects: u32) -> Self {
        Self { set_up: self.set_up / objects, ..self }
    }

    /// Returns a table with the cost of operations, and no layer times.
    pub(crate) fn table(&self) -> SlackTable {
        let curve = |bandwidth| Curve::line(self.latency, bandwidth).expect("bandwidths");
        let costs = IoCosts { read: curve(self.read), write: curve(self.write), mixed: self.mixed };
        let [model, gpu, engine] = [(); 3].map(|()| "simulated".to_owned());
        SlackTable::new(Setting { model, gpu, engine, drives: Vec::new() }, costs)
    }
}

/// A channel and its operations.
#[derive(Debug)]
pub(crate) struct Lane {
    model: LaneModel,
    /// Operations outside the window, with the index of their queue: 0 for reads, 1 for writes.
    outside: VecDeque<(usize, Waiting)>,
    /// Queues of reads and writes in progress.
    queues: [VecDeque<Waiting>; 2],
    /// Transferred operations in their latency phase: arrival time, and start time.
    landing: VecDeque<(Duration, OpId, Duration)>,
    /// Granted fraction of each direction's rate, on a shared link.
    share: [f64; 2],
    now: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Waiting {
    id: OpId,
    /// Seconds of work left, on an otherwise idle channel.
    left: f64,
    /// Start time of its transfer.
    since: Duration,
}

/// Threshold for completion in seconds: rounding of times to nanoseconds.
const NOTHING: f64 = 1e-9;

impl Lane {
    pub(crate) fn new(model: LaneModel) -> Self {
        let (outside, queues, landing) = Default::default();
        Self { model, outside, queues, landing, share: [1.0; 2], now: Duration::ZERO }
    }

    /// Adds an operation. `now` must not be before that of an earlier call.
    pub(crate) fn push(
        &mut self,
        now: Duration,
        id: OpId,
        direction: Direction,
        bytes: u64,
        objects: u64,
    ) {
        self.advance(now);
        let (bandwidth, queue) = self.way(direction);
        let [calls, set_up] =
            [self.model.object, self.model.set_up].map(|each| objects as f64 * each.as_secs_f64());
        let left = (bytes as f64 / bandwidth + set_up).max(calls);
        self.outside.push_back((queue, Waiting { id, left, since: now }));
        self.admit();
    }

    /// Returns the bandwidth of a direction alone, and the index of its queue.
    fn way(&self, direction: Direction) -> (f64, usize) {
        match direction {
            Direction::Read => (self.model.read, 0),
            Direction::Write => (self.model.write, 1),
        }
    }

    /// Admits operations into the window.
    fn admit(&mut self) {
        let queued = self.queues.iter().map(VecDeque::len).sum::<usize>();
        let room = self.model.window.saturating_sub(queued + self.landing.len());
        let most = room.min(self.outside.len());
        for (queue, mut op) in self.outside.drain(..most) {
            op.since = self.now;
            self.queues[queue].push_back(op);
        }
    }

    /// Returns the fraction of its bandwidth that each busy direction has, without outside limits.
    fn alone(&self) -> f64 {
        let both = self.queues.iter().all(|queue| !queue.is_empty());
        if both { self.model.mixed / 2.0 } else { 1.0 }
    }

    fn rates(&self) -> [f64; 2] {
        self.share.map(|share| self.alone() * share)
    }

    /// Returns the operation at the head of a direction, and its demand in bytes a second.
    pub(crate) fn wanted(&self, direction: Direction) -> Option<(OpId, f64)> {
        let (bandwidth, queue) = self.way(direction);
        Some((self.queues[queue].front()?.id, bandwidth * self.alone()))
    }

    /// Sets the granted fractions of reads and writes, from the time of the last call on.
    pub(crate) fn limit(&mut self, share: [f64; 2]) {
        self.share = share;
    }

    /// Returns the time of the next event.
    pub(crate) fn next_event(&self) -> Option<Duration> {
        let ends = self.queues.iter().zip(self.rates()).filter_map(|(queue, rate)| {
            let left = queue.front()?.left;
            Some(self.now + Duration::from_secs_f64(left / rate) + Duration::from_nanos(1))
        });
        let lands = self.landing.front().map(|(time, ..)| *time);
        ends.chain(lands).min()
    }

    /// Returns the operations that arrived until `now`, with their start times.
    pub(crate) fn arrived(&mut self, now: Duration) -> Vec<(OpId, Duration)> {
        let mut arrived = Vec::new();
        while let Some(event) = self.next_event().filter(|event| *event <= now) {
            self.advance(event);
            let landed = self.landing.iter().take_while(|(time, ..)| *time <= event).count();
            arrived.extend(self.landing.drain(..landed).map(|(_, id, since)| (id, since)));
            self.admit();
        }
        self.advance(now);
        arrived
    }

    /// Returns the time when all operations have arrived.
    pub(crate) fn ends(mut self) -> Duration {
        while let Some(next) = self.next_event() {
            self.arrived(next);
        }
        self.now
    }

    /// Advances the time, to the next event at most.
    fn advance(&mut self, now: Duration) {
        let (past, rates) = (now.saturating_sub(self.now).as_secs_f64(), self.rates());
        self.now = self.now.max(now);
        for (queue, rate) in self.queues.iter_mut().zip(rates) {
            let Some(first) = queue.front_mut() else { continue };
            first.left -= past * rate;
            if first.left <= NOTHING {
                self.landing.push_back((self.now + self.model.latency, first.id, first.since));
                queue.pop_front();
                if let Some(next) = queue.front_mut() {
                    next.since = self.now;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
