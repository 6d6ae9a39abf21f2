//! The command line: raw flags, and what they mean once they are checked.

mod args;
mod devices;
mod gpu;
mod raw;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Parser as _;

use crate::problem::{EXIT_FAILED, EXIT_USAGE, Problem, one_line};
use crate::{doctor, identify, replay};

pub(crate) use args::{Descriptors, DoctorArgs, EMU_DEPTH, EMU_QUEUES, ReplayArgs, Verify};
pub(crate) use devices::{Devices, EmuChoice, MediaChoice, MemoryChoice, Named};
pub(crate) use gpu::{Executor, GpuChoice, Route};
#[cfg(test)]
pub(crate) use raw::Command;
pub(crate) use raw::Raw;

/// Runs the command line of this process to its exit code.
pub fn run() -> ExitCode {
    let raw = Raw::parse();
    let outcome = match raw.command {
        raw::Command::Replay(flags) => {
            log(flags.verbose, flags.quiet);
            args::ReplayArgs::check(&flags).map_err(Into::into).and_then(replay::run)
        }
        raw::Command::Identify(flags) => {
            log(flags.verbose, false);
            let named = devices::parse(&flags.device).map_err(Into::into);
            named.and_then(|devices| identify::run(&devices, flags.json))
        }
        raw::Command::Doctor(flags) => {
            log(flags.verbose, flags.verbose == 0);
            let asked = args::DoctorArgs::check(&flags).map_err(Into::into);
            asked.and_then(|args| doctor::run(&args))
        }
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => ExitCode::from(complain(&error)),
    }
}

/// Tells what went wrong, in one line and a hint, and chooses the exit code.
#[allow(clippy::print_stderr, reason = "messages for the person at the terminal")]
fn complain(error: &anyhow::Error) -> u8 {
    // Whoever reads stdout has seen enough.
    let closed = |error: &std::io::Error| error.kind() == std::io::ErrorKind::BrokenPipe;
    if error.downcast_ref().is_some_and(closed) {
        return EXIT_FAILED;
    }
    eprintln!("error: {}", one_line(error));
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
