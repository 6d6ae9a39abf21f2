//! The state of a plane: its jobs, and what moves them.

use std::sync::Arc;

use gio_uring::{Affine, Event, PoolDesc, Progress};
use kv_catalog::{BlockId, DeviceIndex, FileId, Geometry, KvShape, Layer, Region, Seal};
use nvme_driver::{Clock, DmaMemory, Nanos, RateLimit};
use nvme_spec::{ids::Nsid, nvm::Direction};

use super::{
    checksums::JobChecksums,
    copier::{Copier, Copies, Uploaded},
    devices::{Device, Devices, StoreEvent},
    job::{Job, JobDone, Jobs, LayerState, next_id},
    pacer::Pacer,
    pools::Pools,
    transport::Transport,
    wait::{Polled, Step, wait_for},
};
use crate::{
    config::StoreOptions,
    device::SharedController,
    error::StoreError,
    ids::{JobId, Move, PoolId, Ticket},
    order::Order,
    registration::KvPool,
    stats::{PlaneStats, Times},
    store::owner::Ownership,
};

/// Parameters that do not change while a plane is open.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) shape: KvShape,
    pub(super) geometry: Geometry,
    pub(super) files: u32,
    /// Set if checksums are computed and compared.
    pub(super) checksums: bool,
    /// Set if writes have force unit access.
    pub(super) fua: bool,
    /// Set if a volatile cache must be flushed before written data counts as stored.
    pub(super) must_flush: bool,
    /// Placement handles that every device has; 0 without placement.
    pub(super) placements: u32,
    pub(super) options: StoreOptions,
}

impl Setup {
    /// Returns the description of a ring's pool, without the addresses of its objects. `pads`: see
    /// [`Mover::pads`].
    pub(super) fn describe(
        &self,
        devices: &Devices,
        pads: Option<&Arc<dyn DmaMemory>>,
    ) -> PoolDesc {
        let pad = pads.map(|memory| memory.segments()[0].iova);
        let half = pads.map_or(0, |memory| memory.len() as u64 / 2);
        PoolDesc {
            row_iova: Vec::new(),
            row_memory: Vec::new(),
            data_lba: devices.regions().iter().map(|region| region.first.0).collect(),
            block_stride: 0,
            blocks: 0,
            files: self.files,
            group: self.geometry.group,
            object_bytes: self.geometry.object_bytes,
            slot_bytes: self.geometry.slot_bytes,
            run_bytes: self.options.run_bytes,
            pad_read: pad.map(|iova| iova.offset(half)),
            pad_write: pad,
        }
    }
}

/// Counts that the plane keeps itself.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tally {
    pub(super) stored_bytes: u64,
    pub(super) retrieved_bytes: u64,
    pub(super) times: Times,
}

/// Devices to flush.
pub(super) struct Flushing {
    pub(super) number: u64,
    pub(super) devices: Vec<(SharedController, Nsid)>,
    pub(super) seal: Seal,
}

/// The state of an open plane. One thread uses it at a time.
#[derive(Debug)]
pub(crate) struct Mover {
    pub(super) transport: Transport,
    pub(super) jobs: Jobs,
    /// The engine's pool.
    pub(super) pool: KvPool,
    /// This pool, and those of other owners.
    pub(super) pools: Pools,
    pub(super) copier: Copier,
    /// Source and target of padding. Never read; kept because the devices use it.
    pub(super) pads: Option<Arc<dyn DmaMemory>>,
    pub(super) setup: Setup,
    pub(super) clock: Arc<dyn Clock>,
    /// Decides when layers start; without it, they start at once.
    pub(super) pacer: Option<Box<Pacer>>,
    pub(super) tally: Tally,
    /// Memory reused between calls.
    pub(super) map: Vec<Affine>,
    /// Flushes that have begun. One covers the writes that had ended by then.
    pub(super) flushes: u64,
    /// Broken by a failed flush: nothing is stored any more.
    pub(super) seal: Seal,
    /// Of messages about failed layers.
    pub(super) warnings: RateLimit,
    /// Set if other processes may reach the devices.
    pub(super) owner: Option<Ownership>,
}

impl Mover {
    /// Refuses calls on a failed plane.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        self.transport.check()
    }

    /// Refuses to move anything once another process owns the devices.
    pub(crate) fn check_owner(&self) -> Result<(), StoreError> {
        self.owner.as_ref().map_or(Ok(()), |owner| owner.check())
    }

    /// Returns the controllers, their namespaces, and the regions of the files' objects.
    pub(crate) fn data_regions(&self) -> Vec<(SharedController, Nsid, Region)> {
        let of = |device: &Device| (device.controller.clone(), device.nsid, device.region);
        self.transport.devices.all.iter().map(of).collect()
    }

    pub(crate) fn event(&mut self) -> Result<Event, StoreError> {
        Ok(self.transport.ring()?.event()?)
    }

    /// Returns abandoned jobs that have ended: no device accesses their files any more.
    pub(crate) fn take_ended(&mut self) -> Vec<JobId> {
        std::mem::take(&mut self.jobs.ended)
    }

    /// Returns files that could not be read since the last call, each once.
    pub(crate) fn take_lost(&mut self) -> Vec<FileId> {
        let mut lost = std::mem::take(&mut self.jobs.lost);
        lost.sort_unstable();
        lost.dedup();
        lost
    }

    /// Returns a count that grows when controllers are recovered from a timeout or a fault, and
    /// whenever one of them is reset, by any owner: its volatile cache may have lost data that was
    /// stored and not flushed. For comparing with [`JobDone::recoveries`].
    pub(crate) fn recoveries(&self) -> u64 {
        self.transport.recoveries + self.transport.devices.resets()
    }

    pub(crate) fn stats(&mut self) -> Result<PlaneStats, StoreError> {
        let Tally { stored_bytes, retrieved_bytes, times } = self.tally;
        Ok(PlaneStats {
            path: self.pool.path(),
            executor: self.transport.executor_name(),
            is_bounced: self.copier.is_bounced(),
            stored_bytes,
            retrieved_bytes,
            dram: self.copier.stats(),
            codec: self.copier.codec_stats(),
            recoveries: self.transport.recoveries,
            ring: self.transport.ring()?.counters(),
            layers_in_flight: self.transport.in_flight() as u32,
            layers_waiting: self.pacer.as_ref().map_or(0, |pacer| pacer.waiting.len() as u32),
            times,
        })
    }

    /// Processes everything since the last call: events of devices, at their poll interval, and
    /// completions.
    pub(crate) fn sync(&mut self) -> Result<(), StoreError> {
        self.check()?;
        self.attend()?;
        self.reap().map(|_| ())
    }

    /// Does the periodic work that is due.
    pub(super) fn attend(&mut self) -> Result<(), StoreError> {
        let attended = self.transport.attend();
        self.or_fail(attended)?;
        self.after_completions()
    }

    pub(crate) fn poll_events(&mut self) -> Result<Vec<StoreEvent>, StoreError> {
        self.check()?;
        let polled = self.transport.poll_devices();
        self.or_fail(polled)?;
        self.after_completions()?;
        Ok(self.transport.devices.take_events())
    }

    pub(crate) fn requested_devices(&self) -> Vec<DeviceIndex> {
        self.transport.devices.requested()
    }

    /// Shares the seal of the catalog: a failure of either one ends what both store.
    pub(crate) fn share(&mut self, seal: &Seal) {
        self.seal = seal.clone();
    }

    /// Begins a flush, while no other one is in progress. Returns the devices to flush, and `None`
    /// if there are none with a volatile write cache.
    pub(super) fn begin_flush(&mut self) -> Option<Flushing> {
        if !self.setup.must_flush {
            return None;
        }
        self.flushes += 1;
        let devices = self.transport.devices.all.iter().filter(|device| device.is_volatile);
        let devices = devices.map(|device| (device.controller.clone(), device.nsid));
        let (number, seal) = (self.flushes, self.seal.clone());
        Some(Flushing { number, devices: devices.collect(), seal })
    }

    /// Refuses to store when the plane was opened to be read, on media that have become read-only,
    /// and once a flush has failed.
    pub(crate) fn check_writable(&self) -> Result<(), StoreError> {
        self.check()?;
        if self.setup.options.read_only {
            return Err(StoreError::OpenedToRead);
        }
        self.transport.devices.check_writable()?;
        Ok(self.seal.check()?)
    }

    /// Prepares to move blocks of a pool; if not `is_cached`, past the DRAM cache.
    pub(crate) fn begin(
        &mut self,
        pool: PoolId,
        direction: Direction,
        mut moves: Vec<Move>,
        expected: &[u32],
        is_cached: bool,
    ) -> Result<JobId, StoreError> {
        self.check_blocks(pool, moves.iter().map(|entry| entry.block))?;
        // Jobs that have ended give their bounce buffers back.
        self.sync()?;
        self.check_owner()?;
        if direction == Direction::Write {
            self.check_writable()?;
        }
        let id = next_id();
        self.check_moves(id, pool, direction, &moves)?;
        let (of, now) = ((pool, direction), self.now());
        let (copies, rest) = self.copier.take(of, &mut moves, expected, is_cached, now)?;
        self.begin_job(id, direction, moves, copies, rest.as_deref().unwrap_or(expected))
    }

    /// Begins a job whose moves the devices can make.
    pub(super) fn begin_job(
        &mut self,
        id: JobId,
        direction: Direction,
        moves: Vec<Move>,
        copies: Copies,
        expected: &[u32],
    ) -> Result<JobId, StoreError> {
        let (layers, now) = (self.setup.shape.layers, self.clock.now());
        let mut job = Job::new(direction, layers, moves, self.recoveries(), now);
        job.copies = copies;
        if let Some(coder) = &self.copier.coder {
            coder.prepare(&mut job.copies, direction, &job.moves, expected);
        }
        if let Err(error) = self.upload(&mut job, expected) {
            self.let_go(&job);
            return Err(error);
        }
        self.jobs.insert(id, job);
        Ok(id)
    }

    /// Keeps a job's data apart from data of other classes, on devices with placement handles
    /// (Flexible Data Placement): data that expires at about the same time should have one class.
    /// Handle 0 is used by all writes without a class: the journal's. Classes share the others
    /// round-robin. Layers that were started before are not affected.
    pub(crate) fn place(&mut self, id: JobId, class: u32) -> Result<(), StoreError> {
        let handles = self.setup.placements.saturating_sub(1);
        let placement = (handles > 0).then(|| 1 + (class % handles) as u16);
        self.jobs.get_mut(id)?.placement = placement;
        Ok(())
    }

    /// Ends a job of which nothing is in flight. Stored data may be in volatile caches: before it
    /// is committed, the devices must be flushed, and [`JobDone::recoveries`] compared.
    pub(crate) fn end(&mut self, id: JobId) -> Result<JobDone, StoreError> {
        self.check()?;
        if let Some(Ticket { layer, .. }) = self.in_flight(id) {
            return Err(StoreError::InFlight { layer });
        }
        let job = self.jobs.remove(id)?;
        let (direction, failure, recoveries) = (job.direction, job.verdict(), job.recoveries);
        let mut checksums = Vec::new();
        if direction == Direction::Write {
            let rows = self.setup.shape.rows();
            let made = job.checksums.as_ref().map(|made| made.values(rows, &job.moves));
            checksums = made.unwrap_or_else(|| job.copies.through.words.clone());
        }
        self.let_go(&job);
        Ok(JobDone { job: id, direction, failure, recoveries, flushes: self.flushes, checksums })
    }

    /// Ends jobs of which nothing is in flight; none of them if one was abandoned or moves again:
    /// nobody would learn that the others have ended, and release what they hold.
    pub(super) fn end_all(&mut self, ids: &[JobId]) -> Result<Vec<JobDone>, StoreError> {
        for (at, id) in ids.iter().enumerate() {
            if ids[..at].contains(id) {
                return Err(StoreError::no_such_job(*id));
            }
            self.jobs.get_mut(*id)?;
            if let Some(Ticket { layer, .. }) = self.in_flight(*id) {
                return Err(StoreError::InFlight { layer });
            }
        }
        ids.iter().map(|id| self.end(*id)).collect()
    }

    /// Fails ended jobs whose data is not permanent after the flush that covers them: if any flush
    /// has failed, or a controller was reset, whose volatile cache may have lost the data before.
    /// Counts the time of that flush, unless another thread has.
    pub(super) fn settle(&mut self, ended: &mut [JobDone], flush: Option<Nanos>) {
        flush.into_iter().for_each(|took| self.tally.times.flushes.add(took));
        let recoveries = self.recoveries();
        for done in ended.iter_mut().filter(|done| done.has_stored()) {
            // Another owner may have written to the files meanwhile.
            let kept = self.check_owner().and_then(|()| Ok(self.seal.check()?));
            done.failure = match kept {
                Ok(()) if self.setup.must_flush && done.recoveries != recoveries => {
                    Some(StoreError::Forgotten)
                }
                kept => kept.err(),
            };
        }
    }

    /// Abandons a job. It ends immediately, or when its last operation completes:
    /// [`Mover::take_ended`] then returns it, and no device accesses its files or blocks any more.
    pub(crate) fn abandon(&mut self, id: JobId) {
        self.cancel_waiting(id);
        if let Some(job) = self.jobs.abandon(id) {
            self.let_go(&job);
        }
    }

    /// Releases the memory of an ended job.
    pub(super) fn let_go(&mut self, job: &Job) {
        let is_whole = job.map.is_some() && job.verdict().is_none();
        let written = if job.direction == Direction::Write { &job.moves[..] } else { &[] };
        self.copier.release(&job.copies, is_whole, written);
    }

    /// Adds a pool of another owner.
    pub(super) fn add_pool(&mut self, pool: KvPool) -> Result<PoolId, StoreError> {
        self.check()?;
        let shape = &self.setup.shape;
        let wrong = |problem: &str| StoreError::Config { field: "pool", problem: problem.into() };
        if (pool.rows(), pool.object_bytes()) != (shape.rows(), shape.object_bytes) {
            return Err(wrong("it has another shape than the plane's blocks"));
        }
        if pool.path() != self.pool.path() || pool.is_bounced() {
            return Err(wrong("its path is not the one that was proven for the plane"));
        }
        if self.copier.is_bounced() || self.transport.streams.is_some() {
            return Err(wrong("a plane with a GPU or bounce buffers has one pool only"));
        }
        let desc = self.setup.describe(&self.transport.devices, self.pads.as_ref());
        let (ring, checksums) = (self.transport.ring()?, self.setup.checksums);
        let id = self.pools.add(pool.clone(), ring, &desc, checksums)?;
        if !self.copier.add_pool(id, &pool) {
            self.pools.take(id)?;
            return Err(wrong("it is out of reach of whoever copies"));
        }
        Ok(id)
    }

    /// Abandons all jobs of a pool that was added, which takes no new ones from now on.
    pub(super) fn abandon_pool(&mut self, pool: PoolId) -> Result<(), StoreError> {
        self.pools.end(pool)?;
        self.jobs.of_pool(pool).into_iter().for_each(|job| self.abandon(job));
        Ok(())
    }

    /// Returns a layer of the pool's jobs that is in flight.
    pub(super) fn in_flight_of_pool(&self, pool: PoolId) -> Option<Ticket> {
        let job = |ticket: &Ticket| self.jobs.get(ticket.job);
        let is_of = |ticket: &Ticket| job(ticket).is_some_and(|job| job.copies.pool == pool);
        self.transport.tickets().find(is_of)
    }

    /// Gives a pool back of which nothing is in flight.
    pub(super) fn take_pool(&mut self, pool: PoolId) -> Result<KvPool, StoreError> {
        self.check()?;
        self.after_completions()?;
        assert!(self.jobs.of_pool(pool).is_empty(), "they were abandoned, and have ended");
        self.copier.remove_pool(pool);
        self.pools.take(pool)
    }

    /// Moves a layer that is about to start to or from the same blocks of another pool.
    pub(crate) fn aim(&mut self, ticket: Ticket, pool: PoolId) -> Result<(), StoreError> {
        let blocks = self.pools.used(pool)?.len();
        let layers = self.setup.shape.layers;
        let of = self.check_start(ticket, Order::Unordered)?.copies.pool;
        let wanted = self.pools.used(of)?.len();
        if blocks != wanted {
            let problem = format!("it has {blocks} blocks, and that of the job has {wanted}");
            return Err(StoreError::Config { field: "pool", problem });
        }
        self.jobs.get_mut(ticket.job)?.copies.aim(ticket.layer, layers, pool);
        Ok(())
    }

    /// Refuses blocks that the engine, or the owner of an added pool, does not have.
    pub(crate) fn check_blocks(
        &mut self,
        pool: PoolId,
        mut named: impl Iterator<Item = BlockId>,
    ) -> Result<(), StoreError> {
        let blocks = self.pools.used(pool)?.len() as u32;
        match named.find(|block| block.0 >= blocks) {
            Some(block) => Err(StoreError::argument(format!(
                "block {block} was given, but {blocks} blocks are registered"
            ))),
            None => Ok(()),
        }
    }

    fn check_moves(
        &mut self,
        id: JobId,
        pool: PoolId,
        direction: Direction,
        moves: &[Move],
    ) -> Result<(), StoreError> {
        let files = self.setup.files;
        let used = self.pools.used(pool)?;
        for Move { file, block, .. } in moves.iter().copied() {
            if file.0 >= files {
                return Err(StoreError::no_such_file(file, files));
            }
            // Two blocks read into the same place would leave a mixture.
            let before = std::mem::replace(&mut used[block.0 as usize], id.0);
            if direction == Direction::Read && before == id.0 {
                let why = format!("block {block} is the destination of two blocks of one request");
                return Err(StoreError::argument(why));
            }
        }
        match self.copier.slots() {
            Some(slots) if moves.len() > slots as usize => {
                Err(StoreError::Staging { blocks: moves.len(), slots })
            }
            _ => Ok(()),
        }
    }

    /// Returns the entry of a job's map.
    pub(super) fn affine(&self, job: &Job, index: u32) -> Affine {
        let Move { file, block, .. } = job.moves[index as usize];
        // In staging memory, objects are ordered by position. Blocks that are read ahead go to the
        // DRAM cache itself.
        let is_staged = self.copier.is_staged() && !job.is_ahead;
        Affine { block: if is_staged { index } else { block.0 }, file: file.0 }
    }

    /// Uploads the job's map, unless it is empty, and the tables of copies that streams do.
    pub(super) fn upload(&mut self, job: &mut Job, expected: &[u32]) -> Result<(), StoreError> {
        let ring = self.transport.ring()?;
        self.copier.upload(ring, &mut job.copies)?;
        if job.moves.is_empty() {
            return Ok(());
        }
        let devices = self.setup.geometry.devices;
        // Blocks that are read ahead go to the DRAM cache itself.
        let staged = self.copier.is_staged() && !job.is_ahead;
        let is_coded = self.copier.coder.is_some();
        let rows = self.setup.shape.rows();
        let is_write = job.direction == Direction::Write;
        let wanted = self.setup.checksums && !is_coded && (is_write || !expected.is_empty());
        if staged && !is_coded {
            let blocks = job.moves.iter().map(|entry| entry.block);
            job.copies.through.uploaded = Some(Uploaded::staged(ring, blocks)?);
        }
        let mut map = std::mem::take(&mut self.map);
        map.clear();
        map.extend((0..job.moves.len() as u32).map(|at| self.affine(job, at)));
        self.map = map;
        let ring = self.transport.ring()?;
        let uploaded = ring.upload_map(&self.map, devices)?;
        if wanted {
            // A write computes them.
            let expected = if is_write { &[] } else { expected };
            let count = self.map.len();
            let made = JobChecksums::new(ring, &uploaded, rows, count, expected, staged)?;
            job.checksums = Some(made);
        }
        job.map = Some(uploaded);
        Ok(())
    }

    /// Waits for everything in flight. Failures stay with their jobs.
    fn drain(&mut self) -> Result<(), StoreError> {
        self.check()?;
        let (clock, timeout) = (self.clock.clone(), self.setup.options.wait_timeout);
        for ticket in self.all_in_flight() {
            // The job holds the result.
            let _ = wait_for(&*clock, timeout, |step| self.step(ticket, step));
            self.check()?;
        }
        self.sync()
    }

    /// Waits for everything in flight, stops the I/O kernel, takes the queues back and returns the
    /// controllers and the pool.
    pub(super) fn close(&mut self) -> Result<(Vec<SharedController>, KvPool), StoreError> {
        // Layers that wait never start.
        self.pacer = None;
        self.drain()?;
        let shut = self.transport.shut();
        self.or_fail(shut)?;
        // Nothing is in flight.
        self.owner = None;
        let controllers = self.transport.devices.take_controllers();
        Ok((controllers, self.pool.clone()))
    }

    /// Recovers controllers and kernel. Everything in flight has failed afterwards.
    pub(super) fn recover(&mut self, cause: &str) -> Result<(), StoreError> {
        tracing::warn!(cause, "stopping the I/O kernel and recovering the controllers");
        self.check()?;
        let recovered = self.transport.recover(cause);
        self.or_fail(recovered)?;
        self.complete_over();
        let restarted = self.restart().map_err(|error| format!("{cause}; then {error}"));
        self.or_fail(restarted)?;
        self.transport.recoveries += 1;
        Ok(())
    }

    /// Starts the kernel again, and registers everything with a new ring if that was replaced.
    fn restart(&mut self) -> Result<(), StoreError> {
        // The old ring keeps what streams still use: it is leaked then.
        let Some(_replaced) = self.transport.restart()? else { return Ok(()) };
        let Setup { checksums, options, .. } = &self.setup;
        let desc = self.setup.describe(&self.transport.devices, self.pads.as_ref());
        let ring = self.transport.ring()?;
        self.copier.register(ring, &self.pool, &desc, *checksums, options.staging_buffers)?;
        self.pools.register(ring, &desc, *checksums)?;
        // Maps and tables live in the old executor's memory: jobs that have them must start over.
        for job in self.jobs.iter_mut() {
            if job.has_tables() {
                job.cancel(Layer(0));
            }
        }
        Ok(())
    }

    /// Fails the plane if a step that it cannot do without has failed.
    pub(super) fn or_fail<T>(&mut self, result: Result<T, String>) -> Result<T, StoreError> {
        result.map_err(|cause| self.fail(cause))
    }

    /// Fails the plane: every later call returns the cause. Memory that a device or kernel might
    /// still reach is leaked; the controllers do the same with their queues.
    pub(super) fn fail(&mut self, cause: String) -> StoreError {
        tracing::error!(cause, "the store has failed");
        self.transport.fail(&cause);
        self.copier.leak();
        std::mem::forget((self.pads.take(), self.pools.all()));
        for layer in self.jobs.iter_mut().flat_map(|job| &mut job.layers) {
            if matches!(layer.state, LayerState::InFlight | LayerState::Waiting(_)) {
                layer.state = LayerState::Idle;
            }
        }
        StoreError::Failed { cause }
    }

    /// Does a step of waiting for a layer.
    pub(super) fn step(&mut self, ticket: Ticket, step: Step) -> Result<Polled, StoreError> {
        match step {
            Step::Poll => self.poll(ticket),
            Step::Overdue => self.overdue(ticket).map(|()| Polled::Pending(Progress::Moved)),
        }
    }

    /// Does a step of waiting for a layer, and counts the time since the first one that found it
    /// pending. A layer that was found done costs no look at the clock.
    pub(super) fn timed_step(
        &mut self,
        ticket: Ticket,
        step: Step,
        since: &mut Option<Nanos>,
    ) -> Result<Polled, StoreError> {
        let polled = self.step(ticket, step);
        match (&polled, *since) {
            (Ok(Polled::Pending(_)), None) => *since = Some(self.clock.now()),
            (Ok(Polled::Pending(_)), Some(_)) | (_, None) => {}
            (_, Some(since)) => {
                if let Some(job) = self.jobs.get(ticket.job) {
                    self.tally.times.waited(job.direction, self.clock.now() - since);
                }
            }
        }
        polled
    }

    /// Polls a layer that was started, and returns whether anything moved.
    pub(crate) fn poll(&mut self, ticket: Ticket) -> Result<Polled, StoreError> {
        self.check()?;
        let mut progress = Progress::Idle;
        let state = self.jobs.state(ticket);
        if matches!(state, Some(LayerState::Waiting(_))) || self.transport.has(ticket) {
            progress = self.reap()?;
            if progress == Progress::Idle {
                self.attend()?;
            }
            self.pump()?;
        }
        let layer = ticket.layer;
        match self.jobs.state(ticket).ok_or(StoreError::Ended { layer })? {
            LayerState::Idle => Err(StoreError::NotStarted { layer }),
            LayerState::InFlight | LayerState::Waiting(_) => Ok(Polled::Pending(progress)),
            LayerState::Ended(Ok(done)) => Ok(Polled::Done(done)),
            LayerState::Ended(Err(failure)) => Err(StoreError::Transfer { failure }),
        }
    }

    /// Returns a layer of the job that is in flight or waits for its turn, if there is one.
    pub(super) fn in_flight(&self, id: JobId) -> Option<Ticket> {
        let waiting = || {
            let mut layers = self.jobs.get(id)?.layers.iter().zip(0..);
            let found = layers.find(|(layer, _)| matches!(layer.state, LayerState::Waiting(_)));
            found.map(|(_, layer)| Ticket { job: id, layer: Layer(layer) })
        };
        self.transport.of_job(id).or_else(waiting)
    }

    /// Returns all layers in flight.
    pub(super) fn all_in_flight(&self) -> Vec<Ticket> {
        self.transport.tickets().collect()
    }

    /// Handles the timeout of a layer: declares the I/O kernel or a device dead, or the stream that
    /// moves the layer's objects.
    pub(crate) fn overdue(&mut self, ticket: Ticket) -> Result<(), StoreError> {
        // It may have completed while the clock was read.
        self.reap()?;
        let is_waiting = matches!(self.jobs.state(ticket), Some(LayerState::Waiting(_)));
        if is_waiting && self.demand(ticket) {
            // It waited for others for long enough, and has just begun.
            return Ok(());
        }
        let first = self.transport.tickets().next().filter(|_| is_waiting);
        if is_waiting && first.is_none() {
            self.give_up_waiting(ticket);
            return Ok(());
        }
        // One that cannot begin waits for those in flight.
        let ticket = first.unwrap_or(ticket);
        let overdue = self.transport.overdue(ticket);
        self.or_fail(overdue)?;
        self.after_completions()
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        if self.transport.is_open() {
            let Err(cause) = self.transport.shut() else { return };
            // Memory that a device might reach was leaked; a drop can do no more.
            let error = self.fail(cause);
            tracing::error!(%error, "dropping a plane");
        }
        if let Some(owner) = self.owner.take() {
            owner.leave();
        }
    }
}
