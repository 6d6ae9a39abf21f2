//! Opening a plane.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use gio_uring::{IoExecutor, PoolDesc, Uring, UringOptions};
use kv_catalog::{DeviceIndex, Geometry, KvShape, Region};
use nvme_driver::{
    Bus, Clock, DmaMemory, Nanos, PLACEMENTS_MAX, QueueGrant, QueueMemory, Quiesced,
};
use nvme_spec::ids::{Nsid, QueueId};

use super::{
    Device, Factory, Plane, PlaneId, Scratch, SharedController, Tally, Target,
    late::Late,
    memory::HostMemory,
    route,
    staging::{Staging, StagingLayout},
    streams::Streams,
};
use crate::{
    config::{Durability, ExecutorFactory, StoreGpu, StoreOptions},
    error::StoreError,
    registration::KvPool,
    stats::Path,
};

/// A device of a plane.
#[derive(Debug)]
pub struct PlaneDevice {
    /// The controller, in the ready state.
    pub controller: SharedController,
    /// The namespace.
    pub nsid: Nsid,
    /// Region of the files' objects.
    pub data: Region,
    /// At least 16 KiB that the proof of the path may overwrite.
    pub scratch: Region,
    /// Memory of the device's queues, one entry for each; memory of the controller's address space
    /// if empty.
    pub queue_memory: Vec<QueueMemory>,
}

/// Configuration of a plane.
pub struct PlaneConfig {
    /// The devices. All of their controllers must share one DMA address space with the pool.
    pub devices: Vec<PlaneDevice>,
    /// Clock.
    pub clock: Arc<dyn Clock>,
    /// Creates the executor of the I/O kernel.
    pub executor: ExecutorFactory,
    /// Shape of a KV block.
    pub shape: KvShape,
    /// Placement of files in the devices' data regions.
    pub geometry: Geometry,
    /// Number of files. The last one is reserved for the self-test.
    pub files: u32,
    /// Set to compute checksums of stored objects, and compare those of retrieved ones.
    pub checksums: bool,
    /// The engine's KV memory.
    pub pool: KvPool,
    /// The GPU. Needed for a pool on one, and for [`crate::Order`]s that name a stream.
    pub gpu: Option<StoreGpu>,
    /// Tunable options.
    pub options: StoreOptions,
}

impl std::fmt::Debug for PlaneConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlaneConfig")
            .field("devices", &self.devices)
            .field("geometry", &self.geometry)
            .field("files", &self.files)
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

impl Plane {
    /// Proves that data gets to the pool and back on the path that it is registered for, creates
    /// and grants the queues, starts the I/O kernel, and proves that it reaches every device.
    ///
    /// The pool's memory may not be used meanwhile: the proof writes to both ends of it, and
    /// restores its contents. It also writes to each device's scratch region.
    ///
    /// # Errors
    /// Returns [`StoreError::Route`] if a device does not reach the pool, the I/O kernel does not
    /// reach a device, or the GPU does not move objects to a staged pool;
    /// [`StoreError::Config`] if the configuration is inconsistent;
    /// [`StoreError::Driver`], [`StoreError::Ring`] or [`StoreError::Executor`] if a lower layer
    /// fails.
    pub fn open(config: PlaneConfig) -> Result<Self, StoreError> {
        let PlaneConfig { devices, clock, mut executor, shape, geometry, .. } = config;
        let (files, checksums, pool) = (config.files, config.checksums, config.pool);
        let (gpu, options) = (config.gpu, config.options);
        check(&shape, &pool, gpu.as_ref(), &devices, &options)?;
        let bus = devices[0].controller.lock().bus().clone();
        let mut memory = HostMemory::new(&*bus, &shape, &pool, gpu.as_ref(), &options)?;
        let scratch: Vec<Region> = devices.iter().map(|device| device.scratch).collect();
        let devices = (0..).zip(devices).map(|(at, device)| prepare(at, device, &options));
        let mut devices = devices.collect::<Result<Vec<Device>, _>>()?;
        let regions: Vec<Region> = devices.iter().map(|device| device.region).collect();
        // Before anything is granted: the proof has the controllers to itself.
        route::prove(&devices, &scratch, &pool, gpu.as_ref())?;
        memory.as_ref().map_or(Ok(()), |memory| memory.prove(&devices, &scratch))?;
        let mut ring = start_ring(&mut devices, executor()?, clock.clone(), &options)?;
        let plan = Plan {
            pool: &pool,
            shape: &shape,
            geometry: &geometry,
            regions: &regions,
            files,
            checksums,
            clock: &*clock,
            options: &options,
        };
        let registered = route::prove_kernel(&mut ring, &devices, &scratch, &pool, gpu.as_ref())
            .and_then(|()| plan.register(&mut ring, gpu, &*bus, memory.as_mut()));
        let parts = match registered {
            Ok(registered) => registered,
            Err(error) => {
                give_up(ring, &mut devices, pool, clock.now() + options.stop_timeout);
                return Err(error);
            }
        };
        let (fua, must_flush) = durability(&options, &devices);
        let (next_poll, used) = (clock.now(), vec![0; pool.blocks() as usize]);
        let plane = Self {
            ring: Some(ring),
            placements: placements(&options, &devices),
            target: parts.target,
            streams: parts.streams,
            devices,
            clock,
            executor: Factory(executor),
            checksums,
            fua,
            must_flush,
            read_only: None,
            shape,
            geometry,
            files,
            pool,
            memory,
            pads: parts.pads,
            jobs: HashMap::new(),
            jobs_ever: 0,
            ops: Vec::with_capacity(options.iocbs as usize),
            options,
            abandoned: 0,
            ended: Vec::new(),
            lost: Vec::new(),
            events: VecDeque::new(),
            next_poll,
            late: Late::default(),
            id: PlaneId::new(),
            tally: Tally::default(),
            scratch: Scratch { used, ..Scratch::default() },
            fault: None,
            failed: None,
        };
        plane.announce();
        Ok(plane)
    }

    fn announce(&self) {
        tracing::info!(
            files = self.files,
            file_bytes = self.geometry.file_bytes(),
            group = self.geometry.group(),
            devices = self.devices.len(),
            executor = self.ring.as_ref().map_or("none", Uring::executor_name),
            path = %self.pool.path(),
            fua = self.fua,
            "plane opened"
        );
    }
}

/// Parts of a plane that live in its ring's memory.
struct Parts {
    target: Target,
    streams: Option<Streams>,
    pads: Option<Arc<dyn DmaMemory>>,
}

/// Inputs of [`Parts`].
struct Plan<'a> {
    pool: &'a KvPool,
    shape: &'a KvShape,
    geometry: &'a Geometry,
    regions: &'a [Region],
    files: u32,
    checksums: bool,
    clock: &'a dyn Clock,
    options: &'a StoreOptions,
}

impl Plan<'_> {
    fn register(
        &self,
        ring: &mut Uring,
        gpu: Option<StoreGpu>,
        bus: &dyn Bus,
        memory: Option<&mut HostMemory>,
    ) -> Result<Parts, StoreError> {
        let pads = pads(bus, self.geometry)?;
        let desc = describe(self.geometry, self.regions, self.files, pads.as_ref(), self.options);
        let target = target(ring, self.pool, self.shape, &desc, self.checksums, self.options)?;
        memory.map_or(Ok(()), |memory| memory.register(ring, &desc, self.checksums))?;
        let streams = gpu.map(|gpu| Streams::new(gpu, ring)).transpose()?;
        self.prove_scatter_gather(Parts { target, streams, pads }, ring)
    }

    /// Proves that objects get from staging memory to the pool, if there is staging memory.
    fn prove_scatter_gather(
        &self,
        mut parts: Parts,
        ring: &mut Uring,
    ) -> Result<Parts, StoreError> {
        let (Some(streams), Target::Staged(staging)) = (&mut parts.streams, &mut parts.target)
        else {
            return Ok(parts);
        };
        let (pool, shape, clock) = (self.pool, self.shape, self.clock);
        let timeout = self.options.stop_timeout;
        let proof = route::Proof { ring, streams, staging, pool, shape, clock, timeout };
        let Err(error) = route::prove_scatter_gather(proof) else { return Ok(parts) };
        if !parts.streams.as_ref().is_none_or(Streams::is_past) {
            // The GPU may still move objects.
            std::mem::forget((parts, pool.clone()));
        }
        Err(error)
    }
}

/// Grants the queues and starts the I/O kernel on them; on failure takes them back.
fn start_ring(
    devices: &mut [Device],
    executor: Box<dyn IoExecutor>,
    clock: Arc<dyn Clock>,
    options: &StoreOptions,
) -> Result<Uring, StoreError> {
    let started = grant_all(devices).and_then(|grants| {
        let ring_options = ring_options(options);
        Ok(Uring::init_queue(options.iocbs, executor, clock, &grants, ring_options)?)
    });
    if started.is_err() {
        let quiesced = never_started(devices);
        take_back(devices, &quiesced);
    }
    started
}

/// Returns the proof that no kernel has the grants of `devices`.
#[allow(unsafe_code, reason = "only the grantor knows that no executor was started")]
fn never_started(devices: &[Device]) -> Quiesced {
    let mut epochs = Vec::new();
    for device in devices {
        epochs.extend(device.controller.lock().grants().map(|grant| grant.epoch));
    }
    // SAFETY: the ring was not set up. It starts its executor last, and an executor whose start
    // fails runs nothing (`IoExecutor::start`).
    unsafe { Quiesced::assert(epochs) }
}

/// Stops the ring of a plane that could not be opened. A kernel that does not stop keeps its
/// queues, and the pool is leaked unless no device can write to it any more.
fn give_up(mut ring: Uring, devices: &mut [Device], pool: KvPool, deadline: Nanos) {
    let quiesced = ring.stop(deadline);
    if !quiesced.is_ok_and(|quiesced| take_back(devices, &quiesced)) {
        std::mem::forget(pool);
    }
}

/// Takes the queues back for a plane that could not be opened. Returns true if all came back;
/// queues that a device does not delete are leaked.
fn take_back(devices: &mut [Device], quiesced: &Quiesced) -> bool {
    let mut all = true;
    for device in devices {
        for qid in device.queues.drain(..) {
            if let Err(error) = device.controller.lock().reclaim(qid, quiesced) {
                tracing::warn!(%error, "giving up on a plane that could not be opened");
                all = false;
            }
        }
    }
    all
}

fn config_error<T>(field: &'static str, problem: String) -> Result<T, StoreError> {
    Err(StoreError::Config { field, problem })
}

fn check(
    shape: &KvShape,
    pool: &KvPool,
    gpu: Option<&StoreGpu>,
    devices: &[PlaneDevice],
    options: &StoreOptions,
) -> Result<(), StoreError> {
    shape.validate()?;
    if devices.is_empty() {
        return config_error("devices", "a store needs at least one device".to_owned());
    }
    let (rows, bytes) = (pool.rows(), pool.object_bytes());
    if rows != shape.rows() || bytes != shape.object_bytes {
        let problem = format!(
            "the pool has {rows} rows of {bytes}-byte objects, the shape {} of {}; register the \
             pool with the store's shape",
            shape.rows(),
            shape.object_bytes
        );
        return config_error("pool", problem);
    }
    if pool.path() == Path::Staged && gpu.is_none() {
        let problem = "a staged pool needs a GPU that moves its objects; give the one it is on";
        return config_error("gpu", problem.to_owned());
    }
    if options.queues_per_device == 0 {
        return config_error("queues_per_device", "at least one queue is needed".to_owned());
    }
    let first = devices[0].controller.lock().bus().clone();
    for device in &devices[1..] {
        let bus = device.controller.lock().bus().clone();
        if !Arc::ptr_eq(first.dma(), bus.dma()) {
            let problem = format!(
                "{} is in address space {}, {} in {}; all devices of a store share one",
                first.id(),
                first.dma().name(),
                bus.id(),
                bus.dma().name()
            );
            return config_error("devices", problem);
        }
    }
    Ok(())
}

/// Creates the queues of a device.
fn prepare(at: usize, device: PlaneDevice, options: &StoreOptions) -> Result<Device, StoreError> {
    let PlaneDevice { controller, nsid, data, queue_memory, .. } = device;
    let index = DeviceIndex(at as u32);
    if !queue_memory.is_empty() && queue_memory.len() != usize::from(options.queues_per_device) {
        let (given, queues) = (queue_memory.len(), options.queues_per_device);
        let problem = format!("memory was given for {given} queues, but {queues} are to be made");
        return config_error("queue_memory", problem);
    }
    let mut queues: Vec<QueueId> = Vec::new();
    {
        let mut controller = controller.lock();
        let depth = options.queue_depth.min(1 << controller.info().entries_max.ilog2());
        for at in 0..usize::from(options.queues_per_device) {
            let made = match queue_memory.get(at) {
                Some(memory) => controller.create_queue_pair_in(memory.clone()),
                None => controller.create_queue_pair(depth),
            };
            queues.push(made.map_err(|source| StoreError::Driver { device: index, source })?);
        }
    }
    Ok(Device {
        controller,
        nsid,
        region: data,
        queues,
        read_only: false,
        requested: false,
        must_reset: false,
    })
}

/// Returns whether writes use force unit access, and whether volatile caches must be flushed.
fn durability(options: &StoreOptions, devices: &[Device]) -> (bool, bool) {
    let volatile = devices.iter().any(|device| device.controller.lock().info().vwc);
    match options.durability {
        Durability::Auto => (false, volatile),
        Durability::Fua => (true, false),
        Durability::Volatile => (false, false),
    }
}

/// Returns the number of placement handles that every device has and the I/O kernel can name.
fn placements(options: &StoreOptions, devices: &[Device]) -> u32 {
    let handles = |device: &Device| {
        let controller = device.controller.lock();
        let space = controller.namespace(device.nsid);
        space.map_or(0, |space| space.placement_ids.len().min(PLACEMENTS_MAX) as u32)
    };
    let fewest = devices.iter().map(handles).min().unwrap_or(0);
    if options.placement { fewest } else { 0 }
}

/// Grants every queue of every device.
pub(super) fn grant_all(devices: &mut [Device]) -> Result<Vec<(u32, QueueGrant)>, StoreError> {
    let mut grants = Vec::new();
    for (at, device) in devices.iter_mut().enumerate() {
        let index = DeviceIndex(at as u32);
        for qid in &device.queues {
            let grant = device.controller.lock().grant(*qid, device.nsid);
            let grant = grant.map_err(|source| StoreError::Driver { device: index, source })?;
            grants.push((index.0, grant));
        }
    }
    Ok(grants)
}

pub(super) fn ring_options(options: &StoreOptions) -> UringOptions {
    UringOptions {
        command_timeout: options.command_timeout,
        // The host's timeout is shorter, so that its error, which names the operation, comes first.
        event_timeout: Nanos(options.wait_timeout.0.saturating_mul(2)),
        virtual_time: options.virtual_time,
        stop_timeout: options.stop_timeout,
        arena_bytes: options.arena_bytes,
        // The store has no explicit contexts.
        explicit_max: 1,
        ..UringOptions::default()
    }
}

/// Allocates memory for the padding of objects: zeroes to write, then a target for reads.
fn pads(bus: &dyn Bus, geometry: &Geometry) -> Result<Option<Arc<dyn DmaMemory>>, StoreError> {
    let padding = (geometry.slot_bytes() - geometry.object_bytes()) as usize;
    if padding == 0 {
        return Ok(None);
    }
    let memory = bus.dma().alloc_on(2 * padding.next_multiple_of(4096), bus.numa_node());
    match memory {
        Ok(memory) => Ok(Some(memory)),
        Err(source) => config_error("padding", source.to_string()),
    }
}

/// Returns the description of the ring's pool, without the addresses of its objects.
pub(super) fn describe(
    geometry: &Geometry,
    regions: &[Region],
    files: u32,
    pads: Option<&Arc<dyn DmaMemory>>,
    options: &StoreOptions,
) -> PoolDesc {
    let pad = pads.map(|memory| memory.segments()[0].iova);
    let half = pads.map_or(0, |memory| memory.len() as u64 / 2);
    PoolDesc {
        row_iova: Vec::new(),
        row_memory: Vec::new(),
        data_lba: regions.iter().map(|region| region.first.0).collect(),
        block_stride: 0,
        blocks: 0,
        files,
        group: geometry.group(),
        object_bytes: geometry.object_bytes(),
        slot_bytes: geometry.slot_bytes(),
        run_bytes: options.run_bytes,
        pad_read: pad.map(|iova| iova.offset(half)),
        pad_write: pad,
    }
}

/// Completes the description for a pool that the devices reach.
pub(super) fn of_pool(desc: &PoolDesc, pool: &KvPool, checksums: bool) -> PoolDesc {
    PoolDesc {
        row_iova: pool.row_iova().to_vec(),
        row_memory: if checksums { pool.row_places() } else { Vec::new() },
        block_stride: pool.block_stride(),
        blocks: pool.blocks(),
        ..desc.clone()
    }
}

/// Registers the pool with the ring, or each buffer of its staging memory.
pub(super) fn target(
    ring: &mut Uring,
    pool: &KvPool,
    shape: &KvShape,
    desc: &PoolDesc,
    checksums: bool,
    options: &StoreOptions,
) -> Result<Target, StoreError> {
    if pool.path() != Path::Staged {
        return Ok(Target::Pool(ring.register_pool(&of_pool(desc, pool, checksums))?));
    }
    let layout = StagingLayout::new(pool.memory().len() as u64, shape, options.staging_buffers)?;
    let mut pools = Vec::with_capacity(layout.buffers as usize);
    for at in 0..layout.buffers {
        pools.push(ring.register_pool(&PoolDesc {
            row_iova: layout.row_iova(at, pool, shape)?,
            block_stride: u64::from(shape.object_bytes),
            blocks: layout.slots,
            ..desc.clone()
        })?);
    }
    Ok(Target::Staged(Staging::new(ring, layout, pool, shape, pools)?))
}
