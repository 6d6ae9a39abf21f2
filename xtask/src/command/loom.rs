//! `cargo xtask loom`: tests the rings under every interleaving that loom distinguishes.

use std::process::ExitCode;

use anyhow::Result;

use crate::step::Step;
use crate::{RunArgs, folder, report};

pub fn run(args: RunArgs) -> Result<ExitCode> {
    report::run_all(vec![step()], args)
}

/// Returns the step of the models: the unit tests of gio-uring with `loom` in their path.
pub fn step() -> Step {
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    Step::cargo("loom", "test --package gio-uring --release --lib loom")
        .env("RUSTFLAGS", format!("{flags} --cfg loom").trim_start())
        .env("CARGO_TARGET_DIR", folder::target("loom").to_string_lossy())
        // A filter that matches nothing passes, so a renamed module would go unnoticed.
        .tests_at_least(1)
}
