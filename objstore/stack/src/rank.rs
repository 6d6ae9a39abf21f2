//! The plane of a rank with its devices, in a worker's process.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use gio_uring::RawStream;
use nvme_driver::{Clock, ControllerOptions, Nanos, Waiter};
use nvme_spec::nvm::Direction;
use objstore::{
    FileId, JobId, KvShape, Layer, LayerDone, Move, Order, Plane, PlaneStats, RankConfig, RankId,
    Report, StoreError, StoreEvent, StoreOptions, Ticket,
};

use crate::{
    bounce::Bounced,
    build::{Built, Parts, Placement, Plan},
    error::StackError,
    executor::Executor,
    place::Place,
    pool::PoolMemory,
    route::Route,
    stack::shut_down,
};

mod watch;

use watch::Watch;

/// Parameters of a rank's plane.
#[derive(Debug)]
pub struct RankStackConfig {
    /// Its devices: [`crate::Ranks::place`].
    pub place: Place,
    /// The rank and its store.
    pub id: RankId,
    /// The executor of the I/O kernel.
    pub executor: Executor,
    /// The required route; `None`: the best that works.
    pub require: Option<Route>,
    /// Shape of a KV block.
    pub shape: KvShape,
    /// Location of the KV pool.
    pub pool: PoolMemory,
    /// Options for attaching to controllers.
    pub controller: ControllerOptions,
    /// Options of the plane.
    pub options: StoreOptions,
}

/// A plane, and the resources that must outlive it. Any number of threads may use it; a waiting
/// thread does not block the others.
///
/// A thread of its own watches the devices: the removal of a device fails the plane, and a request
/// of a device's owner to give it back closes it. Every later call returns the reason.
#[derive(Debug)]
pub struct RankStack {
    shared: Arc<Shared>,
    _watch: Watch,
    clock: Arc<dyn Clock>,
    wait_timeout: Nanos,
    shape: KvShape,
    is_bounced: bool,
    placement: Placement,
}

#[derive(Debug)]
struct Shared(Mutex<State>);

#[derive(Debug)]
enum State {
    Open(Box<Open>),
    /// Closed, for this reason.
    Closed(String),
}

/// Fields are dropped in this order: users before what they use.
#[derive(Debug)]
struct Open {
    plane: Plane,
    jobs: HashMap<JobId, Job>,
    built: Built,
}

#[derive(Debug)]
struct Job {
    direction: Direction,
    /// The ticket of each layer in flight.
    tickets: Vec<Option<Ticket>>,
    bounced: Option<Bounced>,
}

impl Open {
    fn poll(&mut self, job: JobId, layer: Layer) -> Result<Option<LayerDone>, StackError> {
        let Self { plane, jobs, .. } = self;
        let entry = jobs.get_mut(&job).ok_or(StoreError::NoSuchJob { job })?;
        let slot = entry.tickets.get_mut(layer.0 as usize);
        let slot = slot.ok_or(StackError::NotStarted { layer })?;
        let ticket = slot.as_ref().ok_or(StackError::NotStarted { layer })?;
        let polled = plane.poll(ticket);
        if !matches!(polled, Ok(None)) {
            *slot = None;
        }
        let done = polled?;
        if done.is_some() {
            entry.arrived(layer);
        }
        Ok(done)
    }

    /// Waits for an overdue layer, recovering devices that hang.
    fn insist(&mut self, job: JobId, layer: Layer) -> Result<LayerDone, StackError> {
        let Self { plane, jobs, .. } = self;
        let entry = jobs.get_mut(&job).ok_or(StoreError::NoSuchJob { job })?;
        let ticket = entry.tickets[layer.0 as usize].take();
        let done = plane.wait(ticket.ok_or(StackError::NotStarted { layer })?)?;
        entry.arrived(layer);
        Ok(done)
    }
}

impl Job {
    /// Copies a retrieved layer out of its bounce buffers.
    fn arrived(&self, layer: Layer) {
        if let (Some(bounced), Direction::Read) = (&self.bounced, self.direction) {
            bounced.copy(layer, Direction::Read);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(
        &self,
        act: impl FnOnce(&mut Open) -> Result<T, StackError>,
    ) -> Result<T, StackError> {
        match &mut *self.state() {
            State::Open(open) => act(open),
            State::Closed(why) => Err(StoreError::Failed { cause: why.clone() }.into()),
        }
    }

    fn close(&self, why: String) -> Result<(), StackError> {
        // Held to the end: no caller may see it closed while a device uses the engine's blocks.
        let mut state = self.state();
        if matches!(*state, State::Closed(_)) {
            return Ok(());
        }
        let State::Open(open) = std::mem::replace(&mut *state, State::Closed(why)) else {
            unreachable!("it was just seen to be open")
        };
        let Open { plane, jobs, built } = *open;
        let closed = plane.close();
        drop(jobs);
        let _below = built.unmap();
        closed?.controllers.iter().try_for_each(|controller| shut_down(&mut controller.lock()))
    }

    /// Checks the devices, for the watch thread. Returns true while there is anything to watch.
    fn look(&self) -> bool {
        let wanted = self.with(|open| {
            open.plane.sync()?;
            Ok(open.plane.requested_devices().next())
        });
        let device = match wanted {
            Ok(None) => return true,
            Ok(Some(device)) => device,
            // The next caller receives the error.
            Err(_) => return false,
        };
        let why = format!("the owner of device {device} wants it back, so the store was closed");
        tracing::warn!(%device, "its owner wants it back; closing the store");
        if let Err(error) = self.close(why) {
            tracing::error!(%error, "closing the store for the owner of a device");
        }
        false
    }
}

impl RankStack {
    /// Builds the devices and opens the plane on them.
    ///
    /// # Errors
    /// Returns the [`StackError`] of the part that fails, or an error of [`Plane::open_rank`].
    pub fn open(config: RankStackConfig, clock: Arc<dyn Clock>) -> Result<Self, StackError> {
        let RankStackConfig { place, id, executor, require, shape, pool, controller, options } =
            config;
        let wait_timeout = options.wait_timeout;
        let plan = Plan {
            place,
            executor,
            require,
            shape: &shape,
            pool: &pool,
            controller: &controller,
            options,
            format: None,
            clock: &clock,
        };
        let (plane, built) = plan.open(|parts| {
            let Parts { devices, pool, gpu, executor, options } = parts;
            let clock = clock.clone();
            let config = RankConfig { id, devices, executor, clock, shape, pool, gpu, options };
            Ok(Plane::open_rank(config)?)
        })?;
        Self::over(plane, built, clock, wait_timeout)
    }

    fn over(
        plane: Plane,
        built: Built,
        clock: Arc<dyn Clock>,
        wait_timeout: Nanos,
    ) -> Result<Self, StackError> {
        let (is_bounced, placement) = (built.bounce.is_some(), built.placement.clone());
        let shape = *plane.shape();
        let open = Box::new(Open { plane, jobs: HashMap::new(), built });
        let shared = Arc::new(Shared(Mutex::new(State::Open(open))));
        let watched = shared.clone();
        let watch = Watch::spawn(move || watched.look()).map_err(StackError::Watch)?;
        Ok(Self { shared, _watch: watch, clock, wait_timeout, shape, is_bounced, placement })
    }

    fn with<T>(
        &self,
        act: impl FnOnce(&mut Open) -> Result<T, StackError>,
    ) -> Result<T, StackError> {
        self.shared.with(act)
    }

    /// Returns the shape of the KV blocks.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Same as [`crate::Stack::is_bounced`].
    #[must_use]
    pub fn is_bounced(&self) -> bool {
        self.is_bounced
    }

    /// Returns the route, the locations, and the reasons against better routes.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Prepares to move blocks; see [`Plane::begin`].
    ///
    /// # Errors
    /// Returns [`StackError::Bounce`], or an error of [`Plane::begin`].
    pub fn begin(
        &self,
        direction: Direction,
        moves: &[Move],
        expected: &[u32],
    ) -> Result<JobId, StackError> {
        self.with(|open| {
            let blocks: Vec<_> = moves.iter().map(|entry| entry.block).collect();
            let bounced =
                open.built.bounce.as_ref().map(|bounce| bounce.take(&blocks)).transpose()?;
            let mut moves = moves.to_vec();
            if let Some(bounced) = &bounced {
                let buffers = moves.iter_mut().zip(bounced.buffers());
                buffers.for_each(|(entry, buffer)| entry.block = *buffer);
            }
            let id = open.plane.begin(direction, &moves, expected)?;
            let tickets = (0..self.shape.layers).map(|_| None).collect();
            open.jobs.insert(id, Job { direction, tickets, bounced });
            Ok(id)
        })
    }

    /// Starts reading files into host memory, for jobs that load them within this time; see
    /// [`Plane::prefetch`]. Returns the number of leading files that are there or in flight.
    ///
    /// # Errors
    /// Same as [`Plane::prefetch`].
    pub fn prefetch(
        &self,
        files: &[FileId],
        expected: &[u32],
        within: Nanos,
    ) -> Result<usize, StackError> {
        let until = self.clock.now() + within;
        self.with(|open| {
            // Discards finished prefetches, for which no caller waits.
            open.plane.take_ended();
            Ok(open.plane.prefetch(files, expected, until)?.0)
        })
    }

    /// Starts a layer, ordered after the work already enqueued on `after`, a stream of the pool's
    /// GPU. Waits while the limit of layers in flight is reached.
    ///
    /// # Errors
    /// Same as [`Plane::start`].
    pub fn start(
        &self,
        job: JobId,
        layer: Layer,
        after: Option<RawStream>,
    ) -> Result<(), StackError> {
        let mut waiter = Waiter::new(&*self.clock, self.clock.now() + self.wait_timeout);
        loop {
            let started = self.with(|open| {
                let Open { plane, jobs, .. } = open;
                let entry = jobs.get_mut(&job).ok_or(StoreError::NoSuchJob { job })?;
                if let Some(bounced) = &entry.bounced {
                    if after.is_some() {
                        // The copy would not be ordered with the stream.
                        return Err(StoreError::NoStreams.into());
                    }
                    if entry.direction == Direction::Write {
                        bounced.copy(layer, Direction::Write);
                    }
                }
                let order = after.map_or(Order::Unordered, Order::AfterStream);
                let ticket = plane.start(job, layer, order)?;
                entry.tickets[layer.0 as usize] = Some(ticket);
                Ok(())
            });
            let full = matches!(
                started,
                Err(StackError::Store(StoreError::Busy { .. } | StoreError::StagingBusy { .. }))
            );
            if !full || !waiter.wait() {
                return started;
            }
        }
    }

    /// Makes later work on `stream` wait for a started layer; see [`Plane::join`]. Does not block;
    /// a failure of the layer is reported by [`RankStack::end`].
    ///
    /// # Errors
    /// Returns [`StackError::NotStarted`], or an error of [`Plane::join`].
    pub fn join(&self, job: JobId, layer: Layer, stream: RawStream) -> Result<(), StackError> {
        self.with(|open| {
            let Open { plane, jobs, .. } = open;
            let entry = jobs.get(&job).ok_or(StoreError::NoSuchJob { job })?;
            let ticket = entry.tickets.get(layer.0 as usize).and_then(Option::as_ref);
            Ok(plane.join(ticket.ok_or(StackError::NotStarted { layer })?, stream)?)
        })
    }

    /// Waits for a started layer. On return, no device uses the layer's blocks.
    ///
    /// # Errors
    /// Returns [`StackError::NotStarted`], or an error of [`Plane::wait`].
    pub fn wait(&self, job: JobId, layer: Layer) -> Result<LayerDone, StackError> {
        let mut waiter = Waiter::new(&*self.clock, self.clock.now() + self.wait_timeout);
        loop {
            if let Some(done) = self.poll(job, layer)? {
                return Ok(done);
            }
            if !waiter.wait() {
                return self.with(|open| open.insist(job, layer));
            }
        }
    }

    /// Polls a layer: `None` while it is in flight.
    ///
    /// # Errors
    /// Same as [`RankStack::wait`].
    pub fn poll(&self, job: JobId, layer: Layer) -> Result<Option<LayerDone>, StackError> {
        self.with(|open| open.poll(job, layer))
    }

    /// Ends jobs: waits for their layers in flight, and makes the stored data durable, with one
    /// flush for all. The reports are for the catalog: [`objstore::DurableCatalog`].
    ///
    /// A failed flush fails every job that stored something ([`StoreError::JournalFailed`]), in
    /// this call and in all later ones, and no new job is accepted: open the rank again.
    ///
    /// # Errors
    /// Returns [`StoreError::NoSuchJob`] or [`StoreError::Failed`].
    pub fn end(&self, jobs: &[JobId]) -> Result<Vec<Report>, StackError> {
        let mut ended = Vec::with_capacity(jobs.len());
        for &job in jobs {
            for layer in (0..self.shape.layers).map(Layer) {
                let mut waiter = Waiter::new(&*self.clock, self.clock.now() + self.wait_timeout);
                while matches!(self.poll(job, layer), Ok(None)) {
                    if !waiter.wait() {
                        // The end of the job reports the result.
                        let _ = self.with(|open| open.insist(job, layer));
                    }
                }
            }
            ended.push(self.with(|open| {
                let done = open.plane.end(job)?;
                let entry = open.jobs.remove(&job).ok_or(StoreError::NoSuchJob { job })?;
                Ok((entry.direction, done))
            })?);
        }
        self.with(|open| Ok(open.plane.report(ended)))
    }

    /// Returns the files whose data was unreadable or corrupt since the last call, for the catalog.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] once it was closed.
    pub fn take_lost(&self) -> Result<Vec<FileId>, StackError> {
        self.with(|open| Ok(open.plane.take_lost()))
    }

    /// Returns events of the devices since the last call; see [`Plane::poll_events`]. Optional.
    ///
    /// # Errors
    /// Same as [`Plane::poll_events`].
    pub fn poll_events(&self) -> Result<Vec<StoreEvent>, StackError> {
        self.with(|open| Ok(open.plane.poll_events()?))
    }

    /// Returns the counters.
    ///
    /// # Errors
    /// Same as [`Plane::stats`].
    pub fn stats(&self) -> Result<PlaneStats, StackError> {
        self.with(|open| Ok(open.plane.stats()?))
    }

    /// Waits for I/O in flight, shuts the devices down, and releases the engine's memory. Every
    /// later call fails as closed.
    ///
    /// # Errors
    /// Returns [`StackError::Shutdown`], or an error of [`Plane::close`].
    pub fn close(&self) -> Result<(), StackError> {
        self.shared.close("it was closed".to_owned())
    }
}

#[cfg(test)]
mod durability;
#[cfg(test)]
mod tests;
