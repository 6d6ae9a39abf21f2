//! `ripieno replay`: serving traffic through the whole stack, with every byte accounted for.

mod engine;
mod flight;
mod plan;
mod pool;
mod rate;
mod room;
mod verify;

use std::sync::Arc;
use std::time::Instant;

use nvme_driver::{Clock, MonotonicClock};

use crate::cli::{Devices, ReplayArgs, Verify};
use crate::drives::Drives;
use crate::gpu::{self, Gpu, GpuReport};
use crate::interrupt::Interrupt;
use crate::problem::{EXIT_FAILED, EXIT_INTERRUPTED};
use crate::progress::Progress;
use crate::report::{Report, ratio};
use crate::size::Size;
use crate::stack::{self, NoRoute, Placement, Stack};
use crate::synthetic;
use crate::trace::{self, Request};

use engine::{Engine, Tally};
use plan::Plan;
use verify::Sampler;

pub(crate) use engine::LAYERS_AHEAD;
pub(crate) use pool::{CpuHand, GpuHand, Hand, Pool};
pub(crate) use room::{Room, kv_shape};
pub(crate) use verify::{Mismatch, PARTS_MAX};

/// Requests of the made workload, where nobody asked for a number.
const SYNTHETIC_REQUESTS: usize = 4000;
/// ... but no more than what fits here.
const SYNTHETIC_BYTES: u64 = 2 << 30;

/// What was measured and counted when the last request was done.
struct Outcome {
    tally: Tally,
    stats: objstore::StoreStats,
    wall_s: f64,
    memcpy_gib_s: f64,
    interrupted: bool,
}

/// What it was done with.
struct Setting {
    limits: Limits,
    placement: Placement,
    gpu: Option<GpuReport>,
}

/// Replays and reports. Returns the exit code.
///
/// # Errors
/// [`crate::problem::Problem`] for bad input; anything else is a failure of the stack.
pub(crate) fn run(args: ReplayArgs) -> anyhow::Result<u8> {
    // Both before any other thread starts: threads read the environment, and inherit which signals
    // are blocked.
    if args.executor.gpu().is_some() {
        gpu::set_environment();
    }
    let mut interrupt = Interrupt::listen()?;
    let gpu = args.executor.gpu().map(Gpu::open).transpose()?;
    let (report, closed) =
        perform(&args, gpu.as_ref(), &mut interrupt).map_err(|error| {
            match error.downcast_ref::<NoRoute>() {
                Some(none) => none.problem().into(),
                None => error,
            }
        })?;
    report.print(args.json)?;
    closed?;
    Ok(match (report.is_clean(), report.interrupted) {
        (false, _) => EXIT_FAILED,
        (true, true) => EXIT_INTERRUPTED,
        (true, false) => 0,
    })
}

/// A replay that nobody ends early, as a trial of what the arguments name.
///
/// # Errors
/// As for [`run`].
pub(crate) fn trial(args: &ReplayArgs, gpu: Option<&Arc<Gpu>>) -> anyhow::Result<Report> {
    let (report, closed) = perform(args, gpu, &mut Interrupt::never())?;
    closed?;
    Ok(report)
}

/// Returns the report, and whether the devices were shut down well.
fn perform(
    args: &ReplayArgs,
    gpu: Option<&Arc<Gpu>>,
    interrupt: &mut Interrupt,
) -> anyhow::Result<(Report, anyhow::Result<()>)> {
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let requests = requests(args)?;
    let mut drives = open_drives(args, &clock)?;
    let limits = Limits::of(args, drives.as_ref());
    args.check_prp(limits.lba_bytes)?;
    let plan = plan(args, &requests, &limits);
    let room = Room::new(args, &plan, limits.lba_bytes)?;
    room.check_machine(args)?;
    notes(args, &plan, &room);
    if let Some(drives) = &mut drives {
        drives.claim(room.device_bytes, args.overwrite)?;
    }
    let parts = stack::Plan { args, room: &room, clock: &clock, gpu };
    let (mut stack, pool) = Stack::build(parts, drives)?;
    route_notes(args, stack.placement());
    let outcome = drive(args, &plan, &mut stack, pool, interrupt)?;
    let gpu = gpu.and_then(|gpu| gpu.report());
    let setting = Setting { limits, placement: stack.placement().clone(), gpu };
    let closed = stack.close();
    Ok((report(args, &plan, &room, setting, outcome), closed))
}

/// What the devices are like, where it matters to the replay.
#[derive(Debug, Clone, Copy)]
struct Limits {
    lba_bytes: u32,
    mdts_bytes: Option<u64>,
}

impl Limits {
    fn of(args: &ReplayArgs, drives: Option<&Drives>) -> Self {
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

fn open_drives(args: &ReplayArgs, clock: &Arc<dyn Clock>) -> anyhow::Result<Option<Drives>> {
    let Devices::Vfio(addresses) = &args.devices else { return Ok(None) };
    Drives::open(addresses, args.memory, clock, &stack::options(args)).map(Some)
}

fn requests(args: &ReplayArgs) -> anyhow::Result<Vec<Request>> {
    match &args.trace {
        Some(path) => Ok(trace::read(path, args.requests)?),
        None => Ok(synthetic::requests(args.seed, args.requests.unwrap_or(SYNTHETIC_REQUESTS))),
    }
}

fn plan(args: &ReplayArgs, requests: &[Request], limits: &Limits) -> Plan {
    let file = room::file_bytes(&args.shape, limits.lba_bytes);
    let made = args.trace.is_none() && args.requests.is_none();
    let most = made.then(|| (SYNTHETIC_BYTES / file).max(1));
    Plan::new(requests, &args.shape, most)
}

/// What a person should know before the numbers come.
#[allow(clippy::print_stderr, reason = "notes for the person at the terminal")]
fn notes(args: &ReplayArgs, plan: &Plan, room: &Room) {
    if args.quiet {
        return;
    }
    eprintln!(
        "capacity {} for {} blocks on {} devices; the whole workload needs {}",
        Size(room.capacity_bytes()),
        room.files,
        args.devices.count(),
        Size(room.needed_bytes)
    );
    if plan.uneven() > 0 {
        eprintln!(
            "warning: {} of {} requests have an input_length that does not match their number of \
             hash_ids (512 tokens each); the ids count",
            plan.uneven(),
            plan.requests()
        );
    }
    if args.requests.is_some_and(|asked| asked > plan.requests()) {
        eprintln!("note: the trace has only {} requests", plan.requests());
    }
}

/// Why the data does not go by a better route.
#[allow(clippy::print_stderr, reason = "notes for the person at the terminal")]
fn route_notes(args: &ReplayArgs, placement: &Placement) {
    if args.quiet {
        return;
    }
    for not in &placement.not_taken {
        eprintln!("note: the route {} is not taken: {}", not.route, not.why);
        if !not.mend.is_empty() {
            eprintln!(" hint: {}", not.mend);
        }
    }
}

fn drive(
    args: &ReplayArgs,
    plan: &Plan,
    stack: &mut Stack,
    pool: Pool,
    interrupt: &mut Interrupt,
) -> anyhow::Result<Outcome> {
    let memcpy_gib_s = rate::memcpy_gib_s(&args.shape, args.seed);
    let progress = Progress::new(plan.requests(), args.progress);
    let mut engine = Engine {
        store: stack.store(),
        pool,
        shape: args.shape,
        sampler: Sampler::new(args.verify, args.seed, args.shape.object_bytes),
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
    // Before the last look, which is not part of the replay.
    let stats = engine.store.stats()?;
    if args.verify == Verify::Full && !engine.is_over() {
        progress.note("looking at everything that is still stored");
        engine.look_at_everything(plan)?;
    }
    progress.finish();
    let interrupted = engine.is_interrupted();
    Ok(Outcome { tally: engine.tally, stats, wall_s, memcpy_gib_s, interrupted })
}

fn report(
    args: &ReplayArgs,
    plan: &Plan,
    room: &Room,
    setting: Setting,
    outcome: Outcome,
) -> Report {
    let Setting { limits, placement, gpu } = setting;
    let Outcome { tally, stats, wall_s, memcpy_gib_s, interrupted } = outcome;
    let (retrieved_bytes, stored_bytes) = (tally.retrieve.bytes(), tally.store.bytes());
    let objects = (retrieved_bytes + stored_bytes) / u64::from(args.shape.object_bytes);
    Report {
        version: env!("CARGO_PKG_VERSION"),
        path: stats.path.to_string(),
        executor: args.executor.name(),
        gpu,
        device: args.devices.to_string(),
        devices: args.devices.count(),
        media: args.devices.media(),
        memory: placement.memory(),
        routes_not_taken: placement.not_taken,
        lba_bytes: limits.lba_bytes,
        mdts_bytes: limits.mdts_bytes,
        queues_per_device: args.queues,
        queue_depth: args.depth,
        coalesce_bytes: args.coalesce,
        descriptors: args.descriptors.name(),
        model: args.shape.model,
        layers: args.shape.layers,
        segments: args.shape.segments,
        block_tokens: args.shape.block_tokens,
        object_bytes: args.shape.object_bytes,
        pool_blocks: room.pool_blocks,
        trace: args.trace.as_ref().map(|path| path.display().to_string()),
        seed: args.seed,
        requests: tally.requests,
        requests_planned: plan.requests() as u64,
        trace_blocks: tally.trace_blocks,
        trace_blocks_planned: plan.trace_blocks(),
        trace_blocks_hit: tally.trace_blocks_hit,
        hit_ratio: ratio(tally.trace_blocks_hit, tally.trace_blocks),
        trace_blocks_hit_unlimited: plan.ideal_hits(),
        requests_uneven: plan.uneven(),
        capacity_bytes: room.capacity_bytes(),
        needed_bytes: room.needed_bytes,
        stored_bytes,
        retrieved_bytes,
        objects,
        evicted_files: stats.evictions,
        blocks_left_out: tally.blocks_left_out,
        verify: args.verify.name(),
        verified_bytes: tally.findings.bytes,
        mismatches: tally.findings.mismatches,
        mismatches_shown: tally.findings.shown,
        last_look_blocks: tally.blocks_looked_at,
        last_look_bytes: tally.last_look.bytes(),
        io_errors: tally.io_errors,
        recoveries: stats.recoveries,
        retrieve_gib_s: tally.retrieve.gib_s(),
        store_gib_s: tally.store.gib_s(),
        memcpy_gib_s,
        retrieve_s: tally.retrieve.busy_s(),
        store_s: tally.store.busy_s(),
        commands: stats.commands,
        sq_doorbells: stats.sq_doorbells,
        cq_doorbells: stats.cq_doorbells,
        commands_per_sq_doorbell: ratio(stats.commands, stats.sq_doorbells),
        objects_per_sq_doorbell: ratio(objects, stats.sq_doorbells),
        objects_per_command: ratio(objects, stats.commands),
        wall_s,
        interrupted,
    }
}

#[cfg(test)]
mod tests;
