//! Builds what a replay drives: controllers, driver, KV pool and store, by the best route that
//! works.

mod emulation;
mod fleet;
mod route;

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::ValueEnum as _;
use gio_kernels::cuda::{DoorbellKind, Registration};
use gio_kernels::{HostExecutor, HostOptions, InlineExecutor};
use gio_uring::{ExecutorError, IoExecutor};
use nvme_driver::Clock;
#[cfg(test)]
use nvme_emu::Emu;
use nvme_emu::EmuDomain;
use objstore::{
    ExecutorFactory, Format, Namespace, Overwrite, Store, StoreConfig, StoreError, StoreId,
    StoreOptions,
};
use rand::{Rng as _, TryRngCore as _, rngs::OsRng};

use crate::config::{Executor, ReplayArgs, Route};
use crate::devices::{Devices, MediaChoice, MemoryChoice};
use crate::drives::Drives;
use crate::gpu::Gpu;
use crate::keep::Keep;
use crate::pool::Pool;
use crate::problem::{Problem, unfit};
use crate::progress;

pub(crate) use emulation::{Emulation, emulate, in_home};
use route::Prepared;

pub(crate) use fleet::Build;
use fleet::Fleet;
pub(crate) use route::{NoRoute, NotTaken};

type Made = Result<Box<dyn IoExecutor>, ExecutorError>;

/// Everything below the engine. Fields are dropped in this order: who uses before who is used.
#[derive(Debug)]
pub(crate) struct Stack {
    store: Store,
    emulation: Option<Emulation>,
    _registrations: Vec<Arc<Registration>>,
    placement: Placement,
    opening: Opening,
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

/// Where things are, and why not in a better place.
#[derive(Debug, Clone)]
pub(crate) struct Placement {
    /// Queues and descriptors.
    pub(crate) queues: String,
    /// The KV pool.
    pub(crate) pool: String,
    /// Better routes, and why they were not taken.
    pub(crate) not_taken: Vec<NotTaken>,
}

impl Placement {
    /// Where everything is, in a few words.
    pub(crate) fn memory(&self) -> String {
        let Self { queues, pool, .. } = self;
        if queues == pool {
            return pool.clone();
        }
        format!("queues in {queues}, KV pool in {pool}")
    }
}

impl Stack {
    /// Builds controllers (or takes the drives that were opened), driver, pool and store, by the
    /// first route that works.
    ///
    /// # Errors
    /// [`NoRoute`]; [`crate::problem::Problem`] when the media directory cannot be used; else
    /// whatever a layer refuses.
    pub(crate) fn build(plan: Build<'_>, drives: Option<Drives>) -> anyhow::Result<(Self, Pool)> {
        let mut drives = drives;
        let mut spare = None;
        let mut not_taken = Vec::new();
        for &route in routes(plan.args) {
            let mut fleet = match spare.take() {
                Some(fleet) => fleet,
                None => plan.fleet(drives.take())?,
            };
            let built = match route::prepare(route, plan, &mut fleet) {
                Ok(prepared) => plan.open(fleet, prepared),
                Err(error) => {
                    spare = Some(fleet);
                    Err(error)
                }
            };
            match built {
                Ok((mut stack, pool)) => {
                    stack.placement.not_taken = not_taken;
                    return Ok((stack, pool));
                }
                Err(error) => not_taken.push(NotTaken::because(route, error)?),
            }
        }
        Err(NoRoute(not_taken).into())
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
        self.emulation.as_ref().map_or(&[], |emulation| &emulation.emus)
    }

    /// Shuts the devices down, then ends the threads that drive them.
    ///
    /// # Errors
    /// When a device does not shut down.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        let Self { store, emulation, _registrations, .. } = self;
        let controllers = store.close().context("closing the store")?.controllers;
        for mut controller in controllers {
            controller.shutdown().context("shutting a device down")?;
        }
        drop(emulation);
        Ok(())
    }
}

/// The routes that are tried, the best first.
fn routes(args: &ReplayArgs) -> &[Route] {
    match (&args.flags.require, args.flags.executor) {
        (Some(route), _) => std::slice::from_ref(route),
        (None, Executor::Cuda) => Route::value_variants(),
        (None, Executor::Host | Executor::Inline) => &[Route::Host],
    }
}

impl Build<'_> {
    /// Controllers with queues where they should be: `drives`, or software controllers.
    fn fleet(&self, drives: Option<Drives>) -> anyhow::Result<Fleet> {
        let Self { args, sizing, clock, gpu, keep } = self;
        let mut fleet = match (&args.devices, drives) {
            (Devices::Emu(choice), _) => {
                let domain = match gpu {
                    Some(gpu) => EmuDomain::with_copies("replay", gpu.copies()),
                    None => EmuDomain::new("replay"),
                };
                let home = keep.and_then(Keep::home);
                let configs = emulation::configs(choice, sizing, home)?;
                let options = args.controller_options();
                let (devices, emulation) = emulate(configs, &options, &domain, clock)?;
                let fleet = Fleet::new(devices, domain, DoorbellKind::Memory);
                Fleet { emulation: Some(emulation), ..fleet }
            }
            (Devices::Vfio(_), Some(drives)) => Fleet::of_drives(drives),
            // They went with a store that was opened over a route that does not work.
            (Devices::Vfio(addresses), None) => {
                let options = args.controller_options();
                Fleet::of_drives(Drives::open(addresses, args.flags.memory, clock, &options)?)
            }
        };
        fleet.outfit(args, gpu.map(|gpu| &**gpu))?;
        Ok(fleet)
    }

    fn open(&self, fleet: Fleet, prepared: Prepared) -> anyhow::Result<(Stack, Pool)> {
        let Self { args, sizing, clock, gpu, keep } = *self;
        let Fleet { devices, emulation, registrations, queues, .. } = fleet;
        let Prepared { registered, hand, place } = prepared;
        let format = Format {
            capacity_bytes: Some(sizing.capacity_bytes()),
            group: Some(sizing.group),
            // A CPU reads another function's memory far too slowly.
            checksums: !args.flags.no_checksums && args.flags.memory == MemoryChoice::Host,
            // Homes and drives were checked when they were claimed.
            overwrite: Overwrite::Anything,
            ..Format::new(StoreId(OsRng.unwrap_err().random()), args.shape.kv())
        };
        let config = StoreConfig {
            devices,
            executor: executor(args, gpu, clock)?,
            clock: clock.clone(),
            shape: args.shape.kv(),
            pool: registered,
            gpu: gpu.map(|gpu| gpu.for_store()),
            options: StoreOptions {
                queues_per_device: args.flags.queues,
                queue_depth: args.flags.depth,
                run_bytes: args.coalesce(),
                staging_buffers: route::layers_ahead(&args.shape),
                sms: args.gpu.map_or(1, |gpu| gpu.io_sms),
                // Files keep the space that they have.
                deallocate: !matches!(args.devices.media(), Some(MediaChoice::File(_))),
                ..StoreOptions::default()
            },
            namespace: Namespace::default(),
        };
        let found = keep.is_some_and(Keep::is_found);
        if !found {
            Store::format(&config.devices, &format).map_err(not_opened)?;
        }
        let start = Instant::now();
        let mut progress = progress::Opening::new(args.shows_progress());
        let opened =
            Store::open_with(config, |done, all| progress.read(done, all, start.elapsed()));
        progress.finish();
        let store = opened.map_err(not_opened)?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        let how = match (keep, found) {
            (None, _) => "scratch",
            (Some(_), false) => "made",
            (Some(_), true) => "opened",
        };
        let opening = Opening { how, files: store.stats()?.files_stored, ms };
        let placement = Placement { queues, pool: place, not_taken: Vec::new() };
        let pool = Pool::new(hand, args.shape, sizing.pool_blocks, args.flags.seed);
        let stack = Stack { store, emulation, _registrations: registrations, placement, opening };
        Ok((stack, pool))
    }
}

/// A route that the store found not to work closes that route only.
fn not_opened(error: StoreError) -> anyhow::Error {
    match error {
        StoreError::Route { why, .. } => unfit(why, "see nvme-bind doctor, for drives"),
        // What is there is not what was asked for; it says what to do.
        StoreError::Format(error) => Problem::new(error.to_string(), "").into(),
        error => anyhow::Error::new(error).context("opening the store"),
    }
}

fn executor(
    args: &ReplayArgs,
    gpu: Option<&Arc<Gpu>>,
    clock: &Arc<dyn Clock>,
) -> anyhow::Result<ExecutorFactory> {
    let clock = clock.clone();
    Ok(match (args.flags.executor, args.gpu, gpu) {
        (Executor::Host, ..) => Box::new(move || -> Made {
            Ok(Box::new(HostExecutor::new(HostOptions::default(), clock.clone())))
        }),
        (Executor::Inline, ..) => {
            Box::new(move || -> Made { Ok(Box::new(InlineExecutor::new(clock.clone()))) })
        }
        (Executor::Cuda, Some(choice), Some(gpu)) => gpu.executor(choice, clock),
        (Executor::Cuda, ..) => bail!("the GPU was not opened"),
    })
}
