//! `cargo xtask coverage`: the lines of driver, rings and store that tests run.
//!
//! rustc puts counters into the workspace's crates (`-Cinstrument-coverage`), llvm-profdata adds up
//! those of all processes of a test run, and llvm-cov turns them into counts of lines.

mod lines;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::{fmt, fs, io};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Deserialize;

use crate::child::compile;
use crate::command::test::allow_programs;
use crate::deadline::Deadline;
use crate::needs::{self, Need};
use crate::programs;
use crate::step::{Step, Verdict};
use crate::{EXIT_STEP_FAILED, folder};
use lines::Lines;

/// Lines of the crates below these folders are counted.
const MEASURED: &[&str] = &["driver", "gio-uring", "objstore"];
/// Packages whose tests run, besides those of the measured crates.
const ALSO_TESTED: &[&str] = &["gio-kernels", "ripieno-tests"];
/// Files in the table of those with the most lines that no test runs.
const SHOWN: usize = 15;

#[derive(Args)]
pub struct CoverageArgs {
    /// Run only the tests of this package (may be repeated) [default: those of all crates below
    /// driver, gio-uring and objstore, of gio-kernels and of ripieno-tests]
    #[arg(long, short, value_name = "NAME")]
    package: Vec<String>,
}

/// A part of what `cargo metadata` prints.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
}

#[derive(Debug)]
struct Report {
    total: Lines,
    crates: Vec<Row>,
    files: Vec<Row>,
}

/// Of a crate, or of a file.
#[derive(Debug)]
struct Row {
    name: String,
    lines: Lines,
}

pub fn run(args: &CoverageArgs) -> Result<ExitCode> {
    needs::satisfy([Need::LlvmTools])?;
    let measured = measured()?;
    let profiles = std::path::absolute(place().join("profiles"))?;
    let tests = tests(&args.package, &measured, &profiles);
    let lacking = needs::provide(tests.all_needs())?;
    let tests = tests.without(&lacking);
    let programs = build(&tests)?;
    // Build scripts of ours have counters, too, and a former run's counts are of other programs.
    if profiles.is_dir() {
        fs::remove_dir_all(&profiles)
            .with_context(|| format!("cannot empty {}", profiles.display()))?;
    }
    eprintln!("    $ {tests}");
    let outcome = tests.run(Deadline::never(), &mut io::stderr(), None);
    let report = Report::new(&measured, &export(&profiles, &programs)?)?;
    print!("{report}");
    for why in &tests.skipped_parts {
        eprintln!("skipped in part: {why}");
    }
    if let Verdict::Failed(why) = outcome.verdict {
        eprintln!("tests failed ({why}): what they did not reach counts as not run");
        return Ok(ExitCode::from(EXIT_STEP_FAILED));
    }
    Ok(ExitCode::SUCCESS)
}

fn place() -> PathBuf {
    folder::target("coverage")
}

/// The crates to measure, each with its sources.
fn measured() -> Result<Vec<(String, PathBuf)>> {
    let metadata =
        compile(Command::new("cargo").args(["metadata", "--no-deps", "--format-version=1"]))?;
    let metadata: Metadata = serde_json::from_slice(&metadata.stdout)?;
    let root = folder::workspace();
    let sources = |package: Package| {
        let home = package.manifest_path.parent()?.to_owned();
        let is_measured = MEASURED.iter().any(|folder| home.starts_with(root.join(folder)));
        is_measured.then(|| (package.name, home.join("src")))
    };
    Ok(metadata.packages.into_iter().filter_map(sources).collect())
}

/// Runs tests of `packages`, or else of all there are to run, with counters.
fn tests(packages: &[String], measured: &[(String, PathBuf)], profiles: &Path) -> Step {
    let own = measured.iter().map(|(name, _)| name.as_str());
    let all: Vec<&str> = own.chain(ALSO_TESTED.iter().copied()).collect();
    let chosen =
        if packages.is_empty() { all } else { packages.iter().map(String::as_str).collect() };
    let wrapper = folder::workspace().join("xtask/src/command/coverage.sh");
    allow_programs(Step::cargo("tests", "test --all-features --lib --bins --tests --no-fail-fast"))
        .args(chosen.iter().flat_map(|name| ["--package", name]))
        .env("RUSTC_WORKSPACE_WRAPPER", wrapper.to_string_lossy())
        .env("CARGO_TARGET_DIR", place().join("build").to_string_lossy())
        // A file for each program, or two if several processes end at the same time.
        .env("LLVM_PROFILE_FILE", profiles.join("%2m.profraw").to_string_lossy())
}

/// Builds the tests; returns their programs, those that they start, and shared libraries.
fn build(tests: &Step) -> Result<Vec<PathBuf>> {
    let mut programs = Vec::new();
    for built in programs::build(&tests.clone().args(["--no-run"]))? {
        programs.extend(built.executable);
        if built.target.is_some_and(|target| target.kind.iter().any(|kind| kind == "cdylib")) {
            let is_shared = |file: &PathBuf| file.extension().is_some_and(|so| so == "so");
            programs.extend(built.filenames.into_iter().filter(is_shared));
        }
    }
    Ok(programs)
}

/// Makes lcov.info of the counters: each file's lines with their counts.
fn export(profiles: &Path, programs: &[PathBuf]) -> Result<String> {
    let tools = programs::llvm_tools().find("llvm/bin")?;
    let (merged, lcov) = (place().join("tests.profdata"), place().join("lcov.info"));
    let mut merge = Command::new(tools.join("llvm-profdata"));
    // A process that was killed while it wrote leaves a file that is of no use.
    merge.args(["merge", "--sparse", "--failure-mode=warn", "--output"]).arg(&merged).arg(profiles);
    compile(merge.stderr(Stdio::inherit()))?;
    let mut export = Command::new(tools.join("llvm-cov"));
    export.args(["export", "--format=lcov", "--skip-functions", "--instr-profile"]).arg(&merged);
    let (first, more) = programs.split_first().context("no program was built")?;
    export.arg(first).args(more.iter().flat_map(|program| [Path::new("--object"), program]));
    export.args(MEASURED.iter().map(|folder| folder::workspace().join(folder)));
    let text = String::from_utf8(compile(&mut export)?.stdout)?;
    fs::write(&lcov, &text).with_context(|| format!("cannot write {}", lcov.display()))?;
    eprintln!("wrote {}", lcov.display());
    Ok(text)
}

impl Report {
    fn new(measured: &[(String, PathBuf)], lcov: &str) -> Result<Self> {
        let by_file = lines::without_tests(lines::of_lcov(lcov))?;
        let (mut total, mut crates, mut files) = (Lines::default(), Vec::new(), Vec::new());
        for (name, sources) in measured {
            let mut of_crate = Lines::default();
            for (file, lines) in by_file.iter().filter(|(file, _)| file.starts_with(sources)) {
                of_crate += *lines;
                let file = file.strip_prefix(folder::workspace()).unwrap_or(file);
                files.push(Row { name: file.display().to_string(), lines: *lines });
            }
            total += of_crate;
            // None if no program contains the crate.
            crates
                .extend((of_crate.lines > 0).then(|| Row { name: name.clone(), lines: of_crate }));
        }
        ensure!(total.lines > 0, "llvm-cov knows no line of {}", MEASURED.join(", "));
        files.sort_by_key(|row| std::cmp::Reverse(row.lines.missed()));
        Ok(Self { total, crates, files })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", Row::heading("crate"))?;
        self.crates.iter().try_for_each(|row| writeln!(f, "{row}"))?;
        writeln!(f, "{}", Row { name: "total".to_owned(), lines: self.total })?;
        writeln!(f, "\n{}", Row::heading("most lines that were not run"))?;
        self.files.iter().take(SHOWN).try_for_each(|row| writeln!(f, "{row}"))
    }
}

impl Row {
    fn heading(name: &str) -> String {
        format!("{name:<50} {:>7} {:>7} {:>7}", "lines", "covered", "percent")
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, lines } = self;
        let Lines { lines: all, covered } = lines;
        write!(f, "{name:<50} {all:>7} {covered:>7} {:>7.1}", lines.percent())
    }
}
