//! Counters of the store in a paced run.

use std::time::Duration;

use kv_schedule::Counts;
use objstore::DramStats;

/// Requests after which layer times should be known.
pub(super) const WARM: usize = 100;

/// Counts of a run.
#[derive(Debug, Clone, Default)]
pub(super) struct Tally {
    /// Time that the GPU waited for loads, by layer.
    pub(super) bubbles: Vec<Duration>,
    /// Time that the GPU computed.
    pub(super) compute: Duration,
    /// Time with I/O in flight, without prefetches.
    pub(super) io_busy: Duration,
    /// Start of the current I/O period.
    io_since: Option<Duration>,
    /// Blocks that the store had no room for.
    pub(super) blocks_refused: u64,
    pub(super) io_errors: u64,
    /// Statistics of the host memory cache.
    pub(super) dram: DramStats,
    /// Batches that were too late to prefetch.
    pub(super) late_batches: u64,
    /// Counters of the scheduler.
    pub(super) counts: Counts,
    /// Relative errors of the table after [`WARM`] requests.
    pub(super) errors: Vec<f64>,
}

impl Tally {
    pub(super) fn new(layers: u32) -> Self {
        Self { bubbles: vec![Duration::ZERO; layers as usize], ..Self::default() }
    }

    /// Records that the GPU waited before a layer, and computes for `takes`.
    pub(super) fn computes(&mut self, layer: usize, waited: Duration, takes: Duration) {
        self.bubbles[layer] += waited;
        self.compute += takes;
    }

    /// Records that I/O is in flight, or not, from now on.
    pub(super) fn io(&mut self, is_busy: bool, now: Duration) {
        match (is_busy, self.io_since) {
            (true, None) => self.io_since = Some(now),
            (false, Some(since)) => {
                self.io_busy += now - since;
                self.io_since = None;
            }
            _ => {}
        }
    }

    /// Records the predicted and the actual time of a layer, after `requests` requests.
    pub(super) fn predicted(&mut self, said: Option<Duration>, is: Duration, requests: usize) {
        if requests >= WARM {
            let said = said.unwrap_or_default().as_secs_f64();
            self.errors.push((said / is.as_secs_f64() - 1.0).abs());
        }
    }

    pub(super) fn bubble(&self) -> Duration {
        self.bubbles.iter().sum()
    }

    /// Returns the fraction of the time with I/O in flight in which the GPU did not wait.
    pub(super) fn hidden(&self) -> f64 {
        let busy = self.io_busy.as_secs_f64();
        if busy > 0.0 { (1.0 - self.bubble().as_secs_f64() / busy).max(0.0) } else { 1.0 }
    }

    /// Formats a one-line summary.
    pub(super) fn line(&self) -> String {
        let waited = 100.0 * self.bubble().as_secs_f64();
        let all = (self.bubble() + self.compute).as_secs_f64().max(f64::MIN_POSITIVE);
        format!("the GPU waited {:.1} % of its time", waited / all)
    }
}
