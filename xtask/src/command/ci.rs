//! `cargo xtask ci`: everything that CI runs. It begins with the README's test command.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::command::{abi, book, c, cpu, documented, engine, lint, ptx, python, test, vm};
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
    let mut steps = if args.rest { Vec::new() } else { test::steps() };
    steps.extend(rest());
    report::run_all(steps.into_iter().map(test::lean).collect(), args.run)
}

fn rest() -> Vec<Step> {
    // Without lint's own tidy step: the workspace's tests contain it, and it must not count twice.
    let mut steps = lint::checks();
    steps.extend([lint::deny(), lint::advisories(), lint::oldest_rust()]);
    steps.extend([test::with_programs(), test::slow()]);
    let replay = "run --release --bin ripieno -- replay --model tiny --verify full";
    let tests = |args, needs| Step::xtask(args, needs).tests_at_least(1);
    // A test of ripieno-c compares the header.
    let c = Step::xtask("c check", c::CHECK_NEEDS);
    steps.extend([
        Step::cargo("replay", replay).needs(&["cxx"]),
        // Over 15,000 power cuts, and the planted bugs that they must catch, whose tests run
        // without any bug first, which is the harness as it is.
        Step::cargo("crash", "xtask mutants --area crash").needs(&["cxx"]).tests_at_least(1),
        tests("documented", documented::NEEDS),
        Step::xtask("book", book::NEEDS),
        c::PARTS.into_iter().fold(c, |step, (need, off)| step.part_needs(need, off)),
        tests("python", python::NEEDS),
        tests("cpu", cpu::NEEDS),
        // It waits a lot, and takes longest. Virtual machines on the same disk would stall its
        // stores.
        tests("engine", engine::NEEDS).aside(),
        Step::xtask("abi --check", abi::NEEDS),
        tests("ptx --check", ptx::NEEDS),
        tests("vm", vm::NEEDS),
    ]);
    // Beside the virtual machines: one thread each.
    let aside = [
        // A debug build of them leaves out what takes minutes there.
        Step::cargo("simulator", "test --release --package ripieno-sim --lib").tests_at_least(1),
        Step::cargo("candle", "test --release --package ripieno-candle")
            .needs(&["cxx"])
            .tests_at_least(1),
        test::loom(),
    ];
    steps.extend(aside.map(Step::aside));
    steps
}
