//! `ripieno replay`: serving traffic through the whole stack, with every byte accounted for.

mod engine;
mod flight;
mod rate;
mod report;
mod verify;

use std::sync::Arc;
use std::time::Instant;

use nvme_driver::{Clock, MonotonicClock};
use objstore::BlockKey;
use ripieno_stack::{Drives, Executor, Gpu, Placement};

use crate::config::{StoreArgs, Verify};
use crate::devices::Devices;
use crate::drives;
use crate::gpu::{self, GpuReport};
use crate::interrupt::Interrupt;
use crate::keep::Keep;
use crate::plan::Plan;
use crate::pool::Pool;
use crate::problem::{NoRoute, Problem, user_error};
use crate::progress::Progress;
use crate::size::Size;
use crate::sizing::{self, Sizing};
use crate::stack::{Build, Opening, Stack};
use crate::terminal::{self, say};
use crate::{synthetic, trace};

use engine::{Engine, Tally};
use report::Report;
use verify::Sampler;

/// Default number of requests of the synthetic workload.
const SYNTHETIC_REQUESTS: usize = 4000;
/// Limit of the default workload's size in bytes.
const SYNTHETIC_BYTES: u64 = 1 << 30;

/// Measurements and counters after the last request.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) tally: Tally,
    pub(crate) stats: objstore::StoreStats,
    pub(crate) wall_s: f64,
    pub(crate) memcpy_gib_s: f64,
    pub(crate) interrupted: bool,
}

/// Setup of the replay.
#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) limits: Limits,
    pub(crate) placement: Placement,
    pub(crate) opening: Opening,
    pub(crate) gpu: Option<GpuReport>,
}

/// Replays and reports. Returns the exit code.
pub(crate) fn run(args: &StoreArgs) -> anyhow::Result<u8> {
    // Both come before any other thread starts: threads read the environment, and inherit the
    // signal mask.
    if matches!(args.executor, Executor::Cuda(_)) {
        gpu::set_environment();
    }
    let mut interrupt = Interrupt::listen()?;
    let gpu = args.executor.gpu().map_err(user_error)?;
    let (report, closed) = perform(args, gpu.as_ref(), &mut interrupt).map_err(|error| {
        match error.downcast_ref::<NoRoute>() {
            Some(none) => none.problem().into(),
            None => error,
        }
    })?;
    terminal::report(&report, args.common.output.json, Report::text)?;
    closed?;
    Ok(interrupt.end(report.is_clean(), report.outcome.interrupted))
}

/// Runs an uninterruptible replay to test the arguments' devices and route.
pub(crate) fn trial(args: &StoreArgs, gpu: Option<&Arc<Gpu>>) -> anyhow::Result<Report> {
    let (report, closed) = perform(args, gpu, &mut Interrupt::never())?;
    closed?;
    Ok(report)
}

/// Returns the report, and the result of shutting the devices down.
fn perform(
    args: &StoreArgs,
    gpu: Option<&Arc<Gpu>>,
    interrupt: &mut Interrupt,
) -> anyhow::Result<(Report, anyhow::Result<()>)> {
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let mut keep = args.flags.keep.then(|| Keep::find(args)).transpose()?;
    let store_dir = keep.as_ref().and_then(Keep::store_dir);
    let args =
        &store_dir.map_or_else(|| Ok(args.clone()), |store_dir| args.in_store_dir(store_dir))?;
    let plan = plan(args)?;
    interrupt.orderly();
    let mut drives = open_drives(args, &clock)?;
    let limits = Limits::of(args, drives.as_ref());
    args.check_prp(limits.lba_bytes)?;
    let sizing = Sizing::new(args, &plan, limits.lba_bytes)?;
    sizing.check_machine(args, keep.as_ref().is_some_and(Keep::is_found))?;
    match (&mut drives, &mut keep) {
        (Some(drives), None) => {
            drives::claim(drives, sizing.device_bytes, args.config.overwrite.unwrap_or_default())?
        }
        (Some(drives), Some(keep)) => keep.claim(drives, args, &sizing)?,
        (None, Some(keep)) => keep.make(args, &sizing)?,
        (None, None) => {}
    }
    let parts = Build { args, sizing: &sizing, clock: &clock, gpu, keep: keep.as_ref(), sim: None };
    let (mut stack, pool) = Stack::build(parts, drives)?;
    let sizing = match &mut keep {
        Some(keep) => keep.opened(args, &sizing, stack.store().superblock().layout.files)?,
        None => sizing,
    };
    notes(args, &plan, &sizing, stack.opening);
    route_notes(args, stack.placement());
    if let (Some(endpoint), false) = (&stack.metrics, args.common.output.quiet) {
        say(format_args!("metrics are at {0}: ripieno top {0}", endpoint.address()));
    }
    let outcome = drive(args, &plan, &mut stack, pool, interrupt)?;
    let gpu = gpu.and_then(|gpu| gpu.report()).as_ref().map(GpuReport::new);
    let (placement, opening) = (stack.placement().clone(), stack.opening);
    let setting = Setting { limits, placement, opening, gpu };
    let closed = stack.close().map(|_| ());
    Ok((report(args, &plan, &sizing, setting, outcome), closed))
}

/// Device limits that matter to the replay.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    lba_bytes: u32,
    /// Largest transfer of one command on all devices, in bytes; null for no limit.
    mdts_bytes: Option<u64>,
}

impl Limits {
    fn of(args: &StoreArgs, drives: Option<&Drives>) -> Self {
        match (&args.devices, drives) {
            (_, Some(drives)) => {
                Self { lba_bytes: drives.lba_bytes(), mdts_bytes: drives.mdts_bytes() }
            }
            (Devices::Emu(emu), None) => {
                Self { lba_bytes: emu.lba_bytes, mdts_bytes: Some(u64::from(emu.mdts)) }
            }
            (Devices::Vfio(_), None) => Self { lba_bytes: 512, mdts_bytes: None },
        }
    }
}

/// Returns the LBA size of the devices in bytes.
pub(crate) fn lba_bytes(args: &StoreArgs, drives: Option<&Drives>) -> u32 {
    Limits::of(args, drives).lba_bytes
}

/// Opens the drives; `None` for software controllers.
pub(crate) fn open_drives(
    args: &StoreArgs,
    clock: &Arc<dyn Clock>,
) -> anyhow::Result<Option<Drives>> {
    let Devices::Vfio(addresses) = &args.devices else { return Ok(None) };
    let options = args.controller_options();
    Drives::open(addresses, args.flags.path.memory, clock, &options).map(Some).map_err(user_error)
}

/// Returns the blocks of all requests; for the default synthetic workload, as many as fit.
pub(crate) fn plan(args: &StoreArgs) -> Result<Plan, Problem> {
    let requests = args.common.requests;
    if let Some(path) = &args.common.trace {
        let requests = trace::read(path, requests)?;
        let ids: usize = requests.iter().map(|request| request.hash_ids.len()).sum();
        let keys = ids as u64 * u64::from(args.shape.subs()) * size_of::<BlockKey>() as u64;
        sizing::fits(keys, "for the keys of the trace's blocks")?;
        return Ok(Plan::new(requests.into_iter(), &args.shape, None));
    }
    // Drives are opened later; assume the largest LBAs.
    let lba_bytes = match &args.devices {
        Devices::Emu(emu) => emu.lba_bytes,
        Devices::Vfio(_) => 4096,
    };
    let most = (SYNTHETIC_BYTES / args.shape.file_bytes(lba_bytes)).max(1);
    let count = requests.unwrap_or(SYNTHETIC_REQUESTS);
    let blocks = synthetic::BLOCKS_MEAN * u64::from(args.shape.subs());
    let keys = (count as u64).saturating_mul(blocks * size_of::<BlockKey>() as u64);
    sizing::fits(keys, &format!("for the keys of {count} requests"))?;
    let requests_of_workload = synthetic::requests(args.common.seed, count);
    Ok(Plan::new(requests_of_workload, &args.shape, requests.is_none().then_some(most)))
}

/// Prints notes before the replay starts.
fn notes(args: &StoreArgs, plan: &Plan, sizing: &Sizing, opening: Opening) {
    if args.common.output.quiet {
        return;
    }
    if args.flags.keep {
        let Opening { how, files, ms } = opening;
        say(format_args!("the store was {how} in {ms:.0} ms; it held {files} blocks"));
    }
    say(format_args!(
        "capacity {} for {} blocks on {} devices; the whole workload needs {}",
        Size(sizing.capacity_bytes()),
        sizing.files,
        args.devices.count(),
        Size(sizing.needed_bytes)
    ));
    if args.common.requests.is_some_and(|asked| asked > plan.requests()) {
        say(format_args!("note: the trace has only {} requests", plan.requests()));
    }
}

/// Prints why better routes are not taken.
fn route_notes(args: &StoreArgs, placement: &Placement) {
    if args.common.output.quiet {
        return;
    }
    for not in &placement.not_taken {
        say(format_args!("note: the route {} is not taken: {}", not.route, not.why));
        if !not.fix.is_empty() {
            say(format_args!(" hint: {}", not.fix));
        }
    }
}

fn drive(
    args: &StoreArgs,
    plan: &Plan,
    stack: &mut Stack,
    pool: Pool,
    interrupt: &mut Interrupt,
) -> anyhow::Result<Outcome> {
    let memcpy_gib_s = rate::memcpy_gib_s(&args.shape, args.common.seed);
    let progress = Progress::new("requests", plan.requests(), args.shows_progress());
    let saved = stack.metrics.as_ref().map(|endpoint| endpoint.compute_saved().clone());
    let mut engine = Engine {
        store: stack.store(),
        saved,
        pool,
        shape: args.shape,
        sampler: Sampler::new(args.flags.verify, args.common.seed, args.shape.object_bytes),
        interrupt,
        tally: Tally::default(),
    };
    let start = Instant::now();
    for index in 0..plan.requests() {
        if engine.is_over() {
            break;
        }
        engine.request(index, plan)?;
        progress.advance(index + 1, || engine.tally.line());
    }
    let wall_s = start.elapsed().as_secs_f64();
    // Taken before the final check, which is not part of the replay.
    let stats = engine.store.stats()?;
    if args.flags.verify == Verify::Full && !engine.is_over() {
        progress.note("checking everything that is still stored");
        engine.check_everything(plan)?;
    }
    progress.finish();
    let interrupted = engine.is_interrupted();
    Ok(Outcome { tally: engine.tally, stats, wall_s, memcpy_gib_s, interrupted })
}

fn report(
    args: &StoreArgs,
    plan: &Plan,
    sizing: &Sizing,
    setting: Setting,
    outcome: Outcome,
) -> Report {
    let planned = [plan.requests() as u64, plan.trace_blocks()];
    let (args, sizing, ideal_hits) = (args.clone(), *sizing, plan.ideal_hits);
    Report { args, sizing, planned, ideal_hits, setting, outcome }
}

#[cfg(test)]
mod tests;
