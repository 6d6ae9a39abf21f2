//! `cargo xtask cpu`: runs our programs on an emulation of their minimum CPU.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::time::Instant;

use anyhow::{Context, Result};

use crate::child::shown;
use crate::needs;
use crate::step::Step;
use crate::tally::Tally;
use crate::{EXIT_STEP_FAILED, child, folder};

/// Minimum CPU of our programs as a QEMU model: exactly x86-64-v2. It has SSE4.2 and POPCNT, and no
/// AVX.
pub const LEAST_CPU: &str = "Nehalem";

const SIGILL: i32 = 4;

/// Crashes on a CPU without AVX2.
const AVX2: &str = "int main() { __asm__ volatile(\"vpaddd %ymm0, %ymm0, %ymm0\"); }";

const NEEDS: &[&str] = &["cxx", "qemu-user"];

/// A program, its CPU, and its expected end.
struct Trial<'a> {
    name: &'static str,
    cpu: &'static str,
    command: Vec<&'a str>,
    signal: Option<i32>,
}

/// Returns the step of `cargo xtask ci`.
pub fn step() -> Step {
    Step::cargo("cpu", "xtask cpu").needs(NEEDS).tests_at_least(1)
}

pub fn run() -> Result<ExitCode> {
    needs::satisfy(NEEDS)?;
    Step::cargo("build", "build --release --bin ripieno").demand()?;
    let avx2 = build_avx2()?;
    let (avx2, ripieno) = (absolute(&avx2)?, absolute(&folder::target("release/ripieno"))?);
    let replay = |more: &'static str| {
        let line = "replay --model tiny --requests 50 --verify full";
        [&*ripieno].into_iter().chain(line.split(' ')).chain(more.split_whitespace()).collect()
    };
    let trials = [
        Trial {
            name: "the emulated CPU has no AVX2",
            cpu: LEAST_CPU,
            command: vec![&avx2],
            signal: Some(SIGILL),
        },
        Trial {
            name: "a CPU with AVX2 has it",
            cpu: "Haswell",
            command: vec![&avx2],
            signal: None,
        },
        Trial { name: "replay", cpu: LEAST_CPU, command: replay(""), signal: None },
        Trial {
            name: "replay with PRPs and two queues",
            cpu: LEAST_CPU,
            command: replay("--descriptors prp --queues 2 --executor inline"),
            signal: None,
        },
    ];
    let (start, mut tally) = (Instant::now(), Tally::default());
    for trial in trials {
        let wrong = trial.run()?;
        let (passed, word) = wrong.as_deref().map_or((true, "ok"), |wrong| (false, wrong));
        println!("test {} ({}) ... {word}", trial.name, trial.cpu);
        tally += Tally { passed: passed.into(), failed: (!passed).into(), skipped: 0 };
    }
    println!("{}", tally.line(start.elapsed()));
    Ok(if tally.failed > 0 { ExitCode::from(EXIT_STEP_FAILED) } else { ExitCode::SUCCESS })
}

impl Trial<'_> {
    /// Runs the program. Returns the error, if any.
    fn run(&self) -> Result<Option<String>> {
        let mut command = Command::new(needs::program("qemu-x86_64")?);
        // QEMU writes the core dump of a killed program.
        command.args(["-cpu", self.cpu]).args(&self.command).current_dir(folder::target("cpu"));
        let line = shown(&command);
        eprintln!("    $ {line}");
        let output = command.output().with_context(|| format!("cannot run `{line}`"))?;
        let wrong = is_wrong(output.status, self.signal);
        if wrong.is_some() {
            eprint!("{}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(wrong)
    }
}

fn is_wrong(status: ExitStatus, signal: Option<i32>) -> Option<String> {
    let is_right = match signal {
        Some(signal) => status.signal() == Some(signal),
        None => status.success(),
    };
    (!is_right).then(|| format!("FAILED ({status})"))
}

fn build_avx2() -> Result<PathBuf> {
    let place = folder::target("cpu");
    fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    let (source, program) = (place.join("avx2.cpp"), place.join("avx2"));
    fs::write(&source, AVX2).with_context(|| format!("cannot write {}", source.display()))?;
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut compile = Command::new(compiler);
    child::run(compile.arg(&source).arg("-o").arg(&program))?;
    Ok(program)
}

fn absolute(path: &Path) -> Result<String> {
    Ok(std::path::absolute(path)?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_was_not_expected_is_wrong() {
        let (ended, killed) = (ExitStatus::from_raw(0), ExitStatus::from_raw(SIGILL));
        assert_eq!(is_wrong(ended, None), None);
        assert_eq!(is_wrong(killed, Some(SIGILL)), None);
        assert!(is_wrong(killed, None).is_some());
        assert!(is_wrong(ended, Some(SIGILL)).is_some());
        assert!(is_wrong(ExitStatus::from_raw(1 << 8), Some(SIGILL)).is_some());
    }
}
