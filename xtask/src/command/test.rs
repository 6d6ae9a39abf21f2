//! `cargo xtask test`: runs every test that needs no hardware, and a replay that checks every byte.

use std::env;
use std::process::ExitCode;

use anyhow::Result;

use crate::command::{crash, loom};
use crate::folder::IN_DEBUG;
use crate::needs::Need;
use crate::step::Step;
use crate::unpacked::{self, Program};
use crate::{RunArgs, report};

/// Programs that tests use, and the variables that name them if they are not on the PATH, and that
/// skip what needs them.
const PROGRAMS: [(Program, Need, &str, &str); 2] = [
    (unpacked::QEMU, Need::Qemu, "RIPIENO_QEMU", "RIPIENO_SKIP_QEMU"),
    (unpacked::PROMTOOL, Need::Promtool, "RIPIENO_PROMTOOL", "RIPIENO_SKIP_PROMTOOL"),
];

pub fn run(args: RunArgs) -> Result<ExitCode> {
    report::run_all(steps(), args)
}

pub fn steps() -> Vec<Step> {
    let mut steps = vec![
        tests(),
        loom::step(),
        Step::cargo("replay", "run --release --bin ripieno -- replay --model tiny --verify full")
            .needs(&[Need::Cxx]),
        // A debug build of them leaves out what takes minutes there.
        Step::cargo("simulator", "test --release --package ripieno-sim --lib").tests_at_least(1),
    ];
    steps.extend(crash::steps());
    steps
}

/// Returns the step of the unit, integration and doc tests. Not nextest, which runs no doc tests,
/// so there would be two test runners.
fn tests() -> Step {
    with_programs(Step::cargo("tests", &format!("test {IN_DEBUG} --no-fail-fast")))
}

/// A run of tests, of which some compare with QEMU's controllers, or have metrics checked by
/// promtool, where they can be had.
pub fn with_programs(tests: Step) -> Step {
    let mut step = tests.needs(&[Need::Cxx]).tests_at_least(1);
    for (program, need, name, off) in PROGRAMS {
        step = step.part_needs(need, off);
        if let Some(path) = program.unpacked().filter(|_| env::var_os(name).is_none()) {
            step = step.env(name, path.to_string_lossy());
        }
    }
    step
}
