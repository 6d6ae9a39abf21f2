//! Records of a run: totals by second, and the work for one request by layer.

use std::time::Duration;

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

#[derive(Debug)]
pub(super) struct Record {
    watched: usize,
    seconds: Vec<Second>,
    spans: Vec<Span>,
}

impl Record {
    pub(super) fn new(watched: usize) -> Self {
        Self { watched, seconds: Vec::new(), spans: Vec::new() }
    }

    pub(super) fn is_watched(&self, request: usize) -> bool {
        request == self.watched
    }

    pub(super) fn span(&mut self, work: Work, layer: u32, from: Duration, to: Duration) {
        self.spans.push(Span { work, layer, from, to });
    }

    pub(super) fn second(&mut self, now: Duration) -> &mut Second {
        let at = now.as_secs() as usize;
        if at >= self.seconds.len() {
            self.seconds.resize(at + 1, Second::default());
        }
        &mut self.seconds[at]
    }

    pub(super) fn compute(&mut self, from: Duration, to: Duration) {
        let mut from = from;
        while from < to {
            let end = Duration::from_secs(from.as_secs() + 1).min(to);
            self.second(from).compute += end - from;
            from = end;
        }
    }

    pub(super) fn end(self) -> (Vec<Second>, Vec<Span>) {
        (self.seconds, self.spans)
    }
}
