//! `ripieno replay --pace`: requests at their arrival times, in virtual time, with the scheduler
//! and without.

mod mixed;
mod report;
pub(super) mod sweep;
mod tally;
mod tiers;

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use kv_schedule::{Config, Scheduler, SlackTable, StepShape};
use kv_tier::LookaheadConfig;
use nvme_driver::Clock;
use nvme_emu::{BandwidthDial, SimClock};
use objstore::PacedStore;
use ripieno_sim::{H100, LLAMA_3_8B, LayerTimes, Model, Request, Setup, serve_over};

use crate::config::ReplayArgs;
use crate::file;
use crate::interrupt::Interrupt;
use crate::pace::{self, Pace};
use crate::plan::{Plan, Times};
use crate::problem::{EXIT_FAILED, Problem};
use crate::progress::Progress;
use crate::size::Size;
use crate::sizing::Sizing;
use crate::stack::{Build, Sim, Stack};

use report::{Report, Run};
use tally::Tally;
use tiers::StoreTiers;

/// Model name of the software controllers.
const DRIVE: &str = "Ripieno software controller";

/// Replays and reports. Returns the exit code.
///
/// # Errors
/// Returns a [`Problem`] for bad input, and an error if the stack fails.
pub(super) fn run(
    args: &ReplayArgs,
    pace: &Pace,
    plan: &Plan,
    interrupt: &mut Interrupt,
) -> anyhow::Result<u8> {
    let report = perform(args, pace, plan, interrupt)?;
    report.print(args.flags.json)?;
    Ok(match (report.is_clean(), report.interrupted) {
        (false, _) => EXIT_FAILED,
        (true, true) => interrupt.exit_code(),
        (true, false) => 0,
    })
}

pub(super) fn perform(
    args: &ReplayArgs,
    pace: &Pace,
    plan: &Plan,
    interrupt: &mut Interrupt,
) -> anyhow::Result<Report> {
    let sizing = sizing(args, plan)?;
    if let Some(path) = pace.slack() {
        file::check_output("--slack", path)?;
    }
    interrupt.orderly();
    let table = table(args, pace)?;
    let requests = requests(pace, plan);
    let mut runs = Vec::new();
    for is_scheduled in pace.runs().iter().copied() {
        let setup = RunSetup { args, pace, plan, sizing: &sizing, table: &table };
        let (served, learned) = setup.serve(&requests, is_scheduled, interrupt)?;
        if let (Some(path), true) = (pace.slack(), is_scheduled) {
            file::write("--slack", path, &learned.to_json())?;
        }
        runs.push(Run::new(is_scheduled, &requests, served));
    }
    Ok(Report::new(args, pace, plan, runs))
}

/// Returns the sizes for a plan.
fn sizing(args: &ReplayArgs, plan: &Plan) -> Result<Sizing, Problem> {
    let sizing = Sizing::new(args, plan, super::Limits::of(args, None).lba_bytes)?;
    sizing.check_machine(args, false)?;
    check_pool(args, plan, &sizing)?;
    Ok(sizing)
}

/// Rejects a pool that cannot hold the longest request as a whole.
fn check_pool(args: &ReplayArgs, plan: &Plan, sizing: &Sizing) -> Result<(), Problem> {
    if plan.longest() <= sizing.pool_blocks as usize {
        return Ok(());
    }
    let (longest, has) = (plan.longest(), sizing.pool_blocks);
    let bytes = Size(args.shape.block_bytes() * longest as u64);
    Err(Problem::new(
        format!("--pace: the longest request has {longest} blocks, and the KV pool {has}"),
        format!("use --pool-blocks {longest} ({bytes}) or more, or --model mini"),
    ))
}

/// Returns the table in the file, or an empty one.
fn table(args: &ReplayArgs, pace: &Pace) -> anyhow::Result<SlackTable> {
    let drives = vec![DRIVE.to_owned(); args.devices.count() as usize];
    let setting = pace::setting(args.shape.model, drives);
    let new = || Ok(SlackTable::new(setting.clone(), pace.medium.costs()?));
    let Some(path) = pace.slack() else { return new() };
    match file::read_text(path, pace::TABLE_BYTES_MAX) {
        Ok(text) => {
            Ok(SlackTable::from_json(&text, &setting)
                .map_err(|error| pace::unusable(path, error))?)
        }
        Err(error) if error.kind() == ErrorKind::NotFound => new(),
        Err(error) => Err(pace::unusable(path, error).into()),
    }
}

/// Returns the requests as the engine takes them: blocks have their keys in `plan`.
fn requests(pace: &Pace, plan: &Plan) -> Vec<Request> {
    let tokens = |tokens| u32::try_from(tokens).unwrap_or(u32::MAX).max(1);
    let request = |number| {
        let Times { arrival, input, output } = plan.times(number);
        let (arrival, blocks) = (pace.arrival(arrival), Vec::new());
        Request { arrival, input: tokens(input), output: tokens(output), blocks, leaves: None }
    };
    (0..plan.requests()).map(request).collect()
}

/// Layer times: known ones, and others from the settings.
#[derive(Debug)]
struct LayerTable<'a> {
    known: &'a SlackTable,
    pace: &'a Pace,
}

impl LayerTimes for LayerTable<'_> {
    fn layer(&self, step: StepShape) -> Option<Duration> {
        Some(self.known.layer(step).unwrap_or_else(|| self.pace.layer(step)))
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
    args: &'a ReplayArgs,
    pace: &'a Pace,
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
        let Self { args, pace, table, .. } = *self;
        let progress = Progress::new(requests.len(), args.shows_progress());
        let times = LayerTable { known: table, pace };
        let setup = Setup {
            // Of the model only the layers count, and of the GPU nothing: layer times are given.
            model: Model { layers: args.shape.layers, ..LLAMA_3_8B },
            gpu: H100,
            layers: Some(&times),
            kv_bytes: u64::MAX,
            block_tokens: args.shape.block_tokens,
            step_tokens: pace.step_tokens(),
            requests_max: pace.batch(),
        };
        let mut is_interrupted = false;
        let ((report, tally), learned) =
            self.with_store(pace.config(is_scheduled), &progress, |tiers| {
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
        let Self { args, pace, plan, sizing, table } = *self;
        let sim = Sim { clock: SimClock::new(args.flags.seed), dial: BandwidthDial::default() };
        let clock: Arc<dyn Clock> = sim.clock.clone();
        let build = Build { args, sizing, clock: &clock, gpu: None, keep: None, sim: Some(&sim) };
        let (mut stack, mut pool) = Stack::build(build, None)?;
        let from = stack.store().superblock().data_region().context("a store has data")?.first.0;
        let lba_bytes = u64::from(super::Limits::of(args, None).lba_bytes);
        sim.dial.set(Some(pace.medium.each(args.devices.count(), from * lba_bytes)));
        let scheduler = Scheduler::new(config, table.clone());
        let mut store = PacedStore::new(stack.store().clone(), scheduler);
        if config.is_slack_aware && args.flags.dram > 0 {
            // The link copies only after a request has its blocks, as part of its loads.
            let link = Scheduler::new(config, table.clone());
            store = store.with_lookahead(link, LookaheadConfig::default());
        }
        let free = pool.take(pool.blocks());
        let shape = (args.shape.layers, args.shape.block_tokens);
        let tiers = StoreTiers::new(plan, shape, &sim.clock, progress, (store, free));
        let (tiers, result) = act(tiers)?;
        sim.dial.set(None);
        let learned = tiers.table();
        drop(tiers);
        stack.close()?;
        Ok((result, learned))
    }
}
