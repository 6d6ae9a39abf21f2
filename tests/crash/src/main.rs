//! Crashes a store at random points and checks what is left: `cargo xtask crash`.
//!
//! # Architecture
//!
//! A seed makes a [`history::History`]: small devices, and several lives of a store on them. In
//! each life random operations run against the real store, journal, rings, I/O kernel, driver and
//! software controllers, on one thread and in virtual time, until the power is cut. What unflushed
//! writes leave is decided by the seed: kept, dropped, torn at 512 bytes. The next life opens the
//! store on what is left, and compares it with [`model::Model`].
//!
//! # Invariants
//!
//! - A seed gives the same history on every machine.
//! - What is found under a key is one version, whole, that was stored under that key.
//! - Every commit that was acknowledged is there, unless it was evicted or removed afterwards.
//! - What was cleared, and acknowledged as permanent, never comes back.
//!
//! # Not implemented
//!
//! Several ranks: their commits are tested in kv-catalog.

#![allow(clippy::print_stdout, reason = "the report goes to stdout")]

mod history;
mod model;
#[cfg(feature = "planted-bugs")]
mod planted;

use std::{
    ops::Range,
    process::{Command, ExitCode, Stdio},
    sync::Mutex,
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;

use history::{History, Outcome};

/// Seeds of one process.
const PART: u64 = 100;

const EXIT_CODES: &str = "\
Exit codes:
  0  nothing was wrong (with --planted: every bug was caught)
  1  something was; the seeds are printed
  2  the command line could not be parsed";

/// Crashes a store at random points and checks what is left.
#[derive(Debug, Clone, Parser)]
#[command(name = "cargo xtask crash", after_help = EXIT_CODES)]
struct Args {
    /// Seeds to run, A..B
    #[arg(long, value_parser = seeds, default_value = "0..2500")]
    seeds: Range<u64>,

    /// Let the devices lie, too: writes that are lost or go elsewhere, bits that rot. Then commits
    /// may be lost, but no wrong byte may be found
    #[arg(long)]
    lies: bool,

    /// Switch on one bug after the other, and count the seeds until it is caught
    #[cfg(feature = "planted-bugs")]
    #[arg(long)]
    planted: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,

    /// Run the seeds in this process
    #[arg(long, hide = true)]
    part: bool,

    /// With this bug
    #[arg(long, hide = true)]
    plant: Option<String>,
}

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let (first, end) = text.split_once("..").ok_or("expected A..B")?;
    let number = |text: &str| text.parse::<u64>().map_err(|error| error.to_string());
    let range = number(first)?..number(end)?;
    if range.is_empty() { Err("no seed is in it".to_owned()) } else { Ok(range) }
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    #[cfg(feature = "planted-bugs")]
    if args.planted {
        return planted::run(&args);
    }
    if args.part {
        #[cfg(feature = "planted-bugs")]
        planted::plant(args.plant.as_deref())?;
        println!("{}", serde_json::to_string(&run_part(&args)?)?);
        return Ok(ExitCode::SUCCESS);
    }
    let start = Instant::now();
    let outcome = run(&args)?;
    let minutes = start.elapsed().as_secs_f64() / 60.0;
    let count = args.seeds.end - args.seeds.start;
    let per_minute = (count as f64 / minutes).round() as u64;
    if args.json {
        let mut json = serde_json::to_value(&outcome)?;
        json["seeds_per_minute"] = per_minute.into();
        println!("{json}");
    } else {
        for failure in &outcome.failures {
            println!("{failure}");
        }
        println!(
            "{} crash points, {} wrong bytes, {} lost commits, {} came back, {} did not open; {} \
             blocks checked; {count} seeds, {per_minute} seeds per minute",
            outcome.crashes,
            outcome.wrong_bytes,
            outcome.lost_commits,
            outcome.came_back,
            outcome.did_not_open,
            outcome.checked,
        );
    }
    Ok(ExitCode::from(u8::from(!outcome.is_clean())))
}

/// Runs some seeds in this process.
fn run_part(args: &Args) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for seed in args.seeds.clone() {
        outcome.seeds += 1;
        let ran = History::new(seed, args.lies).run(&mut outcome);
        if args.plant.is_none() {
            ran.with_context(|| format!("seed {seed}"))?;
            continue;
        }
        // With a bug, a history may end anyhow.
        outcome.did_not_open += u64::from(ran.is_err());
        if !outcome.is_clean() {
            break;
        }
    }
    Ok(outcome)
}

/// Runs seeds in a process of their own.
fn run_process(args: &Args, seeds: Range<u64>) -> Result<Outcome> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--part", "--seeds", &format!("{}..{}", seeds.start, seeds.end)]);
    command.args(args.lies.then_some("--lies")).stderr(Stdio::inherit());
    if let Some(bug) = &args.plant {
        command.args(["--plant", bug]).stderr(Stdio::null());
    }
    let output = command.output().context("starting a process for some seeds")?;
    ensure!(output.status.success(), "seeds {seeds:?} ended with {}", output.status);
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Runs all seeds on all cores, in processes of their own: what a store leaks when its devices are
/// gone, because they could still write to it, ends with them.
fn run(args: &Args) -> Result<Outcome> {
    let parts = Mutex::new(args.seeds.clone().step_by(PART as usize));
    let threads = thread::available_parallelism().context("counting cores")?.get();
    let work = || -> Result<Outcome> {
        let mut outcome = Outcome::default();
        loop {
            let next = parts.lock().map_err(|_| anyhow::anyhow!("a thread panicked"))?.next();
            let Some(first) = next else { return Ok(outcome) };
            let end = args.seeds.end.min(first + PART);
            outcome.merge(run_process(args, first..end)?);
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut all = Outcome::default();
        for worker in workers {
            all.merge(worker.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??);
        }
        Ok(all)
    })
}
