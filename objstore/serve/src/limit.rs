//! A limit on the bytes that the clients of a user move in a second.

use std::{num::NonZeroU64, time::Duration};

/// The turn of the next layer of a user's clients: each one begins when those before it would have
/// ended, if the devices moved them at the limit. There is no credit for time in which nothing was
/// moved.
#[derive(Debug)]
pub(crate) struct Limit {
    bytes_s: NonZeroU64,
    free_at: Duration,
}

impl Limit {
    pub(crate) fn new(bytes_s: NonZeroU64) -> Self {
        Self { bytes_s, free_at: Duration::ZERO }
    }

    /// Returns how long a layer of `bytes` bytes has to wait that one of them starts now, or `None`
    /// if that is longer than `wait_max`: it has no turn then.
    pub(crate) fn take(
        &mut self,
        bytes: u64,
        now: Duration,
        wait_max: Duration,
    ) -> Option<Duration> {
        let begin = now.max(self.free_at);
        let wait = begin - now;
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_s.get());
        let time = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        (wait <= wait_max).then(|| {
            self.free_at = begin.saturating_add(time);
            wait
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Returns the share that each client gets of a device of 1 GB/s, in 100 s of virtual time, if
    /// it starts a layer of 1 MB when its last one has ended. The device moves them in the order of
    /// their starts.
    fn shares(limits: &mut [Option<Limit>]) -> Vec<f64> {
        const LAYER: u64 = 1_000_000;
        let service = Duration::from_millis(1);
        let mut ready = vec![Duration::ZERO; limits.len()];
        let (mut moved, mut busy_until) = (vec![0.0; limits.len()], Duration::ZERO);
        let wait = |limit: &mut Option<Limit>, now| match limit {
            Some(limit) => limit.take(LAYER, now, 100 * SECOND).unwrap(),
            None => Duration::ZERO,
        };
        for (at, limit) in ready.iter_mut().zip(limits.iter_mut()) {
            *at += wait(limit, *at);
        }
        while let Some(next) = (0..ready.len()).min_by_key(|client| ready[*client])
            && ready[next] < 100 * SECOND
        {
            busy_until = busy_until.max(ready[next]) + service;
            moved[next] += 1.0 / 100_000.0;
            ready[next] = busy_until + wait(&mut limits[next], busy_until);
        }
        moved
    }

    #[test]
    fn two_of_eight_get_their_tenth() {
        let tenth = || Some(Limit::new(NonZeroU64::new(100_000_000).unwrap()));
        let mut limits = [tenth(), None, None, tenth(), None, None, None, None];
        let shares = shares(&mut limits);
        for (share, limit) in shares.iter().zip(&limits) {
            let expected = if limit.is_some() { 0.09..=0.11 } else { 0.13..=0.14 };
            assert!(expected.contains(share), "{shares:?}");
        }
        assert!(shares.iter().sum::<f64>() > 0.99, "the others get the rest: {shares:?}");
    }

    #[test]
    fn a_turn_that_is_too_far_away_is_not_taken() {
        let mut limit = Limit::new(NonZeroU64::new(1000).unwrap());
        assert_eq!(limit.take(2000, SECOND, SECOND), Some(Duration::ZERO));
        assert_eq!(limit.take(1, SECOND, SECOND), None);
        assert_eq!(limit.take(1000, 2 * SECOND, SECOND), Some(SECOND));
        assert_eq!(limit.take(u64::MAX, 9 * SECOND, SECOND), Some(Duration::ZERO));
        assert_eq!(limit.take(0, 9 * SECOND, SECOND), None);
    }
}
