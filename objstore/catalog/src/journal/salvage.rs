//! Reading a damaged journal.

use std::collections::BTreeMap;

use super::{
    JournalError,
    group::{Group, whole_group},
    recovery::Window,
};
use crate::{
    block_io::{BlockError, BlockIo},
    ids::NamespaceId,
    record::{Record, Records},
    superblock::{Half, JournalArea, Superblock},
};

/// Unreadable LBAs of a device before salvage fails.
const UNREADABLE_MAX: u64 = 4096;

/// Summary of a salvaged journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JournalSalvage {
    /// Groups of the active half that are whole and in their place.
    pub groups: u64,
    /// Runs of bytes that are no such group, before the last valid group or the length recorded in
    /// the superblock.
    pub gaps: u64,
    /// Bytes in these gaps.
    pub gap_bytes: u64,
    /// Records that are invalid in this store, and those behind them in their groups.
    pub refused: u64,
}

/// Passes all whole records of the active half to `visit`, in order, including those behind damage.
/// Records lost between them are unknown. Writes nothing.
///
/// The other half, as far as it is whole, adds namespaces: those that are not in the active half
/// come first, and an epoch that the active half lacks comes last, which drops all of its
/// namespace.
///
/// `visit` returns true if a record is valid in this store. `progress` receives the bytes read and
/// the total.
///
/// # Errors
/// Returns [`JournalError::None`] if the device carries no journal, or [`JournalError::Block`] if
/// too much of it is unreadable.
pub fn salvage_journal(
    io: &mut dyn BlockIo,
    superblock: &Superblock,
    mut visit: impl FnMut(Record<'_>) -> bool,
    mut progress: impl FnMut(u64, u64),
) -> Result<JournalSalvage, JournalError> {
    let device = io.name().to_owned();
    let area = superblock.journal.ok_or(JournalError::None { device })?;
    let io = &mut Patient { io, unreadable: 0 };
    let all = 3 * area.half_bytes;
    let (mut others, mut own) = (Spaces::default(), Spaces::default());
    walk(io, superblock, area.active.other(), |at, found| {
        progress(at, all);
        // Groups of an unfinished compaction are later than the active half.
        let before = |generation| generation < area.generation;
        found.iter().for_each(|(generation, group)| {
            others.add(*generation, group, before(*generation));
        });
    })?;
    walk(io, superblock, area.active, |at, found| {
        progress(area.half_bytes + at, all);
        let found = found.filter(|(generation, _)| *generation == area.generation);
        found.iter().for_each(|(generation, group)| own.add(*generation, group, true));
    })?;
    for (id, (_, record)) in &others.registered {
        if !own.registered.contains_key(id) {
            Records::new(record).map_while(Result::ok).for_each(|record| {
                own.note_epoch(&record);
                visit(record);
            });
        }
    }
    let (mut salvage, mut end) = (JournalSalvage::default(), 0);
    walk(io, superblock, area.active, |at, found| {
        progress(2 * area.half_bytes + at, all);
        let found = found.filter(|(generation, _)| *generation == area.generation);
        let Some((_, group)) = found else { return };
        salvage.skip(end, at);
        end = at + group.bytes;
        salvage.groups += 1;
        for record in Records::new(group.payload) {
            salvage.refused += u64::from(!record.is_ok_and(&mut visit));
        }
    })?;
    salvage.skip(end, area.certain_bytes);
    for (namespace, epoch) in others.epochs {
        if own.epochs.get(&namespace).is_some_and(|own| *own < epoch) {
            visit(Record::Epoch { namespace, epoch });
        }
    }
    Ok(salvage)
}

/// Namespace records and epochs found in a half.
#[derive(Default)]
struct Spaces {
    /// For each, the first Namespace record of the latest generation that has one, and that
    /// generation.
    registered: BTreeMap<NamespaceId, (u64, Vec<u8>)>,
    /// The latest epoch of each.
    epochs: BTreeMap<NamespaceId, u64>,
}

impl Spaces {
    fn add(&mut self, generation: u64, group: &Group<'_>, registers: bool) {
        for record in Records::new(group.payload).map_while(Result::ok) {
            self.note_epoch(&record);
            let Record::Namespace { id, .. } = record else { continue };
            let is_later = |(known, _): &(u64, _)| *known < generation;
            if registers && self.registered.get(&id).is_none_or(is_later) {
                let mut bytes = Vec::new();
                record.encode(&mut bytes);
                self.registered.insert(id, (generation, bytes));
            }
        }
    }

    fn note_epoch(&mut self, record: &Record<'_>) {
        if let Record::Namespace { id, epoch, .. } | Record::Epoch { namespace: id, epoch } =
            *record
        {
            let known = self.epochs.entry(id).or_default();
            *known = epoch.max(*known);
        }
    }
}

impl JournalSalvage {
    /// Counts a gap from `end` to `next`.
    fn skip(&mut self, end: u64, next: u64) {
        self.gaps += u64::from(next > end);
        self.gap_bytes += next.saturating_sub(end);
    }
}

/// Calls `visit` with each offset of a half at which a group may begin, and with the generation and
/// the whole group that belongs there, if any.
fn walk(
    io: &mut dyn BlockIo,
    superblock: &Superblock,
    half: Half,
    mut visit: impl FnMut(u64, Option<(u64, Group<'_>)>),
) -> Result<(), JournalError> {
    let device = io.name().to_owned();
    let area = superblock.journal.ok_or(JournalError::None { device })?;
    let lba_bytes = u64::from(io.lba_bytes());
    let mut window = Window::new(io, JournalArea { active: half, ..area });
    let mut position = 0;
    while position < area.half_bytes {
        let found = whole_group(window.at(position)?, superblock.store, lba_bytes);
        let found = found.filter(|(_, group)| group.position == position);
        let bytes = found.as_ref().map_or(lba_bytes, |(_, group)| group.bytes);
        visit(position, found);
        position += bytes;
    }
    Ok(())
}

/// A device that returns zeroes for unreadable blocks, up to a limit.
struct Patient<'a> {
    io: &'a mut dyn BlockIo,
    unreadable: u64,
}

impl BlockIo for Patient<'_> {
    fn name(&self) -> &str {
        self.io.name()
    }

    fn lba_bytes(&self) -> u32 {
        self.io.lba_bytes()
    }

    fn bytes(&self) -> u64 {
        self.io.bytes()
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        if self.io.read(offset, into).is_ok() {
            return Ok(());
        }
        let lba_bytes = self.io.lba_bytes();
        for (at, block) in (0..).zip(into.chunks_mut(lba_bytes as usize)) {
            if let Err(error) = self.io.read(offset + at * u64::from(lba_bytes), block) {
                self.unreadable += 1;
                if self.unreadable > UNREADABLE_MAX {
                    return Err(error);
                }
                block.fill(0);
            }
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
        self.io.write(offset, from, fua)
    }

    fn flush(&mut self) -> Result<(), BlockError> {
        self.io.flush()
    }
}
