//! Opening a plane.

use std::{mem, sync::Arc};

use gio_uring::PoolDesc;
use kv_catalog::{Geometry, KvShape, Region, Seal, Superblock};
use nvme_driver::{Bus, Clock, DmaMemory, PLACEMENTS_MAX, RateLimit};

use super::{
    copier::{Cache, Copier},
    devices::{Device, Devices, PlaneDevice},
    job::Jobs,
    mover::{Mover, Setup, Tally},
    pools::Pools,
    route,
    streams::Streams,
    transport::Transport,
};
use crate::{
    config::{Durability, StoreConfig, StoreGpu, StoreOptions},
    data_path::Route,
    error::StoreError,
    registration::KvPool,
};

/// Opens a plane; see [`crate::Plane::open`].
pub(super) fn open(
    config: StoreConfig,
    devices: Vec<PlaneDevice>,
    superblock: &Superblock,
) -> Result<Mover, StoreError> {
    let StoreConfig { clock, executor, shape, pool, gpu, options, .. } = config;
    let layout = &superblock.layout;
    // One more than the catalog's: for the self-test.
    let (files, checksums) = (layout.files + 1, layout.words_per_file > 0);
    let geometry = superblock.geometry().expect("the devices hold data");
    check(&shape, &pool, gpu.as_ref(), &devices, &options)?;
    let bus = devices[0].controller.lock().bus().clone();
    let mut copier = Copier::new(&*bus, layout, &pool, gpu.as_ref(), &options)?;
    let mut pools = Pools::new(pool.clone());
    let scratch: Vec<Region> = devices.iter().map(|device| device.scratch).collect();
    let devices = Devices::new(devices, &options, clock.now())?;
    // Before anything is granted: the proof has the controllers to itself, and writes.
    if !options.read_only {
        route::prove(&devices.all, &scratch, &pool, gpu.as_ref())?;
        let prove = |cache: &Cache| route::prove(&devices.all, &scratch, &cache.own, None);
        copier.cache.as_ref().map_or(Ok(()), prove)?;
        if let Some(coder) = &copier.coder {
            route::prove(&devices.all, &scratch, coder.memory(), None)?;
        }
    }
    let (fua, must_flush) = durability(&options, &devices);
    let placements = placements(&options, &devices);
    // Files need no explicit contexts.
    let mut transport = Transport::new(devices, executor, clock.clone(), options.clone(), 1)?;
    let setup = Setup { shape, geometry, files, checksums, fua, must_flush, placements, options };
    let proven =
        route::prove_kernel(&mut transport, &scratch, &pool, gpu.as_ref()).and_then(|()| {
            let pads = pads(&*bus, &setup.geometry)?;
            let desc = setup.describe(&transport.devices, pads.as_ref());
            pools.register(transport.ring()?, &desc, checksums)?;
            register(&mut transport, &pool, &setup, gpu, &desc, &mut copier, &*clock)?;
            Ok(pads)
        });
    let pads = match proven {
        Ok(pads) => pads,
        Err(error) => {
            if !transport.give_up() {
                // A kernel that did not stop may still write to it.
                mem::forget(pool);
            }
            return Err(error);
        }
    };
    tracing::info!(
        files,
        file_bytes = setup.geometry.file_bytes(),
        group = setup.geometry.group,
        devices = transport.devices.all.len(),
        executor = transport.executor_name(),
        path = %pool.path(),
        fua,
        "plane opened"
    );
    Ok(Mover {
        transport,
        jobs: Jobs::default(),
        pool,
        pools,
        copier,
        pads,
        setup,
        clock,
        pacer: None,
        tally: Tally::default(),
        map: Vec::new(),
        flushes: 0,
        seal: Seal::default(),
        warnings: RateLimit::default(),
        owner: None,
    })
}

/// Allocates memory for the padding of objects: zeroes to write, then a target for reads.
fn pads(bus: &dyn Bus, geometry: &Geometry) -> Result<Option<Arc<dyn DmaMemory>>, StoreError> {
    let padding = (geometry.slot_bytes - geometry.object_bytes) as usize;
    if padding == 0 {
        return Ok(None);
    }
    let memory = bus.dma().alloc_on(2 * padding.next_multiple_of(4096), bus.numa_node());
    match memory {
        Ok(memory) => Ok(Some(memory)),
        Err(source) => Err(StoreError::Config { field: "padding", problem: source.to_string() }),
    }
}

/// Registers the copier's memory with the ring, and proves that objects get from staging memory to
/// the pool, if there is staging memory.
fn register(
    transport: &mut Transport,
    pool: &KvPool,
    setup: &Setup,
    gpu: Option<StoreGpu>,
    desc: &PoolDesc,
    copier: &mut Copier,
    clock: &dyn Clock,
) -> Result<(), StoreError> {
    let Setup { shape, checksums, options, .. } = setup;
    let ring = transport.ring()?;
    copier.register(ring, pool, desc, *checksums, options.staging_buffers)?;
    let mut streams = gpu.map(|gpu| Streams::new(gpu, ring)).transpose()?;
    if let (Some(moving), true) = (&mut streams, copier.staging.is_some()) {
        let timeout = options.stop_timeout;
        let proof = route::Proof { ring, streams: moving, copier, pool, shape, clock, timeout };
        if let Err(error) = route::prove_scatter_gather(proof) {
            if !moving.is_past() {
                // The GPU may still move objects.
                copier.leak();
                mem::forget((streams, pool.clone()));
            }
            return Err(error);
        }
    }
    transport.streams = streams;
    Ok(())
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
    if pool.path() == Route::Staged && gpu.is_none() {
        let problem = "a staged pool needs a GPU that moves its objects; give the one it is on";
        return config_error("gpu", problem.to_owned());
    }
    if options.queues == 0 {
        return config_error("queues", "at least one queue is needed".to_owned());
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

/// Returns whether writes use force unit access, and whether volatile caches must be flushed.
fn durability(options: &StoreOptions, devices: &Devices) -> (bool, bool) {
    let volatile = devices.all.iter().any(|device| device.is_volatile);
    match options.durability {
        Durability::Auto => (false, volatile),
        Durability::Fua => (true, false),
        Durability::Volatile => (false, false),
    }
}

/// Returns the number of placement handles that every device has and the I/O kernel can name.
fn placements(options: &StoreOptions, devices: &Devices) -> u32 {
    let handles = |device: &Device| {
        let controller = device.controller.lock();
        let space = controller.namespace(device.nsid);
        space.map_or(0, |space| space.placement_ids.len().min(PLACEMENTS_MAX) as u32)
    };
    let fewest = devices.all.iter().map(handles).min().unwrap_or(0);
    if options.placement { fewest } else { 0 }
}
