//! Which part of the time the devices have been busy lately.

use std::time::Duration;

// The standard library's are those of the platform; the same events give the same decisions.
use libm::{exp, log as ln};

/// What was so long ago weighs a third.
const MEMORY: Duration = Duration::from_millis(50);

/// An average that forgets.
#[derive(Debug, Default)]
pub(super) struct Utilisation {
    average: f64,
    is_busy: bool,
    since: Duration,
}

impl Utilisation {
    /// The devices are busy from now on, or not.
    pub(super) fn set(&mut self, is_busy: bool, now: Duration) {
        self.average = self.at(now);
        (self.is_busy, self.since) = (is_busy, now);
    }

    /// From 0 to 1.
    pub(super) fn at(&self, now: Duration) -> f64 {
        let past = now.saturating_sub(self.since).as_secs_f64() / MEMORY.as_secs_f64();
        let target = f64::from(u8::from(self.is_busy));
        target + (self.average - target) * exp(-past)
    }

    /// When devices that stay idle have been busy for less than `level` of the time.
    pub(super) fn falls_to(&self, level: f64) -> Duration {
        let memories = ln(self.average / level.max(f64::MIN_POSITIVE)).max(0.0);
        // And a little: the other side of a rounding.
        self.since + MEMORY.mul_f64(memories.min(1e3)) + Duration::from_nanos(100)
    }
}
