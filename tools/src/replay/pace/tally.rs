//! What a run at the pace of its requests was like.

use std::time::Duration;

use kv_schedule::Counts;
use objstore::DramStats;

/// Requests after which layer times should be known.
pub(super) const WARM: usize = 100;

/// Counts of a run.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// From a request's arrival to its first token.
    pub(super) ttft: Vec<Duration>,
    /// From its first token to its last.
    pub(super) decode: Vec<Duration>,
    /// The GPU waited for a load, by layer.
    pub(super) bubbles: Vec<Duration>,
    /// The GPU computed.
    pub(super) compute: Duration,
    /// Anything was in flight, but for what is read ahead.
    pub(super) io_busy: Duration,
    /// Since when something is.
    io_since: Option<Duration>,
    /// When everything had ended.
    pub(super) took: Duration,
    pub(super) input_tokens: u64,
    /// Tokens of prompts that were loaded.
    pub(super) loaded_tokens: u64,
    pub(super) read_bytes: u64,
    pub(super) write_bytes: u64,
    /// Blocks that were not stored: no room, or too much waited.
    pub(super) blocks_dropped: u64,
    pub(super) io_errors: u64,
    /// What host memory served.
    pub(super) dram: DramStats,
    /// Batches that were too late to be read ahead.
    pub(super) late_batches: u64,
    /// What the scheduler counts.
    pub(super) counts: Counts,
    /// Relative errors of the table, once it should be warm.
    pub(super) errors: Vec<f64>,
    pub(super) is_interrupted: bool,
}

impl Tally {
    pub(super) fn new(layers: u32) -> Self {
        Self { bubbles: vec![Duration::ZERO; layers as usize], ..Self::default() }
    }

    /// The GPU waited before it computed a layer.
    pub(super) fn waited(&mut self, layer: usize, time: Duration) {
        self.bubbles[layer] += time;
    }

    /// Whether anything is in flight from now on.
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

    /// What the table said of a layer's time, and what it is, after so many requests.
    pub(super) fn predicted(&mut self, said: Option<Duration>, is: Duration, requests: usize) {
        if requests >= WARM {
            let said = said.unwrap_or_default().as_secs_f64();
            self.errors.push((said / is.as_secs_f64() - 1.0).abs());
        }
    }

    pub(super) fn bubble(&self) -> Duration {
        self.bubbles.iter().sum()
    }

    /// Part of the time with I/O in flight in which the GPU did not wait.
    pub(super) fn hidden(&self) -> f64 {
        let busy = self.io_busy.as_secs_f64();
        if busy > 0.0 { (1.0 - self.bubble().as_secs_f64() / busy).max(0.0) } else { 1.0 }
    }

    /// The state of things in a few words.
    pub(super) fn line(&self) -> String {
        let waited = 100.0 * self.bubble().as_secs_f64();
        let all = (self.bubble() + self.compute).as_secs_f64().max(f64::MIN_POSITIVE);
        format!("the GPU waited {:.1} % of its time", waited / all)
    }
}
