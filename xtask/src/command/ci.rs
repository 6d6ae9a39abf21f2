//! `cargo xtask ci`: everything that CI runs. It begins with the README's test command.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::command::{self, lint};
use crate::step::Step;
use crate::{RunArgs, report};

#[derive(Args)]
pub struct CiArgs {
    /// Leave out the steps of `cargo xtask test`
    #[arg(long)]
    rest: bool,
    #[command(flatten)]
    run: RunArgs,
}

pub fn run(args: &CiArgs) -> Result<ExitCode> {
    let mut steps = if args.rest { Vec::new() } else { command::test::steps() };
    steps.extend(rest());
    report::run_all(steps.into_iter().map(command::test::lean).collect(), args.run)
}

fn rest() -> Vec<Step> {
    // Without lint's own tidy step: the workspace's tests contain it, and it must not count twice.
    let mut steps = lint::checks();
    steps.extend([lint::deny(), lint::advisories(), lint::oldest_rust()]);
    steps.extend([command::test::with_programs(), command::test::slow()]);
    let replay = "run --release --bin ripieno -- replay --model tiny --verify full";
    steps.push(Step::cargo("replay", replay).needs(&["cxx"]));
    steps.push(command::crash::step());
    steps.push(command::documented::step());
    steps.push(command::book::step());
    steps.push(command::c::step());
    steps.push(command::python::step());
    steps.push(command::cpu::step());
    // It waits a lot, and takes longest. Virtual machines on the same disk would stall its stores.
    steps.push(command::engine::step().aside());
    steps.push(command::abi::step());
    steps.push(command::ptx::step());
    steps.push(command::vm::step());
    // Beside the virtual machines: one thread each.
    let aside = [
        // A debug build of them leaves out what takes minutes there.
        Step::cargo("simulator", "test --release --package ripieno-sim --lib").tests_at_least(1),
        Step::cargo("candle", "test --release --package ripieno-candle")
            .needs(&["cxx"])
            .tests_at_least(1),
        command::loom::step(),
    ];
    steps.extend(aside.map(Step::aside));
    steps
}
