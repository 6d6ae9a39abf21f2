//! Writes the catalog's records to the journal.

use crate::{
    catalog::{Catalog, Group, SnapshotCursor},
    ids::Lsn,
    journal::{Appended, Journal, JournalError},
};

/// Bytes of the state that are taken, or files that are searched for it, in one round of a
/// compaction that must end before anything else is written. Doubled each time that it is
/// restarted, so that it ends, however fast records are made meanwhile.
const TAKEN: u64 = 1 << 20;

/// The journal, and the progress of its compaction.
#[derive(Debug)]
pub struct JournalWriter {
    /// `None` once the journal is closed.
    journal: Option<Journal>,
    compacting: Option<SnapshotCursor>,
}

/// A piece of the state, and the position after it.
struct Piece {
    records: Vec<u8>,
    looked: u64,
    next: Option<SnapshotCursor>,
}

impl Piece {
    /// Takes a piece of the state: at least `least` bytes and searched files if there are so many.
    fn take(catalog: &mut Catalog, cursor: SnapshotCursor, max_bytes: usize, least: u64) -> Self {
        let mut records = Vec::new();
        let mut next = catalog.snapshot(cursor, max_bytes, &mut records);
        let done = |next: &SnapshotCursor, records: &[u8]| {
            next.looked() - cursor.looked() + records.len() as u64
        };
        while let Some(cursor) = next.filter(|next| done(next, &records) < least) {
            next = catalog.snapshot(cursor, max_bytes, &mut records);
        }
        let looked = next.map_or(0, |next| next.looked() - cursor.looked());
        Self { records, looked, next }
    }
}

impl JournalWriter {
    pub fn new(journal: Journal) -> Self {
        Self { journal: Some(journal), compacting: None }
    }

    /// Writes the queued records, and the part of a compaction that is due. Files that only waited
    /// for their records are free afterwards. Records that do not fit, or are too many, are written
    /// as part of the whole state. `with` locks the catalog, never during I/O.
    pub fn write(
        &mut self,
        with: impl Fn(&mut dyn FnMut(&mut Catalog)),
    ) -> Result<(), JournalError> {
        self.write_or_renew(false, with)
    }

    /// Reads the journal again. Returns an error if it is damaged.
    pub fn verify(&mut self) -> Result<(), JournalError> {
        self.journal.as_mut().map_or(Ok(()), Journal::verify)
    }

    /// Writes the whole state into the other half, which becomes the active one: this repairs a
    /// damaged journal.
    pub fn renew(
        &mut self,
        with: impl Fn(&mut dyn FnMut(&mut Catalog)),
    ) -> Result<(), JournalError> {
        self.write_or_renew(true, with)
    }

    fn write_or_renew(
        &mut self,
        renew: bool,
        with: impl Fn(&mut dyn FnMut(&mut Catalog)),
    ) -> Result<(), JournalError> {
        let Self { journal, compacting } = self;
        let Some(journal) = journal else { return Ok(()) };
        // Restarts of a compaction that must end, in powers of two.
        let mut begun = 0;
        if renew {
            begin_instead(journal, compacting, &mut begun)?;
        }
        // The last record that becomes permanent with the compaction.
        let mut carried: Option<Lsn> = None;
        for round in 0.. {
            if journal.wants_compaction() {
                journal.begin_compaction()?;
                *compacting = Some(SnapshotCursor::default());
            }
            let cursor = compacting.filter(|_| journal.copy_due());
            if round > 0 && cursor.is_none() {
                break;
            }
            let (mut group, mut piece) = (None, None);
            let max_bytes = journal.payload_bytes_max();
            // Under one lock: a piece of the state belongs right behind the records made so far.
            with(&mut |catalog| {
                group = catalog.pending(usize::MAX);
                let (cursor, begun) = match &group {
                    Some(Group { needs_snapshot: true, .. }) => {
                        (Some(SnapshotCursor::default()), once_more(begun))
                    }
                    _ => (cursor, begun),
                };
                let least = TAKEN.saturating_mul(begun);
                piece = cursor.map(|cursor| Piece::take(catalog, cursor, max_bytes, least));
            });
            if let Some(Group { records, lsn, needs_snapshot }) = group {
                if needs_snapshot {
                    begin_instead(journal, compacting, &mut begun)?;
                    carried = Some(lsn);
                } else {
                    match journal.append(&records) {
                        Ok(Appended::Permanent) => with(&mut |catalog| catalog.durable(lsn)),
                        Ok(Appended::WithCompaction) => carried = Some(lsn),
                        Err(JournalError::Full { .. }) => {
                            begin_instead(journal, compacting, &mut begun)?;
                            carried = Some(lsn);
                            // The piece belongs to a copy that was abandoned.
                            continue;
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
            if let Some(Piece { records, looked, next }) = piece {
                journal.copy(&records, looked)?;
                *compacting = next;
                if next.is_none() {
                    journal.finish_compaction()?;
                    begun = 0;
                    if let Some(lsn) = carried.take() {
                        with(&mut |catalog| catalog.durable(lsn));
                    }
                }
            }
        }
        Ok(())
    }

    /// Gives the device back: nothing is written from now on. If the last write was `written`,
    /// records the journal's length first, so that the next opening detects if the device lost the
    /// end of it.
    pub fn close(&mut self, written: bool) -> Result<(), JournalError> {
        self.journal.take().filter(|_| written).map_or(Ok(()), Journal::close)
    }

    /// Returns the bytes written since the journal was opened.
    pub fn written_bytes(&self) -> u64 {
        self.journal.as_ref().map_or(0, |journal| journal.counts().written_bytes)
    }
}

/// Begins a compaction that must end before anything else is written.
fn begin_instead(
    journal: &mut Journal,
    compacting: &mut Option<SnapshotCursor>,
    begun: &mut u64,
) -> Result<(), JournalError> {
    journal.compact_instead()?;
    *compacting = Some(SnapshotCursor::default());
    *begun = once_more(*begun);
    Ok(())
}

fn once_more(begun: u64) -> u64 {
    begun.saturating_mul(2).max(1)
}

#[cfg(test)]
mod tests;
