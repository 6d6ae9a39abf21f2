//! The plane: moves files between devices and registered memory. It knows no keys.
//!
//! Each worker process of an engine has a plane: its devices, their queues and rings, and the KV
//! pool. A catalog, which may be in another process, decides which files to move; the two exchange
//! plain data ([`Move`], [`JobDone`]). Jobs are begun and ended by number, and a layer of a job is
//! named by a [`Ticket`]; dropping either releases nothing.

use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use gio_uring::{Event, RawStream};
use kv_catalog::{DeviceIndex, FileId, KvShape, Superblock, lock};
use kv_schedule::{Flow, Scheduler, StepId};
use kv_tier::{Lookahead, LookaheadConfig, RequestId, When};
use nvme_driver::{Clock, Nanos, Waiter};
use nvme_spec::nvm::Direction;

use crate::{
    config::StoreConfig,
    device::SharedController,
    error::StoreError,
    ids::{JobId, LayerDone, Move, PoolId, Ticket},
    order::Order,
    registration::KvPool,
    stats::PlaneStats,
    store::owner::Ownership,
};

mod checksums;
mod complete;
mod copier;
mod devices;
mod job;
mod mover;
mod open;
mod pacer;
mod pacing;
mod pools;
mod raw;
mod retry;
mod route;
mod self_test;
mod start;
mod streams;
mod transport;
mod wait;

pub use devices::{PlaneDevice, StoreEvent};
pub use job::JobDone;
use mover::Flushing;
pub(crate) use mover::Mover;
pub use pacer::Advanced;
use pacer::Pacer;
pub use raw::RawRing;
pub use route::kernel_read;
pub use self_test::KvView;
pub(crate) use wait::Polled;
use wait::wait_for;

/// The parts of a closed plane.
#[derive(Debug)]
pub struct ClosedPlane {
    /// The controllers, in the order of the configuration.
    pub controllers: Vec<SharedController>,
    /// The engine's pool, still registered.
    pub pool: KvPool,
}

/// Devices, rings and registered memory: moves files by number.
///
/// A cheap handle: clones refer to the same plane, and any number of threads may use them. A thread
/// that waits does not block the others.
#[derive(Debug, Clone)]
pub struct Plane {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    shape: KvShape,
    is_bounced: bool,
    clock: Arc<dyn Clock>,
    wait_timeout: Nanos,
    state: Mutex<State>,
    /// Number of the last flush that has ended; locked during one, and never with `state` locked.
    flushed: Mutex<u64>,
    /// Notified when the pacer gets work.
    begun: Condvar,
    listener: OnceLock<Listener>,
}

#[derive(Debug)]
enum State {
    Open(Box<Mover>),
    /// Closed, for this reason.
    Closed(String),
}

/// Called with the plane locked, after each use of it.
struct Listener(Box<dyn Fn(&mut Mover) + Send + Sync>);

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listener")
    }
}

impl Plane {
    /// Proves that data gets to the pool and back on the path that it is registered for, creates
    /// and grants the queues, starts the I/O kernel, and proves that it reaches every device.
    ///
    /// The pool's memory may not be used meanwhile: the proof writes to both ends of it, and
    /// restores its contents. It also writes to each device's scratch region. `devices` are those
    /// of a store with this superblock, and hold data; `owner` keeps the claims on them.
    ///
    /// # Errors
    /// Returns [`StoreError::Route`] if a device does not reach the pool, the I/O kernel does not
    /// reach a device, or the GPU does not move objects to a staged pool;
    /// [`StoreError::Config`] if the configuration is inconsistent;
    /// [`StoreError::Driver`], [`StoreError::Ring`] or [`StoreError::Executor`] if a lower layer
    /// fails.
    pub(crate) fn open(
        config: StoreConfig,
        devices: Vec<PlaneDevice>,
        superblock: &Superblock,
        owner: Option<Ownership>,
    ) -> Result<Self, StoreError> {
        let mut mover = open::open(config, devices, superblock)?;
        mover.owner = owner;
        Ok(Self {
            shared: Arc::new(Shared {
                shape: mover.setup.shape,
                is_bounced: mover.copier.is_bounced(),
                clock: mover.clock.clone(),
                wait_timeout: mover.setup.options.wait_timeout,
                state: Mutex::new(State::Open(Box::new(mover))),
                flushed: Mutex::default(),
                begun: Condvar::new(),
                listener: OnceLock::new(),
            }),
        })
    }

    /// Calls `act` with the plane locked.
    pub(crate) fn with<T>(
        &self,
        act: impl FnOnce(&mut Mover) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        match &mut *lock(&self.shared.state) {
            State::Open(mover) => {
                let had_work = mover.has_work();
                let result = act(mover);
                if !had_work && mover.has_work() {
                    self.shared.begun.notify_all();
                }
                match self.shared.listener.get() {
                    Some(Listener(listener)) => listener(mover),
                    // No caller waits for the end of an abandoned job.
                    None => _ = mover.take_ended(),
                }
                result
            }
            State::Closed(cause) => Err(StoreError::Failed { cause: cause.clone() }),
        }
    }

    /// Calls `listener` with the plane locked, after each use of it. Only one can be set.
    pub(crate) fn listen(&self, listener: impl Fn(&mut Mover) + Send + Sync + 'static) {
        let _ = self.shared.listener.set(Listener(Box::new(listener)));
    }

    /// Returns the time of the plane's clock.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.shared.clock.now()
    }

    /// Returns the shape of the KV blocks.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.shared.shape
    }

    /// Returns true if the CPU copies blocks, because the devices cannot describe their memory.
    #[must_use]
    pub fn is_bounced(&self) -> bool {
        self.shared.is_bounced
    }

    /// Prepares to move blocks. This is the only step whose cost grows with their number. A job
    /// without moves is valid: its layers are done as soon as they are started.
    ///
    /// `expected`: for a read, the checksums from the [`JobDone`] of the write, `[block][row]`;
    /// objects that do not match fail with [`gio_uring::IoStatus::Checksum`]. Empty: nothing is
    /// compared.
    ///
    /// # Errors
    /// Returns [`StoreError::Argument`], also if a read names a block twice;
    /// [`StoreError::Staging`] for more blocks than fit into a staging buffer, and
    /// [`StoreError::Bounce`] for more than bounce buffers are free; [`StoreError::ReadOnly`] for a
    /// write, and [`StoreError::JournalFailed`] after a failed flush; [`StoreError::Ring`] if
    /// memory for the job runs out ([`crate::StoreOptions::arena_bytes`]); [`StoreError::Failed`].
    pub fn begin(
        &self,
        direction: Direction,
        moves: &[Move],
        expected: &[u32],
    ) -> Result<JobId, StoreError> {
        self.with(|mover| mover.begin(PoolId::default(), direction, moves.to_vec(), expected, true))
    }

    /// Adds a pool of another owner, in memory of this process that the devices reach. The path is
    /// the plane's, which was proven when it was opened; the memory is not touched.
    ///
    /// # Errors
    /// Returns [`StoreError::Config`] if the pool has another shape or path than the plane's, or
    /// the plane has a GPU or bounce buffers, which know one pool only;
    /// [`StoreError::Ring`] or [`StoreError::Failed`].
    pub fn add_pool(&self, pool: KvPool) -> Result<PoolId, StoreError> {
        self.with(|mover| mover.add_pool(pool))
    }

    /// Abandons the jobs of a pool that was added, waits until nothing of them is in flight, and
    /// returns the pool: no device accesses its memory any more.
    ///
    /// # Errors
    /// Returns [`StoreError::Argument`], or [`StoreError::Failed`]: the memory is leaked then.
    pub fn remove_pool(&self, pool: PoolId) -> Result<KvPool, StoreError> {
        self.with(|mover| mover.abandon_pool(pool))?;
        while let Some(ticket) = self.with(|mover| Ok(mover.in_flight_of_pool(pool)))? {
            let _ = self.wait_in_turn(ticket);
        }
        self.with(|mover| mover.take_pool(pool))
    }

    /// Starts moving a layer of a job, with an order: nothing accesses the layer's blocks before
    /// `order` allows it. Waits while as many layers are in flight as there may be; otherwise O(1)
    /// in the number of blocks.
    ///
    /// A stream that waits continues even if the layer failed. The contents of its blocks are then
    /// undefined; [`Plane::wait`] and [`Plane::end`] report the failure.
    ///
    /// # Errors
    /// Returns [`StoreError::Argument`], [`StoreError::InFlight`], [`StoreError::Ended`],
    /// [`StoreError::Busy`] or [`StoreError::StagingBusy`] if none ends in time,
    /// [`StoreError::RequestFailed`] after a layer of the job failed, [`StoreError::Failed`],
    /// [`StoreError::NoStreams`] without a GPU, [`StoreError::Stream`] if the stream refuses, or
    /// [`StoreError::Ring`] for another plane's event.
    pub fn start(&self, ticket: Ticket, order: Order<'_>) -> Result<(), StoreError> {
        self.while_full(|mover| mover.start(ticket, order))
    }

    /// Same as [`Plane::start`], to or from the same blocks of another pool that was added and has
    /// as many: memory that the caller lends to one layer after the other. Remove the pool of the
    /// job ([`Plane::remove_pool`]) before the others.
    ///
    /// # Errors
    /// Same as [`Plane::start`]; [`StoreError::Argument`], or [`StoreError::Config`] for a pool
    /// with another number of blocks.
    pub fn start_at(&self, ticket: Ticket, pool: PoolId) -> Result<(), StoreError> {
        self.while_full(|mover| {
            mover.aim(ticket, pool)?;
            mover.start(ticket, Order::Unordered)
        })
    }

    /// Repeats `act` while as much is in flight as there may be.
    fn while_full(
        &self,
        act: impl Fn(&mut Mover) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let Shared { clock, wait_timeout, .. } = &*self.shared;
        let since = clock.now();
        let mut waiter = Waiter::new(&**clock, since + *wait_timeout);
        let mut has_waited = false;
        loop {
            let started = self.with(|mover| {
                let started = act(mover);
                if is_full(&started) {
                    mover.attend()?;
                } else if has_waited {
                    mover.tally.times.slot_waits.add(clock.now() - since);
                }
                started
            });
            if !is_full(&started) || !waiter.wait() {
                return started;
            }
            has_waited = true;
        }
    }

    /// Makes work enqueued on `stream` from now on wait for a layer that was started: it sees a
    /// retrieved layer's data, and may change the blocks of a stored one. The stream continues even
    /// if the layer failed. May be called for any number of streams, and for a layer that has
    /// ended. A layer that waits for its turn starts now.
    ///
    /// # Errors
    /// Returns [`StoreError::NoStreams`] without a GPU, [`StoreError::Stream`] if the stream
    /// refuses, [`StoreError::NotStarted`], [`StoreError::Ended`], or [`StoreError::Failed`].
    pub fn join(&self, ticket: Ticket, stream: RawStream) -> Result<(), StoreError> {
        self.while_full(|mover| mover.join(ticket, stream))
    }

    /// Waits until all of the layer's data is in place. A layer that waits for its turn starts now.
    ///
    /// When this returns, with any result, nothing accesses the layer's blocks any more: after a
    /// timeout or a fault the I/O kernel was stopped and the controllers were recovered first.
    /// Everything else in flight at that time was sent again, or has failed as well, with
    /// [`gio_uring::IoStatus::Cancelled`] or [`gio_uring::IoStatus::Fault`].
    ///
    /// # Errors
    /// Returns [`StoreError::Transfer`] with layer, block, file and status. After a failed read,
    /// [`Plane::take_lost`] returns the files whose data is lost. Returns
    /// [`StoreError::NotStarted`], [`StoreError::Ended`] after the end of the job, and
    /// [`StoreError::Failed`] if the controllers could not be recovered.
    pub fn wait(&self, ticket: Ticket) -> Result<LayerDone, StoreError> {
        self.with(|mover| Ok(mover.demand(ticket)))?;
        self.wait_in_turn(ticket)
    }

    /// Waits for a layer, and does not start it before its turn.
    fn wait_in_turn(&self, ticket: Ticket) -> Result<LayerDone, StoreError> {
        let Shared { clock, wait_timeout, .. } = &*self.shared;
        let mut since = None;
        wait_for(&**clock, *wait_timeout, |step| {
            self.with(|mover| mover.timed_step(ticket, step, &mut since))
        })
    }

    /// Checks if the layer is done, without waiting.
    ///
    /// # Errors
    /// Same as [`Plane::wait`].
    pub fn poll(&self, ticket: Ticket) -> Result<Option<LayerDone>, StoreError> {
        match self.with(|mover| mover.poll(ticket))? {
            Polled::Done(done) => Ok(Some(done)),
            Polled::Pending(_) => Ok(None),
        }
    }

    /// Waits for the layers of a job that are in flight. The job holds their results.
    pub(crate) fn wait_for_job(&self, job: JobId) -> Result<(), StoreError> {
        self.with(|mover| {
            mover.hurry_reads(job);
            Ok(())
        })?;
        while let Some(ticket) = self.with(|mover| Ok(mover.in_flight(job)))? {
            let _ = self.wait_in_turn(ticket);
        }
        Ok(())
    }

    /// Ends jobs: waits for their layers in flight, and makes the stored data permanent, with one
    /// flush for all, and for all callers that waited for the end of another one. Other calls do
    /// not wait for a flush. The results are for the catalog: [`kv_catalog::Catalog::written`].
    ///
    /// A failed flush fails every job that stored something ([`StoreError::JournalFailed`]), in
    /// this call and in all later ones, and no new job may store: it is unknown what a later flush
    /// would cover. Open the plane again.
    ///
    /// # Errors
    /// Returns [`StoreError::Argument`] or [`StoreError::Failed`].
    pub fn end(&self, jobs: &[JobId]) -> Result<Vec<JobDone>, StoreError> {
        jobs.iter().try_for_each(|job| self.wait_for_job(*job))?;
        let mut ended = self.with(|mover| mover.end_all(jobs))?;
        self.settle(&mut ended)?;
        Ok(ended)
    }

    /// Makes what ended jobs stored permanent, with one flush for all, or fails them.
    pub(crate) fn settle(&self, ended: &mut [JobDone]) -> Result<(), StoreError> {
        let stored = ended.iter().filter(|done| done.has_stored());
        let before = stored.map(|done| done.flushes).max();
        let took = before.map_or(Ok(None), |before| self.flush_after(before))?;
        self.with(|mover| {
            mover.settle(ended, took);
            Ok(())
        })
    }

    /// Flushes the devices' volatile caches, unless a flush that began after this call does it. A
    /// failure breaks the seal.
    pub(crate) fn flush(&self) -> Result<(), StoreError> {
        let before = self.with(|mover| Ok(mover.flushes))?;
        let took = self.flush_after(before)?;
        self.with(|mover| {
            mover.settle(&mut [], took);
            Ok(())
        })
    }

    /// Flushes, unless a flush that began after the first `before` does it. Returns the time that
    /// it took.
    fn flush_after(&self, before: u64) -> Result<Option<Nanos>, StoreError> {
        let mut flushed = lock(&self.shared.flushed);
        if *flushed > before {
            return Ok(None);
        }
        let begun = self.with(|mover| Ok(mover.begin_flush()))?;
        let Some(Flushing { number, devices, seal }) = begun else { return Ok(None) };
        let since = self.now();
        // None is asked after the first that fails.
        let _ = devices.iter().try_for_each(|(controller, nsid)| controller.flush(*nsid, &seal));
        *flushed = number;
        Ok(Some(self.now() - since))
    }

    /// Returns an error if the plane was closed or has failed.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn check_open(&self) -> Result<(), StoreError> {
        self.with(|_| Ok(()))
    }

    /// Returns an error if the plane takes no writes any more.
    ///
    /// # Errors
    /// Returns [`StoreError::JournalFailed`] with the first cause after a failed flush, or write of
    /// the store's journal; [`StoreError::ReadOnly`], or [`StoreError::Failed`].
    pub fn check_writable(&self) -> Result<(), StoreError> {
        self.with(|mover| mover.check_writable())
    }

    /// Abandons a job, whose layers in flight end by themselves. Wait for them before the engine
    /// uses their blocks.
    pub fn abandon(&self, job: JobId) {
        // A closed plane has nothing left to release.
        let _ = self.with(|mover| {
            mover.abandon(job);
            Ok(())
        });
    }

    /// Returns true if there is a DRAM cache ([`crate::StoreOptions::dram`]).
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn has_dram(&self) -> Result<bool, StoreError> {
        self.with(|mover| Ok(mover.keeps_blocks()))
    }

    /// Starts reading files into the DRAM cache ([`crate::StoreOptions::dram`]), except those
    /// that are cached or being read. All of them are protected from eviction for the time
    /// `within`. Without a cache, does nothing; while half of all IOCBs are in flight, starts
    /// nothing. Returns how many leading files are cached or being read. Files that are rewritten
    /// meanwhile are not kept.
    ///
    /// `expected`: same as for [`Plane::begin`]. Reads in flight are not cancelled, and delay
    /// everything started later: prefetch what is needed next.
    ///
    /// # Errors
    /// Returns [`StoreError::Argument`], [`StoreError::Ring`] or [`StoreError::Failed`].
    pub fn prefetch(
        &self,
        files: &[FileId],
        expected: &[u32],
        within: Nanos,
    ) -> Result<usize, StoreError> {
        let until = self.shared.clock.now() + within;
        self.with(|mover| Ok(mover.prefetch(files, expected, until)?.0))
    }

    /// Has `scheduler` decide when layers start that devices move ([`crate::Plane::start`]), until
    /// the plane is closed: reads by deadline, and writes while nothing reads. With a DRAM cache,
    /// it reads ahead for announced requests. Without it, every layer starts at once.
    ///
    /// Someone must then call [`Plane::advance`] regularly: decisions are made in it, and
    /// while a caller waits for a layer. Layers that are started in between are put in order. Times
    /// of the scheduler are those of the plane's clock.
    ///
    /// # Errors
    /// Returns [`StoreError::Config`] if it has one, or [`StoreError::Failed`].
    pub fn pace(&self, scheduler: Scheduler, ahead: LookaheadConfig) -> Result<(), StoreError> {
        let pacer = Pacer::new(scheduler, Lookahead::new(ahead), self.shared.clock.now());
        self.with(|mover| {
            if mover.pacer.is_some() {
                let problem = "the plane has a scheduler already".to_owned();
                return Err(StoreError::Config { field: "pace", problem });
            }
            mover.pacer = Some(Box::new(pacer));
            Ok(())
        })
    }

    /// Calls `act` with the scheduler: for the engine's steps and layers
    /// ([`Scheduler::announce`], [`Scheduler::layer_begins`]), and for its counts. Returns `None`
    /// without one.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn with_scheduler<T>(
        &self,
        act: impl FnOnce(&mut Scheduler) -> T,
    ) -> Result<Option<T>, StoreError> {
        self.with(|mover| Ok(mover.pacer.as_deref_mut().map(|pacer| act(&mut pacer.scheduler))))
    }

    /// Same as [`Plane::with_scheduler`], for the lookahead: for the duration of the engine's
    /// iterations ([`Lookahead::iteration`]), and for its counts.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn with_lookahead<T>(
        &self,
        act: impl FnOnce(&mut Lookahead<FileId>) -> T,
    ) -> Result<Option<T>, StoreError> {
        self.with(|mover| Ok(mover.pacer.as_deref_mut().map(|pacer| act(&mut pacer.lookahead))))
    }

    /// Sets the owner of a job, which has a fair share of the devices, and the announced step that
    /// a read is for: its layers are due before those of the step compute. Without a step, a read
    /// is due as soon as is fair. Applies to layers that start later.
    ///
    /// # Errors
    /// Returns [`StoreError::Argument`] or [`StoreError::Failed`].
    pub fn assign(&self, job: JobId, flow: Flow, step: Option<StepId>) -> Result<(), StoreError> {
        self.with(|mover| mover.assign(job, flow, step))
    }

    /// Starts the layers of a job that wait for their turn, and later ones at once: the engine
    /// needs its blocks.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn hurry(&self, job: JobId) -> Result<(), StoreError> {
        self.with(|mover| {
            mover.hurry(job);
            Ok(())
        })
    }

    /// Announces a request that will load these files. With a pacer and a DRAM cache, they are read
    /// into the cache in time, as long as that delays no other transfer. Calling it again updates
    /// time and files, and retries files that were late, failed to read, or found no room.
    ///
    /// `expected`: same as for [`Plane::begin`].
    ///
    /// # Errors
    /// Returns [`StoreError::Argument`] or [`StoreError::Failed`].
    pub fn announce(
        &self,
        request: RequestId,
        files: &[FileId],
        expected: &[u32],
        when: When,
    ) -> Result<(), StoreError> {
        self.with(|mover| mover.announce(request, files, expected, when))
    }

    /// Forgets what was in files, in the DRAM cache and about mismatches: a plane beside this one
    /// has stored other blocks in them.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn forget(&self, files: &[FileId]) -> Result<(), StoreError> {
        self.with(|mover| {
            mover.forget(files);
            Ok(())
        })
    }

    /// Ends reading ahead for a request, which `runs` now or else was aborted: then files that only
    /// it wanted are evicted first. Reads in flight end by themselves.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn withdraw(&self, request: RequestId, runs: bool) -> Result<(), StoreError> {
        self.with(|mover| {
            mover.withdraw(request, runs);
            Ok(())
        })
    }

    /// Processes completions, and starts everything that may start. An operation in flight for
    /// [`crate::StoreOptions::wait_timeout`] while nothing moves has failed, the same as for
    /// [`Plane::wait`].
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn advance(&self) -> Result<Advanced, StoreError> {
        self.with(Mover::advance)
    }

    /// Waits until the pacer has work, or for `timeout`. Returns true if it has.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] once the plane was closed.
    pub fn has_work(&self, timeout: Duration) -> Result<bool, StoreError> {
        let has_work = |state: &State| match state {
            State::Open(mover) => Ok(mover.has_work()),
            State::Closed(cause) => Err(StoreError::Failed { cause: cause.clone() }),
        };
        let state = lock(&self.shared.state);
        if has_work(&state)? {
            return Ok(true);
        }
        let waited = self.shared.begun.wait_timeout(state, timeout);
        has_work(&waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    /// Returns the files that could not be read since the last call, each once: they are misses
    /// from now on.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] once the plane was closed.
    pub fn take_lost(&self) -> Result<Vec<FileId>, StoreError> {
        self.with(|mover| Ok(mover.take_lost()))
    }

    /// Returns an event that layers can wait for ([`crate::Order::AfterEvent`]) and that the
    /// engine's stream signals. Valid until the plane is closed or has to replace its executor.
    ///
    /// # Errors
    /// Returns [`StoreError::Ring`] if memory runs out, or [`StoreError::Failed`].
    pub fn event(&self) -> Result<Event, StoreError> {
        self.with(Mover::event)
    }

    /// Processes everything since the last call: events of devices, at their poll interval, and
    /// completions.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`], or the error of a recovery from an earlier fault.
    pub fn sync(&self) -> Result<(), StoreError> {
        self.with(Mover::sync)
    }

    /// Polls every device and returns the events since the last call. Without any, it costs one
    /// register read per device. Calls that plan work poll at most every 100 ms, and so does
    /// waiting for a layer; starting one does not. So an idle engine should call this periodically,
    /// for example once a second.
    ///
    /// The plane reacts by itself where it can: a controller with a fatal status is recovered, one
    /// with a PCIe error is reset, media that became read-only refuses writes, and a namespace that
    /// changed but still holds the data region gets new grants. After
    /// [`nvme_driver::ControllerEvent::Requested`] the plane must be closed: the unbind of the
    /// device waits for that.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] if a device was removed, cannot be recovered, or its
    /// namespace no longer holds the data region.
    pub fn poll_events(&self) -> Result<Vec<StoreEvent>, StoreError> {
        self.with(Mover::poll_events)
    }

    /// Returns the devices that their owner wants back (unbind, hot removal): close the plane soon.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] once the plane was closed.
    pub fn requested_devices(&self) -> Result<Vec<DeviceIndex>, StoreError> {
        self.with(|mover| Ok(mover.requested_devices()))
    }

    /// Returns the devices' controllers, for their logs.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn controllers(&self) -> Result<Vec<SharedController>, StoreError> {
        self.with(|mover| {
            let devices = &mover.transport.devices.all;
            Ok(devices.iter().map(|device| device.controller.clone()).collect())
        })
    }

    /// Returns the counts.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn stats(&self) -> Result<PlaneStats, StoreError> {
        self.with(Mover::stats)
    }

    /// Waits for everything that was started. Failures stay with their jobs.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn drain(&self) -> Result<(), StoreError> {
        loop {
            let (in_flight, waiting) = self.with(|mover| {
                mover.hurry_all();
                Ok((mover.all_in_flight(), mover.first_waiting()))
            })?;
            for ticket in in_flight.into_iter().chain(waiting) {
                let _ = self.wait(ticket);
                self.with(|mover| mover.check())?;
            }
            // Those that found no room were not in flight.
            if waiting.is_none() {
                break;
            }
        }
        self.sync()
    }

    /// Waits for everything in flight, stops the I/O kernel, takes the queues back and returns the
    /// controllers and the pool, which is still registered ([`KvPool::unregister`]); `None` if the
    /// plane was closed before. No stream uses memory of the plane any more. Later calls, on any
    /// handle, return `why`.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] if the kernel did not stop, a controller kept a queue, or a
    /// stream did not get past its operations for the store in time; memory is leaked then.
    pub fn close(&self, why: &str) -> Result<Option<ClosedPlane>, StoreError> {
        // A flush uses the controllers.
        let _flushed = lock(&self.shared.flushed);
        // Held to the end: no caller may see it closed while a device uses the engine's blocks.
        let mut state = lock(&self.shared.state);
        if matches!(*state, State::Closed(_)) {
            return Ok(None);
        }
        self.shared.begun.notify_all();
        match std::mem::replace(&mut *state, State::Closed(why.to_owned())) {
            State::Open(mut mover) => {
                let closed = mover.close();
                if let Some(Listener(listener)) = self.shared.listener.get() {
                    listener(&mut mover);
                }
                let (controllers, pool) = closed?;
                Ok(Some(ClosedPlane { controllers, pool }))
            }
            State::Closed(_) => Ok(None),
        }
    }
}

/// Returns true if a layer could not start because as many are in flight as there may be.
fn is_full(started: &Result<(), StoreError>) -> bool {
    matches!(started, Err(StoreError::Busy { .. } | StoreError::StagingBusy { .. }))
}
