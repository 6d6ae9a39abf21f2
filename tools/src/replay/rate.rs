//! Bandwidth of transfers, and of a plain memory copy for comparison.

use std::time::{Duration, Instant};

use rand::seq::SliceRandom as _;
use rand::{SeedableRng, rngs::StdRng};

use crate::model::Shape;

/// Size of both buffers of the plain copy: larger than the CPU caches.
const COPY_BYTES: usize = 64 << 20;
/// Minimum duration of the plain copy.
const COPY_TIME: Duration = Duration::from_millis(150);

const GIB: f64 = (1u64 << 30) as f64;

/// Bytes moved in one direction, and the time with any in flight.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    bytes: u64,
    busy: Duration,
    in_flight: u32,
    since: Option<Instant>,
}

impl Meter {
    /// Records that a transfer is about to be issued.
    pub(crate) fn begin(&mut self) {
        if self.in_flight == 0 {
            self.since = Some(Instant::now());
        }
        self.in_flight += 1;
    }

    /// Records a completed transfer that moved `bytes` bytes without error.
    pub(crate) fn end(&mut self, bytes: u64) {
        assert!(self.in_flight > 0, "a transfer ended that never began");
        self.bytes += bytes;
        self.in_flight -= 1;
        if self.in_flight == 0
            && let Some(since) = self.since.take()
        {
            self.busy += since.elapsed();
        }
    }

    /// Returns the bytes moved.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the seconds with transfers in flight.
    pub(crate) fn busy_s(&self) -> f64 {
        self.busy.as_secs_f64()
    }

    /// Returns GiB a second; 0 before anything moved.
    pub(crate) fn gib_s(&self) -> f64 {
        if self.busy.is_zero() { 0.0 } else { self.bytes as f64 / GIB / self.busy.as_secs_f64() }
    }
}

/// Measures GiB a second of one thread that copies objects of this shape between scattered places.
pub(crate) fn memcpy_gib_s(shape: &Shape, seed: u64) -> f64 {
    let object = shape.object_bytes as usize;
    let count = (COPY_BYTES / object).max(2);
    let from = vec![1u8; count * object];
    let mut to = vec![2u8; count * object];
    let mut places: Vec<usize> = (0..count).collect();
    places.shuffle(&mut StdRng::seed_from_u64(seed));
    let mut copy = || {
        for (index, &place) in places.iter().enumerate() {
            let source = &from[index * object..][..object];
            to[place * object..][..object].copy_from_slice(source);
        }
        std::hint::black_box(&mut to);
    };
    copy();
    let start = Instant::now();
    let mut rounds = 0u32;
    while rounds == 0 || start.elapsed() < COPY_TIME {
        copy();
        rounds += 1;
    }
    f64::from(rounds) * (count * object) as f64 / GIB / start.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_once_while_transfers_overlap() {
        let mut meter = Meter::default();
        assert_eq!(meter.gib_s(), 0.0);
        let start = Instant::now();
        meter.begin();
        meter.begin();
        std::thread::sleep(Duration::from_millis(5));
        meter.end(100);
        assert_eq!(meter.busy_s(), 0.0);
        meter.end(20);
        let all = start.elapsed().as_secs_f64();
        assert!((0.005..=all).contains(&meter.busy_s()), "{} of {all}", meter.busy_s());
        let busy = meter.busy_s();
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!((meter.busy_s(), meter.bytes()), (busy, 120));
    }
}
