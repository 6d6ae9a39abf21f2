//! Opening a store.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use gio_uring::{IoExecutor, PoolDesc, Uring, UringOptions};
use nvme_driver::{Clock, Controller, DmaMemory, QueueGrant, Quiesced};
use nvme_spec::ids::Lba;

use super::{
    Device, Factory, Scratch, Store, Tally, Target, route,
    staging::{Staging, StagingLayout},
    streams::Streams,
};
use kv_catalog::{DeviceIndex, FilePool, Geometry, Index, KvShape, Region};

use crate::{
    config::{Durability, StoreConfig, StoreDevice, StoreGpu, StoreOptions},
    error::StoreError,
    registration::KvPool,
    stats::Path,
    transfer::ReleaseSender,
};

impl Store {
    /// Opens an empty store: proves that data gets to the pool and back on the path that it is
    /// registered for, creates and grants the queues, and starts the I/O kernel.
    ///
    /// The pool's memory may not be used meanwhile: the proof writes to its begin and end, and
    /// puts back what was there. It also writes to the first LBAs of each device's region.
    ///
    /// # Errors
    /// [`StoreError::Route`] when a device does not reach the pool, or the GPU does not move
    /// objects to a staged one; [`StoreError::Config`] and [`StoreError::Layout`] when the numbers
    /// do not fit together; [`StoreError::Driver`], [`StoreError::Ring`] and
    /// [`StoreError::Executor`] when a part below refuses.
    pub fn open(config: StoreConfig) -> Result<Self, StoreError> {
        let StoreConfig { devices, clock, mut executor, shape, pool, gpu, options } = config;
        check(&shape, &pool, gpu.as_ref(), &devices, &options)?;
        let mut devices = devices
            .into_iter()
            .enumerate()
            .map(|(at, device)| prepare(at, device, &options))
            .collect::<Result<Vec<Device>, _>>()?;
        let regions: Vec<Region> = devices.iter().map(|device| device.region).collect();
        let geometry = geometry(&shape, &regions, &options)?;
        let files = geometry.files_in(&regions, options.capacity_bytes)?;
        // Before anything is granted: the proof has the controllers to itself.
        route::prove(&mut devices, &pool, gpu.as_ref())?;
        let mut ring = start_ring(&mut devices, executor()?, clock.clone(), &options)?;
        let plan = Plan {
            pool: &pool,
            shape: &shape,
            geometry: &geometry,
            regions: &regions,
            files,
            clock: &*clock,
            options: &options,
        };
        let Parts { target, streams, pads } =
            match plan.register(&mut ring, gpu, &devices[0].controller) {
                Ok(registered) => registered,
                Err(error) => {
                    // A kernel that does not stop keeps its queues.
                    if let Ok(quiesced) = ring.stop(clock.now() + options.stop_timeout) {
                        take_back(&mut devices, &quiesced);
                    }
                    return Err(error);
                }
            };
        let (fua, next_poll) = (fua(&options, &devices), clock.now());
        let (releases, messages) = ReleaseSender::new();
        let used = vec![0; pool.blocks() as usize];
        let store = Self {
            ring: Some(ring),
            target,
            streams,
            devices,
            clock,
            executor: Factory(executor),
            fua,
            shape,
            geometry,
            path: pool.path(),
            pool,
            pads,
            index: Index::new(files),
            files: FilePool::new(files),
            requests: HashMap::new(),
            requests_ever: 0,
            ops: Vec::with_capacity(options.iocbs as usize),
            options,
            ended: Vec::new(),
            events: VecDeque::new(),
            next_poll,
            releases,
            messages,
            tally: Tally::default(),
            scratch: Scratch { used, ..Scratch::default() },
            fault: None,
            failed: None,
        };
        store.announce();
        Ok(store)
    }

    fn announce(&self) {
        tracing::info!(
            files = self.files.files(),
            file_bytes = self.geometry.file_bytes(),
            group = self.geometry.group(),
            devices = self.devices.len(),
            executor = self.ring.as_ref().map_or("none", Uring::executor_name),
            path = %self.path,
            fua = self.fua,
            "store opened"
        );
    }
}

/// What of a store lives in its ring's memory.
struct Parts {
    target: Target,
    streams: Option<Streams>,
    pads: Option<Arc<dyn DmaMemory>>,
}

/// What they are made from.
struct Plan<'a> {
    pool: &'a KvPool,
    shape: &'a KvShape,
    geometry: &'a Geometry,
    regions: &'a [Region],
    files: u32,
    clock: &'a dyn Clock,
    options: &'a StoreOptions,
}

impl Plan<'_> {
    fn register(
        &self,
        ring: &mut Uring,
        gpu: Option<StoreGpu>,
        controller: &Controller,
    ) -> Result<Parts, StoreError> {
        let pads = pads(controller, self.geometry)?;
        let desc = describe(self.geometry, self.regions, self.files, pads.as_ref(), self.options);
        let target = target(ring, self.pool, self.shape, &desc, self.options)?;
        let streams = gpu.map(|gpu| Streams::new(gpu, ring)).transpose()?;
        self.prove_scatter_gather(Parts { target, streams, pads }, ring)
    }

    /// Proves that objects get from staging memory to the pool, where there is staging memory.
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
            // It may move objects yet.
            std::mem::forget((parts, pool.clone()));
        }
        Err(error)
    }
}

/// Grants the queues and starts the I/O kernel on them; on failure they are taken back.
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

/// The proof that no kernel has the grants of `devices`.
#[allow(unsafe_code, reason = "only the grantor knows that no executor was started")]
fn never_started(devices: &[Device]) -> Quiesced {
    let grants = devices.iter().flat_map(|device| device.controller.grants());
    // SAFETY: the ring was not set up. It starts its executor last, and an executor whose start
    // fails runs nothing (`IoExecutor::start`).
    unsafe { Quiesced::assert(grants.map(|grant| grant.epoch)) }
}

/// Takes the queues back for a store that could not be opened. What a device does not give back is
/// leaked.
fn take_back(devices: &mut [Device], quiesced: &Quiesced) {
    for device in devices {
        for qid in device.queues.drain(..) {
            if let Err(error) = device.controller.reclaim(qid, quiesced) {
                tracing::warn!(%error, "giving up on a store that could not be opened");
            }
        }
    }
}

fn config_error<T>(field: &'static str, problem: String) -> Result<T, StoreError> {
    Err(StoreError::Config { field, problem })
}

fn check(
    shape: &KvShape,
    pool: &KvPool,
    gpu: Option<&StoreGpu>,
    devices: &[StoreDevice],
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
    let first = devices[0].controller.bus();
    for device in &devices[1..] {
        let bus = device.controller.bus();
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

/// Chooses namespace and region, and creates the queues.
fn prepare(at: usize, device: StoreDevice, options: &StoreOptions) -> Result<Device, StoreError> {
    let StoreDevice { mut controller, nsid, region, queue_memory } = device;
    let index = DeviceIndex(at as u32);
    let driver = |source| StoreError::Driver { device: index, source };
    let Some(nsid) = nsid.or_else(|| controller.namespaces().first().map(|space| space.nsid))
    else {
        return config_error("devices", format!("{} has no usable namespace", controller.id()));
    };
    let space = controller.namespace(nsid).map_err(driver)?;
    let (first, lbas) = region.unwrap_or((Lba(0), space.lbas));
    if first.0.checked_add(lbas).is_none_or(|end| end > space.lbas) {
        let problem = format!(
            "{lbas} LBAs from LBA {first} on were given to the store, but namespace {nsid} of {} \
             has {} LBAs",
            controller.id(),
            space.lbas
        );
        return config_error("region", problem);
    }
    let region = Region { first, lbas, lba_shift: space.lba_shift };
    let depth = options.queue_depth.min(1 << controller.info().entries_max.ilog2());
    if !queue_memory.is_empty() && queue_memory.len() != usize::from(options.queues_per_device) {
        let (given, queues) = (queue_memory.len(), options.queues_per_device);
        let problem = format!("memory was given for {given} queues, but {queues} are to be made");
        return config_error("queue_memory", problem);
    }
    let mut queues = Vec::new();
    for at in 0..usize::from(options.queues_per_device) {
        let made = match queue_memory.get(at) {
            Some(memory) => controller.create_queue_pair_in(memory.clone()),
            None => controller.create_queue_pair(depth),
        };
        queues.push(made.map_err(driver)?);
    }
    Ok(Device { controller, nsid, region, queues, read_only: false, requested: false })
}

/// Whether writes bypass volatile caches.
fn fua(options: &StoreOptions, devices: &[Device]) -> bool {
    match options.durability {
        Durability::Auto => devices.iter().any(|device| device.controller.info().vwc),
        Durability::Fua => true,
        Durability::Volatile => false,
    }
}

fn geometry(
    shape: &KvShape,
    regions: &[Region],
    options: &StoreOptions,
) -> Result<Geometry, StoreError> {
    let Some(group) = options.group else {
        return Ok(Geometry::for_regions(shape, regions)?);
    };
    let lba_bytes = regions.iter().map(|region| 1 << region.lba_shift).max().unwrap_or(1);
    Ok(Geometry::new(shape, regions.len() as u32, group, lba_bytes)?)
}

/// Grants every queue of every device.
pub(super) fn grant_all(devices: &mut [Device]) -> Result<Vec<(u32, QueueGrant)>, StoreError> {
    let mut grants = Vec::new();
    for (at, device) in devices.iter_mut().enumerate() {
        let index = DeviceIndex(at as u32);
        for qid in &device.queues {
            let grant = device.controller.grant(*qid, device.nsid);
            let grant = grant.map_err(|source| StoreError::Driver { device: index, source })?;
            grants.push((index.0, grant));
        }
    }
    Ok(grants)
}

pub(super) fn ring_options(options: &StoreOptions) -> UringOptions {
    UringOptions {
        command_timeout: options.command_timeout,
        virtual_time: options.virtual_time,
        stop_timeout: options.stop_timeout,
        arena_bytes: options.arena_bytes,
        // The store has no explicit contexts.
        explicit_max: 1,
        ..UringOptions::default()
    }
}

/// Memory for the padding of objects: zeroes to write, then a place to read to.
fn pads(
    controller: &Controller,
    geometry: &Geometry,
) -> Result<Option<Arc<dyn DmaMemory>>, StoreError> {
    let padding = (geometry.slot_bytes() - geometry.object_bytes()) as usize;
    if padding == 0 {
        return Ok(None);
    }
    let bus = controller.bus();
    let memory = bus.dma().alloc_on(2 * padding.next_multiple_of(4096), bus.numa_node());
    match memory {
        Ok(memory) => Ok(Some(memory)),
        Err(source) => config_error("padding", source.to_string()),
    }
}

/// Everything of the ring's pool but where its objects are in memory.
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

/// Registers the pool with the ring, or each buffer of its staging memory.
pub(super) fn target(
    ring: &mut Uring,
    pool: &KvPool,
    shape: &KvShape,
    desc: &PoolDesc,
    options: &StoreOptions,
) -> Result<Target, StoreError> {
    if pool.path() != Path::Staged {
        return Ok(Target::Pool(ring.register_pool(&PoolDesc {
            row_iova: pool.row_iova().to_vec(),
            block_stride: pool.block_stride(),
            blocks: pool.blocks(),
            ..desc.clone()
        })?));
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
