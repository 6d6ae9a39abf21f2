//! `cargo xtask lint`: what can be said about the tree without running it.

use std::process::ExitCode;

use anyhow::Result;

use crate::step::Step;
use crate::{RunArgs, folder, needs, report};

/// Pinned: another version may complain of other things.
const CARGO_DENY: &str = "cargo-deny@0.20.2";
const DENY: &str = "check bans licenses sources";

pub fn run(args: RunArgs) -> Result<ExitCode> {
    // Clippy runs the build scripts, and one of them compiles C++.
    needs::cxx_compiler()?;
    let mut steps = checks();
    steps.push(deny_if_installed());
    steps.push(Step::cargo("tidy", "test --package ripieno-tests --test tidy").tests_at_least(1));
    Ok(report::run_all(steps, args))
}

/// All of lint but the rules for dependencies, which take a program of their own, and the tidy
/// rules, which are a test of the workspace.
pub fn checks() -> Vec<Step> {
    vec![
        Step::cargo("fmt", "fmt --all -- --check"),
        Step::cargo("clippy", "clippy --workspace --all-targets --all-features -- -D warnings"),
        Step::cargo("docs", "doc --workspace --all-features --no-deps")
            .env("RUSTDOCFLAGS", "-D warnings"),
    ]
}

/// The rules for dependencies, with a cargo-deny that the first run builds (in a minute or two).
pub fn deny_of_our_own() -> [Step; 2] {
    let tools = folder::target("tools");
    let install = format!("install --locked --debug --quiet {CARGO_DENY} --root");
    [
        Step::cargo("get deny", &install).args([tools.to_string_lossy()]),
        Step::new("deny", tools.join("bin/cargo-deny").to_string_lossy())
            .args(DENY.split_whitespace()),
    ]
}

/// The rules for dependencies, where that costs no build.
fn deny_if_installed() -> Step {
    let [_, ours] = deny_of_our_own();
    if folder::target("tools").join("bin/cargo-deny").is_file() {
        ours
    } else if needs::is_installed("cargo-deny") {
        Step::cargo("deny", &format!("deny {DENY}"))
    } else {
        ours.skipped("cargo-deny is not installed (`cargo xtask ci` installs it)")
    }
}
