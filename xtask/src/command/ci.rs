//! `cargo xtask ci`: the checks of `.ci/run`, and the README's test command.

use std::process::{Command, ExitCode};

use anyhow::Result;

use crate::command::{self, lint};
use crate::step::Step;
use crate::{RunArgs, child, report};

pub fn run(args: RunArgs) -> Result<ExitCode> {
    // Without lint's own tidy step: the workspace's tests contain it, and it must not count twice.
    let mut steps = lint::checks();
    steps.extend([lint::deny(), lint::advisories(), lint::oldest_rust()]);
    let seed = seed().to_string();
    steps.extend(command::test::steps().into_iter().map(|step| repeatable(step, &seed)));
    steps.push(command::book::step());
    steps.push(command::c::step());
    steps.push(command::python::step());
    steps.push(command::cpu::step());
    steps.push(command::engine::step());
    steps.push(command::abi::step());
    steps.push(command::ptx::step());
    steps.push(command::vm::step());
    report::run_all(steps, args)
}

/// Makes a step's inputs the same on every machine: a commit that passes here must pass there. The
/// fuzz targets run their corpora only, as bolero cannot be given a seed for several inputs.
fn repeatable(step: Step, seed: &str) -> Step {
    step.env("PROPTEST_RNG_SEED", seed).env("BOLERO_RANDOM_ITERATIONS", "0")
}

/// Returns a seed that changes with each commit; 0 outside of a repository.
fn seed() -> u64 {
    let commit = child::text(Command::new("git").args(["rev-parse", "HEAD"])).unwrap_or_default();
    commit.get(..16).map_or(0, |digits| u64::from_str_radix(digits, 16).unwrap_or_default())
}
