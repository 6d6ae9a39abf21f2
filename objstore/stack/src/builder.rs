//! Builds a store from its options.

use std::{mem, sync::Arc};

use gio_kernels::{Ends, EndsClock, cuda::CudaDriver};
use nvme_driver::ControllerOptions;
use objstore::{
    Format, KvPool, KvShape, Namespace, Plane, RankId, RawRing, Route, Store, StoreConfig,
    StoreDevice, StoreId, StoreOptions, Watch,
};

use crate::{
    chosen::Placement,
    config::StackConfig,
    devices::Devices,
    error::StackError,
    executor::Executor,
    gpu::Gpu,
    memory::HostMemory,
    metrics::Endpoint,
    owner::{random, this_process},
    pacing,
    pool::PoolMemory,
    rank::RankStack,
    route::{PoolPlan, limits, routes},
    size::Size,
    stack::{Below, RawStack, Stack},
    store_dir::{COMMAND_BYTES, StoreDir, new_devices},
};

/// Blocks of a pool that the store allocates, unless another number is given.
const BLOCKS: u32 = 64;

/// The steps of opening a store, for programs that take part in them.
pub trait OpenSteps {
    /// Called before a route is tried. Drops all that it has of the route before.
    ///
    /// # Errors
    /// The next route is tried after [`StackError::Unfit`]; any other error ends the opening.
    fn route(&mut self, _route: Route) -> Result<(), StackError> {
        Ok(())
    }

    /// Called when devices and KV pool are ready, before the store is opened on them.
    ///
    /// # Errors
    /// Same as [`OpenSteps::route`].
    fn ready(&mut self, _config: &mut StoreConfig) -> Result<(), StackError> {
        Ok(())
    }

    /// Called while the journal is read: `done` of at most `all` bytes.
    fn read(&mut self, _done: u64, _all: u64) {}
}

impl OpenSteps for () {}

/// Parameters of a store: its options, and values that only a program has.
#[derive(Debug)]
#[must_use = "open it"]
pub struct Builder {
    config: StackConfig,
    /// In place of the path and devices of the options.
    devices: Option<Devices>,
    shape: KvShape,
    format: Option<Format>,
    namespace: Namespace,
    pool: PoolMemory,
    controller: ControllerOptions,
    options: StoreOptions,
    /// That of the executor, once it is open.
    gpu: Option<Arc<Gpu>>,
}

impl Builder {
    /// Starts with the options of a store, and the shape of its blocks.
    pub fn new(config: StackConfig, shape: KvShape) -> Self {
        Self {
            config,
            devices: None,
            shape,
            format: None,
            namespace: Namespace::default(),
            pool: PoolMemory::Own { blocks: BLOCKS },
            controller: ControllerOptions::default(),
            options: StoreOptions::default(),
            gpu: None,
        }
    }

    /// Opens the store on these devices, instead of the path and devices of the options. They may
    /// be attached, with the options of [`Builder::controller`].
    pub fn on(mut self, devices: impl Into<Devices>) -> Self {
        self.devices = Some(devices.into());
        self
    }

    /// Uses the GPU of the executor ([`Executor::gpu`]), if it was opened.
    pub fn gpu(mut self, gpu: Option<Arc<Gpu>>) -> Self {
        self.gpu = gpu;
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
        if self.devices.is_some() {
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

    /// Checks that this machine has the memory that this number of workers ask for, and that a DRAM
    /// cache has room for a block. Opening does it, too: the cache is filled with zeroes at once.
    ///
    /// # Errors
    /// Returns [`StackError::Config`] if it has less.
    pub fn check_memory(&self, workers: u32) -> Result<(), StackError> {
        let dram = self.config.dram.unwrap_or(self.options.dram);
        if self.shape.validate().is_ok() && (1..self.shape.block_bytes()).contains(&dram) {
            let [dram, block] = [dram, self.shape.block_bytes()].map(Size);
            let problem = format!("{dram} have no room for a block of {block}; give more, or 0");
            return Err(StackError::config("dram", problem));
        }
        HostMemory::check_dram(dram, workers)
    }

    /// Returns the bytes on the devices of a block of the store that opening would make in its
    /// directory; `None` if there is one, or no capacity. Writes nothing.
    ///
    /// # Errors
    /// Returns [`StackError::Config`] if the capacity has no room for a block.
    pub fn new_block_bytes(&self) -> Result<Option<u64>, StackError> {
        let Some(bytes) = self.config.capacity else { return Ok(None) };
        if StoreDir::exists(self.config.dir()?) {
            return Ok(None);
        }
        let options = self.config.dir_options(bytes, 0);
        let (files, lba_bytes) = (new_devices(&options)?, options.lba_bytes);
        let (count, format) = (files.len() as u32, self.new_format([0; 16]));
        let stored = format.codec.stored(&self.shape).unwrap_or(self.shape);
        let object_bytes = u64::from(stored.object_bytes).next_multiple_of(lba_bytes.into());
        let block_bytes = u64::from(stored.rows()) * object_bytes;
        let format = Format { capacity_bytes: Some(block_bytes), ..format };
        let least = Store::device_bytes(&format, count, lba_bytes);
        let least = least.map_err(StackError::of_format)?.div_ceil(1 << 20);
        if files[0].bytes >> 20 < least {
            let (given, least) = (Size(bytes), u64::from(count) * least);
            let problem = format!("{given} have no room for a block; give {least}MiB or more");
            return Err(StackError::config("capacity", problem));
        }
        Ok(Some(block_bytes))
    }

    fn new_format(&self, id: [u8; 16]) -> Format {
        let codec = self.config.codec.unwrap_or_default();
        Format { codec, ..Format::new(StoreId(id), self.shape) }
    }

    /// Opens the store; with a capacity, creates it if there is none.
    ///
    /// # Errors
    /// Returns the [`StackError`] of the part that fails; [`StackError::NotEmpty`] if drives hold
    /// data that may not be overwritten.
    pub fn open(self) -> Result<Stack, StackError> {
        self.open_with(&mut ())
    }

    /// Same as [`Builder::open`], by these steps.
    ///
    /// # Errors
    /// Also returns those of `steps`.
    pub fn open_with(mut self, steps: &mut dyn OpenSteps) -> Result<Stack, StackError> {
        self.check_memory(1)?;
        let namespace = mem::take(&mut self.namespace);
        let (store, below) = self.build(steps, |config, steps| {
            let config = StoreConfig { namespace: namespace.clone(), ..config };
            Ok(Store::open_with(config, |done, all| steps.read(done, all))?)
        })?;
        let mut stack = Stack::new(store, below);
        stack.pacer = self.pacer(stack.store().plane())?;
        let serve = |address| Endpoint::of_store(address, stack.store());
        stack.metrics = self.config.metrics.as_ref().map(serve).transpose()?;
        Ok(stack)
    }

    /// Opens the plane of a rank of a store in several processes, on the devices of
    /// [`crate::Ranks::devices`], or beside that on those of [`crate::Ranks::devices_beside`].
    ///
    /// # Errors
    /// Returns the [`StackError`] of the part that fails.
    pub fn open_rank(mut self, id: RankId) -> Result<RankStack, StackError> {
        self.check_memory(id.ranks)?;
        let (plane, below) = self.build(&mut (), |config, _| Ok(Plane::open_rank(id, config)?))?;
        let mut stack = RankStack::new(plane, below)?;
        stack.pacer = self.pacer(stack.plane())?;
        let serve = |address| Endpoint::of_plane(address, stack.plane());
        stack.metrics = self.config.metrics.as_ref().map(serve).transpose()?;
        Ok(stack)
    }

    /// Opens a ring over the devices, without a store, for operations of up to `contexts`
    /// transfers.
    ///
    /// # Errors
    /// Returns the [`StackError`] of the part that fails.
    pub fn open_raw(mut self, contexts: u32) -> Result<RawStack, StackError> {
        let (ring, below) = self.build(&mut (), |config, _| {
            let StoreConfig { devices, executor, clock, pool, options, .. } = config;
            let devices = devices.into_iter().map(StoreDevice::raw).collect::<Result<_, _>>()?;
            Ok(RawRing::open(devices, executor, clock, pool, &options, contexts)?)
        })?;
        Ok(RawStack { ring, below })
    }

    fn pacer(&self, plane: &Plane) -> Result<Option<Watch>, StackError> {
        let is_paced = self.config.pacing.unwrap_or(false);
        is_paced.then(|| pacing::spawn(plane)).transpose()
    }

    /// Takes devices and memory, by each route in turn until `open` succeeds.
    fn build<T>(
        &mut self,
        steps: &mut dyn OpenSteps,
        mut open: impl FnMut(StoreConfig, &mut dyn OpenSteps) -> Result<T, StackError>,
    ) -> Result<(T, Below), StackError> {
        self.check()?;
        let (mut devices, format) = self.devices()?;
        let executor = self.executor(&devices)?;
        if self.gpu.is_none() {
            self.gpu = match (executor, &self.pool) {
                (Executor::File, PoolMemory::Gpu { memory, .. }) => {
                    let device = CudaDriver::load()?.device(memory.ordinal())?;
                    Some(Gpu::for_copies(device)?)
                }
                _ => executor.gpu()?,
            };
        }
        // That whose memory has the queues: who fills them is elsewhere otherwise.
        let runs_kernel = matches!(executor, Executor::Cuda(_));
        let kernel_gpu = self.gpu.clone().filter(|_| runs_kernel);
        self.tune(executor, &devices)?;
        let (mut unformatted, mut not_taken) = (format.as_ref(), Vec::new());
        for &route in routes(executor, &self.pool, self.config.route)? {
            let error = match steps.route(route) {
                Err(error) => error,
                Ok(()) => {
                    let gpu = self.gpu.as_deref();
                    let on = devices.controllers(&self.controller, gpu)?;
                    if executor != Executor::File {
                        on.run()?;
                    }
                    on.outfit(&self.options, kernel_gpu.as_deref())?;
                    let (queues, space, unit) = (on.queues.clone(), on.space.clone(), limits(on).0);
                    let opened = self.pool_plan().register(route, on).and_then(|(pool, place)| {
                        let mut config = self.store_config(executor, &mut devices, pool.clone());
                        if let Some(format) = unformatted.take() {
                            devices.format(&config.devices, format)?;
                        }
                        steps.ready(&mut config)?;
                        Ok((open(config, steps)?, pool, place))
                    });
                    match opened {
                        Err(error) => error,
                        Ok((opened, pool, place)) => {
                            if format.is_some() {
                                devices.set_ready()?;
                            }
                            let placement = Placement { route, queues, pool: place, not_taken };
                            return Ok((opened, Below { pool, placement, space, unit, devices }));
                        }
                    }
                }
            };
            let not = error.of_route(route)?;
            tracing::info!(%route, why = not.why, "the route is not taken");
            not_taken.push(not);
        }
        Err(StackError::NoRoute { tried: not_taken })
    }

    /// Returns the executor: the one that is asked for, or that of the devices and the KV pool.
    fn executor(&self, devices: &Devices) -> Result<Executor, StackError> {
        let executor = self.config.executor(&self.pool);
        let StackConfig { executor: asked, route, io_sms, .. } = &self.config;
        // Both need the I/O kernel on the GPU.
        let on_gpu = *route == Some(Route::Direct) || io_sms.is_some();
        match (asked, executor) {
            (None, _) if devices.has_files() && !on_gpu => Ok(match is_in_valgrind() {
                true => {
                    tracing::warn!(
                        "in valgrind, software controllers move the data: it has no io_uring"
                    );
                    executor
                }
                false => Executor::File,
            }),
            (_, Executor::File) if !devices.has_files() => {
                let problem =
                    "file is for a store in a path at full speed, and drives ng:; take host";
                Err(StackError::config("executor", problem))
            }
            _ => Ok(executor),
        }
    }

    fn pool_plan(&self) -> PoolPlan<'_> {
        let Self { pool, shape, options, gpu, .. } = self;
        let staging_buffers = options.staging_buffers;
        PoolPlan { pool, shape, staging_buffers, gpu: gpu.as_ref() }
    }

    /// Sets the options that depend on the executor and the devices.
    fn tune(&mut self, executor: Executor, devices: &Devices) -> Result<(), StackError> {
        let (options, controller) = (mem::take(&mut self.options), mem::take(&mut self.controller));
        (self.options, self.controller) = self.config.tune(executor, options, controller);
        // The same for all routes: a claim that a route left is this process's own.
        self.options.owner = this_process()?;
        if let Executor::Cuda(choice) = executor {
            self.options.sms = choice.sms;
        }
        if devices.is_read_only() {
            (self.options.read_only, self.options.self_test) = (true, false);
        }
        // Files do not gain from deallocation: zeroing them only costs time.
        if devices.is_on_files() {
            self.options.deallocate = false;
            if self.options.run_bytes == StoreOptions::default().run_bytes {
                self.options.run_bytes = COMMAND_BYTES;
            }
        }
        Ok(())
    }

    /// Takes the attached controllers.
    fn store_config(&self, executor: Executor, devices: &mut Devices, pool: KvPool) -> StoreConfig {
        let mut clock = devices.clock();
        let executor = if executor == Executor::File {
            let ends = Arc::new(Ends::default());
            clock = Arc::new(EndsClock { clock, ends: ends.clone() });
            devices.file_executors(&ends, &clock, self.gpu.as_deref())
        } else {
            executor.factory(&clock, self.gpu.as_ref())
        };
        StoreConfig {
            executor,
            clock,
            shape: self.shape,
            namespace: Namespace::default(),
            pool,
            gpu: self.gpu.as_ref().map(|gpu| gpu.for_store()),
            options: self.options.clone(),
            devices: devices.take_controllers().devices,
        }
    }

    /// Opens or makes the devices. Returns them with the format to apply first.
    fn devices(&mut self) -> Result<(Devices, Option<Format>), StackError> {
        let format = self.format.take();
        if let Some(devices) = self.devices.take() {
            return Ok((devices, format));
        }
        let Some(bytes) = self.config.capacity else {
            return Ok((Devices::find(&self.config)?, format));
        };
        let random = random()?;
        let id = u64::from_le_bytes(*random.first_chunk().expect("8 of 16 bytes"));
        let options = self.config.dir_options(bytes, id);
        let dir = StoreDir::open_or_create(self.config.dir()?, &options)?;
        let format = format.or_else(|| (!dir.is_ready()).then(|| self.new_format(random)));
        Ok((dir.into(), format))
    }
}

/// Returns true in valgrind. It runs one thread at a time, and (3.19) does not know that
/// `io_uring_enter` waits: all threads would stand still while that of the file executor sleeps.
fn is_in_valgrind() -> bool {
    let preloaded = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    preloaded.to_string_lossy().contains("vgpreload")
}
