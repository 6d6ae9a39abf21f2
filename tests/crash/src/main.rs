//! Crashes a store at random points and checks the result: `cargo xtask crash`.
//!
//! # Architecture
//!
//! A seed determines a [`history::History`]: small devices ([`machine`]), and several lives of a
//! store on them, from power-on until the power is cut. In each life a few processes use the store,
//! one after the other; each closes it, or is killed while it waits for a device. In each process
//! writers, readers and others take turns ([`session`]) with the real store, journal, rings, I/O
//! kernel, driver and software controllers, on one thread and in virtual time; some changes
//! ([`change`]) happen while another actor waits for a commit. Operations fail, a device loses its
//! power alone, bits in host memory flip. While the store is closed it is formatted, damaged or
//! repaired ([`offline`]), possibly only in part. The seed decides the fate of unflushed writes:
//! kept, dropped, or torn at 512 bytes. The next process compares the store with [`model::Model`].
//!
//! One in four histories is a [`ranks::RankHistory`]: a catalog and two ranks that crash
//! independently.
//!
//! # Invariants
//!
//! - A seed gives the same history on every machine.
//! - A key that is found has one complete version that was stored under that key.
//! - Every acknowledged commit is found, unless it was evicted or removed later. Unreadable data is
//!   not found, unless a device has failed.
//! - Data that was cleared or dropped, acknowledged as durable, never comes back, and uncommitted
//!   data is never found.
//! - Quotas, weights and epochs are those of the last sync, or later.
//! - After a failure to make something durable, the store acknowledges nothing.
//!
//! # Not implemented
//!
//! - Several threads: actors switch only where the store waits.
//! - Real files: system calls of file media are tested in nvme-emu.

#![allow(clippy::print_stdout, reason = "the report goes to stdout")]

mod change;
mod history;
mod machine;
mod model;
mod offline;
mod outcome;
mod ranks;
mod session;

use std::{
    ops::Range,
    process::{Command, ExitCode, Output, Stdio},
    sync::{Mutex, OnceLock},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;

use history::History;
use machine::Faults;
use outcome::Outcome;
use ranks::RankHistory;

/// Seeds per process.
const PART: u64 = 50;
/// Timeout of a process.
const PART_TIMEOUT: Duration = Duration::from_secs(600);
/// One in this many histories is of a store with ranks.
const RANKS_EVERY: u64 = 4;

const EXIT_CODES: &str = "\
Exit codes:
  0  nothing was wrong
  1  something was; the seeds are printed
  2  the command line could not be parsed";

/// Crash a store at random points and check the result
#[derive(Debug, Clone, Parser)]
#[command(name = "cargo xtask crash", after_help = EXIT_CODES)]
struct Args {
    /// Seeds to run, A..B
    #[arg(long, value_parser = seeds, default_value = "0..2500")]
    seeds: Range<u64>,

    /// Also make the devices lie: lost and misdirected writes, bit rot. Then commits may be lost,
    /// but no wrong data may be found
    #[arg(long)]
    lies: bool,

    /// Stop at the first seed that fails, and name the check
    #[arg(long)]
    first: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,

    /// Run the seeds in this process
    #[arg(long, hide = true)]
    part: bool,
}

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let (first, end) = text.split_once("..").ok_or("expected A..B")?;
    let number = |text: &str| text.parse::<u64>().map_err(|error| error.to_string());
    let range = number(first)?..number(end)?;
    if range.is_empty() { Err("no seed is in it".to_owned()) } else { Ok(range) }
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    if args.part {
        println!("{}", serde_json::to_string(&run_part(&args)?)?);
        return Ok(ExitCode::SUCCESS);
    }
    let start = Instant::now();
    let outcome = run(&args)?;
    let minutes = start.elapsed().as_secs_f64() / 60.0;
    let count = outcome.seeds;
    let per_minute = (count as f64 / minutes).round() as u64;
    if args.json {
        let mut json = serde_json::to_value(&outcome)?;
        json["seeds_per_minute"] = per_minute.into();
        println!("{json}");
    } else {
        for failure in &outcome.failures {
            println!("{failure}");
        }
        print_counts(&outcome);
        println!("{count} seeds, {per_minute} seeds per minute");
        if args.first {
            print_verdict(&outcome);
        }
    }
    let is_whole = count >= 100 && !args.lies && !args.first;
    if let (Some(never), true) = (outcome.never(), is_whole) {
        bail!("in {count} seeds there never was {never}: a run without it says nothing");
    }
    Ok(ExitCode::from(u8::from(!outcome.is_clean())))
}

/// Prints the result in the form of libtest, which `cargo xtask mutants` reads.
fn print_verdict(outcome: &Outcome) {
    match outcome.caught_by() {
        Some(check) => println!("test {check} ... FAILED"),
        None => println!("test result: ok. {} passed; 0 failed", outcome.seeds),
    }
}

fn print_counts(outcome: &Outcome) {
    let Outcome { crashes, kills, closes, offline, steps, meanwhile, faults, .. } = outcome;
    println!(
        "{crashes} power cuts, {kills} kills, {closes} closes, {offline} formats and repairs; \
         {steps} steps, {meanwhile} of them during a commit"
    );
    let Faults { failed_reads, failed_writes, failed_flushes, .. } = faults;
    let Faults { blackouts, memory, torn, lies, .. } = faults;
    println!(
        "faults: {failed_flushes} flushes, {failed_writes} writes and {failed_reads} reads failed, \
         {blackouts} devices lost power alone, {memory} bits flipped in memory, {torn} blocks \
         torn, {lies} lies"
    );
    println!(
        "{} blocks checked: {} wrong bytes, {} lost commits, {} false acknowledgements, {} came \
         back, {} wrong states, {} did not open",
        outcome.checked,
        outcome.wrong_bytes,
        outcome.lost_commits,
        outcome.false_acks,
        outcome.came_back,
        outcome.wrong_state,
        outcome.did_not_open,
    );
}

/// Runs some seeds in this process.
fn run_part(args: &Args) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for seed in args.seeds.clone() {
        outcome.seeds += 1;
        let ran = match seed % RANKS_EVERY == RANKS_EVERY - 1 && !args.lies {
            true => RankHistory::new(seed).run(&mut outcome),
            false => History::new(seed, args.lies).run(&mut outcome),
        };
        if !args.first {
            ran.with_context(|| format!("seed {seed}"))?;
            continue;
        }
        if let Err(error) = ran {
            outcome.did_not_open += 1;
            outcome.describe(seed, format!("{error:#}"));
        }
        if !outcome.is_clean() {
            break;
        }
    }
    Ok(outcome)
}

/// Runs a command with a timeout of [`PART_TIMEOUT`].
fn output_of(mut command: Command) -> Result<Output> {
    let child = command.stdout(Stdio::piped()).spawn();
    let mut child = child.context("starting a process for some seeds")?;
    let end = Instant::now() + PART_TIMEOUT;
    // Its output fits into the pipe.
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            child.kill()?;
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(child.wait_with_output()?)
}

/// Runs seeds in a separate process.
fn run_process(args: &Args, seeds: Range<u64>) -> Result<Outcome> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--part", "--seeds", &format!("{}..{}", seeds.start, seeds.end)]);
    command.args(args.lies.then_some("--lies")).args(args.first.then_some("--first"));
    let output = output_of(command)?;
    ensure!(output.status.success(), "seeds {seeds:?} ended with {}", output.status);
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Runs all seeds on all cores, in separate processes: memory that a store leaks, because a lost
/// device could still write to it, is freed with the process.
fn run(args: &Args) -> Result<Outcome> {
    let has_failed = OnceLock::new();
    let parts = args.seeds.clone().step_by(PART as usize);
    let parts = parts.take_while(|_| !args.first || has_failed.get().is_none());
    let run = |first| {
        let outcome = run_process(args, first..args.seeds.end.min(first + PART))?;
        if !outcome.is_clean() {
            has_failed.get_or_init(|| ());
        }
        Ok(outcome)
    };
    let mut all = Outcome::default();
    on_all_cores(parts, run)?.into_iter().for_each(|outcome| all.merge(outcome));
    Ok(all)
}

/// Returns the results of `work` in the order of its inputs.
fn on_all_cores<T, R: Send>(
    inputs: impl Iterator<Item = T> + Send,
    work: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let inputs = Mutex::new(inputs.enumerate());
    let threads = thread::available_parallelism().context("counting cores")?.get();
    let take = || -> Result<Vec<(usize, R)>> {
        let mut done = Vec::new();
        loop {
            let next = inputs.lock().map_err(|_| anyhow::anyhow!("a thread panicked"))?.next();
            let Some((at, input)) = next else { return Ok(done) };
            done.push((at, work(input)?));
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(take)).collect();
        let mut all = Vec::new();
        for worker in workers {
            all.extend(worker.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??);
        }
        all.sort_by_key(|(at, _)| *at);
        Ok(all.into_iter().map(|(_, result)| result).collect())
    })
}
