//! A medium with the bandwidth of a drive, including the loss when reads and writes mix.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use nvme_driver::Nanos;

use super::{Media, MediaDone, MediaKind, MediaOp};

/// Speed of a [`BandwidthMedia`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bandwidth {
    /// Bytes per second of reads alone.
    pub read: f64,
    /// Bytes per second of writes alone.
    pub write: f64,
    /// Time from the transfer of the last byte to the end of an operation.
    pub latency: Nanos,
    /// Fraction of the bandwidth available to both directions together while reads and writes mix
    /// (paper, figure 6: 0.4). Each direction gets half of it.
    pub mixed: f64,
    /// Operations that begin before this offset take no time, for instance those of a journal, if
    /// only data is measured.
    pub from: u64,
}

/// Sets the speed of a [`BandwidthMedia`], even inside a controller. Initially, and with `None`,
/// the medium is as fast as the one below it.
#[derive(Debug, Clone, Default)]
pub struct BandwidthDial(Arc<Mutex<Option<Bandwidth>>>);

impl BandwidthDial {
    /// Sets the speed. `None` must not be set with operations in flight: they would never end.
    pub fn set(&self, bandwidth: Option<Bandwidth>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = bandwidth;
    }

    fn get(&self) -> Option<Bandwidth> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A read or a write that is being transferred, or waits for its turn.
#[derive(Debug)]
struct Queued {
    op: MediaOp,
    /// Remaining transfer time in nanoseconds, without traffic in the other direction.
    left: f64,
}

/// Tolerance for rounding errors of sums.
const NOTHING: f64 = 1e-6;

/// A medium at the speed of a drive: operations of one direction are transferred one after the
/// other and end one latency later. Bytes move at that time.
#[derive(Debug)]
pub struct BandwidthMedia {
    inner: Box<dyn Media>,
    dial: BandwidthDial,
    /// Queues of reads and of writes.
    queues: [VecDeque<Queued>; 2],
    /// Transferred operations, by end time.
    landing: VecDeque<(Nanos, MediaOp)>,
    now: Nanos,
}

impl BandwidthMedia {
    /// Wraps `inner`, with the speed of `dial`.
    #[must_use]
    pub fn new(inner: impl Media + 'static, dial: BandwidthDial) -> Self {
        let (queues, landing) = Default::default();
        Self { inner: Box::new(inner), dial, queues, landing, now: Nanos::default() }
    }

    /// Returns each direction's fraction of its bandwidth.
    fn rate(&self, speed: &Bandwidth) -> f64 {
        let mix = self.queues.iter().all(|queue| !queue.is_empty());
        if mix { speed.mixed / 2.0 } else { 1.0 }
    }

    /// Returns the time at which the next transfer ends.
    fn turn_ends(&self) -> Option<Nanos> {
        let speed = self.dial.get()?;
        let rate = self.rate(&speed);
        let ends = |first: &Queued| self.now + Nanos((first.left / rate).ceil() as u64);
        self.queues.iter().filter_map(|queue| queue.front().map(ends)).min()
    }

    /// Advances time.
    fn go_on(&mut self, now: Nanos) {
        while let Some(event) = self.turn_ends().filter(|event| *event <= now) {
            self.advance(event);
        }
        self.advance(now);
    }

    /// Advances time, at most to the end of the next transfer.
    fn advance(&mut self, now: Nanos) {
        let Some(speed) = self.dial.get() else { return };
        let work = (now - self.now).0 as f64 * self.rate(&speed);
        self.now = self.now.max(now);
        for queue in &mut self.queues {
            let Some(first) = queue.front_mut() else { continue };
            first.left -= work;
            if first.left < NOTHING {
                let landing = queue.pop_front().map(|first| (self.now + speed.latency, first.op));
                self.landing.extend(landing);
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
        let landed = self.landing.iter().take_while(|(ends, _)| *ends <= now).count();
        for (_, op) in self.landing.drain(..landed) {
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
