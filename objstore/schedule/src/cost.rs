//! Duration of a read or a write by its size: a measured curve, and a learned factor.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Rate at which a curve's factor follows measurements.
const FOLLOW: f64 = 0.1;
/// Limits of the factor; values beyond them are measurement errors.
const FACTOR: (f64, f64) = (0.1, 10.0);
/// From this ratio on, a write in flight does not slow a read: each direction has nearly all of its
/// bandwidth.
const MIXES_WELL: f64 = 1.9;

/// Direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the devices.
    Read,
    /// To the devices.
    Write,
}

/// The points of a curve do not rise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the cost of I/O by size is no curve that rises; profile the devices again")]
pub struct CurveError;

/// Duration of batches by size, with nothing else in flight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// (bytes of a batch, nanoseconds); both rise.
    points: Vec<(u64, u64)>,
    /// Learned ratio of measured to tabulated time.
    factor: f64,
}

impl Curve {
    /// Makes a curve from measured points: bytes and duration of a batch.
    ///
    /// # Errors
    /// Returns [`CurveError`] if there is no point, or if more bytes take less time.
    pub fn new(points: &[(u64, Duration)]) -> Result<Self, CurveError> {
        let nanos = |took: &Duration| u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let points = points.iter().map(|(bytes, took)| (*bytes, nanos(took))).collect();
        let curve = Self { points, factor: 1.0 };
        curve.check().map(|()| curve)
    }

    /// Makes a curve from a latency and a bandwidth (TierKV, equation 1).
    ///
    /// # Errors
    /// Returns [`CurveError`] if the bandwidth is zero.
    pub fn line(latency: Duration, bytes_per_second: f64) -> Result<Self, CurveError> {
        const LARGE: u64 = 1 << 40;
        let took = |bytes: u64| bytes as f64 / bytes_per_second;
        let at = |bytes| {
            let seconds = Duration::try_from_secs_f64(took(bytes));
            seconds.map(|seconds| (bytes, latency + seconds)).map_err(|_| CurveError)
        };
        Self::new(&[at(1)?, at(LARGE)?])
    }

    pub(crate) fn check(&self) -> Result<(), CurveError> {
        let rises = |pair: &[(u64, u64)]| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1;
        let first = self.points.first().is_some_and(|(bytes, took)| *bytes > 0 && *took > 0);
        let is_good = first
            && self.points.windows(2).all(rises)
            && (FACTOR.0..=FACTOR.1).contains(&self.factor);
        if is_good { Ok(()) } else { Err(CurveError) }
    }

    /// Returns the duration of `bytes`.
    #[must_use]
    pub fn duration(&self, bytes: u64) -> Duration {
        if bytes == 0 {
            return Duration::ZERO;
        }
        let nanos = self.nanos(bytes as f64) * self.factor;
        Duration::from_nanos(nanos as u64)
    }

    /// Interpolates linearly between points, and extrapolates outside of them.
    fn nanos(&self, bytes: f64) -> f64 {
        let float = |(bytes, nanos): (u64, u64)| (bytes as f64, nanos as f64);
        let [.., _, _] = self.points[..] else {
            let (known, nanos) = float(self.points[0]);
            return nanos * (bytes / known).max(1.0);
        };
        let at = self.points.partition_point(|(known, _)| (*known as f64) < bytes);
        let at = at.clamp(1, self.points.len() - 1);
        let (low, high) = (float(self.points[at - 1]), float(self.points[at]));
        let slope = (high.1 - low.1) / (high.0 - low.0);
        (low.1 + (bytes - low.0) * slope).max(1.0)
    }

    /// Learns the duration of a batch that had nothing else in flight.
    fn learn(&mut self, bytes: u64, took: Duration) {
        if bytes == 0 || took.is_zero() {
            return;
        }
        let found = took.as_nanos() as f64 / self.nanos(bytes as f64);
        // A batch that hung says nothing about the next one.
        let found = found.clamp(self.factor / 2.0, self.factor * 2.0);
        self.factor = (self.factor + FOLLOW * (found - self.factor)).clamp(FACTOR.0, FACTOR.1);
    }
}

/// I/O costs of the devices for reads, writes, and both together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct IoCosts {
    /// Reads alone.
    pub read: Curve,
    /// Writes alone.
    pub write: Curve,
    /// Total bandwidth of a half-read, half-write mix, divided by the mean of the two alone (paper,
    /// figure 6: 0.4).
    pub mixed: f64,
}

impl IoCosts {
    /// Returns true when reads lose little if writes are in flight with them.
    #[must_use]
    pub fn mixes_well(&self) -> bool {
        self.mixed >= MIXES_WELL
    }

    /// Learns the duration of a batch that had nothing else in flight.
    pub fn learn(&mut self, direction: Direction, bytes: u64, took: Duration) {
        match direction {
            Direction::Read => self.read.learn(bytes, took),
            Direction::Write => self.write.learn(bytes, took),
        }
    }

    pub(crate) fn check(&self) -> Result<(), CurveError> {
        self.read.check()?;
        self.write.check()?;
        if (0.0..=2.0).contains(&self.mixed) { Ok(()) } else { Err(CurveError) }
    }
}

#[cfg(test)]
mod tests;
