//! Builds a store from a directory or drives, with a default for everything else.

use std::{path::PathBuf, sync::Arc};

use nvme_driver::{Clock, ControllerOptions, MonotonicClock};
use objstore::{
    Format, KvShape, Namespace, Plane, RankConfig, RankId, Route, Store, StoreId, StoreOptions,
};

use crate::{
    address::MetricsAddress,
    build::{Built, Parts, Plan},
    error::StackError,
    executor::Executor,
    memory::HostMemory,
    metrics::Endpoint,
    owner::random,
    pacing::Pacing,
    place::Place,
    pool::PoolMemory,
    rank::RankStack,
    route::routes,
    stack::Stack,
    store_dir::{COMMAND_BYTES, StoreDir, StoreDirMedia, StoreDirOptions},
    watch::Watch,
};

/// Blocks of a pool that the store allocates, unless another number is given.
const BLOCKS: u32 = 64;

/// Parameters of a store. All but place and shape have defaults.
#[derive(Debug)]
#[must_use = "open it"]
pub struct Builder {
    place: Location,
    shape: KvShape,
    files: Files,
    format: Option<Format>,
    executor: Executor,
    require: Option<Route>,
    namespace: Namespace,
    pool: PoolMemory,
    controller: ControllerOptions,
    options: StoreOptions,
    pacing: Option<Pacing>,
    metrics: Option<MetricsAddress>,
}

#[derive(Debug)]
enum Location {
    Directory(PathBuf),
    Place(Place),
}

/// Files of a directory that is created.
#[derive(Debug, Clone, Copy)]
struct Files {
    /// Bytes in all; `None`: the directory must exist.
    capacity: Option<u64>,
    devices: u32,
    lba_bytes: u32,
}

impl Builder {
    /// Starts with the store in a directory of files, one for each software controller.
    pub fn new(dir: impl Into<PathBuf>, shape: KvShape) -> Self {
        Self::at(Location::Directory(dir.into()), shape)
    }

    /// Starts with the store in an opened directory, or on drives.
    pub fn on(place: impl Into<Place>, shape: KvShape) -> Self {
        Self::at(Location::Place(place.into()), shape)
    }

    fn at(place: Location, shape: KvShape) -> Self {
        Self {
            place,
            shape,
            files: Files { capacity: None, devices: 1, lba_bytes: 4096 },
            format: None,
            executor: Executor::Host,
            require: None,
            namespace: Namespace::default(),
            pool: PoolMemory::Own { blocks: BLOCKS },
            controller: ControllerOptions::default(),
            options: StoreOptions::default(),
            pacing: None,
            metrics: None,
        }
    }

    /// Creates the store if the directory has none, with files of this many bytes in all. They are
    /// allocated immediately.
    pub fn capacity(mut self, bytes: u64) -> Self {
        self.files.capacity = Some(bytes);
        self
    }

    /// Sets the number of software controllers of a directory that is created; default: 1.
    pub fn devices(mut self, count: u32) -> Self {
        self.files.devices = count;
        self
    }

    /// Sets the bytes of an LBA of a directory that is created; default: 4096.
    pub fn lba_bytes(mut self, bytes: u32) -> Self {
        self.files.lba_bytes = bytes;
        self
    }

    /// Formats the devices first, and marks a directory as ready. Not needed with
    /// [`Builder::capacity`].
    pub fn format(mut self, format: Format) -> Self {
        self.format = Some(format);
        self
    }

    /// Sets the executor of the I/O kernel; default: host threads.
    pub fn executor(mut self, executor: Executor) -> Self {
        self.executor = executor;
        self
    }

    /// Requires a route; default: the best that works.
    pub fn require(mut self, route: Option<Route>) -> Self {
        self.require = route;
        self
    }

    /// Sets the namespace of the first handle; default: the empty one.
    pub fn namespace(mut self, namespace: Namespace) -> Self {
        self.namespace = namespace;
        self
    }

    /// Sets the location of the KV pool; default: 64 blocks that the store allocates.
    pub fn pool(mut self, pool: PoolMemory) -> Self {
        self.pool = pool;
        self
    }

    /// Sets the options for attaching to controllers.
    pub fn controller(mut self, options: ControllerOptions) -> Self {
        self.controller = options;
        self
    }

    /// Sets the options of the store.
    pub fn options(mut self, options: StoreOptions) -> Self {
        self.options = options;
        self
    }

    /// Has a thread decide when layers start; default (`None`): at once, in the order of the calls.
    pub fn pacing(mut self, pacing: Option<Pacing>) -> Self {
        self.pacing = pacing;
        self
    }

    /// Serves metrics in the OpenMetrics format at this address; default: nowhere.
    pub fn metrics(mut self, address: Option<MetricsAddress>) -> Self {
        self.metrics = address;
        self
    }

    /// Checks that this machine has the memory that the options ask for. [`Builder::open`] does it,
    /// too: a DRAM cache is filled with zeroes at once.
    ///
    /// # Errors
    /// Returns [`StackError::Config`] if it has less.
    pub fn check(&self) -> Result<(), StackError> {
        HostMemory::check_dram(self.options.dram_bytes, 1)
    }

    /// Opens the store; with [`Builder::capacity`], creates it if there is none.
    ///
    /// # Errors
    /// Returns the [`StackError`] of the part that fails; [`StackError::NotEmpty`] if drives hold
    /// data that may not be overwritten.
    pub fn open(mut self) -> Result<Stack, StackError> {
        self.check()?;
        let (place, format) = self.place()?;
        let namespace = std::mem::take(&mut self.namespace);
        let (store, built, place) = self.build(place, format, |parts, plan| {
            Ok(Store::open(parts.store(plan, namespace.clone()))?)
        })?;
        let mut stack = Stack::new(store, built, place);
        stack.pacer = self.pacer(stack.store().plane())?;
        let serve = |address| Endpoint::of_store(address, stack.store());
        stack.metrics = self.metrics.as_ref().map(serve).transpose()?;
        Ok(stack)
    }

    /// Opens the plane of a rank of a store in several processes, on the devices of
    /// [`crate::Ranks::place`].
    ///
    /// # Errors
    /// Returns the [`StackError`] of the part that fails.
    pub fn open_rank(mut self, id: RankId) -> Result<RankStack, StackError> {
        HostMemory::check_dram(self.options.dram_bytes, id.ranks)?;
        let (place, format) = self.place()?;
        let (plane, built, place) = self.build(place, format, |parts, plan| {
            let Parts { devices, pool, gpu, executor, options, .. } = parts;
            let (clock, shape) = (plan.clock.clone(), *plan.shape);
            let config = RankConfig { id, devices, executor, clock, shape, pool, gpu, options };
            Ok(Plane::open_rank(config)?)
        })?;
        let mut stack = RankStack::new(plane, built, place)?;
        stack.pacer = self.pacer(stack.plane())?;
        let serve = |address| Endpoint::of_plane(address, stack.plane());
        stack.metrics = self.metrics.as_ref().map(serve).transpose()?;
        Ok(stack)
    }

    fn pacer(&self, plane: &Plane) -> Result<Option<Watch>, StackError> {
        self.pacing.as_ref().map(|pacing| pacing.spawn(plane)).transpose()
    }

    fn build<T>(
        &self,
        mut place: Place,
        format: Option<Format>,
        open: impl Fn(Parts, &Plan<'_>) -> Result<T, StackError>,
    ) -> Result<(T, Built, Place), StackError> {
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
        // Contradictions are found before a GPU is opened.
        routes(self.executor, &self.pool, self.require)?;
        let gpu = self.executor.gpu()?;
        // Files do not gain from deallocation: zeroing them only costs time.
        let mut options = self.options.clone();
        if place.is_on_files() {
            options.deallocate = false;
            options.run_bytes = options.run_bytes.max(COMMAND_BYTES);
        }
        let plan = Plan {
            executor: self.executor,
            gpu: gpu.as_ref(),
            require: self.require,
            shape: &self.shape,
            pool: &self.pool,
            options: &options,
            clock: &clock,
            check: &|_| Ok(()),
        };
        let mut unformatted = format.as_ref();
        let controllers = || place.controllers(&clock, &self.controller, gpu.as_deref());
        let (opened, built) = plan.open(controllers, |parts| {
            if let Some(format) = unformatted.take() {
                place.format(&parts.devices, format)?;
            }
            open(parts, &plan)
        })?;
        if format.is_some() {
            place.set_ready()?;
        }
        Ok((opened, built, place))
    }

    /// Opens or makes the place. Returns it with the format to apply first.
    fn place(&mut self) -> Result<(Place, Option<Format>), StackError> {
        let format = self.format.take();
        let dir = match std::mem::replace(&mut self.place, Location::Directory(PathBuf::new())) {
            Location::Place(place) => return Ok((place, format)),
            Location::Directory(dir) => dir,
        };
        let Files { capacity: Some(bytes), devices: count, lba_bytes } = self.files else {
            return Ok((StoreDir::open(&dir)?.into(), format));
        };
        let random = random()?;
        let id = u64::from_le_bytes(*random.first_chunk().expect("8 of 16 bytes"));
        let media = StoreDirMedia::Files { count, bytes };
        let dir = StoreDir::open_or_create(&dir, &StoreDirOptions { id, media, lba_bytes })?;
        let new = || Format::new(StoreId(random), self.shape);
        let format = format.or_else(|| (!dir.is_ready()).then(new));
        Ok((dir.into(), format))
    }
}
