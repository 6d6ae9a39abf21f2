//! The journal: changes of the catalog, in an order that survives power loss. The byte map and the
//! rules of recovery are in docs/reference/on-disk-format.md.
//!
//! A half is a stream of groups. A group is appended by one write with FUA and is valid only as a
//! whole. When the active half is nearly full, the state is copied as records into the other one,
//! piece by piece between appends, while every append goes to both; the superblock then names the
//! other half. See [`Journal::begin_compaction`].

mod error;
mod group;
mod recovery;
mod rewrite;
mod salvage;
mod scan;

use std::fmt::Display;

use crate::{
    block_io::{BlockAction, BlockError, BlockIo},
    record::{Record, Records},
    superblock::{COPIES, Half, JournalArea, SUPERBLOCK_BYTES, StoreId, Superblock},
};

pub use self::{
    error::{DamageProof, JournalError},
    rewrite::rewrite_journal,
    salvage::{JournalSalvage, salvage_journal},
    scan::{JournalScan, RecordCounts, scan_journal},
};
use self::{
    group::Series,
    recovery::{Replayed, payload_bytes_max, replay, search_bytes},
};

/// Bytes copied for each byte appended during a compaction, to ensure that it ends.
const COPIED_A_BYTE: u64 = 4;

/// Compaction begins when this part of the half is left above the reserve: 1 / 8. For a snapshot of
/// a fourth of the half 1 / 16 is enough ([`COPIED_A_BYTE`]), and 1 / 12 including the files that
/// it visits ([`Journal::copy`]).
const LEFT_AT_COMPACTION: u64 = 8;

/// The part of the active half that is kept free: 1 / 4, the snapshot of a full store. Below that,
/// a compaction must complete before the next append. So between two appends, every file may be
/// stored anew.
const RESERVE: u64 = 4;

/// Durability of the records when [`Journal::append`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Appended {
    /// Durable in the active half.
    Permanent,
    /// Queued for, or written to, the copy of a compaction: durable when that has ended.
    WithCompaction,
}

/// Write counters of a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JournalCounts {
    /// Bytes of appended records.
    pub appended_bytes: u64,
    /// Groups that hold them.
    pub groups: u64,
    /// Compactions completed.
    pub compactions: u64,
    /// Bytes written to the device: both halves and the superblock, with headers and padding.
    pub written_bytes: u64,
}

/// A half that is being written.
#[derive(Debug, Clone, Copy)]
struct Stream {
    half: Half,
    generation: u64,
    /// Offset of the next group, from the start of the half.
    end: u64,
}

#[derive(Debug)]
struct Compaction {
    to: Stream,
    /// Queued records of pieces and appends, in order. None must be durable before the compaction
    /// ends, so they wait for a whole group.
    queue: Vec<u8>,
    /// True once a piece was copied. Appends before the first piece are part of it.
    has_begun: bool,
    /// Bytes that should have been copied by now.
    due: u64,
}

/// The journal of an open store. It has no threads, no clock and no randomness.
pub struct Journal {
    io: Box<dyn BlockIo>,
    superblock: Superblock,
    area: JournalArea,
    active: Stream,
    compaction: Option<Compaction>,
    /// Set when the active half lacks records that only the compaction has: it takes no more.
    is_sealed: bool,
    failed: Option<String>,
    counts: JournalCounts,
    buffer: Vec<u8>,
}

/// Creates an empty journal on a device that is being formatted, if it carries one.
pub(crate) fn create(io: &mut dyn BlockIo, superblock: &mut Superblock) -> Result<(), BlockError> {
    let Some(area) = &mut superblock.journal else { return Ok(()) };
    (area.active, area.generation) = (Half::A, superblock.sequence);
    let mut group = Vec::new();
    series(superblock.store, area.generation, io).encode(0, &[], &mut group);
    area.certain_bytes = group.len() as u64;
    io.write(area.half_offset(area.active), &group, true)
}

fn series(store: StoreId, generation: u64, io: &dyn BlockIo) -> Series {
    Series { store, generation, lba_bytes: u64::from(io.lba_bytes()) }
}

/// Writes the last group again, with FUA. It may be only in the device's cache, because its write
/// failed or was in flight when another process died. A flush is not enough: one that succeeds
/// after a failed one proves nothing. The groups before it were durable before it was written.
///
/// It is read once more for this. Bytes that are no longer the group are an error: writing them
/// would destroy what may be durable.
fn rewrite_last(
    io: &mut dyn BlockIo,
    superblock: &Superblock,
    area: &JournalArea,
    replayed: &Replayed,
) -> Result<(), BlockError> {
    let mut group = vec![0; (replayed.end - replayed.last) as usize];
    let offset = area.half_offset(area.active) + replayed.last;
    io.read(offset, &mut group)?;
    let series = series(superblock.store, area.generation, io);
    if series.group_in(&group).is_none_or(|found| found.position != replayed.last) {
        return Err(BlockError {
            device: io.name().to_owned(),
            action: BlockAction::Read,
            offset,
            bytes: group.len() as u64,
            reason: "the journal's last group has other bytes than at the first read".to_owned(),
        });
    }
    io.write(offset, &group, true)
}

impl Journal {
    /// Opens the journal that `superblock`, read from `io`, names: passes every valid record to
    /// `apply`, in order, and calls `progress` with the bytes read and the most there may be.
    ///
    /// # Errors
    /// Returns [`JournalError::Damaged`] or [`JournalError::Record`] (also an error of `apply`)
    /// if the journal is unusable; nothing was written. Returns [`JournalError::Block`] if the
    /// device fails, [`JournalError::None`] if it carries no journal.
    pub fn open<E: Display>(
        mut io: Box<dyn BlockIo>,
        mut superblock: Superblock,
        apply: impl FnMut(Record<'_>) -> Result<(), E>,
        progress: impl FnMut(u64, u64),
    ) -> Result<Self, JournalError> {
        let device = || io.name().to_owned();
        let mut area = superblock.journal.ok_or_else(|| JournalError::None { device: device() })?;
        let mut replayed = Replayed::default();
        let search = search_bytes(&area);
        replay(&mut *io, &superblock, search, &mut replayed, apply, progress)?;
        if replayed.end > area.certain_bytes {
            rewrite_last(&mut *io, &superblock, &area, &replayed)?;
        }
        // Makes both copies whole and equal, and detects a read-only device now.
        area.certain_bytes = replayed.end;
        superblock.journal = Some(area);
        superblock.sequence += 1;
        superblock.write(&mut *io)?;
        let active = Stream { half: area.active, generation: area.generation, end: replayed.end };
        Ok(Self {
            io,
            superblock,
            area,
            active,
            compaction: None,
            is_sealed: false,
            failed: None,
            counts: JournalCounts::default(),
            buffer: Vec::new(),
        })
    }

    /// Returns the bytes of records that one group holds. A single append or copy should not be
    /// longer.
    #[must_use]
    pub fn payload_bytes_max(&self) -> usize {
        payload_bytes_max(&self.area)
    }

    /// Returns the bytes of records that one append may have and still leave room for another one
    /// before a compaction must be completed.
    #[must_use]
    pub fn append_bytes_max(&self) -> usize {
        (self.reserve() / 2) as usize
    }

    /// Returns the write counters since it was opened.
    #[must_use]
    pub fn counts(&self) -> JournalCounts {
        self.counts
    }

    /// Appends whole encoded records. They are durable on return ([`Appended::Permanent`]); after a
    /// crash before that, any prefix of them may be.
    ///
    /// Records longer than [`Journal::payload_bytes_max`] become several groups.
    ///
    /// # Errors
    /// Returns [`JournalError::Full`] if they do not fit: nothing was written, and the next call
    /// must be [`Journal::compact_instead`]. It cannot happen while at most a quarter of a half is
    /// appended between two checks of [`Journal::copy_due`]. [`JournalError::Block`] or
    /// [`JournalError::Outgrown`] if the append fails: any prefix may be durable, and the journal
    /// accepts no more. [`JournalError::Failed`] after an earlier failure.
    ///
    /// # Panics
    /// Panics if `records` are no whole records, or one is longer than a group.
    pub fn append(&mut self, records: &[u8]) -> Result<Appended, JournalError> {
        self.usable()?;
        if self.is_sealed {
            return self.carry(records);
        }
        let parts = self.parts(records);
        let bytes = self.groups_bytes(&parts);
        self.room_in(self.active, bytes)?;
        for part in parts {
            self.active = self.write_group(self.active, part, true)?;
            self.counts.groups += 1;
        }
        self.counts.appended_bytes += records.len() as u64;
        if let Some(compaction) = &mut self.compaction {
            compaction.due += COPIED_A_BYTE * bytes;
            if compaction.has_begun {
                self.queue(records)?;
            }
        }
        Ok(Appended::Permanent)
    }

    /// Leaves records to the compaction for which the active half is sealed.
    fn carry(&mut self, records: &[u8]) -> Result<Appended, JournalError> {
        let compaction = self.compaction.as_ref().expect("a sealed half is compacted");
        // The first piece includes the effect of all earlier records.
        if compaction.has_begun {
            // Groups are cut between records: at worst they are half empty. The rest of the state
            // must still fit.
            let needed = 2 * (compaction.queue.len() + records.len()) as u64 + self.reserve();
            self.room_in(compaction.to, needed)?;
            self.queue(records)?;
        }
        Ok(Appended::WithCompaction)
    }

    /// Returns true when a compaction should begin.
    #[must_use]
    pub fn wants_compaction(&self) -> bool {
        let left = self.area.half_bytes - self.active.end;
        self.compaction.is_none()
            && self.failed.is_none()
            && left <= self.area.half_bytes / LEFT_AT_COMPACTION + self.reserve()
    }

    /// Begins a compaction: a copy of the current state into the other half. Then, until everything
    /// is copied: append the records made so far, take the next piece of the state before anything
    /// changes, and pass it to [`Journal::copy`]; last, call [`Journal::finish_compaction`].
    /// Appends may go on between the pieces; [`Journal::copy_due`] tells when the next piece should
    /// not wait.
    ///
    /// The first piece must have all namespaces, because later appends refer to them. A compaction
    /// in progress is abandoned.
    ///
    /// # Errors
    /// Returns [`JournalError::Block`] if a write fails, [`JournalError::Failed`] after a failure.
    pub fn begin_compaction(&mut self) -> Result<(), JournalError> {
        self.usable()?;
        // The generation is a number that was never used in this half: groups that an abandoned
        // compaction left there are not valid.
        self.switch_to(self.active)?;
        let (half, generation) = (self.active.half.other(), self.superblock.sequence);
        let to = Stream { half, generation, end: 0 };
        self.compaction = Some(Compaction { to, queue: Vec::new(), has_begun: false, due: 1 });
        Ok(())
    }

    /// Begins a compaction instead of an append: for records that do not fit into the active half
    /// ([`JournalError::Full`]), for an overflow of the queue ([`crate::Group::needs_snapshot`]),
    /// or because the active half is damaged. The copied state includes those records. The active
    /// half lacks them, so it takes nothing more until everything is copied: records appended
    /// meanwhile are durable when the compaction has ended.
    ///
    /// # Errors
    /// Same as [`Journal::begin_compaction`].
    pub fn compact_instead(&mut self) -> Result<(), JournalError> {
        self.begin_compaction()?;
        self.is_sealed = true;
        Ok(())
    }

    /// Returns true when a piece of the state should be copied before the next append: some bytes
    /// for each byte appended, and all remaining ones if the active half is nearly full or sealed.
    #[must_use]
    pub fn copy_due(&self) -> bool {
        let scarce = self.area.half_bytes - self.active.end < self.reserve();
        self.failed.is_none()
            && self
                .compaction
                .as_ref()
                .is_some_and(|compaction| compaction.due > 0 || scarce || self.is_sealed)
    }

    /// Copies a piece of the state, encoded as records, into the other half. `looked` is the number
    /// of files visited to find it: each counts as a byte, so that appends do not wait for a search
    /// that finds nothing to copy.
    ///
    /// # Errors
    /// Returns [`JournalError::Block`] or [`JournalError::Outgrown`] if the copy fails, and
    /// [`JournalError::Failed`] after an earlier failure.
    ///
    /// # Panics
    /// Panics if no compaction is in progress, and as [`Journal::append`] does.
    pub fn copy(&mut self, records: &[u8], looked: u64) -> Result<(), JournalError> {
        self.usable()?;
        let compaction = self.compaction.as_mut().expect("a compaction is under way");
        compaction.has_begun = true;
        compaction.due = compaction.due.saturating_sub(records.len() as u64 + looked);
        self.queue(records)
    }

    /// Ends a compaction after all of the state was copied: the other half becomes the active one.
    ///
    /// # Errors
    /// Same as [`Journal::copy`].
    ///
    /// # Panics
    /// Panics if no compaction is in progress.
    pub fn finish_compaction(&mut self) -> Result<(), JournalError> {
        self.usable()?;
        let compaction = self.compaction.as_mut().expect("a compaction is under way");
        let rest = std::mem::take(&mut compaction.queue);
        self.write_queued(&rest)?;
        let to = self.compaction.as_ref().expect("it is under way").to;
        let flushed = self.io.flush();
        self.done(flushed)?;
        self.switch_to(to)?;
        self.active = to;
        self.compaction = None;
        self.is_sealed = false;
        self.counts.compactions += 1;
        Ok(())
    }

    /// Reads all of the active half again and checks it: the device may have changed bytes since
    /// they were written or read. [`Journal::compact_instead`] writes a fresh copy of everything
    /// into the other half.
    ///
    /// # Errors
    /// Returns [`JournalError::Damaged`], or [`JournalError::Block`] for bytes that cannot be read.
    /// The journal accepts appends in either case.
    pub fn verify(&mut self) -> Result<(), JournalError> {
        let Stream { half, generation, end } = self.active;
        let area = JournalArea { active: half, generation, certain_bytes: end, ..self.area };
        let superblock = Superblock { journal: Some(area), ..self.superblock.clone() };
        let nothing = |_: Record<'_>| Ok::<_, std::convert::Infallible>(());
        replay(&mut *self.io, &superblock, 0, &mut Replayed::default(), nothing, |_, _| {})
    }

    /// Records the journal's length in the superblock, so that the next opening detects whether the
    /// device lost any of it. Without this, the loss of the last append looks like a crash.
    ///
    /// # Errors
    /// Returns [`JournalError::Block`] or [`JournalError::Failed`]; all appended records are valid
    /// nevertheless.
    pub fn close(mut self) -> Result<(), JournalError> {
        self.usable()?;
        self.switch_to(self.active)
    }

    fn usable(&self) -> Result<(), JournalError> {
        match &self.failed {
            Some(reason) => Err(JournalError::Failed { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Seals the journal after a failure: it is unknown how much of the write became durable.
    fn done<T>(&mut self, result: Result<T, BlockError>) -> Result<T, JournalError> {
        result.map_err(|error| {
            self.failed = Some(error.to_string());
            JournalError::Block(error)
        })
    }

    /// Queues records for the other half, and writes whole groups of them.
    fn queue(&mut self, records: &[u8]) -> Result<(), JournalError> {
        let longest = self.payload_bytes_max();
        let compaction = self.compaction.as_mut().expect("it is under way");
        compaction.queue.extend_from_slice(records);
        while let Some(compaction) = &mut self.compaction
            && compaction.queue.len() > longest
        {
            let rest = compaction.queue.split_off(Records::fitting(&compaction.queue, longest));
            let group = std::mem::replace(&mut compaction.queue, rest);
            self.write_queued(&group)?;
        }
        Ok(())
    }

    /// Writes a group to the other half.
    fn write_queued(&mut self, records: &[u8]) -> Result<(), JournalError> {
        let to = self.compaction.as_ref().expect("it is under way").to;
        let needed = to.end + self.series(to.generation).group_bytes(records.len());
        if needed > self.area.half_bytes {
            let (device, half_bytes) = (self.io.name().to_owned(), self.area.half_bytes);
            let outgrown = JournalError::Outgrown { device, half_bytes };
            self.failed = Some(outgrown.to_string());
            return Err(outgrown);
        }
        let to = self.write_group(to, records, false)?;
        self.compaction.as_mut().expect("it is under way").to = to;
        Ok(())
    }

    fn reserve(&self) -> u64 {
        self.area.half_bytes / RESERVE
    }

    fn series(&self, generation: u64) -> Series {
        series(self.superblock.store, generation, &*self.io)
    }

    /// Cuts records into groups.
    fn parts<'a>(&self, mut records: &'a [u8]) -> Vec<&'a [u8]> {
        let mut parts = Vec::new();
        while !records.is_empty() {
            let (part, rest) =
                records.split_at(Records::fitting(records, self.payload_bytes_max()));
            parts.push(part);
            records = rest;
        }
        parts
    }

    fn groups_bytes(&self, parts: &[&[u8]]) -> u64 {
        let series = self.series(0);
        parts.iter().map(|part| series.group_bytes(part.len())).sum()
    }

    fn room_in(&self, stream: Stream, needed: u64) -> Result<(), JournalError> {
        let (half, room) = (stream.half, self.area.half_bytes - stream.end);
        if needed > room {
            let device = self.io.name().to_owned();
            return Err(JournalError::Full { device, half, needed, room });
        }
        Ok(())
    }

    /// Writes a group and returns the stream behind it.
    fn write_group(
        &mut self,
        stream: Stream,
        payload: &[u8],
        fua: bool,
    ) -> Result<Stream, JournalError> {
        let mut group = std::mem::take(&mut self.buffer);
        self.series(stream.generation).encode(stream.end, payload, &mut group);
        let offset = self.area.half_offset(stream.half) + stream.end;
        let written = self.io.write(offset, &group, fua);
        let bytes = group.len() as u64;
        self.buffer = group;
        self.done(written)?;
        self.counts.written_bytes += bytes;
        Ok(Stream { end: stream.end + bytes, ..stream })
    }

    /// Makes the superblock name this stream as the active one.
    fn switch_to(&mut self, stream: Stream) -> Result<(), JournalError> {
        self.superblock.journal = Some(JournalArea {
            active: stream.half,
            generation: stream.generation,
            certain_bytes: stream.end,
            ..self.area
        });
        self.superblock.sequence += 1;
        let written = self.superblock.write(&mut *self.io);
        let copy_bytes = SUPERBLOCK_BYTES.next_multiple_of(self.io.lba_bytes() as usize);
        self.counts.written_bytes += (COPIES * copy_bytes) as u64;
        self.done(written)
    }
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal")
            .field("device", &self.io.name())
            .field("active", &self.active)
            .field("compaction", &self.compaction)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
