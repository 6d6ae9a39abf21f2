//! What requests that run soon need is read ahead.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::Arc,
    time::Duration,
};

use kv_catalog::{BlockId, BlockKey, FileId};
use kv_schedule::{Decision, OpId, Scheduler};
use kv_tier::{
    Batch, HostBlock, Lookahead, LookaheadConfig, LookaheadCounts, RequestId, Tier, When,
};

use super::{
    Store,
    handles::{Held, Prefix},
};
use crate::{
    error::StoreError,
    plane::{AGAIN, Copied, Move, Ticket},
};

/// A batch that is read from the devices.
#[derive(Debug)]
struct Flight {
    op: OpId,
    ticket: Ticket,
    /// Its files get no other bytes meanwhile.
    prefix: Option<Arc<Prefix>>,
}

/// A batch that a stream copies to the engine's blocks.
#[derive(Debug)]
struct Copying {
    op: OpId,
    request: RequestId,
    /// What it copies, and where to.
    moves: Vec<Move>,
    ticket: Ticket,
}

/// A request that was announced.
#[derive(Debug)]
struct Announced {
    /// Its blocks stay stored.
    prefix: Arc<Prefix>,
    /// Where they are to go; empty before it has any.
    targets: Vec<BlockId>,
    /// What was copied, and where to.
    copied: HashSet<(FileId, BlockId)>,
}

impl Announced {
    /// Where a block is to go: a prompt may have it twice.
    fn targets(&self, file: FileId) -> impl Iterator<Item = Move> {
        let places = self.prefix.files().iter().zip(&self.targets);
        let of_file = places.filter(move |(other, _)| **other == file);
        of_file.map(move |(_, block)| Move { file, block: *block, position: 0 })
    }
}

/// The lookahead of a [`super::PacedStore`]: its batches and what they are of.
#[derive(Debug)]
pub(super) struct Ahead {
    store: Store,
    lookahead: Lookahead<FileId>,
    /// Of copies from host memory to the engine's.
    link: Scheduler,
    requests: HashMap<RequestId, Announced>,
    in_flight: Vec<Flight>,
    copying: Vec<Copying>,
    /// Copies that have ended, of so many bytes: the link's scheduler does not know it yet.
    copied: Vec<(OpId, u64)>,
    /// There may be something to plan.
    is_due: bool,
    /// When there is, although nothing happens.
    due: Option<Duration>,
}

impl Ahead {
    pub(super) fn new(store: Store, link: Scheduler, config: LookaheadConfig) -> Self {
        let (requests, in_flight, copying, copied) = Default::default();
        let lookahead = Lookahead::new(config);
        let (is_due, due) = (false, None);
        Self { store, lookahead, link, requests, in_flight, copying, copied, is_due, due }
    }

    pub(super) fn counts(&self) -> LookaheadCounts {
        self.lookahead.counts()
    }

    /// What has been in flight for the longest time.
    pub(super) fn oldest(&self) -> Option<&Ticket> {
        let read = self.in_flight.first().map(|flight| &flight.ticket);
        read.or_else(|| self.copying.first().map(|copying| &copying.ticket))
    }

    pub(super) fn owns(&self, op: OpId) -> bool {
        Lookahead::<FileId>::owns(op)
    }

    pub(super) fn iteration(&mut self, took: Duration) {
        self.lookahead.iteration(took);
        self.is_due = true;
    }

    /// Says how many leading blocks are stored.
    pub(super) fn prefetch(
        &mut self,
        id: RequestId,
        keys: &[BlockKey],
        when: When,
        now: Duration,
    ) -> Result<usize, StoreError> {
        let Self { store, lookahead, requests, .. } = self;
        let announced = match requests.entry(id) {
            Entry::Occupied(before) => {
                let announced = before.into_mut();
                // More of it may have been committed since.
                let next = keys.get(announced.prefix.len()..).unwrap_or_default();
                if !store.hold_prefix(&next[..next.len().min(1)])?.is_empty() {
                    announced.prefix = Arc::new(store.hold_prefix(keys)?);
                    let files: HashSet<_> = announced.prefix.files().iter().collect();
                    announced.copied.retain(|(file, _)| files.contains(file));
                }
                announced
            }
            Entry::Vacant(new) => {
                let prefix = Arc::new(store.hold_prefix(keys)?);
                let (targets, copied) = Default::default();
                new.insert(Announced { prefix, targets, copied })
            }
        };
        let files = announced.prefix.files();
        with_tier(store, |tier| lookahead.prefetch(id, files, when, tier, now))?;
        self.is_due = true;
        Ok(files.len())
    }

    pub(super) fn allocated(
        &mut self,
        id: RequestId,
        blocks: &[BlockId],
    ) -> Result<(), StoreError> {
        self.settle(|copying| copying.request == id)?;
        if let Some(request) = self.requests.get_mut(&id) {
            request.targets = blocks.to_vec();
            // Others may have had the rest meanwhile.
            request.copied.retain(|(_, block)| blocks.contains(block));
            self.lookahead.allocated(id);
            self.is_due = true;
        }
        Ok(())
    }

    pub(super) fn cancel(
        &mut self,
        id: RequestId,
        drives: &mut Scheduler,
    ) -> Result<(), StoreError> {
        self.settle(|copying| copying.request == id)?;
        let Self { store, lookahead, link, .. } = self;
        with_tier(store, |tier| lookahead.cancel(id, tier, drives, link))?;
        self.requests.remove(&id);
        self.is_due = true;
        Ok(())
    }

    /// Says how many leading blocks are where they are to go.
    pub(super) fn run(
        &mut self,
        id: RequestId,
        drives: &mut Scheduler,
    ) -> Result<usize, StoreError> {
        self.settle(|copying| copying.request == id)?;
        let Self { store, lookahead, link, .. } = self;
        with_tier(store, |tier| lookahead.run(id, tier, drives, link))?;
        self.is_due = true;
        let Some(Announced { prefix, targets, copied }) = self.requests.remove(&id) else {
            return Ok(0);
        };
        let keys = store.inner.keys();
        let blocks = prefix.files().iter().copied().zip(targets);
        // What was removed meanwhile, or is of another epoch, is not to be used.
        let ready = |(file, _): &_| keys.catalog.is_stored(*file);
        Ok(blocks.take_while(|block| copied.contains(block) && ready(block)).count())
    }

    /// Waits for what streams copy: none of it is written to any more.
    fn settle(&mut self, which: impl Fn(&Copying) -> bool) -> Result<(), StoreError> {
        for copying in self.copying.extract_if(.., |copying| which(copying)).collect::<Vec<_>>() {
            // What became of it, the job says; without a store, nobody.
            let _ = self.store.inner.wait_for(&copying.ticket);
            self.end_copying(copying)?;
        }
        Ok(())
    }

    /// Takes note of what a stream has copied.
    fn end_copying(&mut self, ended: Copying) -> Result<(), StoreError> {
        let Copying { op, request, moves, ticket } = ended;
        let is_good = self.store.inner.with_plane(|plane| Ok(plane.end_ahead(&ticket)))?;
        let moved = self.end_copy(op, request, &moves, is_good)?;
        self.copied.push((op, moved));
        Ok(())
    }

    /// The same of any copy, which the scheduler of the link does not know yet. Says how many bytes
    /// were copied.
    fn end_copy(
        &mut self,
        op: OpId,
        request: RequestId,
        moves: &[Move],
        is_good: bool,
    ) -> Result<u64, StoreError> {
        let Self { store, lookahead, .. } = self;
        let moved = with_tier(store, |tier| lookahead.ended(op, is_good, tier))?;
        if let Some(request) = self.requests.get_mut(&request).filter(|_| is_good) {
            // Its prefix may be another one since: only files that it holds keep their bytes.
            let files = request.prefix.files();
            let held = moves.iter().filter(|to| files.contains(&to.file));
            request.copied.extend(held.map(|to| (to.file, to.block)));
        }
        self.is_due = true;
        Ok(moved.unwrap_or_default())
    }

    /// Takes note of what was read, and hands what may begin to the schedulers. Says when there is
    /// more, although nothing happens.
    pub(super) fn plan(
        &mut self,
        drives: &mut Scheduler,
        now: Duration,
    ) -> Result<Option<Duration>, StoreError> {
        let inner = &self.store.inner;
        let over = inner.with_plane(|plane| {
            let over = self.copying.extract_if(.., |copying| plane.is_over(&copying.ticket));
            Ok(over.collect::<Vec<_>>())
        })?;
        over.into_iter().try_for_each(|copying| self.end_copying(copying))?;
        self.copied.drain(..).for_each(|(op, moved)| self.link.ended(op, moved, now));
        let Self { store, lookahead, link, in_flight, is_due, due, .. } = self;
        *is_due |= due.is_some_and(|due| due <= now);
        store.inner.with_plane(|plane| {
            let over = in_flight.extract_if(.., |flight| plane.is_over(&flight.ticket));
            let over: Vec<Flight> = over.collect();
            for Flight { op, ticket, .. } in over {
                let is_good = plane.end_ahead(&ticket);
                let tier = plane.tier().expect("its memory was read to");
                drives.ended(op, lookahead.ended(op, is_good, tier), now);
                *is_due = true;
            }
            if let (true, Some(tier)) = (std::mem::take(is_due), plane.tier()) {
                *due = lookahead.plan(tier, drives, link, now);
            }
            Ok(*due)
        })
    }

    /// Starts a batch that is read from the devices.
    pub(super) fn read(
        &mut self,
        op: OpId,
        drives: &mut Scheduler,
        now: Duration,
    ) -> Result<(), StoreError> {
        let Self { store, lookahead, .. } = self;
        let batch = with_tier(store, |tier| lookahead.start(op, AGAIN, tier))?.flatten();
        let Some(Batch { request, blocks, .. }) = batch else { return Ok(()) };
        let files: Vec<FileId> = blocks.iter().map(|(file, _)| *file).collect();
        let expected = store.expected(&files);
        let begun = match blocks.is_empty() {
            // It got there otherwise.
            true => None,
            // What could not be started is tried again when it is announced again.
            false => store.inner.with_plane(|plane| plane.read_ahead(&blocks, &expected)).ok(),
        };
        if let Some(ticket) = begun {
            let announced = self.requests.get(&request);
            let prefix = announced.map(|announced| Arc::clone(&announced.prefix));
            self.in_flight.push(Flight { op, ticket, prefix });
        } else {
            with_tier(store, |tier| lookahead.ended(op, blocks.is_empty(), tier))?;
            drives.ended(op, 0, now);
            self.is_due = true;
        }
        Ok(())
    }

    /// A batch cannot be read in time.
    pub(super) fn dropped(&mut self, op: OpId) {
        self.lookahead.dropped(op);
        self.is_due = true;
    }

    /// Copies what may be copied to the engine's blocks. Says whether that was anything, and when
    /// to look again.
    pub(super) fn copy(&mut self, now: Duration) -> Result<(bool, Option<Duration>), StoreError> {
        let mut moved = false;
        loop {
            match self.link.next(now) {
                Decision::Wait(until) => return Ok((moved, until)),
                Decision::Drop(op) => self.dropped(op),
                // What this process copies takes its time: one batch, and then what is urgent.
                Decision::Start(op) if self.copy_batch(op, now)? => return Ok((true, Some(now))),
                Decision::Start(_) => {}
            }
            moved = true;
        }
    }

    /// Says whether it took the time that it takes to copy.
    fn copy_batch(&mut self, op: OpId, now: Duration) -> Result<bool, StoreError> {
        let Self { store, lookahead, requests, copying, .. } = self;
        let batch = with_tier(store, |tier| lookahead.start(op, AGAIN, tier))?.flatten();
        let Some(Batch { request, blocks, .. }) = batch else { return Ok(false) };
        let blocks: Vec<(Move, HostBlock)> = requests.get(&request).map_or(Vec::new(), |request| {
            let to = |(file, host)| request.targets(file).map(move |to| (to, host));
            blocks.into_iter().flat_map(to).collect()
        });
        let moves: Vec<Move> = blocks.iter().map(|(to, _)| *to).collect();
        let is_good = if moves.is_empty() {
            false
        } else {
            let expected = store.expected(&moves.iter().map(|to| to.file).collect::<Vec<_>>());
            match store.inner.with_plane(|plane| plane.copy_ahead(&blocks, &expected)) {
                Ok(Copied::Started(ticket)) => {
                    copying.push(Copying { op, request, moves, ticket });
                    return Ok(false);
                }
                Ok(Copied::AtOnce(is_good)) => is_good,
                Err(_) => false,
            }
        };
        // It has begun and ended at the same time: what it cost is not known.
        self.link.ended(op, 0, now);
        self.end_copy(op, request, &moves, is_good)?;
        Ok(true)
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        // A closed store has nothing left to wait for.
        let _ = self.settle(|_| true);
        let Self { store: Store { inner, .. }, in_flight, .. } = self;
        for Flight { ticket, prefix, .. } in in_flight.drain(..) {
            // A closed store has nothing left to give back.
            let _ = inner.with_plane(|plane| {
                let job = plane.abandon_ahead(&ticket);
                let keys = &mut *inner.keys();
                let files = prefix.as_ref().map_or(&[][..], |prefix| prefix.files());
                keys.held.insert(job, Held::Read(keys.catalog.hold(files).id));
                Ok(())
            });
        }
    }
}

/// Does something with the index of host memory; `None` without such memory.
fn with_tier<T>(
    store: &Store,
    act: impl FnOnce(&mut Tier<FileId>) -> T,
) -> Result<Option<T>, StoreError> {
    store.inner.with_plane(|plane| Ok(plane.tier().map(act)))
}
