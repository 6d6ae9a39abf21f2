//! Write-back: dirty blocks, which were stored in the cache only and are written to the devices
//! later.
//!
//! A layer of such a job is over when its rows were copied to the cache. Dirty blocks keep their
//! memory until [`Plane::clean`]: at most half of the cache, so that there is room for others. A
//! job that would exceed that is written through.

use std::collections::HashMap;

use gio_uring::IoStatus;
use kv_catalog::{FileId, Layer, PlantedBug, planted};
use kv_tier::HostBlock;
use nvme_spec::nvm::Direction;

use super::HostMemory;
use crate::{
    error::{Failure, StoreError},
    plane::{
        Plane,
        checksums::JobChecksums,
        job::{Job, JobFailure, JobId, Ticket},
    },
};

/// Dirty blocks of a job.
#[derive(Debug)]
struct Dirty {
    blocks: Vec<(FileId, HostBlock)>,
    /// Their checksums, `[block][row]`.
    words: Vec<u32>,
    placement: Option<u16>,
    /// Leading blocks that were written, and the count of recoveries when the first write began.
    written: usize,
    recoveries: Option<u64>,
}

/// All dirty blocks.
#[derive(Debug, Default)]
pub(in crate::plane) struct Behind {
    /// Set if write-back is enabled.
    is_on: bool,
    jobs: HashMap<JobId, Dirty>,
    /// Blocks of memory of these jobs, and of jobs in progress that will be dirty.
    pub(in crate::plane) blocks: u32,
    pub(in crate::plane) written_bytes: u64,
    /// Bytes of dirty files that were dropped without being written.
    pub(in crate::plane) spared_bytes: u64,
}

impl HostMemory {
    /// Returns the maximum number of dirty blocks.
    fn dirty_max(&self) -> u32 {
        self.own.blocks() / 2
    }

    /// Marks a write for write-back, if all of it has cache memory.
    pub(super) fn keep(&mut self, job: &mut Job) {
        let count = job.fills.len();
        let fits = self.behind.blocks as usize + count <= self.dirty_max() as usize;
        let is_whole = job.direction == Direction::Write && count == job.moves.len() && count > 0;
        if !self.behind.is_on || !fits || !is_whole {
            return;
        }
        job.is_kept = true;
        self.behind.blocks += count as u32;
        if self.copies_at_once() {
            let words = vec![0; count * self.shape.rows() as usize];
            job.checksums = Some(JobChecksums::Host(words));
        }
    }
}

impl Plane {
    /// Enables write-back: stored blocks stay in the cache only until [`Plane::write_behind`], if
    /// there is a cache.
    ///
    /// # Errors
    /// Returns [`StoreError::Config`] without checksums: they tell if the devices have the bytes
    /// that were stored.
    pub(crate) fn write_back(&mut self) -> Result<(), StoreError> {
        if !self.checksums {
            let problem = "write-back needs checksums, which the store was formatted without; \
                           write through, or format it with them";
            return Err(StoreError::Config { field: "dram_mode", problem: problem.to_owned() });
        }
        self.memory.iter_mut().for_each(|memory| memory.behind.is_on = true);
        Ok(())
    }

    /// Keeps an ended write-back job as dirty until [`Plane::clean`]. Returns true if it is one.
    pub(in crate::plane) fn is_dirty_now(
        &mut self,
        id: JobId,
        job: &mut Job,
        words: &[u32],
    ) -> bool {
        let Some(memory) = self.memory.as_mut().filter(|_| job.is_kept) else { return false };
        let blocks = std::mem::take(&mut job.fills).into_iter();
        let blocks: Vec<_> = blocks.map(|(entry, at)| (entry.file, at)).collect();
        for (_, at) in blocks.iter().rev() {
            memory.tier.hold(*at);
            memory.tier.filled(*at, true);
        }
        let (words, placement) = (words.to_vec(), job.placement);
        let dirty = Dirty { blocks, words, placement, written: 0, recoveries: None };
        memory.behind.jobs.insert(id, dirty);
        true
    }

    /// Returns true if dirty blocks should be written now: nothing else is moved, or they use more
    /// than half of their limit.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub(crate) fn wants_writing(&mut self) -> Result<bool, StoreError> {
        self.reap()?;
        let memory = self.memory.as_ref();
        let is_full = memory.is_some_and(|it| it.behind.blocks > it.dirty_max() / 2);
        Ok(self.ops.is_empty() || is_full)
    }

    /// Returns true if a job's layers are copied to the cache, and written later.
    pub(crate) fn is_kept(&self, id: JobId) -> bool {
        self.jobs.get(&id).is_some_and(|job| job.is_kept)
    }

    /// Returns true if there are dirty blocks, wanted or not.
    pub(crate) fn is_behind(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| !memory.behind.jobs.is_empty())
    }

    /// Frees memory of the dirty blocks of job `id` whose files are no longer wanted. Nothing of
    /// the job may be in flight. Returns true if any blocks are left. Once some of them were
    /// written, either all are freed or none.
    ///
    /// # Errors
    /// Returns [`StoreError::NoSuchJob`].
    pub(crate) fn spare(
        &mut self,
        id: JobId,
        is_wanted: impl Fn(FileId) -> bool,
    ) -> Result<bool, StoreError> {
        let (rows, bytes) = (self.shape.rows() as usize, self.shape.block_bytes());
        let missing = StoreError::NoSuchJob { job: id };
        let Some(HostMemory { behind, tier, .. }) = &mut self.memory else { return Err(missing) };
        let dirty = behind.jobs.get_mut(&id).ok_or(missing)?;
        let is_wanted: Vec<bool> = dirty.blocks.iter().map(|(file, _)| is_wanted(*file)).collect();
        if dirty.written == dirty.blocks.len() || !is_wanted.contains(&true) {
            (dirty.written, dirty.recoveries) = (0, None);
        }
        for at in (0..dirty.blocks.len()).rev() {
            if dirty.written == 0 && !is_wanted[at] {
                let (_, host) = dirty.blocks.remove(at);
                dirty.words.drain(at * rows..(at + 1) * rows);
                tier.release(host);
                behind.blocks -= 1;
                behind.spared_bytes += bytes;
            }
        }
        Ok(!dirty.blocks.is_empty())
    }

    /// Starts writing the next dirty blocks of job `id`, up to `blocks_max`, without files that are
    /// no longer wanted, and returns how many; `None` if no blocks are left. After the last one it
    /// starts over.
    ///
    /// # Errors
    /// Returns [`StoreError::NoSuchJob`], [`StoreError::ReadOnly`], [`StoreError::Busy`],
    /// [`StoreError::Ring`] or [`StoreError::Failed`].
    pub(crate) fn write_behind(
        &mut self,
        id: JobId,
        blocks_max: usize,
        is_wanted: impl Fn(FileId) -> bool,
    ) -> Result<Option<(Ticket, usize)>, StoreError> {
        self.sync()?;
        self.check_writable()?;
        self.check_flushed()?;
        if !self.spare(id, is_wanted)? {
            return Ok(None);
        }
        let dirty = self.memory.as_ref().and_then(|memory| memory.behind.jobs.get(&id));
        let dirty = dirty.ok_or(StoreError::NoSuchJob { job: id })?;
        let rest = dirty.blocks[dirty.written..].iter();
        let blocks: Vec<_> = rest.take(blocks_max).copied().collect();
        let ticket = self.move_blocks(Direction::Write, &blocks, &[], dirty.placement)?;
        Ok(Some((ticket, blocks.len())))
    }

    /// Ends a write of dirty blocks. After the last one, returns the count of recoveries when the
    /// first began ([`crate::JobDone::recoveries`]). After an error all of the job must be written
    /// again.
    ///
    /// # Errors
    /// Returns [`StoreError::Transfer`] if the write failed, or wrote other bytes than were stored,
    /// or [`StoreError::Failed`].
    pub(crate) fn end_behind(
        &mut self,
        id: JobId,
        ticket: &Ticket,
    ) -> Result<Option<u64>, StoreError> {
        let done = self.end(ticket.job)?;
        let rows = self.shape.rows() as usize;
        let dirty = self.memory.as_mut().and_then(|memory| memory.behind.jobs.get_mut(&id));
        let dirty = dirty.ok_or(StoreError::NoSuchJob { job: id })?;
        let first = std::mem::take(&mut dirty.written);
        if let Some(JobFailure::Transfer(failure)) = done.failure {
            dirty.recoveries = None;
            return Err(StoreError::Transfer { failure });
        }
        let mut words = done.checksums.iter().zip(&dirty.words[first * rows..]);
        let differs =
            |(written, stored)| written != stored && !planted(PlantedBug::WriteBackNotCompared);
        let Some(at) = words.position(differs) else {
            dirty.written = first + done.checksums.len() / rows;
            let recoveries = *dirty.recoveries.get_or_insert(done.recoveries);
            let is_last = dirty.written == dirty.blocks.len();
            return Ok((is_last || planted(PlantedBug::RecordAfterFirstPart)).then_some(recoveries));
        };
        dirty.recoveries = None;
        let at = first * rows + at;
        let (position, file) = ((at / rows) as u32, dirty.blocks[at / rows].0);
        let layer = Layer((at % rows) as u32 / self.shape.segments);
        let (direction, status) = (Direction::Write, IoStatus::Checksum);
        let failure = Failure { direction, layer, position, file, status, errors: 1 };
        Err(StoreError::Transfer { failure })
    }

    /// Releases the dirty blocks of job `id`, which are durable, or no longer found by lookups.
    pub(crate) fn clean(&mut self, id: JobId) {
        let Some(memory) = &mut self.memory else { return };
        let Some(dirty) = memory.behind.jobs.remove(&id) else { return };
        memory.behind.blocks -= dirty.blocks.len() as u32;
        dirty.blocks.iter().rev().for_each(|(_, at)| memory.tier.release(*at));
    }
}
