//! What is in a journal, without changing anything: for `inspect` and `fsck`.

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
    /// Namespace.
    pub namespace: u64,
    /// Commit.
    pub commit: u64,
    /// Evict.
    pub evict: u64,
    /// Pin.
    pub pin: u64,
    /// Clear.
    pub clear: u64,
    /// Epoch.
    pub epoch: u64,
    /// Use.
    pub used: u64,
}

impl RecordCounts {
    fn count(&mut self, record: &Record<'_>) {
        let kind = match record {
            Record::Namespace { .. } => &mut self.namespace,
            Record::Commit { .. } => &mut self.commit,
            Record::Evict { .. } => &mut self.evict,
            Record::Pin { .. } => &mut self.pin,
            Record::Clear { .. } => &mut self.clear,
            Record::Epoch { .. } => &mut self.epoch,
            Record::Use { .. } => &mut self.used,
        };
        *kind += 1;
    }
}

/// What is in the active half of a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalScan {
    /// The half.
    pub half: Half,
    /// The generation of its groups.
    pub generation: u64,
    /// Its length in bytes.
    pub half_bytes: u64,
    /// Groups that count.
    pub groups: u64,
    /// Where the next one would be written, from the start of the half.
    pub end: u64,
    /// Records in them.
    pub records: RecordCounts,
    /// What is wrong: why the store would not open.
    pub damage: Option<JournalError>,
}

/// Reads all of the active half, also behind its end, and hands its records to `visit`. Writes
/// nothing, and may run on a store that does not open.
///
/// # Errors
/// [`JournalError::None`] when the device carries no journal. All else is
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
