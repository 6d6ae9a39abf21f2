//! `cargo xtask ci`: the checks of `.ci/run`, and the README's test command.

use std::process::ExitCode;

use anyhow::Result;

use crate::command::{self, lint};
use crate::step::Step;
use crate::{RunArgs, report};

pub fn run(args: RunArgs) -> Result<ExitCode> {
    // Without lint's own tidy step: the workspace's tests contain it, and it must not count twice.
    let mut steps = lint::checks();
    steps.extend([lint::deny(), lint::advisories(), lint::oldest_rust()]);
    steps.extend(command::test::steps().into_iter().map(repeatable));
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

/// Makes the inputs of property tests and fuzz targets the same in each run. The targets run their
/// corpora only, as bolero cannot be given a seed for several inputs.
fn repeatable(step: Step) -> Step {
    step.env("PROPTEST_RNG_SEED", "0").env("BOLERO_RANDOM_ITERATIONS", "0")
}
