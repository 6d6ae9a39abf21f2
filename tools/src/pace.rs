//! `ripieno pace`: requests at their arrival times, in virtual time, with the scheduler and without
//! it. The engine is the simulator's; its transfers go through the store.

mod mixed;
mod report;
mod sweep;
mod tally;
mod tiers;

use std::time::Duration;

use anyhow::Context as _;
use kv_schedule::{Config, Scheduler, SlackTable, StepShape};
use kv_tier::LookaheadConfig;
use ripieno_sim::{Gpu, LLAMA_3_8B, LayerTimes, Model, Parameters, Request, Setup, serve_over};

use clap::Args;

use crate::config::{CommonFlags, DeviceFlags, ReplayFlags, StoreArgs};
use crate::file;
use crate::interrupt::Interrupt;
use crate::layer_times::{TableFile, is_there};
use crate::options::{StoreFlags, Takes};
use crate::plan::{Plan, Times};
use crate::problem::Problem;
use crate::progress::Progress;
use crate::replay;
use crate::size::Size;
use crate::sizing::Sizing;
use crate::stack::{self, Opened, Sim};
use crate::terminal;
use crate::timing::{self, Timing, TimingFlags};

use report::Report;
use tally::Tally;
use tiers::StoreTiers;

/// Model name of the software controllers.
const DRIVE: &str = "Ripieno software controller";

/// Default number of synthetic requests.
const REQUESTS: usize = 500;

/// Flags of `ripieno pace`.
#[derive(Debug, Args)]
pub(crate) struct PaceFlags {
    #[command(flatten)]
    pub(crate) common: CommonFlags,

    #[command(flatten)]
    timing: TimingFlags,

    #[command(flatten)]
    options: StoreFlags<Self>,
}

impl Takes for PaceFlags {
    const OPTIONS: &'static [(&'static str, &'static str)] = &[
        ("devices", "2"),
        ("capacity", "enough for the whole workload"),
        ("lba", "4096; mini, tiny: 512"),
        ("queues", "1"),
        ("depth", ""),
        ("dram", ""),
        ("dram_mode", ""),
    ];
}

/// Serves the requests and reports. Returns the exit code.
pub(crate) fn run(PaceFlags { common, timing, options }: PaceFlags) -> anyhow::Result<u8> {
    let mut interrupt = Interrupt::listen()?;
    let devices = DeviceFlags::default();
    let mut args =
        StoreArgs::check(ReplayFlags { common, devices, options: options.config.into() }, true)?;
    let timing = Timing::new(timing, args.scale)?;
    if let Some(rates) = &timing.flags.hit_rates {
        return sweep::run(&args, &timing, rates, &mut interrupt);
    }
    if args.common.trace.is_none() {
        args.common.requests.get_or_insert(REQUESTS);
    }
    let report = perform(&args, &timing, &replay::plan(&args)?, &mut interrupt)?;
    terminal::report(&report, args.common.output.json, Report::text)?;
    Ok(interrupt.end(report.is_clean, report.interrupted))
}

fn perform(
    args: &StoreArgs,
    timing: &Timing,
    plan: &Plan,
    interrupt: &mut Interrupt,
) -> anyhow::Result<Report> {
    let sizing = sizing(args, plan)?;
    if let Some(path) = &timing.flags.slack {
        file::check_output("--slack", path)?;
    }
    interrupt.orderly();
    let table = table(args, timing)?;
    let requests = requests(timing, plan);
    let mut runs = Vec::new();
    for is_scheduled in timing.runs().iter().copied() {
        let setup = RunSetup { args, timing, plan, sizing: &sizing, table: &table };
        let (served, learned) = setup.serve(&requests, is_scheduled, interrupt)?;
        if let (Some(path), true) = (&timing.flags.slack, is_scheduled) {
            file::write("--slack", path, &learned.to_json())?;
        }
        runs.push((is_scheduled, served));
    }
    Ok(Report::new(args, timing, plan, &requests, &runs))
}

/// Returns the sizes for a plan.
fn sizing(args: &StoreArgs, plan: &Plan) -> Result<Sizing, Problem> {
    let sizing = Sizing::new(args, plan, replay::lba_bytes(args, None))?;
    sizing.check_machine(args, false)?;
    check_pool(args, plan, &sizing)?;
    Ok(sizing)
}

/// Rejects a pool that cannot hold the longest request as a whole.
fn check_pool(args: &StoreArgs, plan: &Plan, sizing: &Sizing) -> Result<(), Problem> {
    if plan.longest <= sizing.pool_blocks as usize {
        return Ok(());
    }
    let (longest, has) = (plan.longest, sizing.pool_blocks);
    let bytes = Size(args.shape.block_bytes() * longest as u64);
    Err(Problem::new(
        format!("the longest request has {longest} blocks, and the KV pool {has}"),
        format!("use --pool-blocks {longest} ({bytes}) or more, or --model mini"),
    ))
}

/// Returns the table in the file, or an empty one.
fn table(args: &StoreArgs, timing: &Timing) -> anyhow::Result<SlackTable> {
    let drives = vec![DRIVE.to_owned(); args.devices.count() as usize];
    let setting = timing::setting(args.shape.model, drives);
    let Some(path) = timing.flags.slack.as_deref().filter(|path| is_there(path)) else {
        return Ok(SlackTable::new(setting, timing.medium.costs()?));
    };
    let hint = "name another file to profile this setting; one that is not there yet is made";
    let file = TableFile("--slack", path, hint);
    let table = file.read()?;
    file.check(&table, &setting)?;
    Ok(table)
}

/// Returns the requests as the engine takes them: blocks have their keys in `plan`.
fn requests(timing: &Timing, plan: &Plan) -> Vec<Request> {
    let tokens = |tokens| u32::try_from(tokens).unwrap_or(u32::MAX).max(1);
    let request = |number| {
        let Times { arrival, input, output, after } = plan.times(number);
        let (arrival, blocks) = (timing.arrival(arrival), Vec::new());
        let after = after.map(|(before, thinks)| (before, timing.arrival(thinks)));
        let [input, output] = [tokens(input), tokens(output)];
        Request { arrival, input, output, blocks, leaves: None, after }
    };
    (0..plan.requests()).map(request).collect()
}

/// Layer times: known ones, and others from the settings.
#[derive(Debug)]
struct LayerTable<'a> {
    known: &'a SlackTable,
    timing: &'a Timing,
}

impl LayerTimes for LayerTable<'_> {
    fn layer(&self, step: StepShape) -> Option<Duration> {
        Some(self.known.layer(step).unwrap_or_else(|| self.timing.layer(step)))
    }
}

/// Result of a run.
struct Served {
    report: ripieno_sim::Report,
    tally: Tally,
    is_interrupted: bool,
}

/// Setup shared by all runs.
struct RunSetup<'a> {
    args: &'a StoreArgs,
    timing: &'a Timing,
    plan: &'a Plan,
    sizing: &'a Sizing,
    table: &'a SlackTable,
}

impl RunSetup<'_> {
    /// Serves all requests with a new store. Also returns the learned table.
    fn serve(
        &self,
        requests: &[Request],
        is_scheduled: bool,
        interrupt: &mut Interrupt,
    ) -> anyhow::Result<(Served, SlackTable)> {
        let Self { args, timing, table, .. } = *self;
        let progress = Progress::new("requests", requests.len(), args.shows_progress());
        let times = LayerTable { known: table, timing };
        let setup = Setup {
            // Of the model only the layers count, and of GPU and tiers nothing: layer times are
            // given, and a store holds the blocks.
            model: Model { layers: args.shape.layers, ..LLAMA_3_8B },
            gpu: Gpu::h100(),
            layers: Some(&times),
            storage: Parameters::default().storage(2, 1),
            known: None,
            kv_bytes: u64::MAX,
            block_tokens: args.shape.block_tokens,
            step_tokens: timing.flags.step_tokens,
            requests_max: timing.flags.batch as usize,
        };
        let mut is_interrupted = false;
        let ((report, tally), learned) =
            self.with_store(timing.config(is_scheduled), &progress, |tiers| {
                let (report, tiers) = serve_over(&setup, tiers, requests, &mut || {
                    is_interrupted |= interrupt.asked();
                    !is_interrupted
                })?;
                progress.finish();
                let tally = tiers.tally()?;
                Ok((tiers, (report, tally)))
            })?;
        Ok((Served { report, tally, is_interrupted }, learned))
    }

    /// Runs `act` with a new store and its whole pool. Also returns the learned table.
    fn with_store<T>(
        &self,
        config: Config,
        progress: &Progress,
        act: impl FnOnce(StoreTiers<'_>) -> anyhow::Result<(StoreTiers<'_>, T)>,
    ) -> anyhow::Result<(T, SlackTable)> {
        let Self { args, timing, plan, sizing, table } = *self;
        let sim = Sim::new(args);
        let devices = replay::devices(args, sizing, None, None, Some(&sim))?;
        let Opened { mut pool, stack, .. } = stack::open(args, sizing, devices, None)?;
        let from = stack.store().superblock().data_region().context("a store has data")?.first.0;
        let lba_bytes = u64::from(replay::lba_bytes(args, None));
        sim.dial.set(Some(timing.medium.each(args.devices.count(), from * lba_bytes)));
        let scheduler = Scheduler::new(config, table.clone());
        let store = stack.store().clone();
        store.plane().pace(scheduler, LookaheadConfig::default())?;
        let looks_ahead = config.reads_first && args.dram() > 0;
        let store = (store, looks_ahead, pool.take(pool.blocks()));
        let tiers = StoreTiers::new(plan, args.shape, &sim.clock, progress, store);
        let (tiers, result) = act(tiers)?;
        sim.dial.set(None);
        let learned = tiers.table()?;
        drop(tiers);
        stack.close()?;
        Ok((result, learned))
    }
}
