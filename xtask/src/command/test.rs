//! `cargo xtask test`: every test that needs no hardware, and a replay that checks every byte.

use std::process::ExitCode;

use anyhow::Result;

use crate::command::{crash, loom};
use crate::needs::Need;
use crate::step::Step;
use crate::{RunArgs, report};

pub fn run(args: RunArgs) -> Result<ExitCode> {
    report::run_all(steps(), args)
}

pub fn steps() -> Vec<Step> {
    let mut steps = vec![
        // Unit, integration and doc tests. Not nextest: it runs no doc tests, and two runners
        // would mean two ways to fail.
        Step::cargo("tests", "test --workspace --all-features --no-fail-fast")
            .needs(&[Need::Cxx, Need::Qemu])
            .tests_at_least(1),
        loom::step(),
        Step::cargo("replay", "run --release --bin ripieno -- replay --verify full")
            .needs(&[Need::Cxx]),
    ];
    steps.extend(crash::steps());
    steps
}
