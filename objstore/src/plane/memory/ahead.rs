//! Reading ahead: from the devices to the DRAM cache, without the engine's blocks.

use std::time::Duration;

use kv_catalog::{BlockId, FileId, Layer};
use kv_tier::HostBlock;
use nvme_driver::Nanos;
use nvme_spec::nvm::Direction;

use crate::{
    error::StoreError,
    order::Order,
    plane::{
        Move, Plane,
        job::{Job, JobId, Ticket},
    },
};

impl Plane {
    /// Starts reading files into the DRAM cache ([`crate::StoreOptions::dram_bytes`]), except those
    /// that are cached or being read. All of them are protected from eviction until `until`.
    /// Without a cache, does nothing; while half of all IOCBs are in flight, starts nothing.
    /// Returns how many leading files are cached or being read, and the job that reads:
    /// [`Plane::take_ended`] returns it when it has ended. Files that are rewritten meanwhile
    /// are not kept.
    ///
    /// `expected`: same as for [`Plane::begin`]. Reads in flight are not cancelled, and delay
    /// everything started later: prefetch what is needed next.
    ///
    /// # Errors
    /// Returns [`StoreError::NoSuchFile`], [`StoreError::Ring`] or [`StoreError::Failed`].
    pub fn prefetch(
        &mut self,
        files: &[FileId],
        expected: &[u32],
        until: Nanos,
    ) -> Result<(usize, Option<JobId>), StoreError> {
        self.sync()?;
        if let Some(file) = files.iter().copied().find(|file| file.0 + 1 >= self.files) {
            return Err(StoreError::NoSuchFile { file, files: self.files - 1 });
        }
        let is_full = self.is_full();
        let now = Duration::from_nanos(self.clock.now().0);
        let Some(memory) = &mut self.memory else { return Ok((0, None)) };
        memory.tier.expire(now);
        let by = Duration::from_nanos(until.0);
        files.iter().for_each(|file| memory.tier.expect(*file, by));
        let moves = files.iter().zip(0..).map(|(file, position)| Move {
            file: *file,
            block: BlockId(0),
            position,
        });
        // If there is not enough room, the tail is left out.
        let taken = moves.map_while(|entry| match memory.tier.class(entry.file) {
            Some(_) => Some(None),
            None if is_full => None,
            None => memory.take(&entry, Some(by)).map(Some),
        });
        let taken: Vec<Option<(Move, HostBlock)>> = taken.collect();
        let there = taken.len();
        let taken: Vec<(Move, HostBlock)> = taken.into_iter().flatten().collect();
        if taken.is_empty() {
            return Ok((there, None));
        }
        let rows = self.shape.rows() as usize;
        let words = taken.iter().flat_map(|(entry, _)| {
            let at = entry.position as usize * rows;
            expected.get(at..at + rows).unwrap_or_default()
        });
        let words: Vec<u32> = words.copied().collect();
        let blocks: Vec<_> = taken.iter().map(|(entry, at)| (entry.file, *at)).collect();
        match self.read_ahead(&blocks, &words) {
            Ok(ticket) => Ok((there, Some(self.abandon_ahead(&ticket)))),
            Err(error) => {
                let memory = self.memory.iter_mut();
                memory.for_each(|m| taken.iter().for_each(|(_, at)| m.tier.filled(*at, false)));
                Err(error)
            }
        }
    }

    fn is_full(&self) -> bool {
        self.ops.len() >= self.options.iocbs as usize / 2
    }

    /// Starts reading files into blocks that were admitted for them. The caller marks these as
    /// filled. Refused while half of all IOCBs are in flight: the rest is for transfers that
    /// callers wait for.
    pub(crate) fn read_ahead(
        &mut self,
        blocks: &[(FileId, HostBlock)],
        words: &[u32],
    ) -> Result<Ticket, StoreError> {
        if self.is_full() {
            return Err(StoreError::Busy { in_flight: self.ops.len() as u32 });
        }
        let moves = blocks.iter().zip(0..).map(|((file, at), position)| Move {
            file: *file,
            block: BlockId(at.0),
            position,
        });
        let moves: Vec<Move> = moves.collect();
        // One operation moves all rows.
        let mut job = Job::new(Direction::Read, 1, &moves, self.recoveries());
        job.is_ahead = true;
        self.upload(&mut job, words)?;
        self.jobs_ever += 1;
        let id = JobId(self.jobs_ever);
        self.jobs.insert(id, job);
        if let Err(error) = self.issue(id, Layer(0), None, None) {
            self.jobs.remove(&id);
            return Err(error);
        }
        self.after_completions()?;
        Ok(self.ticket(id, Layer(0), [None, None]))
    }

    /// Lets a read end by itself: its blocks are then marked as filled, and [`Plane::take_ended`]
    /// returns the job.
    pub(crate) fn abandon_ahead(&mut self, ticket: &Ticket) -> JobId {
        if let Some(job) = self.jobs.get_mut(&ticket.job) {
            job.fills = job.moves.iter().map(|at| (*at, HostBlock(at.block.0))).collect();
        }
        self.abandon(ticket.job);
        ticket.job
    }

    /// Ends a read or copy. Returns true if it succeeded.
    pub(crate) fn end_ahead(&mut self, ticket: &Ticket) -> bool {
        self.end(ticket.job).is_ok_and(|done| done.failure.is_none())
    }

    /// Copies all rows of blocks to the engine's blocks. `words` are their checksums,
    /// `[block][row]`; blocks that do not match are dropped. A stream waits for nothing first.
    pub(crate) fn copy_ahead(
        &mut self,
        blocks: &[(Move, HostBlock)],
        words: &[u32],
    ) -> Result<Copied, StoreError> {
        let (is_full, all) = (self.is_full(), self.pool.blocks());
        let is_there = blocks.iter().all(|(to, _)| to.block.0 < all);
        let Some(memory) = self.memory.as_mut().filter(|_| is_there) else {
            return Ok(Copied::AtOnce(false));
        };
        if memory.copies_at_once() {
            let rows = self.shape.rows();
            let mut words = words.chunks_exact(rows as usize).chain(std::iter::repeat(&[][..]));
            let copied = blocks.iter().map(|(to, host)| {
                memory.give(to, *host, 0..rows, words.next().unwrap_or_default())
            });
            return Ok(Copied::AtOnce(copied.fold(true, |all, is_good| all & is_good)));
        }
        if is_full {
            return Err(StoreError::Busy { in_flight: self.ops.len() as u32 });
        }
        let mut job = Job::new(Direction::Read, 1, &[], self.recoveries());
        job.is_ahead = true;
        job.hits = blocks.to_vec();
        job.hit_words = words.to_vec();
        self.upload_copies(&mut job)?;
        self.jobs_ever += 1;
        let id = JobId(self.jobs_ever);
        self.jobs.insert(id, job);
        match self.start_copied(id, Layer(0), Order::Unordered) {
            Ok(moved) => Ok(Copied::Started(self.ticket(id, Layer(0), [moved, None]))),
            Err(error) => {
                self.jobs.remove(&id);
                Err(error)
            }
        }
    }
}

/// Result of starting a copy.
#[derive(Debug)]
pub(crate) enum Copied {
    /// The CPU copied them; true if all match their checksums.
    AtOnce(bool),
    /// A stream copies them: [`Plane::end_ahead`] returns the result.
    Started(Ticket),
}
