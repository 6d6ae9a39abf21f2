//! How long the engine's iterations take.

use std::time::Duration;

/// Of an average over the last 16 (TierKV, section 3.4).
const WEIGHT: f64 = 2.0 / 17.0;

/// A moving average of iterations' times.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace(Option<Duration>);

impl Pace {
    /// An iteration took so long.
    pub fn iteration(&mut self, took: Duration) {
        self.0 = Some(match self.0 {
            Some(average) => average.mul_f64(1.0 - WEIGHT) + took.mul_f64(WEIGHT),
            None => took,
        });
    }

    /// How long so many iterations take; `None` before the first has ended.
    #[must_use]
    pub fn of(&self, iterations: u32) -> Option<Duration> {
        self.0.map(|average| average.saturating_mul(iterations))
    }
}
