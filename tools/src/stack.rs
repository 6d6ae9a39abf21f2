//! Builds what a replay drives: controllers, driver, KV pool and store, by the best route that
//! works.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use nvme_driver::{Clock, Nanos};
#[cfg(test)]
use nvme_emu::Emu;
use nvme_emu::{BandwidthDial, SimClock};
use objstore::{Format, KvPool, Namespace, Overwrite, Store, StoreConfig, StoreId, StoreOptions};
use rand::{Rng as _, TryRngCore as _, rngs::OsRng};
use ripieno_stack::{
    Below, Drives, Fleet, Gpu, Home, MemoryPlace, Placement, PoolMemory, PoolPlan, Prepared, Route,
    StackError, by_first_route,
};

use crate::config::ReplayArgs;
use crate::devices::{Devices, MediaChoice};
use crate::keep::Keep;
use crate::media;
use crate::pool::{CpuHand, GpuHand, Hand, LAYERS_AHEAD, PARTS_MAX, Pool};
use crate::problem::{Problem, told};
use crate::progress;
use crate::sizing::Sizing;

/// Everything below the engine. Fields are dropped in this order: who uses before who is used.
#[derive(Debug)]
pub(crate) struct Stack {
    store: Store,
    below: Below,
    placement: Placement,
    opening: Opening,
}

/// What a stack is built from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Build<'a> {
    pub(crate) args: &'a ReplayArgs,
    pub(crate) sizing: &'a Sizing,
    pub(crate) clock: &'a Arc<dyn Clock>,
    pub(crate) gpu: Option<&'a Arc<Gpu>>,
    /// Where the store is kept.
    pub(crate) keep: Option<&'a Keep>,
    /// Virtual time.
    pub(crate) sim: Option<&'a Sim>,
}

/// Software controllers in virtual time.
#[derive(Debug)]
pub(crate) struct Sim {
    /// What lets them run.
    pub(crate) clock: Arc<SimClock>,
    /// How fast they are.
    pub(crate) dial: BandwidthDial,
}

/// How the store was opened.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opening {
    /// `opened`, if it was there before; `made` or `scratch` if not.
    pub(crate) how: &'static str,
    /// Files that it held.
    pub(crate) files: u32,
    /// Milliseconds that it took, self-test included.
    pub(crate) ms: f64,
}

impl Stack {
    /// Builds controllers (or takes the drives that were opened), driver, pool and store, by the
    /// first route that works.
    ///
    /// # Errors
    /// [`crate::problem::NoRoute`]; [`Problem`] when the media directory cannot be used; else
    /// whatever a layer refuses.
    pub(crate) fn build(plan: Build<'_>, drives: Option<Drives>) -> anyhow::Result<(Self, Pool)> {
        let Build { args, sizing, gpu, .. } = plan;
        let memory = PoolMemory::Own { blocks: sizing.pool_blocks };
        let routes = Route::of(args.executor(), &memory, args.flags.require).map_err(told)?;
        if routes == [Route::Host] {
            sizing.check_pool(args)?;
        }
        let shape = args.shape.kv();
        let staging_buffers = layers_ahead(args);
        let pool = PoolPlan { memory: &memory, shape: &shape, staging_buffers };
        let prepare = |route, fleet: &mut Fleet| {
            if route == Route::Host {
                sizing.check_pool(args).map_err(Problem::unfit)?;
            }
            Ok((route, pool.prepare(route, fleet, gpu)?))
        };
        let mut drives = drives;
        let opened = by_first_route(
            routes,
            || plan.fleet(drives.take()),
            prepare,
            |fleet, (route, prepared)| plan.open(fleet, route, prepared),
        );
        let ((mut stack, pool), not_taken) =
            opened.map_err(|error| match error.downcast::<StackError>() {
                Ok(error) => told(error),
                Err(error) => error,
            })?;
        stack.placement.not_taken = not_taken;
        Ok((stack, pool))
    }

    /// The store.
    pub(crate) fn store(&mut self) -> &mut Store {
        &mut self.store
    }

    /// How the store was opened.
    pub(crate) fn opening(&self) -> Opening {
        self.opening
    }

    /// Where things are.
    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The software controllers, for tests that make them misbehave.
    #[cfg(test)]
    pub(crate) fn emus(&self) -> &[Arc<Emu>] {
        self.below.emulation().map_or(&[], |emulation| emulation.emus())
    }

    /// Shuts the devices down, then ends the threads that drive them. Returns the devices' models.
    ///
    /// # Errors
    /// When a device does not shut down.
    pub(crate) fn close(self) -> anyhow::Result<Vec<String>> {
        let Self { store, below, .. } = self;
        let controllers = store.close().context("closing the store")?.controllers;
        let mut models = Vec::new();
        for mut controller in controllers {
            models.push(controller.info().model.clone());
            controller.shutdown().context("shutting a device down")?;
        }
        drop(below);
        Ok(models)
    }
}

/// Layers of a request that are in flight at a time: each needs a staging buffer of its own.
fn layers_ahead(args: &ReplayArgs) -> u32 {
    args.shape.layers.min(LAYERS_AHEAD as u32)
}

/// Everything may be asked for at once, and take as long as slow devices need for it.
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
    /// Controllers with queues where they should be: `drives`, or software controllers.
    fn fleet(&self, drives: Option<Drives>) -> anyhow::Result<Fleet> {
        let Self { args, sizing, clock, gpu, keep, sim } = *self;
        let (options, gpu) = (args.controller_options(), gpu.map(|gpu| &**gpu));
        let fleet = match (&args.devices, drives, sim) {
            (Devices::Emu(choice), _, Some(sim)) => {
                let configs = media::simulated(choice, sizing, &sim.dial)?;
                Fleet::simulated(configs, &sim.clock, &options)
            }
            (Devices::Emu(choice), _, None) => {
                let home = keep.and_then(Keep::home);
                let configs = media::controllers(choice, sizing, home)?;
                let name = home.map_or(Path::new("replay"), Home::dir);
                Fleet::of_controllers(configs, name, clock, &options, gpu)
            }
            (Devices::Vfio(_), Some(drives), _) => Ok(Fleet::of_drives(drives)),
            // They went with a store that was opened over a route that does not work.
            (Devices::Vfio(addresses), None, _) => {
                Drives::open(addresses, args.flags.memory, clock, &options).map(Fleet::of_drives)
            }
        };
        let mut fleet = fleet.map_err(told)?;
        fleet.outfit(args.flags.queues, args.flags.depth, gpu).map_err(told)?;
        Ok(fleet)
    }

    fn open(
        &self,
        fleet: Fleet,
        route: Route,
        prepared: Prepared,
    ) -> Result<(Stack, Pool), StackError> {
        let Self { args, sizing, clock, gpu, keep, sim } = *self;
        let (below, devices, queues) = fleet.into_parts();
        let Prepared { pool, place, .. } = prepared;
        let hand = self.hand(route, &pool)?;
        let format = Format {
            capacity_bytes: Some(sizing.capacity_bytes()),
            group: Some(sizing.group),
            // A CPU reads another function's memory far too slowly.
            checksums: !args.flags.no_checksums && args.flags.memory == MemoryPlace::Host,
            // Homes and drives were checked when they were claimed.
            overwrite: Overwrite::Anything,
            ..Format::new(StoreId(OsRng.unwrap_err().random()), args.shape.kv())
        };
        let config = StoreConfig {
            devices,
            executor: args.executor().factory(clock, gpu),
            clock: clock.clone(),
            shape: args.shape.kv(),
            pool,
            gpu: gpu.map(|gpu| gpu.for_store()),
            options: StoreOptions {
                queues_per_device: args.flags.queues,
                queue_depth: args.flags.depth,
                run_bytes: args.coalesce(),
                staging_buffers: layers_ahead(args),
                dram_bytes: args.flags.dram,
                dram_mode: args.flags.dram_mode,
                sms: args.gpu.map_or(1, |gpu| gpu.io_sms),
                // Files keep the space that they have.
                deallocate: !matches!(args.devices.media(), Some(MediaChoice::File(_))),
                ..sim.map_or_else(StoreOptions::default, |_| in_virtual_time())
            },
            namespace: Namespace::default(),
        };
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
        let opening = Opening { how, files: store.stats()?.files_stored, ms };
        let placement = Placement { route, queues, pool: place, not_taken: Vec::new() };
        let pool = Pool::new(hand, args.shape, sizing.pool_blocks, args.flags.seed);
        Ok((Stack { store, below, placement, opening }, pool))
    }

    /// Who makes and checks what is in the pool.
    fn hand(&self, route: Route, pool: &KvPool) -> Result<Box<dyn Hand>, StackError> {
        let Self { args, sizing, gpu, .. } = *self;
        let bytes = Pool::bytes(&args.shape, sizing.pool_blocks);
        Ok(match gpu.filter(|_| route != Route::Host) {
            None => Box::new(CpuHand::new(pool, bytes as usize)?),
            Some(gpu) => {
                // Parts of objects that a batch has at the most, and another one in flight with it.
                let blocks = sizing.pool_blocks as usize;
                let items = blocks * args.shape.segments as usize * PARTS_MAX * 2;
                Box::new(GpuHand::new(gpu, pool, bytes, items)?)
            }
        })
    }
}
