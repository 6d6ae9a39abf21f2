//! Reads blocks ahead for requests that run soon.

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
    ids::{Move, Ticket},
    plane::{Copied, RELOAD_COST},
};

/// A batch being read from the devices.
#[derive(Debug)]
struct Flight {
    op: OpId,
    ticket: Ticket,
    /// Keeps its files from being overwritten meanwhile.
    prefix: Option<Arc<Prefix>>,
}

/// A batch that a stream copies to the engine's blocks.
#[derive(Debug)]
struct Copying {
    op: OpId,
    request: RequestId,
    /// Files to copy, and their destinations.
    moves: Vec<Move>,
    ticket: Ticket,
}

/// A request that was announced.
#[derive(Debug)]
struct Announced {
    /// Keeps its blocks stored.
    prefix: Arc<Prefix>,
    /// Destination blocks; empty before they are allocated.
    targets: Vec<BlockId>,
    /// Files that were copied, and their destinations.
    copied: HashSet<(FileId, BlockId)>,
}

impl Announced {
    /// Returns the destinations of a file: a prompt may have it twice.
    fn targets(&self, file: FileId) -> impl Iterator<Item = Move> {
        let places = self.prefix.files().iter().zip(&self.targets);
        let of_file = places.filter(move |(other, _)| **other == file);
        of_file.map(move |(_, block)| Move { file, block: *block, position: 0 })
    }
}

/// The lookahead of a [`super::PacedStore`], and its batches.
#[derive(Debug)]
pub(super) struct Ahead {
    store: Store,
    lookahead: Lookahead<FileId>,
    /// Scheduler of copies from host memory to the engine's blocks.
    link: Scheduler,
    requests: HashMap<RequestId, Announced>,
    in_flight: Vec<Flight>,
    copying: Vec<Copying>,
    /// Ended copies and their bytes that the link's scheduler has yet to be notified of.
    copied: Vec<(OpId, u64)>,
    /// Set when there may be something to plan.
    is_due: bool,
    /// Time of the next planning if no event occurs before.
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

    /// Returns the operation that has been in flight for the longest time.
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

    /// Returns how many leading blocks are stored.
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
            // Others may have used the other blocks meanwhile.
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

    /// Returns how many leading blocks are in place.
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
        let blocks = prefix.files().iter().copied().zip(targets);
        // Blocks that were removed meanwhile, or are of another epoch, must not be used.
        Ok(store.inner.catalog.with(|catalog| {
            let ready = |(file, _): &_| catalog.is_stored(*file);
            blocks.take_while(|block| copied.contains(block) && ready(block)).count()
        }))
    }

    /// Waits for matching copies by streams: their destinations are not written to any more.
    fn settle(&mut self, which: impl Fn(&Copying) -> bool) -> Result<(), StoreError> {
        for copying in self.copying.extract_if(.., |copying| which(copying)).collect::<Vec<_>>() {
            // The job holds the result; a failed store has none.
            let _ = self.store.inner.plane.wait(copying.ticket);
            self.end_copying(copying)?;
        }
        Ok(())
    }

    /// Records the end of a copy by a stream.
    fn end_copying(&mut self, ended: Copying) -> Result<(), StoreError> {
        let Copying { op, request, moves, ticket } = ended;
        let is_good = self.store.inner.plane.with(|plane| Ok(plane.end_ahead(ticket)))?;
        let moved = self.end_copy(op, request, &moves, is_good)?;
        self.copied.push((op, moved));
        Ok(())
    }

    /// Records the end of any copy, without notifying the scheduler of the link. Returns the bytes
    /// copied.
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
            // Its prefix may have changed since: only files that it holds keep their bytes.
            let files = request.prefix.files();
            let held = moves.iter().filter(|to| files.contains(&to.file));
            request.copied.extend(held.map(|to| (to.file, to.block)));
        }
        self.is_due = true;
        Ok(moved.unwrap_or_default())
    }

    /// Records completed reads, and passes batches that may begin to the schedulers. Returns the
    /// time of the next call if no event occurs before.
    pub(super) fn plan(
        &mut self,
        drives: &mut Scheduler,
        now: Duration,
    ) -> Result<Option<Duration>, StoreError> {
        let inner = &self.store.inner;
        let over = inner.plane.with(|plane| {
            let over = self.copying.extract_if(.., |copying| plane.is_over(copying.ticket));
            Ok(over.collect::<Vec<_>>())
        })?;
        over.into_iter().try_for_each(|copying| self.end_copying(copying))?;
        self.copied.drain(..).for_each(|(op, moved)| self.link.ended(op, moved, now));
        let Self { store, lookahead, link, in_flight, is_due, due, .. } = self;
        *is_due |= due.is_some_and(|due| due <= now);
        store.inner.plane.with(|plane| {
            let over = in_flight.extract_if(.., |flight| plane.is_over(flight.ticket));
            let over: Vec<Flight> = over.collect();
            for Flight { op, ticket, .. } in over {
                let is_good = plane.end_ahead(ticket);
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

    /// Starts reading a batch from the devices.
    pub(super) fn read(
        &mut self,
        op: OpId,
        drives: &mut Scheduler,
        now: Duration,
    ) -> Result<(), StoreError> {
        let Self { store, lookahead, .. } = self;
        let batch = with_tier(store, |tier| lookahead.start(op, RELOAD_COST, tier))?.flatten();
        let Some(Batch { request, blocks, .. }) = batch else { return Ok(()) };
        let files: Vec<FileId> = blocks.iter().map(|(file, _)| *file).collect();
        let expected = store.expected(&files);
        let begun = match blocks.is_empty() {
            // The blocks got there otherwise.
            true => None,
            // Reads that could not be started are retried when the request is announced again.
            false => store.inner.plane.with(|plane| plane.read_ahead(&blocks, &expected)).ok(),
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

    /// Handles a batch that cannot be read in time.
    pub(super) fn dropped(&mut self, op: OpId) {
        self.lookahead.dropped(op);
        self.is_due = true;
    }

    /// Copies to the engine's blocks as the link allows. Returns whether it copied anything, and
    /// the time of the next call.
    pub(super) fn copy(&mut self, now: Duration) -> Result<(bool, Option<Duration>), StoreError> {
        let mut moved = false;
        loop {
            match self.link.next(now) {
                Decision::Wait(until) => return Ok((moved, until)),
                Decision::Drop(op) => self.dropped(op),
                // CPU copies take time: copy one batch, then let urgent work go first.
                Decision::Start(op) if self.copy_batch(op, now)? => return Ok((true, Some(now))),
                Decision::Start(_) => {}
            }
            moved = true;
        }
    }

    /// Copies a batch. Returns true if the CPU copied it, which takes time.
    fn copy_batch(&mut self, op: OpId, now: Duration) -> Result<bool, StoreError> {
        let Self { store, lookahead, requests, copying, .. } = self;
        let batch = with_tier(store, |tier| lookahead.start(op, RELOAD_COST, tier))?.flatten();
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
            match store.inner.plane.with(|plane| plane.copy_ahead(&blocks, &expected)) {
                Ok(Copied::Started(ticket)) => {
                    copying.push(Copying { op, request, moves, ticket });
                    return Ok(false);
                }
                Ok(Copied::AtOnce(is_good)) => is_good,
                Err(_) => false,
            }
        };
        // It begins and ends at the same time: its cost is not known.
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
            // A closed store has nothing left to release.
            let _ = inner.plane.with(|plane| {
                let job = plane.abandon_ahead(ticket);
                let files = prefix.as_ref().map_or(&[][..], |prefix| prefix.files());
                let reference = inner.catalog.with(|catalog| catalog.hold(files));
                inner.jobs().held.insert(job, Held::Read(reference.id));
                Ok(())
            });
        }
    }
}

/// Calls `act` with the index of the DRAM cache; `None` without one.
fn with_tier<T>(
    store: &Store,
    act: impl FnOnce(&mut Tier<FileId>) -> T,
) -> Result<Option<T>, StoreError> {
    store.inner.plane.with(|plane| Ok(plane.tier().map(act)))
}
