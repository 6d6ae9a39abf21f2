//! What requests that run soon need is read ahead.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
    time::Duration,
};

use kv_catalog::{BlockId, BlockKey, FileId};
use kv_schedule::{Decision, OpId, Scheduler};
use kv_tier::{Batch, Lookahead, LookaheadConfig, LookaheadCounts, RequestId, Tier, When};

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
    ticket: Ticket,
}

/// A request that was announced.
#[derive(Debug)]
struct Announced {
    /// Its blocks stay stored.
    prefix: Arc<Prefix>,
    /// Where they are to go; empty before it has any.
    targets: Vec<BlockId>,
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
    /// Copies that have ended, and the scheduler of the link does not know it yet.
    copied: Vec<OpId>,
    /// There may be something to plan.
    is_due: bool,
}

impl Ahead {
    pub(super) fn new(store: Store, link: Scheduler, config: LookaheadConfig) -> Self {
        let (requests, in_flight, copying, copied) = Default::default();
        let lookahead = Lookahead::new(config);
        let is_due = false;
        Self { store, lookahead, link, requests, in_flight, copying, copied, is_due }
    }

    pub(super) fn counts(&self) -> LookaheadCounts {
        self.lookahead.counts()
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
            Entry::Occupied(before) => before.into_mut(),
            Entry::Vacant(new) => {
                let prefix = Arc::new(store.hold_prefix(keys)?);
                new.insert(Announced { prefix, targets: Vec::new() })
            }
        };
        let files = announced.prefix.files();
        with_tier(store, |tier| lookahead.prefetch(id, files, when, tier, now))?;
        self.is_due = true;
        Ok(files.len())
    }

    pub(super) fn allocated(&mut self, id: RequestId, blocks: &[BlockId]) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.targets = blocks.to_vec();
            self.lookahead.allocated(id);
            self.is_due = true;
        }
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
        let missing = with_tier(store, |tier| lookahead.run(id, tier, drives, link))?.flatten();
        self.is_due = true;
        let (Some(request), Some(missing)) = (self.requests.remove(&id), missing) else {
            return Ok(0);
        };
        let files = request.prefix.files();
        let first = files.iter().position(|file| missing.blocks.contains(file));
        Ok(first.unwrap_or(files.len()))
    }

    /// Waits for what streams copy: none of it is written to any more.
    fn settle(&mut self, which: impl Fn(&Copying) -> bool) -> Result<(), StoreError> {
        let Self { store, lookahead, copying, copied, .. } = self;
        for Copying { op, ticket, .. } in copying.extract_if(.., |copying| which(copying)) {
            // What became of it, the job says; without a store, nobody.
            let _ = store.inner.wait_for(&ticket);
            store.inner.with_plane(|plane| {
                let is_good = plane.end_ahead(&ticket);
                let tier = plane.tier().expect("it was copied from there");
                lookahead.ended(op, is_good, tier);
                Ok(())
            })?;
            copied.push(op);
        }
        Ok(())
    }

    /// Takes note of what was read, and hands what may begin to the schedulers.
    pub(super) fn plan(&mut self, drives: &mut Scheduler, now: Duration) -> Result<(), StoreError> {
        let Self { store, lookahead, link, in_flight, copying, copied, is_due, .. } = self;
        store.inner.with_plane(|plane| {
            let over = copying.extract_if(.., |copying| plane.is_over(&copying.ticket));
            for Copying { op, ticket, .. } in over.collect::<Vec<_>>() {
                let is_good = plane.end_ahead(&ticket);
                lookahead.ended(op, is_good, plane.tier().expect("it was copied from there"));
                copied.push(op);
            }
            for op in copied.drain(..) {
                link.ended(op, now);
                *is_due = true;
            }
            let over = in_flight.extract_if(.., |flight| plane.is_over(&flight.ticket));
            let over: Vec<Flight> = over.collect();
            for Flight { op, ticket, .. } in over {
                let is_good = plane.end_ahead(&ticket);
                let tier = plane.tier().expect("its memory was read to");
                lookahead.ended(op, is_good, tier);
                drives.ended(op, now);
                *is_due = true;
            }
            if let (true, Some(tier)) = (std::mem::take(is_due), plane.tier()) {
                lookahead.plan(tier, drives, link, now);
            }
            Ok(())
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
            drives.ended(op, now);
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
                Decision::Start(op) => self.copy_batch(op, now)?,
            }
            moved = true;
        }
    }

    fn copy_batch(&mut self, op: OpId, now: Duration) -> Result<(), StoreError> {
        let Self { store, lookahead, link, requests, copying, .. } = self;
        let batch = with_tier(store, |tier| lookahead.start(op, AGAIN, tier))?.flatten();
        let Some(Batch { request, blocks, .. }) = batch else { return Ok(()) };
        let target = |file: FileId| {
            let Announced { prefix, targets } = requests.get(&request)?;
            let at = prefix.files().iter().position(|other| *other == file)?;
            targets.get(at).copied()
        };
        let files: Vec<FileId> = blocks.iter().map(|(file, _)| *file).collect();
        let expected = store.expected(&files);
        let blocks = blocks.into_iter().map(|(file, host)| {
            let to = Move { file, block: target(file)?, position: 0 };
            Some((to, host))
        });
        let copied = blocks.collect::<Option<Vec<_>>>().and_then(|blocks| {
            store.inner.with_plane(|plane| plane.copy_ahead(&blocks, &expected)).ok()
        });
        let is_good = match copied {
            Some(Copied::Started(ticket)) => {
                copying.push(Copying { op, request, ticket });
                return Ok(());
            }
            Some(Copied::AtOnce(is_good)) => is_good,
            None => false,
        };
        with_tier(store, |tier| lookahead.ended(op, is_good, tier))?;
        link.ended(op, now);
        self.is_due = true;
        Ok(())
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
