//! The command line: raw flags, and what they mean once they are checked.

mod args;
mod raw;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Parser as _;

use crate::problem::{EXIT_FAILED, EXIT_USAGE, Problem};
use crate::replay;

pub(crate) use args::{
    Descriptors, EMU_DEPTH, EMU_QUEUES, Executor, MediaChoice, ReplayArgs, Verify,
};
#[cfg(test)]
pub(crate) use raw::Command;
pub(crate) use raw::Raw;

/// Runs the command line of this process to its exit code.
pub fn run() -> ExitCode {
    let raw = Raw::parse();
    let raw::Command::Replay(flags) = raw.command;
    log(flags.verbose, flags.quiet);
    let outcome = args::ReplayArgs::check(&flags).map_err(Into::into).and_then(replay::run);
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => ExitCode::from(complain(&error)),
    }
}

/// Tells what went wrong, in one line and a hint, and chooses the exit code.
#[allow(clippy::print_stderr, reason = "messages for the person at the terminal")]
fn complain(error: &anyhow::Error) -> u8 {
    eprintln!("error: {error:#}");
    let Some(problem) = error.downcast_ref::<Problem>() else { return EXIT_FAILED };
    if !problem.hint().is_empty() {
        eprintln!(" hint: {}", problem.hint());
    }
    EXIT_USAGE
}

/// Logs of the layers below go to stderr. `RUST_LOG` wins over -v and -q.
fn log(verbose: u8, quiet: bool) {
    use tracing_subscriber::EnvFilter;
    let level = match (quiet, verbose) {
        (true, _) => "error",
        (false, 0) => "warn",
        (false, 1) => "info",
        (false, 2) => "debug",
        (false, _) => "trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
}
