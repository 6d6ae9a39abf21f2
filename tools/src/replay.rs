//! `ripieno replay`: serving traffic through the whole stack, with every byte accounted for.

mod engine;
mod flight;
mod rate;
mod report;
mod verify;

use std::sync::Arc;
use std::time::Instant;

use objstore::{BlockKey, StoreDevice};
use ripieno_stack::{Executor, Gpu, Placement, Stack, StackError, StoreDir};

use crate::config::{StoreArgs, Verify};
use crate::devices::Devices;
use crate::drives;
use crate::gpu::{self, GpuReport};
use crate::interrupt::Interrupt;
use crate::plan::Plan;
use crate::pool::Pool;
use crate::problem::{Problem, no_route, user_error};
use crate::progress::Progress;
use crate::size::Size;
use crate::sizing::{self, Sizing};
use crate::stack::{self, Opened, Opening, Sim};
use crate::terminal::{self, say};
use crate::trace::{self, Trace};
use crate::{keep, media, synthetic};

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
    let (report, closed) =
        perform(args, gpu.as_ref(), &mut interrupt).map_err(|error| {
            match error.downcast_ref() {
                Some(StackError::NoRoute { tried }) => no_route(tried).into(),
                _ => error,
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
    let store_dir = keep::find(args)?;
    let found = store_dir.as_ref();
    let args = &found.map_or_else(|| Ok(args.clone()), |store_dir| args.in_store_dir(store_dir))?;
    let plan = plan(args)?;
    interrupt.orderly();
    let drives = drives::open(args, gpu.map(|gpu| &**gpu))?;
    let limits = Limits::of(args, drives.as_ref());
    args.check_prp(limits.lba_bytes)?;
    let sizing = Sizing::fitting(args, &plan, limits.lba_bytes)?;
    sizing.check_machine(args, store_dir.is_some())?;
    let devices = devices(args, &sizing, drives, store_dir, None)?;
    let Opened { pool, stack, opening } = stack::open(args, &sizing, devices, gpu)?;
    let sizing = found_sizing(args, &sizing, opening, &stack)?;
    if !args.common.output.quiet {
        notes(args, &plan, &sizing, opening);
        route_notes(stack.placement());
        if let Some(endpoint) = stack.metrics() {
            say(format_args!("metrics are at {0}: ripieno top {0}", endpoint.address()));
        }
    }
    let outcome = drive(args, &plan, &stack, pool, interrupt)?;
    let gpu = gpu.and_then(|gpu| gpu.report()).as_ref().map(GpuReport::new);
    let setting = Setting { limits, placement: stack.placement().clone(), opening, gpu };
    let closed = stack.close().map_err(anyhow::Error::from);
    Ok((report(args, &plan, &sizing, setting, outcome), closed))
}

/// Returns the devices, claimed, and how the store on them is opened: drives that were opened, or
/// software controllers, which may run in virtual time.
pub(crate) fn devices(
    args: &StoreArgs,
    sizing: &Sizing,
    drives: Option<ripieno_stack::Devices>,
    store_dir: Option<StoreDir>,
    sim: Option<&Sim>,
) -> anyhow::Result<(ripieno_stack::Devices, &'static str)> {
    let overwrite = args.config.overwrite.unwrap_or_default();
    let mut is_found = store_dir.is_some();
    let devices = match (drives, args.devices.emu()) {
        (Some(mut drives), _) => {
            match args.flags.keep {
                true => is_found = drives::claim_to_keep(&drives, sizing.device_bytes, overwrite)?,
                false => drives::claim(&mut drives, sizing.device_bytes, overwrite)?,
            }
            drives
        }
        (None, Some(emu)) => {
            let store_dir =
                store_dir.map_or_else(|| keep::make(args, sizing), |it| Ok(Some(it)))?;
            media::devices(emu, sizing, store_dir, sim)?
        }
        (None, None) => unreachable!("they were opened"),
    };
    let how = match (is_found, args.flags.keep) {
        (true, _) => "opened",
        (false, true) => "made",
        (false, false) => "scratch",
    };
    Ok((devices, how))
}

/// Returns the sizes of the open store, and refuses others than were asked for.
fn found_sizing(
    args: &StoreArgs,
    asked: &Sizing,
    opening: Opening,
    stack: &Stack,
) -> Result<Sizing, Problem> {
    let files = match args.flags.keep {
        true => stack.store().superblock().layout.files,
        false => asked.files,
    };
    let mut sizing = *asked;
    sizing.files = files;
    if opening.how == "opened" && args.config.capacity.is_some() && files != asked.files {
        let (found, asked) = (Size(sizing.capacity_bytes()), Size(asked.capacity_bytes()));
        return Err(Problem::new(
            format!("--capacity: the store was made with {found} for objects, and not {asked}"),
            "leave it out; a store keeps its size until it is formatted again",
        ));
    }
    let has_checksums = stack.store().superblock().layout.words_per_file > 0;
    if opening.how == "opened" && args.common.no_checksums && has_checksums {
        return Err(Problem::new(
            "--no-checksums: the store was made with checksums",
            "leave it out; a store keeps them until it is formatted again",
        ));
    }
    Ok(sizing)
}

/// Device limits that matter to the replay.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    lba_bytes: u32,
    /// Largest transfer of one command on all devices, in bytes; null for no limit.
    mdts_bytes: Option<u64>,
}

impl Limits {
    fn of(args: &StoreArgs, drives: Option<&ripieno_stack::Devices>) -> Self {
        match (&args.devices, drives) {
            (_, Some(drives)) => {
                let drives = drives.attached();
                let mdts = |it: &StoreDevice| it.controller.lock().info().mdts_bytes;
                let mdts_bytes = drives.iter().filter_map(mdts).min();
                Self { lba_bytes: drives::lba_bytes(drives), mdts_bytes }
            }
            (Devices::Emu(emu), None) => {
                Self { lba_bytes: emu.lba_bytes, mdts_bytes: Some(u64::from(emu.mdts)) }
            }
            (Devices::Drives(_), None) => Self { lba_bytes: 512, mdts_bytes: None },
        }
    }
}

/// Returns the LBA size of the devices in bytes.
pub(crate) fn lba_bytes(args: &StoreArgs, drives: Option<&ripieno_stack::Devices>) -> u32 {
    Limits::of(args, drives).lba_bytes
}

/// Returns the blocks of all requests; for the default synthetic workload, as many as fit.
pub(crate) fn plan(args: &StoreArgs) -> Result<Plan, Problem> {
    let requests = args.common.requests;
    if let Some(path) = &args.common.trace {
        let Trace { requests, notes, .. } = trace::read(path, requests)?;
        if !args.common.output.quiet {
            notes.iter().for_each(|note| say(format_args!("note: the trace: {note}")));
        }
        let blocks: u64 = requests.iter().map(|it| it.padded(args.shape.block_tokens)).sum();
        sizing::fits(blocks * size_of::<BlockKey>() as u64, "for the keys of the trace's blocks")?;
        return Ok(Plan::new(requests.into_iter(), &args.shape, None));
    }
    // Drives are opened later; assume the largest LBAs.
    let lba_bytes = match &args.devices {
        Devices::Emu(emu) => emu.lba_bytes,
        Devices::Drives(_) => 4096,
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
fn route_notes(placement: &Placement) {
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
    stack: &Stack,
    pool: Pool,
    interrupt: &mut Interrupt,
) -> anyhow::Result<Outcome> {
    let memcpy_gib_s = rate::memcpy_gib_s(&args.shape, args.common.seed);
    let progress = Progress::new("requests", plan.requests(), args.shows_progress());
    let saved = stack.metrics().map(|endpoint| endpoint.compute_saved().clone());
    let mut store = stack.store().clone();
    let mut engine = Engine {
        store: &mut store,
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
        progress.shows(index + 1, || engine.tally.line());
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
