//! `cargo xtask coverage`: the lines of driver, rings and store that tests run, by cargo-llvm-cov.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::command::test::allow_programs;
use crate::needs;
use crate::step::Step;

/// Packages whose tests run.
const PACKAGES: &str = "nvme-spec nvme-pci nvme-driver nvme-emu gio-uring gio-kernels kv-catalog \
    kv-schedule kv-tier kv-swarm kv-codec objstore ripieno-stack ripieno-serve ripieno-c \
    ripieno-candle ripieno-tests";
/// Files whose lines are not counted, besides those of tests.
const OTHERS: &str = "/(bench|kernels|python|tools|xtask)/";

#[derive(Args)]
pub struct CoverageArgs {
    /// Run only the tests of this package (may be repeated) [default: those of all crates below
    /// driver, gio-uring and objstore, of gio-kernels and of ripieno-tests]
    #[arg(long, short, value_name = "NAME")]
    package: Vec<String>,
}

pub fn run(args: &CoverageArgs) -> Result<ExitCode> {
    needs::satisfy(&["cxx", "crates", "llvm-cov"])?;
    let llvm = needs::package("coverage", "llvm/bin")?;
    let all = || PACKAGES.split_whitespace().map(str::to_owned).collect();
    let packages = if args.package.is_empty() { all() } else { args.package.clone() };
    let llvm_cov = |args: &str| {
        let program = needs::package("coverage", "../../../bin/cargo-llvm-cov")?;
        let step = Step::new("coverage", program.to_string_lossy()).args(["llvm-cov"]);
        anyhow::Ok(
            step.args(args.split_whitespace())
                .args(["--ignore-filename-regex", OTHERS])
                .env("LLVM_COV", llvm.join("llvm-cov").to_string_lossy())
                .env("LLVM_PROFDATA", llvm.join("llvm-profdata").to_string_lossy())
                // Not every build of LLVM's tools can read compressed names.
                .env("RUSTFLAGS", "-Cllvm-args=-enable-name-compression=false"),
        )
    };
    // A process that was killed while it wrote leaves a file that is of no use.
    let tests = llvm_cov("test --all-features --lib --bins --tests --ignore-run-fail")?
        .args(["--failure-mode", "all"])
        .args(packages.iter().flat_map(|name| ["--package", name]));
    let tests = allow_programs(tests);
    let lacking = needs::provide(tests.all_needs())?;
    tests.without(&lacking).demand()?;
    llvm_cov("report --lcov --failure-mode all --output-path target/lcov.info")?.run_alone()
}
