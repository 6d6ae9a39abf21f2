//! Reading ahead: from the devices to the DRAM cache, without the engine's blocks, and from there
//! to the engine's blocks.

use std::time::Duration;

use kv_catalog::{BlockId, FileId, Layer};
use kv_tier::{HostBlock, Tier};
use nvme_driver::Nanos;
use nvme_spec::nvm::Direction;

use super::{
    job::{Job, LayerState, next_id},
    memory::Cached,
    mover::Mover,
};
use crate::{
    error::StoreError,
    ids::{JobId, Move, Ticket},
    order::Order,
};

/// Result of starting a copy.
#[derive(Debug)]
pub(crate) enum Copied {
    /// The CPU copied them; true if all match their checksums.
    AtOnce(bool),
    /// A stream copies them: [`Mover::end_ahead`] returns the result.
    Started(Ticket),
}

impl Mover {
    /// Starts reading files into the DRAM cache; see [`crate::Plane::prefetch`]. Also returns the
    /// job that reads: [`Mover::take_ended`] returns it when it has ended.
    pub(crate) fn prefetch(
        &mut self,
        files: &[FileId],
        expected: &[u32],
        until: Nanos,
    ) -> Result<(usize, Option<JobId>), StoreError> {
        self.sync()?;
        let stored = self.setup.files - 1;
        if let Some(file) = files.iter().copied().find(|file| file.0 >= stored) {
            return Err(StoreError::NoSuchFile { file, files: stored });
        }
        let (is_full, now) = (self.is_full(), Duration::from_nanos(self.clock.now().0));
        let Some(memory) = &mut self.memory else { return Ok((0, None)) };
        let by = Duration::from_nanos(until.0);
        let (there, taken) = memory.admit(files, is_full, now, by);
        if taken.is_empty() {
            return Ok((there, None));
        }
        let rows = self.setup.shape.rows() as usize;
        let words = taken.iter().flat_map(|(entry, _)| {
            let at = entry.position as usize * rows;
            expected.get(at..at + rows).unwrap_or_default()
        });
        let words: Vec<u32> = words.copied().collect();
        let blocks: Vec<_> = taken.iter().map(|(entry, at)| (entry.file, *at)).collect();
        match self.read_ahead(&blocks, &words) {
            Ok(ticket) => Ok((there, Some(self.abandon_ahead(ticket)))),
            Err(error) => {
                if let Some(memory) = &mut self.memory {
                    taken.iter().for_each(|(_, at)| memory.tier.filled(*at, false));
                }
                Err(error)
            }
        }
    }

    /// Half of all IOCBs are for layers that callers wait for.
    fn is_full(&self) -> bool {
        self.transport.in_flight() >= self.setup.options.iocbs as usize / 2
    }

    fn check_full(&self) -> Result<(), StoreError> {
        match self.is_full() {
            true => Err(StoreError::Busy { in_flight: self.transport.in_flight() as u32 }),
            false => Ok(()),
        }
    }

    /// Starts reading files into blocks that were admitted for them. The caller marks these as
    /// filled. Refused while half of all IOCBs are in flight.
    pub(crate) fn read_ahead(
        &mut self,
        blocks: &[(FileId, HostBlock)],
        words: &[u32],
    ) -> Result<Ticket, StoreError> {
        self.check_full()?;
        let moves = blocks.iter().zip(0..).map(|((file, at), position)| Move {
            file: *file,
            block: BlockId(at.0),
            position,
        });
        let mut job = Job::new(Direction::Read, 1, moves.collect(), self.recoveries());
        job.is_ahead = true;
        self.upload(&mut job, words)?;
        self.start_ahead(job, |mover, ticket| mover.issue(ticket, None, None).map(|_| ()))
    }

    /// Copies all rows of blocks to the engine's blocks. `words` are their checksums,
    /// `[block][row]`; blocks that do not match are dropped. A stream waits for nothing first.
    pub(crate) fn copy_ahead(
        &mut self,
        blocks: &[(Move, HostBlock)],
        words: &[u32],
    ) -> Result<Copied, StoreError> {
        let all = self.pool.blocks();
        let is_there = blocks.iter().all(|(to, _)| to.block.0 < all);
        let Some(memory) = self.memory.as_mut().filter(|_| is_there) else {
            return Ok(Copied::AtOnce(false));
        };
        if memory.copies_at_once() {
            return Ok(Copied::AtOnce(memory.give_all(blocks, words)));
        }
        self.check_full()?;
        let mut job = Job::new(Direction::Read, 1, Vec::new(), self.recoveries());
        job.is_ahead = true;
        job.cached = Cached::of_hits(blocks.to_vec(), words.to_vec());
        self.upload_copies(&mut job)?;
        let start = |mover: &mut Self, ticket| mover.start_copied(ticket, Order::Unordered);
        self.start_ahead(job, |mover, ticket| start(mover, ticket).map(|_| ())).map(Copied::Started)
    }

    /// Starts the one operation of a job that moves all rows.
    fn start_ahead(
        &mut self,
        job: Job,
        start: impl FnOnce(&mut Self, Ticket) -> Result<(), StoreError>,
    ) -> Result<Ticket, StoreError> {
        let ticket = Ticket { job: next_id(), layer: Layer(0) };
        self.jobs.insert(ticket.job, job);
        match start(self, ticket) {
            Ok(()) => self.after_completions().map(|()| ticket),
            Err(error) => {
                // Nothing of it is in flight.
                let _ = self.jobs.remove(ticket.job);
                Err(error)
            }
        }
    }

    /// Lets a read end by itself: its blocks are then marked as filled, and [`Mover::take_ended`]
    /// returns the job.
    pub(crate) fn abandon_ahead(&mut self, ticket: Ticket) -> JobId {
        if let Ok(job) = self.jobs.get_mut(ticket.job) {
            let fills = job.moves.iter().map(|at| (*at, HostBlock(at.block.0))).collect();
            job.cached = Cached::of_fills(fills);
        }
        self.abandon(ticket.job);
        ticket.job
    }

    /// Ends a read or copy. Returns true if it succeeded.
    pub(crate) fn end_ahead(&mut self, ticket: Ticket) -> bool {
        self.end(ticket.job).is_ok_and(|done| done.failure.is_none())
    }

    /// Returns true if no operation of the layer is in flight, as of the last poll.
    pub(crate) fn is_over(&self, ticket: Ticket) -> bool {
        !matches!(self.jobs.state(ticket), Some(LayerState::InFlight))
    }

    /// Returns the index of the DRAM cache; `None` without a cache.
    pub(crate) fn tier(&mut self) -> Option<&mut Tier<FileId>> {
        self.memory.as_mut().map(|memory| &mut memory.tier)
    }

    /// Returns true if there is a DRAM cache.
    pub(crate) fn keeps_blocks(&self) -> bool {
        self.memory.is_some()
    }

    /// Drops the cached blocks of freed files.
    pub(crate) fn forget(&mut self, files: &[FileId]) {
        if let Some(memory) = &mut self.memory {
            files.iter().for_each(|file| memory.tier.remove(*file));
        }
    }
}
