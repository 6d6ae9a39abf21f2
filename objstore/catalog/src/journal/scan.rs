//! Inspection of a journal without changes: for `inspect` and `fsck`.

use std::fmt::Display;

use super::{
    JournalError,
    recovery::{Replayed, replay},
};
use crate::{
    block_io::BlockIo,
    record::Record,
    superblock::{Half, Superblock},
};

/// Records by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecordCounts {
    /// Namespace records.
    pub namespace: u64,
    /// Commit records.
    pub commit: u64,
    /// Evict records.
    pub evict: u64,
    /// Clear records.
    pub clear: u64,
    /// Epoch records.
    pub epoch: u64,
    /// Use records.
    pub used: u64,
}

impl RecordCounts {
    fn count(&mut self, record: &Record<'_>) {
        let kind = match record {
            Record::Namespace { .. } => &mut self.namespace,
            Record::Commit { .. } => &mut self.commit,
            Record::Evict { .. } => &mut self.evict,
            Record::Clear { .. } => &mut self.clear,
            Record::Epoch { .. } => &mut self.epoch,
            Record::Use { .. } => &mut self.used,
        };
        *kind += 1;
    }
}

/// Contents of a journal's active half.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalScan {
    /// The half.
    pub half: Half,
    /// The generation of its groups.
    pub generation: u64,
    /// Its length in bytes.
    pub half_bytes: u64,
    /// Valid groups.
    pub groups: u64,
    /// Offset of the next group to be written, from the start of the half.
    pub end: u64,
    /// Records in the valid groups.
    pub records: RecordCounts,
    /// The damage that would keep the store from opening.
    pub damage: Option<JournalError>,
}

/// Reads all of the active half, also behind its end, and passes its records to `visit`. Writes
/// nothing; works on a store that does not open.
///
/// # Errors
/// Returns [`JournalError::None`] if the device carries no journal. All other errors are
/// [`JournalScan::damage`].
pub fn scan_journal<E: Display>(
    io: &mut dyn BlockIo,
    superblock: &Superblock,
    mut visit: impl FnMut(Record<'_>) -> Result<(), E>,
    progress: impl FnMut(u64, u64),
) -> Result<JournalScan, JournalError> {
    let device = io.name().to_owned();
    let area = superblock.journal.ok_or(JournalError::None { device })?;
    let (mut replayed, mut records) = (Replayed::default(), RecordCounts::default());
    let count = |record: Record<'_>| {
        records.count(&record);
        visit(record)
    };
    let damage = replay(io, superblock, u64::MAX, &mut replayed, count, progress).err();
    Ok(JournalScan {
        half: area.active,
        generation: area.generation,
        half_bytes: area.half_bytes,
        groups: replayed.groups,
        end: replayed.end,
        records,
        damage,
    })
}
