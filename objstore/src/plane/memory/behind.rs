//! What is stored and only here yet: it is written to the devices behind the engine's back
//! (write-back).
//!
//! A layer of such a job is over when its rows were copied here. What the devices lack keeps its
//! memory until [`Plane::clean`]: at most half of the blocks, so that there is room for others. A
//! job that would be more is written through.

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

/// What a job has left here.
#[derive(Debug)]
struct Dirty {
    blocks: Vec<(FileId, HostBlock)>,
    /// Their checksums, `[block][row]`.
    words: Vec<u32>,
    placement: Option<u16>,
    /// Leading blocks that were written, and how often devices had been recovered before.
    written: usize,
    recoveries: Option<u64>,
}

/// What no device has yet.
#[derive(Debug, Default)]
pub(in crate::plane) struct Behind {
    /// Whether anything is kept here without being written.
    is_on: bool,
    jobs: HashMap<JobId, Dirty>,
    /// Blocks of memory of these, and of jobs that are going to be among them.
    pub(in crate::plane) blocks: u32,
    pub(in crate::plane) written_bytes: u64,
    /// Of files that were dropped before.
    pub(in crate::plane) spared_bytes: u64,
}

impl HostMemory {
    /// Most blocks that no device has.
    fn dirty_max(&self) -> u32 {
        self.own.blocks() / 2
    }

    /// Lets a job that stores be copied here only, if all of it has memory.
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
    /// What is stored is kept in memory of this process from now on, if there is any, until
    /// [`Plane::write_behind`].
    ///
    /// # Errors
    /// [`StoreError::Config`] without checksums: what a device does not have yet could not be told
    /// from what it has.
    pub(crate) fn write_back(&mut self) -> Result<(), StoreError> {
        if !self.checksums {
            let problem = "write-back needs checksums, which the store was formatted without; \
                           write through, or format it with them";
            return Err(StoreError::Config { field: "dram_mode", problem: problem.to_owned() });
        }
        self.memory.iter_mut().for_each(|memory| memory.behind.is_on = true);
        Ok(())
    }

    /// Whether all of a job that has ended is only here; then it is kept until [`Plane::clean`].
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

    /// Whether what is only here should be written now: nothing else is moved, or there is little
    /// memory left for more of it.
    ///
    /// # Errors
    /// [`StoreError::Failed`].
    pub(crate) fn wants_writing(&mut self) -> Result<bool, StoreError> {
        self.reap()?;
        let memory = self.memory.as_ref();
        let is_full = memory.is_some_and(|it| it.behind.blocks > it.dirty_max() / 2);
        Ok(self.ops.is_empty() || is_full)
    }

    /// Whether a job's layers are copied here, and written later.
    pub(crate) fn is_kept(&self, id: JobId) -> bool {
        self.jobs.get(&id).is_some_and(|job| job.is_kept)
    }

    /// Whether something is here that no device has, wanted or not.
    pub(crate) fn is_behind(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| !memory.behind.jobs.is_empty())
    }

    /// Frees memory of files that nobody wants any more, of what the job `id` has left here and of
    /// which nothing is being written. Says whether anything is left. Once some of it was written,
    /// all of it goes or nothing.
    ///
    /// # Errors
    /// [`StoreError::NoSuchJob`].
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

    /// Starts writing the next blocks of what the job `id` has left here, up to `blocks_max`, but
    /// for files that nobody wants any more, and says how many; `None` if there is nothing else.
    /// After all of them it begins anew.
    ///
    /// # Errors
    /// [`StoreError::NoSuchJob`], [`StoreError::ReadOnly`], [`StoreError::Busy`],
    /// [`StoreError::Ring`], [`StoreError::Failed`].
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

    /// Ends what was written; if that was the last of it, says how often the devices had been
    /// recovered when the first began ([`crate::JobDone::recoveries`]). After an error all of it
    /// has to be written.
    ///
    /// # Errors
    /// [`StoreError::Transfer`] when it is not on the devices, or other bytes than were stored;
    /// [`StoreError::Failed`].
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

    /// What the job `id` has left here is on the devices for good, or nobody will find its files.
    pub(crate) fn clean(&mut self, id: JobId) {
        let Some(memory) = &mut self.memory else { return };
        let Some(dirty) = memory.behind.jobs.remove(&id) else { return };
        memory.behind.blocks -= dirty.blocks.len() as u32;
        dirty.blocks.iter().rev().for_each(|(_, at)| memory.tier.release(*at));
    }
}
