//! What was done when: second by second, and for one request layer by layer.

use std::time::Duration;

use serde::Serialize;

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Work {
    /// The GPU computes.
    Compute,
    /// Keys and values are loaded.
    Read,
    /// They are stored.
    Write,
}

impl Work {
    /// As a page names it.
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
    /// What is done.
    pub work: Work,
    /// The layer.
    pub layer: u32,
    /// When it begins: of I/O, when its first byte has its turn.
    pub from: Duration,
    /// When it has ended.
    pub to: Duration,
}

/// What was done within a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Second {
    /// The GPU computed for so long.
    pub compute: Duration,
    /// Bytes whose loads from the tier have ended.
    pub read_bytes: u64,
    /// Bytes whose stores have ended.
    pub write_bytes: u64,
    /// Bytes that came from host memory before it.
    pub host_read_bytes: u64,
    /// Bytes that went there.
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
