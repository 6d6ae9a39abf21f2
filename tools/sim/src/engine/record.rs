//! Records of a run: totals by second, and the work for one request by layer.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;

/// Kind of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Work {
    /// Computation on the GPU.
    Compute,
    /// Load of keys and values.
    Read,
    /// Store of keys and values.
    Write,
}

impl Work {
    /// Returns its name on a page.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Compute => "computation",
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// A layer's work for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Kind of work.
    pub work: Work,
    /// The layer.
    pub layer: u32,
    /// Start time; for I/O, when its first byte is transferred.
    pub from: Duration,
    /// End time.
    pub to: Duration,
}

/// Totals of a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Second {
    /// Time that the GPU computed.
    pub compute: Duration,
    /// Bytes of loads from the tier, by time of completion.
    pub read_bytes: u64,
    /// Bytes of stores, by time of completion.
    pub write_bytes: u64,
    /// Bytes read from the host memory cache.
    pub host_read_bytes: u64,
    /// Bytes written to it.
    pub host_write_bytes: u64,
}

/// Maximum number of totals: three days of work. With more, each is of twice as many seconds, so
/// that neither memory nor time follow from slow layers or late arrivals in an input.
const TOTALS_MAX: usize = 1 << 18;

#[derive(Debug)]
pub(super) struct Record {
    watched: usize,
    /// By their first second.
    seconds: BTreeMap<u64, Second>,
    /// Seconds of a total.
    width: u64,
    spans: Vec<Span>,
}

impl Record {
    pub(super) fn new(watched: usize) -> Self {
        Self { watched, seconds: BTreeMap::new(), width: 1, spans: Vec::new() }
    }

    pub(super) fn is_watched(&self, request: usize) -> bool {
        request == self.watched
    }

    pub(super) fn span(&mut self, work: Work, layer: u32, from: Duration, to: Duration) {
        self.spans.push(Span { work, layer, from, to });
    }

    pub(super) fn second(&mut self, now: Duration) -> &mut Second {
        if self.seconds.len() >= TOTALS_MAX {
            self.widen();
        }
        let first = now.as_secs() / self.width * self.width;
        self.seconds.entry(first).or_default()
    }

    fn widen(&mut self) {
        self.width *= 2;
        for (first, second) in std::mem::take(&mut self.seconds) {
            let sum = self.seconds.entry(first / self.width * self.width).or_default();
            sum.compute += second.compute;
            sum.read_bytes += second.read_bytes;
            sum.write_bytes += second.write_bytes;
            sum.host_read_bytes += second.host_read_bytes;
            sum.host_write_bytes += second.host_write_bytes;
        }
    }

    pub(super) fn compute(&mut self, from: Duration, to: Duration) {
        while to.saturating_sub(from).as_secs() / self.width > TOTALS_MAX as u64 {
            self.widen();
        }
        let mut from = from;
        while from < to {
            let next = (from.as_secs() / self.width + 1) * self.width;
            let end = Duration::from_secs(next).min(to);
            self.second(from).compute += end - from;
            from = end;
        }
    }

    pub(super) fn end(self) -> (BTreeMap<u64, Second>, Vec<Span>) {
        (self.seconds, self.spans)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_very_long_run_has_wider_totals_and_the_same_sums() {
        let mut record = Record::new(0);
        let seconds = Duration::from_secs;
        record.second(seconds(5)).read_bytes += 7;
        // A layer of ten years, and one that ends in between.
        let all = seconds(10 * 366 * 24 * 3600);
        record.compute(Duration::from_millis(500), all);
        record.compute(seconds(9), Duration::from_millis(9_250));
        let (totals, _) = record.end();
        assert!(totals.len() <= TOTALS_MAX + 1, "{}", totals.len());
        let compute = totals.values().map(|it| it.compute).sum::<Duration>();
        assert_eq!(compute, all - Duration::from_millis(250));
        assert_eq!(totals.values().map(|it| it.read_bytes).sum::<u64>(), 7);
    }
}
