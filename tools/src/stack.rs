//! Builds controllers, driver, KV pool and store for a replay, over the best route that works.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use nvme_driver::{Clock, Nanos};
#[cfg(test)]
use nvme_emu::Emu;
use nvme_emu::{BandwidthDial, SimClock};
use objstore::{
    Format, KvPool, Overwrite, SharedController, Store, StoreConfig, StoreId, StoreOptions,
};
use rand::{Rng as _, TryRngCore as _, rngs::OsRng};
use ripieno_stack::{
    Built, Controllers, Drives, Endpoint, Gpu, MemoryPlace, Placement, Plan, PoolMemory, Route,
    StackError, StoreDir,
};

use crate::config::StoreArgs;
use crate::devices::Devices;
use crate::keep::Keep;
use crate::media;
use crate::pool::{CpuAccess, GpuAccess, LAYERS_AHEAD, PARTS_MAX, Pool, PoolAccess};
use crate::problem::{Problem, user_error, user_errors};
use crate::progress;
use crate::sizing::Sizing;

/// Everything below the engine. Fields are dropped in this order: users before what they use.
#[derive(Debug)]
pub(crate) struct Stack {
    /// Endpoint of the metrics, if there is one.
    pub(crate) metrics: Option<Endpoint>,
    store: Store,
    /// Of the store's devices: for their logs.
    pub(crate) controllers: Vec<SharedController>,
    built: Built,
    pub(crate) opening: Opening,
}

/// Inputs of a stack.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Build<'a> {
    pub(crate) args: &'a StoreArgs,
    pub(crate) sizing: &'a Sizing,
    pub(crate) clock: &'a Arc<dyn Clock>,
    pub(crate) gpu: Option<&'a Arc<Gpu>>,
    /// Location of a kept store.
    pub(crate) keep: Option<&'a Keep>,
    /// Virtual time; `None` for real time.
    pub(crate) sim: Option<&'a Sim>,
}

/// Software controllers in virtual time.
#[derive(Debug)]
pub(crate) struct Sim {
    /// Clock of the controllers.
    pub(crate) clock: Arc<SimClock>,
    /// Bandwidth of the controllers.
    pub(crate) dial: BandwidthDial,
}

/// Result of opening the store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opening {
    /// "opened" if it existed before; "made" or "scratch" if not.
    pub(crate) how: &'static str,
    /// Files in it.
    pub(crate) files: u32,
    /// Milliseconds to open it, including the self-test.
    pub(crate) ms: f64,
}

/// An opened store, and the pool.
type Opened = (Store, Vec<SharedController>, Opening, Pool);

impl Stack {
    /// Builds controllers (or takes the opened drives), driver, pool and store, over the first
    /// route that works.
    pub(crate) fn build(plan: Build<'_>, drives: Option<Drives>) -> anyhow::Result<(Self, Pool)> {
        let Build { args, sizing, gpu, clock, .. } = plan;
        let memory = PoolMemory::Own { blocks: sizing.pool_blocks };
        let (executor, require) = (args.executor, args.config.route);
        let routes = ripieno_stack::routes(executor, &memory, require).map_err(user_error)?;
        if routes == [Route::Host] {
            sizing.check_pool(args)?;
        }
        let check = |route| match route {
            Route::Host => Ok(sizing.check_pool(args).map_err(Problem::unfit)?),
            Route::Staged | Route::Direct => Ok(()),
        };
        let (shape, options) = (args.shape.kv(), plan.options());
        let parts = Plan {
            executor,
            gpu,
            require,
            shape: &shape,
            pool: &memory,
            options: &options,
            clock,
            check: &check,
        };
        let mut drives = drives;
        let opened = parts.open(|| plan.controllers(drives.take()), |config| plan.open(config));
        let ((store, controllers, opening, pool), built) = opened.map_err(user_errors)?;
        // Whole first: if the address is refused, the store ends before its controllers.
        let mut stack = Self { metrics: None, store, controllers, built, opening };
        let serve = |address| Endpoint::of_store(address, &stack.store).map_err(user_error);
        stack.metrics = args.config.metrics.as_ref().map(serve).transpose()?;
        Ok((stack, pool))
    }

    /// Returns the store.
    pub(crate) fn store(&mut self) -> &mut Store {
        &mut self.store
    }

    /// Returns the route and placement.
    pub(crate) fn placement(&self) -> &Placement {
        &self.built.placement
    }

    /// Returns the software controllers, for fault injection in tests.
    #[cfg(test)]
    pub(crate) fn emus(&self) -> &[Arc<Emu>] {
        self.built.emulation().map_or(&[], |emulation| emulation.emus())
    }

    /// Shuts the devices down, then ends the threads that drive them. Returns the devices' models.
    pub(crate) fn close(self) -> anyhow::Result<Vec<String>> {
        drop((self.metrics, self.controllers));
        Ok(self.built.close(self.store)?)
    }
}

/// Returns the layers of a request in flight at a time: each needs its own staging buffer.
fn layers_ahead(args: &StoreArgs) -> u32 {
    args.shape.layers.min(LAYERS_AHEAD as u32)
}

/// Returns options for unlimited concurrency and slow simulated devices.
fn in_virtual_time() -> StoreOptions {
    let long = Nanos::from_millis(1000 * 3600);
    StoreOptions {
        iocbs: 1 << 15,
        command_timeout: long,
        wait_timeout: long,
        virtual_time: true,
        ..StoreOptions::default()
    }
}

impl Build<'_> {
    /// Returns the controllers: `drives`, or software controllers.
    fn controllers(&self, drives: Option<Drives>) -> anyhow::Result<Controllers> {
        let Self { args, sizing, clock, gpu, keep, sim } = *self;
        let (options, gpu) = (args.controller_options(), gpu.map(|gpu| &**gpu));
        let controllers = match (&args.devices, drives, sim) {
            (Devices::Emu(choice), _, Some(sim)) => {
                let configs = media::simulated(choice, sizing, &sim.dial)?;
                Controllers::simulated(configs, &sim.clock, &options)
            }
            (Devices::Emu(choice), _, None) => {
                let dir = keep.and_then(Keep::store_dir);
                let configs = media::controllers(choice, sizing, dir)?;
                let name = dir.map_or(Path::new("replay"), StoreDir::dir);
                Controllers::emulated(configs, name, clock, &options, gpu)
            }
            (Devices::Vfio(_), Some(drives), _) => Ok(Controllers::of_drives(drives)),
            // An earlier attempt over a failed route has consumed the opened drives.
            (Devices::Vfio(addresses), None, _) => {
                Drives::open(addresses, args.flags.path.memory, clock, &options)
                    .map(Controllers::of_drives)
            }
        };
        controllers.map_err(user_error)
    }

    fn options(&self) -> StoreOptions {
        let Self { args, sim, .. } = *self;
        let options = StoreOptions {
            run_bytes: args.coalesce(),
            staging_buffers: layers_ahead(args),
            // Files keep their disk space.
            deallocate: args.devices.emu().is_none_or(|emu| emu.dir.is_none()),
            ..sim.map_or_else(StoreOptions::default, |_| in_virtual_time())
        };
        args.config.tune(args.executor, options, args.controller_options()).0
    }

    /// Opens the store, formatted if it is not kept, and gives access to the pool.
    fn open(&self, config: StoreConfig) -> Result<Opened, StackError> {
        let Self { args, sizing, keep, .. } = *self;
        let access = self.access(config.pool.path(), &config.pool)?;
        let format = Format {
            capacity_bytes: Some(sizing.capacity_bytes()),
            group: Some(sizing.group),
            // A CPU reads another function's memory far too slowly.
            checksums: !args.common.no_checksums && args.flags.path.memory == MemoryPlace::Host,
            // Homes and drives were checked when they were claimed.
            overwrite: Overwrite::Anything,
            ..Format::new(StoreId(OsRng.unwrap_err().random()), args.shape.kv())
        };
        let controllers = config.devices.iter().map(|device| device.controller.clone()).collect();
        let found = keep.is_some_and(Keep::is_found);
        if !found {
            Store::format(&config.devices, &format)?;
        }
        let start = Instant::now();
        let mut progress = progress::Opening::new(args.shows_progress());
        let opened =
            Store::open_with(config, |done, all| progress.read(done, all, start.elapsed()));
        progress.finish();
        let store = opened?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        let how = match (keep, found) {
            (None, _) => "scratch",
            (Some(_), false) => "made",
            (Some(_), true) => "opened",
        };
        let opening = Opening { how, files: store.stats()?.files.stored, ms };
        let pool = Pool::new(access, args.shape, sizing.pool_blocks, args.common.seed);
        Ok((store, controllers, opening, pool))
    }

    /// Returns the access to the pool's bytes.
    fn access(&self, route: Route, pool: &KvPool) -> Result<Box<dyn PoolAccess>, StackError> {
        let Self { args, sizing, gpu, .. } = *self;
        let bytes = Pool::bytes(&args.shape, sizing.pool_blocks);
        Ok(match gpu.filter(|_| route != Route::Host) {
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
