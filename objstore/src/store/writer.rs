//! From the catalog's records to the journal.

use kv_catalog::{Catalog, Journal, JournalError, SnapshotCursor};

/// The journal, and how far its compaction is.
#[derive(Debug)]
pub(super) struct JournalWriter {
    /// `None` once it was closed.
    journal: Option<Journal>,
    compacting: Option<SnapshotCursor>,
}

impl JournalWriter {
    pub(super) fn new(journal: Journal) -> Self {
        Self { journal: Some(journal), compacting: None }
    }

    /// Writes the records that have queued, and what of a compaction is due. Files that only waited
    /// for their records are free afterwards. `with` locks the catalog, never during I/O.
    pub(super) fn write(
        &mut self,
        with: impl Fn(&mut dyn FnMut(&mut Catalog)),
    ) -> Result<(), JournalError> {
        let Self { journal, compacting } = self;
        let Some(journal) = journal else { return Ok(()) };
        for round in 0.. {
            if journal.wants_compaction() {
                journal.begin_compaction()?;
                *compacting = Some(SnapshotCursor::default());
            }
            let cursor = compacting.filter(|_| journal.copy_due());
            let (mut group, mut piece) = (None, None);
            // Under one lock: a piece of the state belongs right behind the records made so far.
            with(&mut |catalog| {
                // Lookups go on meanwhile, and their uses alone are no reason for one more group.
                if round == 0 || cursor.is_some() || catalog.is_pending() {
                    group = catalog.pending(usize::MAX);
                }
                piece = cursor.map(|cursor| {
                    let mut records = Vec::new();
                    let bytes = journal.payload_bytes_max();
                    let next = catalog.snapshot(cursor, bytes, &mut records);
                    (records, next)
                });
            });
            if group.is_none() && piece.is_none() {
                break;
            }
            if let Some(group) = group {
                journal.append(&group.records)?;
                with(&mut |catalog| catalog.durable(group.lsn));
            }
            if let Some((records, next)) = piece {
                journal.copy(&records)?;
                *compacting = next;
                if next.is_none() {
                    journal.finish_compaction()?;
                }
            }
        }
        Ok(())
    }

    /// Notes the journal's length, so that the next opening finds out if the device lost the end of
    /// it. Nothing is written from now on.
    pub(super) fn close(&mut self) -> Result<(), JournalError> {
        self.journal.take().map_or(Ok(()), Journal::close)
    }

    /// Bytes written since it was opened.
    pub(super) fn written_bytes(&self) -> u64 {
        self.journal.as_ref().map_or(0, |journal| journal.counts().written_bytes)
    }
}
