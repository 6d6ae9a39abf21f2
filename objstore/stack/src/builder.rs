//! Builds a store from its options.

use std::sync::Arc;

use nvme_driver::{Clock, ControllerOptions, MonotonicClock};
use objstore::{
    Format, KvShape, Namespace, Plane, RankId, Store, StoreConfig, StoreId, StoreOptions,
};

use crate::{
    build::{Built, Plan},
    config::StackConfig,
    error::StackError,
    memory::HostMemory,
    metrics::Endpoint,
    owner::random,
    pacing::Pacing,
    place::Place,
    pool::PoolMemory,
    rank::RankStack,
    stack::Stack,
    store_dir::{COMMAND_BYTES, StoreDir, StoreDirMedia, StoreDirOptions},
    watch::Watch,
};

/// Blocks of a pool that the store allocates, unless another number is given.
const BLOCKS: u32 = 64;

/// Parameters of a store: its options, and values that only a program has.
#[derive(Debug)]
#[must_use = "open it"]
pub struct Builder {
    config: StackConfig,
    /// In place of the path and devices of the options.
    place: Option<Place>,
    shape: KvShape,
    format: Option<Format>,
    namespace: Namespace,
    pool: PoolMemory,
    controller: ControllerOptions,
    options: StoreOptions,
}

impl Builder {
    /// Starts with the options of a store, and the shape of its blocks.
    pub fn new(config: StackConfig, shape: KvShape) -> Self {
        Self {
            config,
            place: None,
            shape,
            format: None,
            namespace: Namespace::default(),
            pool: PoolMemory::Own { blocks: BLOCKS },
            controller: ControllerOptions::default(),
            options: StoreOptions::default(),
        }
    }

    /// Opens the store in an opened directory, or on drives, instead of the path and devices of the
    /// options.
    pub fn on(mut self, place: impl Into<Place>) -> Self {
        self.place = Some(place.into());
        self
    }

    /// Formats the devices first, and marks a directory as ready. Not needed with a capacity.
    pub fn format(mut self, format: Format) -> Self {
        self.format = Some(format);
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

    /// Sets what is in no option, and the defaults of options.
    pub fn options(mut self, options: StoreOptions) -> Self {
        self.options = options;
        self
    }

    /// Checks that the options do not contradict each other. [`Builder::open`] does it, too.
    ///
    /// # Errors
    /// Returns [`StackError::Config`] if they do.
    pub fn check(&self) -> Result<(), StackError> {
        self.config.check(&self.pool)?;
        if self.place.is_some() {
            return Ok(());
        }
        match (self.config.drives(), self.config.capacity) {
            ([], _) => self.config.dir().map(|_| ()),
            (_, None) => Ok(()),
            (_, Some(_)) => {
                let problem = "drives get their store from ripieno format; leave it out";
                Err(StackError::config("capacity", problem))
            }
        }
    }

    /// Checks that this machine has the memory that this number of ranks ask for. Opening does it,
    /// too: a DRAM cache is filled with zeroes at once.
    ///
    /// # Errors
    /// Returns [`StackError::Config`] if it has less.
    pub fn check_memory(&self, ranks: u32) -> Result<(), StackError> {
        HostMemory::check_dram(self.config.dram.unwrap_or(self.options.dram), ranks)
    }

    /// Opens the store; with a capacity, creates it if there is none.
    ///
    /// # Errors
    /// Returns the [`StackError`] of the part that fails; [`StackError::NotEmpty`] if drives hold
    /// data that may not be overwritten.
    pub fn open(mut self) -> Result<Stack, StackError> {
        self.check()?;
        self.check_memory(1)?;
        let (place, format) = self.place()?;
        let namespace = std::mem::take(&mut self.namespace);
        let (store, built, place) = self.build(place, format, |config| {
            Ok(Store::open(StoreConfig { namespace: namespace.clone(), ..config })?)
        })?;
        let mut stack = Stack::new(store, built, place);
        stack.pacer = self.pacer(stack.store().plane())?;
        let serve = |address| Endpoint::of_store(address, stack.store());
        stack.metrics = self.config.metrics.as_ref().map(serve).transpose()?;
        Ok(stack)
    }

    /// Opens the plane of a rank of a store in several processes, on the devices of
    /// [`crate::Ranks::place`].
    ///
    /// # Errors
    /// Returns the [`StackError`] of the part that fails.
    pub fn open_rank(mut self, id: RankId) -> Result<RankStack, StackError> {
        self.check()?;
        self.check_memory(id.ranks)?;
        let (place, format) = self.place()?;
        let (plane, built, place) =
            self.build(place, format, |config| Ok(Plane::open_rank(id, config)?))?;
        let mut stack = RankStack::new(plane, built, place)?;
        stack.pacer = self.pacer(stack.plane())?;
        let serve = |address| Endpoint::of_plane(address, stack.plane());
        stack.metrics = self.config.metrics.as_ref().map(serve).transpose()?;
        Ok(stack)
    }

    fn pacer(&self, plane: &Plane) -> Result<Option<Watch>, StackError> {
        let is_paced = self.config.pacing.unwrap_or(false);
        is_paced.then(|| Pacing::default().spawn(plane)).transpose()
    }

    fn build<T>(
        &self,
        mut place: Place,
        format: Option<Format>,
        open: impl Fn(StoreConfig) -> Result<T, StackError>,
    ) -> Result<(T, Built, Place), StackError> {
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
        let executor = self.config.executor(&self.pool);
        let gpu = executor.gpu()?;
        let (mut options, controller) =
            self.config.tune(executor, self.options.clone(), self.controller.clone());
        // Files do not gain from deallocation: zeroing them only costs time.
        if place.is_on_files() {
            options.deallocate = false;
            options.run_bytes = options.run_bytes.max(COMMAND_BYTES);
        }
        let plan = Plan {
            executor,
            gpu: gpu.as_ref(),
            require: self.config.route,
            shape: &self.shape,
            pool: &self.pool,
            options: &options,
            clock: &clock,
            check: &|_| Ok(()),
        };
        let mut unformatted = format.as_ref();
        let controllers = || place.controllers(&clock, &controller, gpu.as_deref());
        let (opened, built) = plan.open(controllers, |config| {
            if let Some(format) = unformatted.take() {
                place.format(&config.devices, format)?;
            }
            open(config)
        })?;
        if format.is_some() {
            place.set_ready()?;
        }
        Ok((opened, built, place))
    }

    /// Opens or makes the place. Returns it with the format to apply first.
    fn place(&mut self) -> Result<(Place, Option<Format>), StackError> {
        let format = self.format.take();
        if let Some(place) = self.place.take() {
            return Ok((place, format));
        }
        if !self.config.drives().is_empty() {
            return Ok((Place::drives(self.config.drives()), format));
        }
        let dir = self.config.dir()?;
        let Some(bytes) = self.config.capacity else {
            let dir = StoreDir::open(dir)?;
            self.config.check_dir(&dir)?;
            return Ok((dir.into(), format));
        };
        let random = random()?;
        let id = u64::from_le_bytes(*random.first_chunk().expect("8 of 16 bytes"));
        let media = StoreDirMedia::Files { count: self.config.files().unwrap_or(1), bytes };
        let lba_bytes = self.config.lba.unwrap_or(4096);
        let dir = StoreDir::open_or_create(dir, &StoreDirOptions { id, media, lba_bytes })?;
        let new = || Format::new(StoreId(random), self.shape);
        let format = format.or_else(|| (!dir.is_ready()).then(new));
        Ok((dir.into(), format))
    }
}
