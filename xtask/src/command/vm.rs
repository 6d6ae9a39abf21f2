//! `cargo xtask vm`: runs the driver's tests in a virtual machine.

use std::iter;
use std::process::ExitCode;
use std::sync::Mutex;
use std::thread::{self, ScopedJoinHandle};

use anyhow::Result;
use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::needs;
use crate::tally::Tally;
use crate::vm::{self, Prepared, SUITES, Suite, Wishes};

#[derive(Args)]
pub struct VmArgs {
    /// Run only this suite; may be repeated [default: all but vllm]
    #[arg(long, value_name = "NAME", value_parser = names())]
    suite: Vec<String>,
    /// Run only the tests whose name contains this text; several texts with commas
    #[arg(long, value_name = "TEXT")]
    test: Option<String>,
    /// List the suites
    #[arg(long, conflicts_with_all = ["suite", "shell"])]
    list: bool,
    /// Keep the drives' files in target/vm/run
    #[arg(long)]
    keep: bool,
    /// Boot into a shell on this terminal; Ctrl-A X ends it
    #[arg(long, conflicts_with_all = ["suite", "test"])]
    shell: bool,
    /// With --shell: bind the drives to the kernel's own driver
    #[arg(long, requires = "shell")]
    nvme: bool,
    /// Show all output of the guest
    #[arg(short, long)]
    verbose: bool,
}

pub const NEEDS: &[&str] = &["cxx", "binutils", "qemu", "guest"];

pub fn run(args: &VmArgs) -> Result<ExitCode> {
    if args.list {
        SUITES.iter().for_each(|suite| println!("{:<8} {}", suite.name, suite.about));
        return Ok(ExitCode::SUCCESS);
    }
    let suites = chosen(&args.suite);
    needs::satisfy(NEEDS)?;
    let prepared = Prepared::new()?;
    if args.shell {
        vm::shell(&prepared, args.nvme)?;
        return Ok(ExitCode::SUCCESS);
    }
    let wishes = Wishes { verbose: args.verbose, keep: args.keep, filter: args.test.as_deref() };
    let (mut total, mut again) = (Tally::default(), Vec::new());
    // Each machine has one processor. Verbose output is readable only for one machine at a time.
    let at_once = if args.verbose { 1 } else { thread::available_parallelism()?.get() };
    let next = Mutex::new(suites.into_iter());
    let take = || next.lock().expect("nobody panics with it").next();
    let work = || {
        iter::from_fn(take).map(|suite| Ok((suite, attempt(suite, &prepared, wishes)?))).collect()
    };
    let ended: Vec<Result<Vec<_>>> = thread::scope(|scope| {
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        let join = |worker: ScopedJoinHandle<'_, _>| worker.join().expect("it does not panic");
        workers.into_iter().map(join).collect()
    });
    for ended in ended {
        for (suite, tally) in ended? {
            if tally.failed > 0 {
                let log = prepared.log(suite.name);
                again.push(format!("{}: the console is in {}", suite.name, log.display()));
            }
            total += tally;
        }
    }
    again.iter().for_each(|line| eprintln!("{line}"));
    println!("{total}");
    Ok(total.exit_code())
}

/// Runs a suite, a second time if QEMU crashes, and prints the result.
fn attempt(suite: &Suite, prepared: &Prepared, wishes: Wishes<'_>) -> Result<Tally> {
    eprintln!("==> {}: {}", suite.name, suite.about);
    if let Some(why) = suite.lacks()? {
        println!("SKIPPED {}: {why}", suite.name);
        return Ok(Tally { skipped: 1, ..Tally::default() });
    }
    let mut ended = suite.run(prepared, wishes)?;
    if ended.crashed {
        let wrong = ended.wrong.take().unwrap_or_default();
        eprintln!("==> {}: {wrong}; that is its own fault: once more", suite.name);
        ended = suite.run(prepared, wishes)?;
    }
    eprintln!("==> {}: {}", suite.name, ended.wrong.as_deref().unwrap_or("ended"));
    println!("{}", ended.tally.line(ended.took));
    Ok(ended.tally)
}

fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(SUITES.iter().map(|suite| suite.name))
}

/// Returns the suites in the order of the list, whatever the order of the names.
fn chosen(names: &[String]) -> Vec<&'static Suite> {
    let is_chosen = |suite: &&Suite| match names {
        [] => suite.is_default(),
        names => names.iter().any(|name| name == suite.name),
    };
    SUITES.iter().filter(is_chosen).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_means_all_suites_but_vllm() {
        assert_eq!(chosen(&[]).len(), SUITES.len() - 1);
        assert_eq!(chosen(&["vllm".into()])[0].name, "vllm");
        let two: Vec<&str> =
            chosen(&["vfio".into(), "bind".into()]).iter().map(|suite| suite.name).collect();
        assert_eq!(two, ["bind", "vfio"]);
    }
}
