//! Layers that failed and are sent again (Base 2.1, "Status Field": DNR and CRD).
//!
//! The I/O kernel's statuses are final. The plane sends the entries that failed again, as an
//! operation of their own: a few times, each after a delay, and only while that operation can still
//! time out before its caller does. Meanwhile the layer is in flight.
//!
//! With streams nothing is sent again: a stream may have gone on behind the operation, with what it
//! found there.

use gio_uring::{BlockMap, IoStatus};
use nvme_driver::Nanos;

use crate::error::Failure;

/// Entries of a job that may have failed: index in the job's moves, and status.
pub(super) type Failed = Vec<(u32, IoStatus)>;

/// How often, and since when, an operation was sent; and how it is sent again.
#[derive(Debug, Clone, Default)]
pub(super) struct Attempts {
    pub(super) since: Nanos,
    pub(super) failures: u32,
    /// Indices in the job's moves of the entries that it moves; `None`: all.
    pub(super) part: Option<Vec<u32>>,
    /// When it is due, and the result of its layer should that not be possible.
    pub(super) again: Option<(Nanos, Failure)>,
}

impl Attempts {
    pub(super) fn first(since: Nanos) -> Self {
        Self { since, ..Self::default() }
    }

    /// Returns true if it waits to be sent again.
    pub(super) fn is_waiting(&self) -> bool {
        self.again.is_some()
    }

    pub(super) fn is_due(&self, now: Nanos) -> bool {
        self.again.is_some_and(|(due, _)| due <= now)
    }

    /// Returns the same after it was sent again.
    pub(super) fn sent(self) -> Self {
        Self { again: None, ..self }
    }

    /// Returns the index in the job's moves of an entry.
    pub(super) fn index(&self, at: u32) -> Option<u32> {
        self.part.as_ref().map_or(Some(at), |part| part.get(at as usize).copied())
    }

    /// Returns the entries that may have failed with the operation, which ended with `status`.
    /// `map`: its map, if the statuses there are known; `entries`: those of the job.
    pub(super) fn failed(&self, map: Option<&BlockMap>, entries: u32, status: IoStatus) -> Failed {
        let of_map = map.into_iter().flat_map(BlockMap::failures);
        let known = of_map.filter_map(|(at, status)| Some((self.index(at)?, status)));
        // Perhaps more than those: the statuses are of all layers of a job.
        let known: Failed = known.collect();
        match known.is_empty() {
            true => (0..entries).map(|at| (at, status)).collect(),
            false => known,
        }
    }
}
