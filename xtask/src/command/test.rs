//! `cargo xtask test`: runs every test that needs no hardware, and a replay that checks every byte.

use std::env;
use std::process::ExitCode;

use anyhow::Result;

use crate::command::{crash, loom};
use crate::needs::Need;
use crate::step::Step;
use crate::{RunArgs, qemu, report};

/// Names QEMU to the tests, if it is not on the PATH.
const QEMU: &str = "RIPIENO_QEMU";

pub fn run(args: RunArgs) -> Result<ExitCode> {
    report::run_all(steps(), args)
}

pub fn steps() -> Vec<Step> {
    let mut steps = vec![
        tests(),
        loom::step(),
        Step::cargo("replay", "run --release --bin ripieno -- replay --model tiny --verify full")
            .needs(&[Need::Cxx]),
    ];
    steps.extend(crash::steps());
    steps
}

/// Returns the step of the unit, integration and doc tests. Not nextest, which runs no doc tests,
/// so there would be two test runners.
fn tests() -> Step {
    with_qemu(Step::cargo("tests", "test --workspace --all-features --no-fail-fast"))
}

/// A run of tests, of which some compare with QEMU's controllers where it can be had.
pub fn with_qemu(tests: Step) -> Step {
    let step =
        tests.needs(&[Need::Cxx]).part_needs(Need::Qemu, "RIPIENO_SKIP_QEMU").tests_at_least(1);
    match qemu::SYSTEM.unpacked() {
        Some(program) if env::var_os(QEMU).is_none() => step.env(QEMU, program.to_string_lossy()),
        _ => step,
    }
}
