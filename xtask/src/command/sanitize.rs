//! `cargo xtask sanitize`: the I/O kernel for the host and the rings under ThreadSanitizer and
//! AddressSanitizer.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::step::Step;
use crate::{RunArgs, folder, report};

/// Links with the standard library of the toolchain, which is not instrumented.
const MIXED: &str = "-Cunsafe-allow-abi-mismatch=sanitizer";

/// Tests for AddressSanitizer: those of the rings, and those of the executors on the host.
const ADDRESS: &str =
    "--package gio-uring --package gio-kernels --lib --test kernel --test stack --test races";

#[derive(Args)]
pub struct SanitizeArgs {
    /// Which one [default: both]
    sanitizer: Option<Sanitizer>,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Sanitizer {
    /// Data races
    Thread,
    /// Accesses out of bounds and after free; in C++ undefined behaviour, too
    Address,
}

pub fn run(args: &SanitizeArgs) -> Result<ExitCode> {
    let all = [Sanitizer::Thread, Sanitizer::Address];
    let chosen = all.into_iter().filter(|one| args.sanitizer.is_none_or(|only| only == *one));
    report::run_all(chosen.flat_map(Sanitizer::steps).collect(), args.run)
}

impl Sanitizer {
    /// The C++ program with the kernel in it, then tests that link Rust with the kernel.
    fn steps(self) -> [Step; 2] {
        let (name, test, packages) = match self {
            Self::Thread => ("thread", "no_data_race", "--package gio-kernels --test races"),
            Self::Address => ("address", "no_access", ADDRESS),
        };
        let alone = format!("test --package gio-kernels --test sanitized {test}");
        let alone = Step::cargo(format!("{name}: C++"), &alone).needs(&["cxx"]);
        let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
        // A target is named, or the flags would be for build scripts, too.
        let together = format!("test --target host-tuple --no-fail-fast {packages}");
        let together = Step::cargo(format!("{name}: Rust and C++"), &together)
            .needs(&["cxx", "sanitizers"])
            // For -Z. The toolchain stays the pinned one.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", format!("{flags} -Zsanitizer={name} {MIXED}").trim_start())
            // A ring that is dropped while its kernel may run leaks its memory, and tests do that.
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .env("CARGO_TARGET_DIR", folder::target("sanitize").to_string_lossy());
        [alone, together].map(|step| step.tests_at_least(1))
    }
}
