//! Moving average of the engine's iteration time.

use std::time::Duration;

/// Weight of a sample in an average over the last 16 (TierKV, section 3.4).
const WEIGHT: f64 = 2.0 / 17.0;

/// A moving average of iteration times.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace(Option<Duration>);

impl Pace {
    /// Adds the duration of an iteration.
    pub fn iteration(&mut self, took: Duration) {
        self.0 = Some(match self.0 {
            Some(average) => average.mul_f64(1.0 - WEIGHT) + took.mul_f64(WEIGHT),
            None => took,
        });
    }

    /// Returns the expected duration of `iterations`; `None` before the first has ended.
    #[must_use]
    pub fn of(&self, iterations: u32) -> Option<Duration> {
        self.0.map(|average| average.saturating_mul(iterations))
    }
}
