//! Rate limit of one message per second for log messages that a device can provoke at will.

use crate::clock::Nanos;

/// Minimum time between two messages.
const EVERY: Nanos = Nanos::from_millis(1_000);

/// Limits log messages to one a second.
#[derive(Debug, Default)]
pub struct RateLimit {
    next: Nanos,
    suppressed: u64,
}

impl RateLimit {
    /// Returns, if a message may be logged at `now`, the number suppressed before it.
    pub fn allow(&mut self, now: Nanos) -> Option<u64> {
        if now < self.next {
            self.suppressed += 1;
            return None;
        }
        self.next = now + EVERY;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_a_second() {
        let mut limit = RateLimit::default();
        assert_eq!(limit.allow(Nanos(0)), Some(0));
        assert_eq!(limit.allow(Nanos(5)), None);
        assert_eq!(limit.allow(Nanos::from_millis(999)), None);
        assert_eq!(limit.allow(Nanos::from_millis(1_000)), Some(2));
    }
}
