//! A way of bytes: drives, or a link. What came first goes first, in each direction.

use std::{collections::VecDeque, time::Duration};

use kv_schedule::{Direction, OpId};

/// What a way can do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LaneModel {
    /// Bytes a second, reads alone.
    pub read: f64,
    /// Bytes a second, writes alone.
    pub write: f64,
    /// From the last byte's turn to its arrival.
    pub latency: Duration,
    /// What an object costs whoever moves it, at the least.
    pub object: Duration,
    /// Part of the bandwidth that is left while reads and writes mix, for both together: 0.4 of
    /// drives, or [`Self::FULL_DUPLEX`].
    pub mixed: f64,
    /// Operations in progress at the most. Others wait, in the order in which they came.
    pub window: usize,
}

impl LaneModel {
    /// Each direction has all of its bandwidth, whatever the other one does: a link of PCIe, which
    /// has wires of its own for each.
    pub const FULL_DUPLEX: f64 = 2.0;
}

/// Such a way, and what is on it.
#[derive(Debug)]
pub(crate) struct Lane {
    model: LaneModel,
    /// Those that are not in progress: 0 for a read, 1 for a write.
    outside: VecDeque<(usize, Waiting)>,
    /// Reads and writes.
    queues: [VecDeque<Waiting>; 2],
    /// On their last microseconds: when they arrive, and when it was their turn.
    landing: VecDeque<(Duration, OpId, Duration)>,
    /// Which part of its rate each direction has: what others leave of a link.
    share: [f64; 2],
    now: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Waiting {
    id: OpId,
    /// Seconds of work that are left, with nothing else on the way.
    left: f64,
    /// Since when it is its turn, if it is.
    since: Duration,
}

/// What is less has ended: a rounding of times to nanoseconds.
const NOTHING: f64 = 1e-9;

impl Lane {
    pub(crate) fn new(model: LaneModel) -> Self {
        let (outside, queues, landing) = Default::default();
        Self { model, outside, queues, landing, share: [1.0; 2], now: Duration::ZERO }
    }

    /// Puts an operation on the way. `now` is not before what was said last.
    pub(crate) fn push(
        &mut self,
        now: Duration,
        id: OpId,
        direction: Direction,
        bytes: u64,
        objects: u64,
    ) {
        self.advance(now);
        let (bandwidth, queue) = match direction {
            Direction::Read => (self.model.read, 0),
            Direction::Write => (self.model.write, 1),
        };
        let calls = objects as f64 * self.model.object.as_secs_f64();
        let left = (bytes as f64 / bandwidth).max(calls);
        self.outside.push_back((queue, Waiting { id, left, since: now }));
        self.admit();
    }

    /// Takes operations on as far as there is room for them.
    fn admit(&mut self) {
        let queued = self.queues.iter().map(VecDeque::len).sum::<usize>();
        let room = self.model.window.saturating_sub(queued + self.landing.len());
        let most = room.min(self.outside.len());
        for (queue, mut op) in self.outside.drain(..most) {
            op.since = self.now;
            self.queues[queue].push_back(op);
        }
    }

    /// Which part of the way each direction has that is in use, if nothing limits it from outside.
    fn alone(&self) -> f64 {
        let both = self.queues.iter().all(|queue| !queue.is_empty());
        if both { self.model.mixed / 2.0 } else { 1.0 }
    }

    fn rates(&self) -> [f64; 2] {
        self.share.map(|share| self.alone() * share)
    }

    /// What has its turn in a direction, and how many bytes a second it would move.
    pub(crate) fn wanted(&self, direction: Direction) -> Option<(OpId, f64)> {
        let (bandwidth, queue) = match direction {
            Direction::Read => (self.model.read, 0),
            Direction::Write => (self.model.write, 1),
        };
        Some((self.queues[queue].front()?.id, bandwidth * self.alone()))
    }

    /// Reads and writes have so large a part of their rate from now on: from what was said last.
    pub(crate) fn limit(&mut self, share: [f64; 2]) {
        self.share = share;
    }

    /// When something happens by itself.
    pub(crate) fn next_event(&self) -> Option<Duration> {
        let ends = self.queues.iter().zip(self.rates()).filter_map(|(queue, rate)| {
            let left = queue.front()?.left;
            Some(self.now + Duration::from_secs_f64(left / rate) + Duration::from_nanos(1))
        });
        let lands = self.landing.front().map(|(time, ..)| *time);
        ends.chain(lands).min()
    }

    /// What has arrived until `now`, and when it was its turn.
    pub(crate) fn arrived(&mut self, now: Duration) -> Vec<(OpId, Duration)> {
        let mut arrived = Vec::new();
        while let Some(event) = self.next_event().filter(|event| *event <= now) {
            self.advance(event);
            let is_there = |(time, ..): &mut (Duration, OpId, Duration)| *time <= event;
            while let Some((_, id, since)) = self.landing.pop_front_if(is_there) {
                arrived.push((id, since));
            }
            self.admit();
        }
        self.advance(now);
        arrived
    }

    /// Lets time go by, to the next event at the most.
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
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    fn lane(mixed: f64) -> Lane {
        let (latency, object) = (Duration::from_micros(80), Duration::ZERO);
        Lane::new(LaneModel { read: 10e9, write: 5e9, latency, object, mixed, window: usize::MAX })
    }

    /// When each operation arrives, in microseconds.
    fn run(lane: &mut Lane) -> Vec<(u64, u128)> {
        let mut arrived = Vec::new();
        while let Some(now) = lane.next_event() {
            arrived.extend(lane.arrived(now).into_iter().map(|(id, _)| (id.0, now.as_micros())));
        }
        arrived
    }

    #[test]
    fn bytes_go_one_after_another_and_latencies_overlap() {
        let mut lane = lane(0.4);
        (1..=2).for_each(|id| lane.push(Duration::ZERO, OpId(id), Direction::Read, 10 * MB, 1));
        assert_eq!(run(&mut lane), [(1, 1080), (2, 2080)]);
    }

    #[test]
    fn mixing_costs_what_the_model_says() {
        let mut lane = lane(0.4);
        lane.push(Duration::ZERO, OpId(1), Direction::Read, 10 * MB, 1);
        lane.push(Duration::ZERO, OpId(2), Direction::Write, 10 * MB, 1);
        // 1 ms of reads at a fifth of the way; 2 ms of writes, of which 1 ms is left then.
        assert_eq!(run(&mut lane), [(1, 5080), (2, 6080)]);
    }

    #[test]
    fn what_is_outside_the_window_mixes_with_nothing() {
        let mut lane = lane(0.4);
        lane.model.window = 1;
        lane.push(Duration::ZERO, OpId(1), Direction::Read, 10 * MB, 1);
        lane.push(Duration::ZERO, OpId(2), Direction::Write, 10 * MB, 1);
        assert_eq!(run(&mut lane), [(1, 1080), (2, 3160)]);
    }

    #[test]
    fn small_objects_cost_their_calls() {
        let mut lane = lane(1.0);
        lane.model.object = Duration::from_micros(10);
        lane.push(Duration::ZERO, OpId(1), Direction::Read, MB, 1000);
        assert_eq!(run(&mut lane), [(1, 10_080)]);
    }
}
