//! A medium with the bandwidth of a drive: reads, writes, and what they lose when they mix.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use nvme_driver::Nanos;

use super::{Media, MediaDone, MediaKind, MediaOp};

/// How fast a [`BandwidthMedia`] is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bandwidth {
    /// Bytes a second, reads alone.
    pub read: f64,
    /// Bytes a second, writes alone.
    pub write: f64,
    /// From the last byte's turn to the end of its operation.
    pub latency: Nanos,
    /// Part of the bandwidth that is left for both together while reads and writes mix (paper,
    /// figure 6: 0.4). Each direction has half of it.
    pub mixed: f64,
    /// Operations that begin before this offset take no time: a journal, where only data is
    /// looked at.
    pub from: u64,
}

/// Sets the speed of a [`BandwidthMedia`], also when that is inside a controller. At first, and
/// with `None`, the medium is as fast as the one below it.
#[derive(Debug, Clone, Default)]
pub struct BandwidthDial(Arc<Mutex<Option<Bandwidth>>>);

impl BandwidthDial {
    /// From now on. While operations are in flight, `None` would leave them there.
    pub fn set(&self, bandwidth: Option<Bandwidth>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = bandwidth;
    }

    fn get(&self) -> Option<Bandwidth> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A read or a write that has its turn, or waits for it.
#[derive(Debug)]
struct Queued {
    op: MediaOp,
    /// Nanoseconds of work that are left, with nothing in the other direction.
    left: f64,
}

/// Less than this is what additions round.
const NOTHING: f64 = 1e-6;

/// Another medium at the speed of a drive: operations of a direction have their turn one after the
/// other, and end a latency after it. Bytes move when they end.
#[derive(Debug)]
pub struct BandwidthMedia {
    inner: Box<dyn Media>,
    dial: BandwidthDial,
    /// Reads, and writes.
    queues: [VecDeque<Queued>; 2],
    /// Those whose turn is over, by when they end.
    landing: VecDeque<(Nanos, MediaOp)>,
    now: Nanos,
}

impl BandwidthMedia {
    /// `inner`, as fast as `dial` says.
    #[must_use]
    pub fn new(inner: impl Media + 'static, dial: BandwidthDial) -> Self {
        let (queues, landing) = Default::default();
        Self { inner: Box::new(inner), dial, queues, landing, now: Nanos::default() }
    }

    /// Which part of its bandwidth each direction has.
    fn rate(&self, speed: &Bandwidth) -> f64 {
        let mix = self.queues.iter().all(|queue| !queue.is_empty());
        if mix { speed.mixed / 2.0 } else { 1.0 }
    }

    /// When the next turn ends.
    fn turn_ends(&self) -> Option<Nanos> {
        let speed = self.dial.get()?;
        let rate = self.rate(&speed);
        let ends = |first: &Queued| self.now + Nanos((first.left / rate).ceil() as u64);
        self.queues.iter().filter_map(|queue| queue.front().map(ends)).min()
    }

    /// Lets time go by.
    fn go_on(&mut self, now: Nanos) {
        while let Some(event) = self.turn_ends().filter(|event| *event <= now) {
            self.advance(event);
        }
        self.advance(now);
    }

    /// Lets time go by, to the end of the next turn at the most.
    fn advance(&mut self, now: Nanos) {
        let Some(speed) = self.dial.get() else { return };
        let work = (now - self.now).0 as f64 * self.rate(&speed);
        self.now = self.now.max(now);
        for queue in &mut self.queues {
            let Some(first) = queue.front_mut() else { continue };
            first.left -= work;
            if let Some(first) = queue.pop_front_if(|first| first.left < NOTHING) {
                self.landing.push_back((self.now + speed.latency, first.op));
            }
        }
    }

    fn forget(&mut self) {
        self.queues.iter_mut().for_each(VecDeque::clear);
        self.landing.clear();
    }
}

impl Media for BandwidthMedia {
    fn capacity_bytes(&self) -> u64 {
        self.inner.capacity_bytes()
    }

    fn granularity_bytes(&self) -> u32 {
        self.inner.granularity_bytes()
    }

    fn submit(&mut self, op: MediaOp, now: Nanos) -> Option<MediaDone> {
        let Some(speed) = self.dial.get().filter(|speed| op.offset >= speed.from) else {
            return self.inner.submit(op, now);
        };
        let (queue, bandwidth) = match op.kind {
            MediaKind::Read => (0, speed.read),
            MediaKind::Write { .. } => (1, speed.write),
            MediaKind::Flush | MediaKind::Deallocate | MediaKind::WriteZeroes => {
                return self.inner.submit(op, now);
            }
        };
        self.go_on(now);
        let left = op.len as f64 / bandwidth * 1e9;
        self.queues[queue].push_back(Queued { op, left });
        None
    }

    fn poll(&mut self, now: Nanos, done: &mut Vec<MediaDone>) {
        self.go_on(now);
        while let Some((_, op)) = self.landing.pop_front_if(|(ends, _)| *ends <= now) {
            done.extend(self.inner.submit(op, now));
        }
        self.inner.poll(now, done);
    }

    fn next_event(&self) -> Option<Nanos> {
        let lands = self.landing.front().map(|(ends, _)| *ends);
        [self.turn_ends(), lands, self.inner.next_event()].into_iter().flatten().min()
    }

    fn set_exclusive(&mut self, exclusive: bool) {
        self.inner.set_exclusive(exclusive);
    }

    fn in_flight(&self) -> usize {
        let queued: usize = self.queues.iter().map(VecDeque::len).sum();
        queued + self.landing.len() + self.inner.in_flight()
    }

    fn cancel(&mut self) {
        self.forget();
        self.inner.cancel();
    }

    fn power_loss(&mut self) {
        self.forget();
        self.inner.power_loss();
    }
}

#[cfg(test)]
mod tests;
