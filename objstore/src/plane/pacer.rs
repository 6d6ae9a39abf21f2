//! Layers that wait for their turn, and requests that are read ahead; `pacing.rs` acts on them.

use std::{collections::HashMap, time::Duration};

use gio_uring::{Progress, Wait};
use kv_catalog::FileId;
use kv_schedule::{OpId, Scheduler};
use kv_tier::{HostBlock, Lookahead, RequestId};
use nvme_driver::Nanos;

use crate::ids::Ticket;

/// A layer that waits for its turn.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) ticket: Ticket,
    /// Point of a stream after which it may start.
    pub(super) after: Option<Wait>,
    pub(super) is_read: bool,
}

/// A request that was announced: its files, and their checksums.
#[derive(Debug)]
pub(super) struct Announced {
    pub(super) files: HashMap<FileId, usize>,
    /// `[file][row]`.
    pub(super) words: Vec<u32>,
}

/// Result of [`crate::Plane::advance`].
#[derive(Debug)]
pub struct Advanced {
    /// [`Progress::Moved`] if anything moved, started or ended.
    pub progress: Progress,
    /// Time of the next call if nothing happens before.
    pub wake: Option<Nanos>,
    /// Layers that ended since the last call: poll them for their results.
    pub ended: Vec<Ticket>,
    /// Layers in flight.
    pub in_flight: usize,
}

/// Decides when the layers of a plane start.
#[derive(Debug)]
pub(crate) struct Pacer {
    pub(super) scheduler: Scheduler,
    pub(super) lookahead: Lookahead<FileId>,
    pub(super) waiting: HashMap<OpId, Waiting>,
    /// Operations that may start, and found no free IOCB or staging buffer.
    pub(super) refused: Vec<OpId>,
    pub(super) in_flight: Vec<(OpId, Ticket)>,
    /// Batches that are read ahead.
    pub(super) reading: Vec<(OpId, Ticket)>,
    pub(super) announced: HashMap<RequestId, Announced>,
    pub(super) ended: Vec<Ticket>,
    pub(super) last: u64,
    /// Time when something last moved or started.
    pub(super) moved_at: Nanos,
    /// Set when there may be something to read ahead.
    pub(super) is_due: bool,
    /// Time of the next look at requests if no event occurs before.
    pub(super) due: Option<Duration>,
}

impl Pacer {
    pub(crate) fn new(scheduler: Scheduler, lookahead: Lookahead<FileId>, now: Nanos) -> Self {
        Self {
            scheduler,
            lookahead,
            waiting: HashMap::new(),
            refused: Vec::new(),
            in_flight: Vec::new(),
            reading: Vec::new(),
            announced: HashMap::new(),
            ended: Vec::new(),
            last: 0,
            moved_at: now,
            is_due: false,
            due: None,
        }
    }

    /// Returns true if layers wait, or requests whose blocks may be read ahead.
    pub(super) fn has_work(&self) -> bool {
        let is_moving = self.scheduler.pending() > 0 || !self.in_flight.is_empty();
        is_moving || self.lookahead.pending() > 0
    }

    pub(super) fn next_op(&mut self) -> OpId {
        self.last += 1;
        OpId(self.last)
    }

    /// Returns the operation that has been in flight for the longest time.
    pub(super) fn oldest(&self) -> Option<Ticket> {
        let all = self.in_flight.first().or_else(|| self.reading.first());
        all.map(|(_, ticket)| *ticket)
    }

    /// Returns the checksums of a batch; `None` if they are not known any more.
    pub(super) fn words(
        &self,
        request: RequestId,
        blocks: &[(FileId, HostBlock)],
        rows: usize,
    ) -> Option<Vec<u32>> {
        let Announced { files, words } = self.announced.get(&request)?;
        let mut all = Vec::new();
        for (file, _) in blocks.iter().filter(|_| !words.is_empty()) {
            let at = files.get(file)? * rows;
            all.extend_from_slice(words.get(at..at + rows)?);
        }
        Some(all)
    }
}
