//! `ripieno replay --pace`: requests at their arrival times, in virtual time, with the scheduler
//! and without.

mod engine;
mod mixed;
mod report;
pub(super) mod sweep;
mod tally;

use std::io::ErrorKind;
use std::sync::Arc;

use anyhow::Context as _;
use kv_schedule::{Config, Scheduler, SlackTable};
use kv_tier::LookaheadConfig;
use nvme_driver::Clock;
use nvme_emu::{BandwidthDial, SimClock};
use objstore::{BlockId, PacedStore};

use crate::config::ReplayArgs;
use crate::file;
use crate::interrupt::Interrupt;
use crate::pace::{self, Pace};
use crate::plan::Plan;
use crate::problem::{EXIT_FAILED, Problem};
use crate::progress::Progress;
use crate::size::Size;
use crate::sizing::Sizing;
use crate::stack::{Build, Sim, Stack};

use engine::{Engine, Setup};
use report::{Report, Run};
use tally::Tally;

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
    let mut runs = Vec::new();
    for is_scheduled in pace.runs().iter().copied() {
        let setup = RunSetup { args, pace, plan, sizing: &sizing, table: &table };
        let (tally, learned) = setup.serve(is_scheduled, interrupt)?;
        if let (Some(path), true) = (pace.slack(), is_scheduled) {
            file::write("--slack", path, &learned.to_json())?;
        }
        runs.push(Run::new(is_scheduled, tally));
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

/// An idle store and the result of its run.
type Done<T> = anyhow::Result<(PacedStore, T)>;

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
        is_scheduled: bool,
        interrupt: &mut Interrupt,
    ) -> anyhow::Result<(Tally, SlackTable)> {
        let Self { args, pace, plan, table, .. } = *self;
        let progress = Progress::new(plan.requests(), args.shows_progress());
        self.with_store(pace.config(is_scheduled), |clock, store, free| {
            let setup = Setup {
                plan,
                pace,
                layers: args.shape.layers,
                block_tokens: args.shape.block_tokens,
                known: Some(table),
                clock,
                progress: &progress,
            };
            let served = Engine::new(setup, store, free).serve(interrupt)?;
            progress.finish();
            Ok(served)
        })
    }

    /// Runs `act` with a new store and its whole pool. Also returns the learned table.
    fn with_store<T>(
        &self,
        config: Config,
        act: impl FnOnce(&Arc<SimClock>, PacedStore, Vec<BlockId>) -> Done<T>,
    ) -> anyhow::Result<(T, SlackTable)> {
        let Self { args, pace, sizing, table, .. } = *self;
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
        let (store, result) = act(&sim.clock, store, free)?;
        sim.dial.set(None);
        let learned = store.scheduler().table().clone();
        drop(store);
        stack.close()?;
        Ok((result, learned))
    }
}
