//! `cargo xtask ci`: the checks of `.ci/run`, and the README's test command.

use std::process::ExitCode;

use anyhow::Result;

use crate::command::{self, lint};
use crate::{RunArgs, report};

pub fn run(args: RunArgs) -> Result<ExitCode> {
    // Without lint's own tidy step: the workspace's tests contain it, and it must not count twice.
    let mut steps = lint::checks();
    steps.extend([lint::deny(), lint::advisories(), lint::oldest_rust()]);
    steps.extend(command::test::steps());
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
