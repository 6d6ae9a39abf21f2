//! Recent utilisation of the devices.

use std::time::Duration;

// The standard library uses the platform's; with libm the same events give the same decisions.
use libm::{exp, log as ln};

/// Time constant: older samples weigh 1 / e.
const MEMORY: Duration = Duration::from_millis(50);

/// An exponentially weighted average.
#[derive(Debug, Default)]
pub(super) struct Utilisation {
    average: f64,
    is_busy: bool,
    since: Duration,
}

impl Utilisation {
    /// Sets the devices busy or idle from now on.
    pub(super) fn set(&mut self, is_busy: bool, now: Duration) {
        self.average = self.at(now);
        (self.is_busy, self.since) = (is_busy, now);
    }

    /// Returns the utilisation, from 0 to 1.
    pub(super) fn at(&self, now: Duration) -> f64 {
        let past = now.saturating_sub(self.since).as_secs_f64() / MEMORY.as_secs_f64();
        let target = f64::from(u8::from(self.is_busy));
        target + (self.average - target) * exp(-past)
    }

    /// Returns when devices that stay idle fall below a utilisation of `level`.
    pub(super) fn falls_to(&self, level: f64) -> Duration {
        let memories = ln(self.average / level.max(f64::MIN_POSITIVE)).max(0.0);
        // Adds a little, to be past any rounding.
        self.since + MEMORY.mul_f64(memories.min(1e3)) + Duration::from_nanos(100)
    }
}
