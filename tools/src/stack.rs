//! Opens the store of a replay or a measurement, and gives access to the contents of its KV pool.

use std::sync::Arc;
use std::time::Instant;

use nvme_driver::Nanos;
use nvme_emu::{BandwidthDial, SimClock};
use objstore::{Format, KvPool, Overwrite, StoreConfig, StoreId, StoreOptions};
use rand::{Rng as _, TryRngCore as _, rngs::OsRng};
use ripieno_stack::{
    Builder, Gpu, MemoryPlace, OpenSteps, PoolMemory, Route, Stack, StackConfig, StackError, routes,
};

use crate::config::StoreArgs;
use crate::pool::{CpuAccess, GpuAccess, LAYERS_AHEAD, PARTS_MAX, Pool, PoolAccess};
use crate::problem::{Problem, user_error};
use crate::progress;
use crate::sizing::Sizing;

/// Virtual time of software controllers.
#[derive(Debug)]
pub(crate) struct Sim {
    /// Clock of the controllers.
    pub(crate) clock: Arc<SimClock>,
    /// Bandwidth of the controllers.
    pub(crate) dial: BandwidthDial,
}

impl Sim {
    pub(crate) fn new(args: &StoreArgs) -> Self {
        Self { clock: SimClock::new(args.common.seed), dial: BandwidthDial::default() }
    }
}

/// How the store was opened.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opening {
    /// "opened" if it existed before; "made" or "scratch" if not.
    pub(crate) how: &'static str,
    /// Files in it.
    pub(crate) files: u32,
    /// Milliseconds to open it, including the self-test.
    pub(crate) ms: f64,
}

/// An open store. Fields are dropped in this order.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) pool: Pool,
    pub(crate) stack: Stack,
    pub(crate) opening: Opening,
}

/// Opens a store over the first route that works, and formats it before if it is not kept.
pub(crate) fn open(
    args: &StoreArgs,
    sizing: &Sizing,
    (devices, how): (ripieno_stack::Devices, &'static str),
    gpu: Option<&Arc<Gpu>>,
) -> anyhow::Result<Opened> {
    let memory = PoolMemory::Own { blocks: sizing.pool_blocks };
    let tried = routes(args.executor, &memory, args.config.route).map_err(user_error)?;
    if tried == [Route::Host] {
        sizing.check_pool(args)?;
    }
    let config = StackConfig { executor: Some(args.executor), ..args.config.clone() };
    let mut builder = Builder::new(config, *args.shape)
        .on(devices)
        .pool(memory)
        .controller(args.controller_options())
        .options(options(args))
        .gpu(gpu.cloned());
    if how != "opened" {
        builder = builder.format(format(args, sizing));
    }
    let progress = progress::Opening::new(args.shows_progress());
    let (access, start) = (None, Instant::now());
    let mut steps = Steps { args, sizing, gpu, access, progress, start };
    let opened = builder.open_with(&mut steps);
    steps.progress.finish();
    let ms = steps.start.elapsed().as_secs_f64() * 1e3;
    let (access, stack) = (steps.access, opened.map_err(user_error)?);
    let opening = Opening { how, files: stack.store().stats()?.files.stored, ms };
    let access = access.expect("a store is opened when its pool is ready");
    let pool = Pool::new(access, args.shape, sizing.pool_blocks, args.common.seed);
    Ok(Opened { pool, stack, opening })
}

fn options(args: &StoreArgs) -> StoreOptions {
    let long = Nanos::from_millis(1000 * 3600);
    let options = StoreOptions {
        // Each layer of a request in flight needs its own staging buffer.
        staging_buffers: args.shape.layers.min(LAYERS_AHEAD as u32),
        // Files keep their disk space.
        deallocate: args.devices.emu().is_none_or(|emu| emu.dir().is_none()),
        ..StoreOptions::default()
    };
    if !args.is_virtual {
        return options;
    }
    // Concurrency is unlimited, and simulated devices are slow.
    StoreOptions {
        iocbs: 1 << 15,
        command_timeout: long,
        wait_timeout: long,
        virtual_time: true,
        ..options
    }
}

fn format(args: &StoreArgs, sizing: &Sizing) -> Format {
    Format {
        capacity_bytes: Some(sizing.capacity_bytes()),
        group: Some(sizing.group),
        // A CPU reads another function's memory far too slowly.
        checksums: !args.common.no_checksums && args.flags.path.memory == MemoryPlace::Host,
        // Directories and drives were checked when they were claimed.
        overwrite: Overwrite::Anything,
        ..Format::new(StoreId(OsRng.unwrap_err().random()), *args.shape)
    }
}

/// Takes part in the opening of a store.
struct Steps<'a> {
    args: &'a StoreArgs,
    sizing: &'a Sizing,
    gpu: Option<&'a Arc<Gpu>>,
    access: Option<Box<dyn PoolAccess>>,
    progress: progress::Opening,
    /// Begin of the opening itself.
    start: Instant,
}

impl OpenSteps for Steps<'_> {
    fn route(&mut self, route: Route) -> Result<(), StackError> {
        self.access = None;
        match route {
            Route::Host => Ok(self.sizing.check_pool(self.args).map_err(Problem::unfit)?),
            Route::Staged | Route::Direct => Ok(()),
        }
    }

    fn ready(&mut self, config: &mut StoreConfig) -> Result<(), StackError> {
        config.options.run_bytes = self.args.coalesce();
        self.access = Some(self.access(&config.pool)?);
        self.start = Instant::now();
        Ok(())
    }

    fn read(&mut self, done: u64, all: u64) {
        self.progress.read(done, all, self.start.elapsed());
    }
}

impl Steps<'_> {
    /// Returns the access to the pool's bytes.
    fn access(&self, pool: &KvPool) -> Result<Box<dyn PoolAccess>, StackError> {
        let Self { args, sizing, gpu, .. } = *self;
        let bytes = sizing.pool_bytes(args);
        Ok(match gpu.filter(|_| pool.path() != Route::Host) {
            None => Box::new(CpuAccess::new(pool, bytes as usize)?),
            Some(gpu) => {
                // Parts per batch of objects, times two batches in flight.
                let blocks = sizing.pool_blocks as usize;
                let items = blocks * args.shape.segments as usize * PARTS_MAX * 2;
                Box::new(GpuAccess::new(gpu, pool, bytes, items)?)
            }
        })
    }
}
