//! `cargo xtask lint`: what can be said about the tree without running it.

use std::process::ExitCode;

use anyhow::Result;

use crate::step::Step;
use crate::{RunArgs, needs, report};

pub fn run(args: RunArgs) -> Result<ExitCode> {
    // Clippy runs the build scripts, and one of them compiles C++.
    needs::cxx_compiler()?;
    let mut steps = checks();
    steps.push(Step::cargo("tidy", "test --package ripieno-tests --test tidy").tests_at_least(1));
    Ok(report::run_all(steps, args))
}

/// All of lint but the tidy rules, which are a test of the workspace.
pub fn checks() -> Vec<Step> {
    let deny = Step::cargo("deny", "deny check bans licenses sources");
    let deny = if needs::is_installed("cargo-deny") {
        deny
    } else {
        deny.skipped("cargo-deny is not installed (cargo install cargo-deny)")
    };
    vec![
        Step::cargo("fmt", "fmt --all -- --check"),
        Step::cargo("clippy", "clippy --workspace --all-targets --all-features -- -D warnings"),
        Step::cargo("docs", "doc --workspace --all-features --no-deps")
            .env("RUSTDOCFLAGS", "-D warnings"),
        deny,
    ]
}
