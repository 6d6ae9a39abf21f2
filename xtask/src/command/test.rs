//! `cargo xtask test`: the tests that need a C++ compiler and the crates, and nothing else.

use std::process::ExitCode;

use anyhow::Result;

use crate::folder::{self, IN_DEBUG};
use crate::step::Step;
use crate::{RunArgs, needs, report};

/// Programs that tests use: the need, their variable on a machine without them in the PATH, the
/// variable that skips the tests, and these tests' files.
const PROGRAMS: [(&str, &str, &str, &str, &str); 2] = [
    ("qemu-system-x86_64", "qemu", "RIPIENO_QEMU", "RIPIENO_SKIP_QEMU", "qemu"),
    ("promtool", "promtool", "RIPIENO_PROMTOOL", "RIPIENO_SKIP_PROMTOOL", "documents"),
];

/// Settings of the builds, unless the user has others. Nothing is built a second time or debugged
/// here, so nothing is kept for it, and a crate is compiled in one piece: a third less to compile.
const LEAN: [(&str, &str); 3] = [
    ("CARGO_INCREMENTAL", "0"),
    ("CARGO_PROFILE_DEV_DEBUG", "0"),
    ("CARGO_PROFILE_DEV_CODEGEN_UNITS", "1"),
];

pub fn run(args: RunArgs) -> Result<ExitCode> {
    report::run_all(steps().into_iter().map(lean).collect(), args)
}

/// Sets [`LEAN`] for a step, which all steps of a run must have: they share what is built. Not for
/// `cargo xtask`, which would be built once more.
pub fn lean(step: Step) -> Step {
    if step.is_xtask() {
        return step;
    }
    let unset = LEAN.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    unset.fold(step, |step, (name, value)| step.env(name, value))
}

/// Returns the step of the unit, integration and doc tests, with the same inputs in each run.
///
/// Property tests have a fixed seed. Fuzz targets run their corpora only, as bolero cannot be given
/// a seed for several inputs. Tests of other programs are skipped, whether this machine has them or
/// not; [`with_programs`] runs them. Not nextest, which runs no doc tests, so there would be two
/// test runners.
pub fn steps() -> Vec<Step> {
    let tests = repeatable(all_tests("tests").args(["--no-fail-fast"]));
    let without = |step: Step, (_, _, _, off, _)| step.env(off, "1");
    vec![PROGRAMS.into_iter().fold(tests, without)]
}

/// Returns the step of the tests that [`steps`] skips: comparisons with QEMU's controllers, and
/// metrics that promtool reads.
pub fn with_programs() -> Step {
    let mut step = repeatable(all_tests("programs"));
    for (.., file) in PROGRAMS {
        step = step.args(["--test", file]);
    }
    allow_programs(step)
}

/// Returns the step of the tests of programs that take seconds each, and are ignored otherwise.
pub fn slow() -> Step {
    repeatable(all_tests("slow").args(["--test", "all", "--", "--ignored"]))
}

/// Returns the step of the models of gio-uring's rings: its unit tests with `loom` in their path.
pub fn loom() -> Step {
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    Step::cargo("loom", "test --package gio-uring --release --lib loom")
        .env("RUSTFLAGS", format!("{flags} --cfg loom").trim_start())
        .env("CARGO_TARGET_DIR", folder::target("loom").to_string_lossy())
        // A filter that matches nothing passes, so a renamed module would go unnoticed.
        .tests_at_least(1)
}

/// Gives a run of tests the programs that some of them use, where they can be had.
pub fn allow_programs(mut step: Step) -> Step {
    for (program, need, name, off, _) in PROGRAMS {
        step = step.part_needs(need, off);
        let unset = || std::env::var_os(name).is_none();
        if let Some(path) = needs::unpacked(program).filter(|_| unset()) {
            step = step.env(name, path.to_string_lossy());
        }
    }
    step
}

fn all_tests(name: &str) -> Step {
    Step::cargo(name, &format!("test {IN_DEBUG}")).needs(&["cxx"]).tests_at_least(1)
}

fn repeatable(step: Step) -> Step {
    step.env("PROPTEST_RNG_SEED", "0").env("BOLERO_RANDOM_ITERATIONS", "0")
}
