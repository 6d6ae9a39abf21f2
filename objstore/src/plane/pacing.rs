//! Pacing: decides when layers start, and reads ahead.
//!
//! With a pacer, [`Mover::start`] hands layers that devices move to a scheduler: they wait, and
//! start when it says so. Reads that someone waits for, and layers of urgent jobs, start at once.
//! Decisions are made by [`Mover::advance`], and while someone waits for a layer: layers of several
//! requests that are started in between are put in order.
//!
//! Reading ahead goes from the devices to the DRAM cache, without the engine's blocks.

use std::{collections::BTreeSet, time::Duration};

use gio_uring::Progress;
use kv_catalog::{BlockId, FileId, Layer};
use kv_schedule::{Cancelled, Decision, Flow, OpId, StepId};
use kv_tier::{Batch, HostBlock, Lookahead, RequestId, Tier, When};
use nvme_driver::Nanos;
use nvme_spec::nvm::Direction;

use super::{
    copier::{Copies, RELOAD_COST},
    job::{Job, LayerState, next_id},
    mover::Mover,
    pacer::{Advanced, Announced, Pacer, Waiting},
};
use crate::{
    error::StoreError,
    ids::{JobId, Move, Ticket},
    order::Order,
};

impl Mover {
    /// Returns the time of the scheduler.
    pub(super) fn now(&self) -> Duration {
        self.clock.now().duration()
    }

    /// Calls `act` with the pacer; without one, returns `None`.
    pub(super) fn paced<T>(&mut self, act: impl FnOnce(&mut Pacer, &mut Self) -> T) -> Option<T> {
        let mut pacer = self.pacer.take()?;
        let result = act(&mut pacer, self);
        self.pacer = Some(pacer);
        Some(result)
    }

    /// Returns true if layers wait or are in flight, or requests are announced.
    pub(super) fn has_work(&self) -> bool {
        self.pacer.as_deref().is_some_and(Pacer::has_work)
    }

    /// Starts everything that may start.
    pub(crate) fn pump(&mut self) -> Result<(), StoreError> {
        if !self.has_work() {
            return Ok(());
        }
        self.paced(|pacer, mover| mover.decide(pacer)).transpose().map(|_| ())
    }

    /// Processes completions, and starts everything that may start.
    pub(crate) fn advance(&mut self) -> Result<Advanced, StoreError> {
        self.attend()?;
        let mut progress = self.reap()?;
        let pumped = self.paced(|pacer, mover| mover.decide(pacer)).transpose()?;
        let (moved, wake) = pumped.unwrap_or((Progress::Idle, None));
        if moved == Progress::Moved {
            progress = moved;
        }
        let Some(pacer) = &mut self.pacer else {
            return Ok(Advanced { progress, wake: None, ended: Vec::new(), in_flight: 0 });
        };
        let (oldest, ended) = (pacer.oldest(), std::mem::take(&mut pacer.ended));
        let in_flight = pacer.in_flight.len() + pacer.refused.len();
        let now = self.clock.now();
        let is_quiet = now > pacer.moved_at + self.setup.options.wait_timeout;
        if oldest.is_none() || progress == Progress::Moved {
            pacer.moved_at = now;
        } else if let (true, Some(ticket)) = (is_quiet, oldest) {
            pacer.moved_at = now;
            self.overdue(ticket)?;
        }
        let wake = wake.map(|time| Nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)));
        Ok(Advanced { progress, wake, ended, in_flight })
    }

    /// Starts a layer now if it waits. Returns true if it does not wait any more.
    pub(super) fn demand(&mut self, ticket: Ticket) -> bool {
        if let Some(LayerState::Waiting(op)) = self.jobs.state(ticket) {
            self.paced(|pacer, mover| mover.demand_waiting(pacer, op));
        }
        !matches!(self.jobs.state(ticket), Some(LayerState::Waiting(_)))
    }

    /// Starts all waiting layers of a job now, and later ones at once.
    pub(crate) fn hurry(&mut self, id: JobId) {
        if let Ok(job) = self.jobs.get_mut(id) {
            job.turn.is_urgent = true;
        }
        for op in self.waiting_of(id) {
            self.paced(|pacer, mover| mover.demand_waiting(pacer, op));
        }
    }

    /// Starts all waiting layers of a job that reads, or has failed: someone waits for its end.
    pub(crate) fn hurry_reads(&mut self, id: JobId) {
        let is_due = |job: &Job| job.direction == Direction::Read || job.failure.is_some();
        if self.jobs.get(id).is_some_and(is_due) {
            self.hurry(id);
        }
    }

    /// Starts everything that waits.
    pub(crate) fn hurry_all(&mut self) {
        let waiting = |pacer: &Pacer| pacer.waiting.values().map(|it| it.ticket.job).collect();
        let jobs: BTreeSet<JobId> = self.pacer.as_deref().map(waiting).unwrap_or_default();
        jobs.into_iter().for_each(|job| self.hurry(job));
    }

    /// Forgets the layers of a job that wait: it is abandoned.
    pub(super) fn cancel_waiting(&mut self, id: JobId) {
        for op in self.waiting_of(id) {
            self.paced(|pacer, mover| mover.cancel_waiting_op(pacer, op));
        }
    }

    /// Returns a layer that waits, if there is one.
    pub(crate) fn first_waiting(&self) -> Option<Ticket> {
        let waiting = &self.pacer.as_deref()?.waiting;
        waiting.iter().min_by_key(|(op, _)| **op).map(|(_, waiting)| waiting.ticket)
    }

    /// Ends a layer that waited for room for too long, while nothing is in flight.
    pub(super) fn give_up_waiting(&mut self, ticket: Ticket) {
        if let Some(LayerState::Waiting(op)) = self.jobs.state(ticket) {
            self.paced(|pacer, mover| {
                mover.cancel_waiting_op(pacer, op);
                pacer.ended.push(ticket);
            });
            let error = StoreError::Busy { in_flight: 0 };
            self.cannot_start(ticket, &error);
        }
    }

    fn waiting_of(&self, id: JobId) -> Vec<OpId> {
        let layers = self.jobs.get(id).map(|job| &job.layers[..]).unwrap_or_default();
        let waiting = layers.iter().filter_map(|layer| match layer.state {
            LayerState::Waiting(op) => Some(op),
            _ => None,
        });
        waiting.collect()
    }

    pub(super) fn set_state(&mut self, ticket: Ticket, state: LayerState) {
        if let Ok(job) = self.jobs.get_mut(ticket.job) {
            job.layer(ticket.layer).state = state;
        }
    }

    /// Ends a layer that waited and cannot be started.
    fn cannot_start(&mut self, ticket: Ticket, error: &StoreError) {
        tracing::debug!(layer = %ticket.layer, %error, "a layer that waited was not started");
        if let Ok(job) = self.jobs.get_mut(ticket.job)
            && let Some(failure) = job.failure.or_else(|| job.cancel(ticket.layer))
        {
            job.layer(ticket.layer).state = LayerState::Ended(Err(failure));
        }
    }

    /// Returns the bytes that devices moved for a layer that has ended.
    fn device_bytes(&self, ticket: Ticket) -> u64 {
        match self.jobs.state(ticket) {
            Some(LayerState::Ended(Ok(done))) => done.device_bytes,
            _ => 0,
        }
    }

    /// Sets the step that a read is for, and the owner of a job.
    pub(crate) fn assign(
        &mut self,
        id: JobId,
        flow: Flow,
        step: Option<StepId>,
    ) -> Result<(), StoreError> {
        let job = self.jobs.get_mut(id)?;
        (job.turn.flow, job.turn.step) = (flow, step);
        Ok(())
    }

    /// Announces a request, or updates its time.
    pub(crate) fn announce(
        &mut self,
        request: RequestId,
        files: &[FileId],
        expected: &[u32],
        when: When,
    ) -> Result<(), StoreError> {
        self.check_files(files)?;
        let now = self.now();
        self.paced(|pacer, mover| {
            let Some(tier) = mover.tier() else { return };
            pacer.lookahead.prefetch(request, files, when, tier, now);
            let files = files.iter().copied().zip(0..).collect();
            pacer.announced.insert(request, Announced { files, words: expected.to_vec() });
            pacer.is_due = true;
        });
        Ok(())
    }

    /// Ends reading ahead for a request, which runs or was aborted.
    pub(crate) fn withdraw(&mut self, request: RequestId, runs: bool) {
        self.paced(|pacer, mover| {
            let Pacer { scheduler, lookahead, .. } = pacer;
            if let Some(tier) = mover.tier() {
                match runs {
                    true => drop(lookahead.run(request, tier, scheduler, None)),
                    false => lookahead.cancel(request, tier, scheduler, None),
                }
            }
            pacer.announced.remove(&request);
            pacer.is_due = true;
        });
    }

    /// Notes what has ended, and starts everything that may start.
    fn decide(&mut self, pacer: &mut Pacer) -> Result<(Progress, Option<Duration>), StoreError> {
        let now = self.now();
        let mut progress = Progress::Idle;
        let over = pacer.in_flight.extract_if(.., |(_, ticket)| self.is_over(*ticket));
        for (op, ticket) in over {
            pacer.scheduler.ended(op, self.device_bytes(ticket), now);
            pacer.ended.push(ticket);
            progress = Progress::Moved;
        }
        let mut refused = std::mem::take(&mut pacer.refused);
        refused.sort_by_key(|op| !pacer.waiting.get(op).is_some_and(|op| op.is_read));
        let mut refused = refused.into_iter();
        // The first one that finds no room stops the others, or they would overtake it.
        while pacer.refused.is_empty()
            && let Some(op) = refused.next()
        {
            self.start_waiting(pacer, op);
        }
        pacer.refused.extend(refused);
        self.end_batches(pacer, now);
        let wake = loop {
            match pacer.scheduler.next(now) {
                Decision::Wait(until) => break until,
                Decision::Start(op) if Lookahead::<FileId>::owns(op) => {
                    self.read_batch(pacer, op, now)
                }
                Decision::Start(op) => self.start_waiting(pacer, op),
                Decision::Drop(op) => {
                    pacer.lookahead.dropped(op);
                    pacer.is_due = true;
                }
            }
            progress = Progress::Moved;
        };
        if progress == Progress::Moved {
            pacer.moved_at = self.clock.now();
        }
        self.check()?;
        Ok((progress, wake.into_iter().chain(pacer.due).min()))
    }

    /// Starts an operation that may start.
    fn start_waiting(&mut self, pacer: &mut Pacer, op: OpId) {
        let Some(Waiting { ticket, after, .. }) = pacer.waiting.get(&op) else { return };
        let (ticket, order) = (*ticket, after.as_ref().map_or(Order::Unordered, Order::AfterEvent));
        self.set_state(ticket, LayerState::Idle);
        match self.start_now(ticket, order) {
            Err(StoreError::Busy { .. } | StoreError::StagingBusy { .. }) => {
                self.set_state(ticket, LayerState::Waiting(op));
                return pacer.refused.push(op);
            }
            Ok(()) => pacer.in_flight.push((op, ticket)),
            Err(error) => {
                self.cannot_start(ticket, &error);
                pacer.scheduler.ended(op, 0, self.now());
                pacer.ended.push(ticket);
            }
        }
        pacer.waiting.remove(&op);
        pacer.moved_at = self.clock.now();
    }

    /// Starts a waiting operation now.
    pub(super) fn demand_waiting(&mut self, pacer: &mut Pacer, op: OpId) {
        if pacer.scheduler.demand(op, self.now()) {
            self.start_waiting(pacer, op);
        }
    }

    /// Removes an operation that waits.
    fn cancel_waiting_op(&self, pacer: &mut Pacer, op: OpId) {
        if pacer.waiting.remove(&op).is_some() {
            pacer.refused.retain(|refused| *refused != op);
            if pacer.scheduler.cancel(op) == Cancelled::InFlight {
                pacer.scheduler.ended(op, 0, self.now());
            }
        }
    }

    /// Ends completed batches, and plans others.
    fn end_batches(&mut self, pacer: &mut Pacer, now: Duration) {
        let over = pacer.reading.extract_if(.., |(_, ticket)| self.is_over(*ticket));
        for (op, ticket) in over.collect::<Vec<_>>() {
            let is_good = self.end_ahead(ticket);
            let moved = self.tier().map_or(0, |tier| pacer.lookahead.ended(op, is_good, tier));
            pacer.scheduler.ended(op, moved, now);
            pacer.is_due = true;
        }
        pacer.is_due |= pacer.due.is_some_and(|due| due <= now);
        if let (true, Some(tier)) = (std::mem::take(&mut pacer.is_due), self.tier()) {
            pacer.due = pacer.lookahead.plan(tier, &mut pacer.scheduler, None, now);
        }
    }

    /// Starts reading a batch.
    fn read_batch(&mut self, pacer: &mut Pacer, op: OpId, now: Duration) {
        let batch = self.tier().and_then(|tier| pacer.lookahead.start(op, RELOAD_COST, tier));
        let Some(Batch { request, blocks, .. }) = batch else { return };
        // If there are none, the blocks got there otherwise.
        let is_over = blocks.is_empty();
        // Reads that could not be started are retried when the request is announced again.
        let begun = match pacer.words(request, &blocks, self.setup.shape.rows() as usize) {
            Some(words) if !is_over => self.read_ahead(&blocks, &words).ok(),
            _ => None,
        };
        match begun {
            Some(ticket) => pacer.reading.push((op, ticket)),
            None => {
                let tier = self.tier().expect("it has begun in the cache");
                pacer.lookahead.ended(op, is_over, tier);
                pacer.scheduler.ended(op, 0, now);
                pacer.is_due = true;
            }
        }
    }

    /// Starts reading files into the DRAM cache; see [`crate::Plane::prefetch`]. Also returns the
    /// job that reads: [`Mover::take_ended`] returns it when it has ended.
    pub(crate) fn prefetch(
        &mut self,
        files: &[FileId],
        expected: &[u32],
        until: Nanos,
    ) -> Result<(usize, Option<JobId>), StoreError> {
        self.sync()?;
        self.check_files(files)?;
        let (is_full, now) = (self.is_full(), Duration::from_nanos(self.clock.now().0));
        let Some(cache) = &mut self.copier.cache else { return Ok((0, None)) };
        let by = Duration::from_nanos(until.0);
        let (there, taken) = cache.admit(files, is_full, now, by);
        if taken.is_empty() {
            return Ok((there, None));
        }
        let rows = self.setup.shape.rows() as usize;
        let words = taken.iter().flat_map(|(entry, _)| {
            let at = entry.position as usize * rows;
            expected.get(at..at + rows).unwrap_or_default()
        });
        let words: Vec<u32> = words.copied().collect();
        let blocks = taken.iter().map(|(entry, at)| (entry.file, HostBlock(at.0)));
        let blocks: Vec<_> = blocks.collect();
        match self.read_ahead(&blocks, &words) {
            Ok(ticket) => Ok((there, Some(self.abandon_ahead(ticket)))),
            Err(error) => {
                if let Some(tier) = self.tier() {
                    blocks.iter().for_each(|(_, at)| tier.filled(*at, false));
                }
                Err(error)
            }
        }
    }

    /// Refuses files that do not exist.
    pub(super) fn check_files(&self, files: &[FileId]) -> Result<(), StoreError> {
        let stored = self.setup.files - 1;
        match files.iter().copied().find(|file| file.0 >= stored) {
            Some(file) => Err(StoreError::no_such_file(file, stored)),
            None => Ok(()),
        }
    }

    /// Half of all IOCBs are for layers that callers wait for.
    fn is_full(&self) -> bool {
        self.transport.in_flight() >= self.setup.options.iocbs as usize / 2
    }

    /// Starts reading files into blocks that were admitted for them. The caller marks these as
    /// filled. Refused while half of all IOCBs are in flight.
    pub(crate) fn read_ahead(
        &mut self,
        blocks: &[(FileId, HostBlock)],
        words: &[u32],
    ) -> Result<Ticket, StoreError> {
        if self.is_full() {
            return Err(StoreError::Busy { in_flight: self.transport.in_flight() as u32 });
        }
        let moves = blocks.iter().zip(0..).map(|((file, at), position)| Move {
            file: *file,
            block: BlockId(at.0),
            position,
        });
        let (recoveries, now) = (self.recoveries(), self.clock.now());
        let mut job = Job::new(Direction::Read, 1, moves.collect(), recoveries, now);
        job.is_ahead = true;
        self.upload(&mut job, words)?;
        let ticket = Ticket { job: next_id(), layer: Layer(0) };
        self.jobs.insert(ticket.job, job);
        if let Err(error) = self.issue(ticket, None, None, None) {
            // Nothing of it is in flight.
            let _ = self.jobs.remove(ticket.job);
            return Err(error);
        }
        self.after_completions().map(|()| ticket)
    }

    /// Lets a read end by itself: its blocks are then marked as filled, and [`Mover::take_ended`]
    /// returns the job.
    pub(crate) fn abandon_ahead(&mut self, ticket: Ticket) -> JobId {
        if let Ok(job) = self.jobs.get_mut(ticket.job) {
            let fills = job.moves.iter().map(|entry| (*entry, entry.block)).collect();
            job.copies = Copies::of_fills(fills);
        }
        self.abandon(ticket.job);
        ticket.job
    }

    /// Ends a read. Returns true if it succeeded.
    pub(crate) fn end_ahead(&mut self, ticket: Ticket) -> bool {
        self.end(ticket.job).is_ok_and(|done| done.failure.is_none())
    }

    /// Returns true if no operation of the layer is in flight, as of the last poll.
    pub(crate) fn is_over(&self, ticket: Ticket) -> bool {
        !matches!(self.jobs.state(ticket), Some(LayerState::InFlight))
    }

    /// Returns the index of the DRAM cache; `None` without a cache.
    pub(crate) fn tier(&mut self) -> Option<&mut Tier<FileId>> {
        self.copier.tier()
    }

    /// Returns true if there is a DRAM cache.
    pub(crate) fn keeps_blocks(&self) -> bool {
        self.copier.cache.is_some()
    }

    /// Forgets what was in freed files, or those that have other blocks now. A mismatch of new
    /// contents is the first one.
    pub(crate) fn forget(&mut self, files: &[FileId]) {
        self.jobs.trust(files);
        if let Some(tier) = self.tier() {
            files.iter().for_each(|file| tier.remove(*file));
        }
    }
}
