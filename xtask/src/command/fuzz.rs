//! `cargo xtask fuzz`: the fuzz targets, guided by coverage.
//!
//! A target is a bolero test. `cargo test` runs it with its corpus and some random inputs; here it
//! is built with counters at each edge and comparison, and libFuzzer, which is a part of bolero,
//! looks for inputs that reach something new. `cargo bolero` would do the same, but builds every
//! test program of a package for one target.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context, Result, ensure};
use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::child::shown;
use crate::needs::{self, Need};
use crate::programs;
use crate::step::Step;
use crate::tally::Tally;
use crate::{EXIT_STEP_FAILED, folder};

/// A test that a fuzzer drives.
#[derive(Debug, Clone, Copy)]
struct Target {
    /// Its name in `check!`.
    name: &'static str,
    /// Arguments of `cargo test` that build its program and no other.
    program: &'static str,
    /// Its path in the program.
    test: &'static str,
    /// Folder of its source file.
    folder: &'static str,
}

const TARGETS: [Target; 6] = [
    Target {
        name: "device",
        program: "--package nvme-driver --test emulated",
        test: "evil::device",
        folder: "driver/host/tests/emulated",
    },
    Target {
        name: "guest",
        program: "--package nvme-emu --lib",
        test: "controller::tests::garbage::guest",
        folder: "driver/emu/src/controller/tests",
    },
    Target {
        name: "iocbs",
        program: "--package gio-kernels --test kernel",
        test: "fuzz::iocbs",
        folder: "kernels/tests/kernel",
    },
    Target {
        name: "image",
        program: "--package objstore --test image",
        test: "image",
        folder: "objstore/tests",
    },
    Target {
        name: "texts",
        program: "--package ripieno --lib",
        test: "tests::texts",
        folder: "tools/src",
    },
    Target {
        name: "calls",
        program: "--package ripieno-c --test calls",
        test: "calls",
        folder: "objstore/c/tests",
    },
];

/// Counters and tables that tell libFuzzer which edges and comparisons an input reaches.
const RUSTFLAGS: &str = "--cfg fuzzing --cfg fuzzing_libfuzzer -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";
/// Bytes of an input.
const BYTES_MAX: u32 = 1024;
/// Files of a corpus that is committed, at the most; those that failed once come on top.
const FILES_MAX: usize = 32;
/// Longer than any input takes.
const TIMEOUT_S: u32 = 20;

#[derive(Args)]
pub struct FuzzArgs {
    /// Only this target
    #[arg(value_parser = PossibleValuesParser::new(TARGETS.map(|target| target.name)))]
    target: Option<String>,
    /// How long each target runs, such as 30s or 10m
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    time: Duration,
    /// Replace the corpora that are committed by the fewest inputs that reach as much, from what
    /// they have and what was found
    #[arg(long)]
    update: bool,
}

fn time(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.strip_suffix('m') {
        Some(number) => (number, 60),
        None => (text.strip_suffix('s').unwrap_or(text), 1),
    };
    match number.parse::<u32>() {
        Ok(number) if number > 0 => Ok(Duration::from_secs(u64::from(number) * unit)),
        _ => Err("expected a whole number of seconds or minutes, such as 30s or 10m".to_owned()),
    }
}

pub fn run(args: &FuzzArgs) -> Result<ExitCode> {
    let start = Instant::now();
    needs::satisfy([Need::Cxx, Need::Crates])?;
    let chosen = |target: &&Target| args.target.as_ref().is_none_or(|name| name == target.name);
    let mut tally = Tally::default();
    let mut table = row("target", &["executions", "corpus", "new", "result"]);
    let mut again = String::new();
    for target in TARGETS.iter().filter(chosen) {
        let built = target.build()?;
        let found = built.fuzz(args.time)?;
        let result = if found.has_failed { "FAILED" } else { "ok" };
        let [executions, new] = [found.executions, found.new].map(|count| count.to_string());
        table += &row(target.name, &[&executions, &found.corpus.to_string(), &new, result]);
        if found.has_failed {
            tally.failed += 1;
            writeln!(again, "\n{}: see {}, and", target.name, built.log().display())?;
            writeln!(again, "    $ cargo test {} {}", target.program, target.test)?;
            continue;
        }
        tally.passed += 1;
        if args.update {
            built.update()?;
        }
    }
    println!("\n{table}{again}\n{}", tally.line(start.elapsed()));
    Ok(if tally.failed > 0 { ExitCode::from(EXIT_STEP_FAILED) } else { ExitCode::SUCCESS })
}

fn row(name: &str, cells: &[&str; 4]) -> String {
    let [executions, corpus, new, result] = cells;
    format!("{name:<8} {executions:>10} {corpus:>7} {new:>6}  {result}\n")
}

impl Target {
    /// Returns the folder in which bolero looks for inputs.
    fn inputs(&self) -> PathBuf {
        folder::workspace().join(self.folder).join("__fuzz__").join(self.name)
    }

    fn build(&self) -> Result<Built<'_>> {
        let target = folder::target("fuzz");
        // With `--target`, build scripts and procedural macros are built without these flags.
        let step = Step::cargo(self.name, "test --no-run --target host-tuple")
            .args(self.program.split(' '))
            .env("RUSTFLAGS", RUSTFLAGS)
            .env("CARGO_TARGET_DIR", target.join("build").to_string_lossy());
        let built = programs::build(&step)?.into_iter().find(programs::Built::is_test);
        let program = built.and_then(|built| built.executable);
        let program = program.context("cargo did not say where the program is")?;
        let work = target.join(self.name);
        fs::create_dir_all(work.join("found"))?;
        Ok(Built { target: self, program, work })
    }
}

/// A target with its program.
struct Built<'a> {
    target: &'a Target,
    program: PathBuf,
    /// Inputs and logs of earlier runs.
    work: PathBuf,
}

/// The result of a run.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    executions: u64,
    /// Inputs at its end.
    corpus: usize,
    /// Inputs that it added.
    new: u64,
    has_failed: bool,
}

impl Built<'_> {
    fn log(&self) -> PathBuf {
        self.work.join("log.txt")
    }

    /// Folders of inputs, the one that new ones go to first.
    fn corpora(&self) -> [PathBuf; 2] {
        [self.work.join("found"), self.target.inputs().join("corpus")]
    }

    fn fuzz(&self, time: Duration) -> Result<Found> {
        // `cargo test` replays this folder first.
        let crashes = self.target.inputs().join("crashes");
        fs::create_dir_all(&crashes)?;
        let mut args: Vec<String> = self.folders()?;
        args.extend([
            format!("-artifact_prefix={}/", crashes.display()),
            format!("-max_total_time={}", time.as_secs()),
            format!("-max_len={BYTES_MAX}"),
            format!("-timeout={TIMEOUT_S}"),
            format!("-report_slow_units={TIMEOUT_S}"),
            // Longer ones from the beginning: short inputs have hardly any choices.
            "-len_control=0".to_owned(),
            // A driver never frees what a device may still write to.
            "-rss_limit_mb=8192".to_owned(),
            "-print_final_stats=1".to_owned(),
        ]);
        let succeeded = self.libfuzzer(&args)?;
        // Only an empty folder can be removed.
        let _ = fs::remove_dir(&crashes);
        let log = String::from_utf8_lossy(&fs::read(self.log())?).into_owned();
        let stat = |name: &str| {
            let of =
                |line: &str| line.strip_prefix("stat::")?.strip_prefix(name)?.trim().parse().ok();
            log.lines().find_map(of)
        };
        let executions = stat("number_of_executed_units:");
        if !succeeded {
            let end: Vec<&str> = log.lines().rev().take(40).collect();
            end.iter().rev().for_each(|line| eprintln!("{line}"));
        }
        ensure!(
            !succeeded || executions.is_some(),
            "{} ran nothing: see {}",
            self.target.name,
            self.log().display()
        );
        Ok(Found {
            executions: executions.unwrap_or(0),
            corpus: self.corpora().iter().map(|folder| files(folder).len()).sum(),
            new: stat("new_units_added:").unwrap_or(0),
            has_failed: !succeeded,
        })
    }

    /// The folders of inputs that there are, as arguments.
    fn folders(&self) -> Result<Vec<String>> {
        let corpora = self.corpora();
        fs::create_dir_all(&corpora[0])?;
        Ok(corpora.iter().filter(|it| it.is_dir()).map(|it| it.display().to_string()).collect())
    }

    /// Runs libFuzzer with these arguments, and returns whether it succeeded.
    fn libfuzzer(&self, args: &[String]) -> Result<bool> {
        // They are handed over as one string.
        ensure!(!args.iter().any(|arg| arg.contains(' ')), "the build folder's path has a space");
        let mut command = Command::new(&self.program);
        command.args([self.target.test, "--exact", "--nocapture", "--quiet"]);
        command.args(["--test-threads", "1"]);
        command.envs([("BOLERO_TEST_NAME", self.target.test), ("BOLERO_LIBTEST_HARNESS", "1")]);
        let args = args.join(" ");
        eprintln!("    $ BOLERO_LIBFUZZER_ARGS=\"{args}\" {}", shown(&command));
        let log = fs::File::create(self.log())?;
        command.env("BOLERO_LIBFUZZER_ARGS", args).current_dir(folder::workspace());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(command.status().with_context(|| format!("cannot run {}", shown(&command)))?.success())
    }

    /// Replaces the corpus by the inputs that reach most together; those that failed once stay.
    fn update(&self) -> Result<()> {
        let (merged, control) = (self.work.join("merged"), self.work.join("control.txt"));
        let _ = (fs::remove_dir_all(&merged), fs::remove_file(&control));
        fs::create_dir(&merged)?;
        let mut args = vec!["-set_cover_merge=1".to_owned(), "-use_counters=0".to_owned()];
        args.push(format!("-merge_control_file={}", control.display()));
        args.push(merged.display().to_string());
        args.extend(self.folders()?);
        ensure!(self.libfuzzer(&args)?, "merging failed: see {}", self.log().display());
        let kept = cover(&fs::read_to_string(&control)?);
        // One of them may be in the corpus, and about to be removed.
        let kept: Vec<_> =
            kept.iter().map(|path| Ok((path, fs::read(path)?))).collect::<Result<_>>()?;
        let corpus = self.target.inputs().join("corpus");
        fs::create_dir_all(&corpus)?;
        files(&corpus).iter().filter(|file| !has_failed(file)).try_for_each(fs::remove_file)?;
        for (path, bytes) in &kept {
            fs::write(corpus.join(path.file_name().unwrap_or_default()), bytes)?;
        }
        eprintln!("    {} inputs are in {}", files(&corpus).len(), corpus.display());
        Ok(())
    }
}

/// Returns whether libFuzzer kept an input because of a failure.
fn has_failed(file: &Path) -> bool {
    file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("crash-"))
}

/// The inputs that reach most together, at most [`FILES_MAX`] of them, from what libFuzzer wrote
/// about a merge: the number of files, a second number, their names, and what each reaches (`FT`,
/// its number, numbers of features).
fn cover(control: &str) -> Vec<PathBuf> {
    let mut lines = control.lines();
    let count = lines.next().and_then(|count| count.parse().ok()).unwrap_or(0);
    let names: Vec<&str> = lines.by_ref().skip(1).take(count).collect();
    let reached = lines.filter_map(|line| line.strip_prefix("FT ")).map(|line| {
        let mut numbers = line.split(' ').filter_map(|number| number.parse::<usize>().ok());
        (numbers.next(), numbers.collect::<BTreeSet<_>>())
    });
    let mut inputs: Vec<(Option<usize>, BTreeSet<usize>)> = reached.collect();
    let mut kept = Vec::new();
    while kept.len() < FILES_MAX
        && let Some(most) = (0..inputs.len()).max_by_key(|at| inputs[*at].1.len())
        && !inputs[most].1.is_empty()
    {
        let (number, features) = inputs.swap_remove(most);
        inputs.iter_mut().for_each(|(_, others)| others.retain(|it| !features.contains(it)));
        kept.extend(number.and_then(|number| names.get(number)).map(PathBuf::from));
    }
    kept
}

/// The files in a folder; none if it does not exist.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(io::Result::ok);
    entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_a_test_that_has_its_name_and_a_corpus() {
        for Target { name, test, folder, .. } in TARGETS {
            let folder = folder::workspace().join(folder);
            let check = format!("check!(name = \"{name}\")");
            let test = format!("fn {}()", test.rsplit("::").next().unwrap_or(test));
            let has = |file: &PathBuf| {
                let text = fs::read_to_string(file).unwrap_or_default();
                text.contains(&check) && text.contains(&test)
            };
            assert!(files(&folder).iter().any(has), "{check} and {test} in {}", folder.display());
            let corpus = folder.join("__fuzz__").join(name).join("corpus");
            let inputs = files(&corpus).iter().filter(|file| !has_failed(file)).count();
            assert!((1..=FILES_MAX).contains(&inputs), "{inputs} in {}", corpus.display());
        }
    }

    #[test]
    fn times_have_units() {
        assert_eq!(time("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(time("90"), Ok(Duration::from_secs(90)));
        assert_eq!(time("2m"), Ok(Duration::from_secs(120)));
        for bad in ["", "0s", "-1s", "1h", "s"] {
            assert!(time(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_inputs_that_reach_most_are_kept() {
        let control = "3\n1\n/a\n/b\n/c\nSTARTED 0 9\nFT 0 1 2\nCOV 0 7\nSTARTED 1 9\n\
                       FT 1 2 3 4 5\nSTARTED 2 9\nFT 2 4 5\n";
        assert_eq!(cover(control), [PathBuf::from("/b"), PathBuf::from("/a")]);
        assert!(cover("").is_empty());
    }
}
