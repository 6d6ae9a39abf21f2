//! Runs the tests of a suite and reports on the console, in the format of xtask/src/vm/console.rs.

use std::fmt;
use std::process::{Child, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::kmsg::Kmsg;
use crate::program;

/// Tests that share a machine.
#[derive(Debug)]
pub struct Suite {
    pub name: &'static str,
    /// Timeout of a test in seconds.
    pub seconds_max: u64,
    pub tests: &'static [Test],
}

/// One test: passes if it returns, unless it returns an error.
#[derive(Debug)]
pub struct Test {
    pub name: &'static str,
    pub run: fn() -> Result<()>,
}

/// Lists functions of the current module as tests.
macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        &[$($crate::runner::Test { name: stringify!($name), run: $name }),*]
    };
}
pub(crate) use tests;

/// The error of a test that lacks its hardware.
#[derive(Debug)]
pub struct Skipped(pub String);

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skipped {}

/// Time after which a wait is a hang, on any machine: emulated code is slow.
pub const WATCHDOG: Duration = Duration::from_secs(SECONDS_MAX);
/// Usual timeout of a test in seconds.
pub const SECONDS_MAX: u64 = 600;
const KERNEL_LINES: usize = 25;

/// First argument of a process that runs one test.
pub const TEST: &str = "test";

/// Runs the tests whose name contains one of the texts of `filter`, each in its own process, so
/// that a failure's open files and leaks do not affect the next. Returns the number of failures.
pub fn run(suite: &Suite, filter: Option<&str>) -> Result<u32> {
    let wanted = |test: &&Test| {
        filter.is_none_or(|texts| texts.split(',').any(|text| test.name.contains(text)))
    };
    let tests: Vec<&Test> = suite.tests.iter().filter(wanted).collect();
    println!("vm: suite {} has {} tests", suite.name, tests.len());
    let mut failed = 0;
    for test in tests {
        let name = format!("{}::{}", suite.name, test.name);
        println!("vm: running {name}");
        let mut log = Kmsg::from_now()?;
        let child = program::start_talking("vm-tests", &[TEST, suite.name, test.name])?;
        let seconds = suite.seconds_max;
        let verdict = match wait(child, seconds)? {
            // The test has reported its result itself.
            Some(0) => continue,
            Some(1) => None,
            Some(code) => Some(format!("it ended with {code}")),
            None => Some(format!("it was ended, by a signal or after {seconds} s")),
        };
        failed += 1;
        let lines = log.lines();
        let from = lines.len().saturating_sub(KERNEL_LINES);
        lines[from..].iter().for_each(|line| println!("kernel: {line}"));
        if let Some(why) = verdict {
            println!("vm: test {name} ... FAILED: {why}");
        }
    }
    println!("vm: suite {} ended", suite.name);
    Ok(failed)
}

/// Returns the exit code; `None` after a signal, including our own on a timeout.
fn wait(mut child: Child, seconds: u64) -> Result<Option<i32>> {
    let until = Instant::now() + Duration::from_secs(seconds);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.code());
        }
        if Instant::now() > until {
            child.kill()?;
            // A process blocked in the kernel ignores the signal; the host's deadline handles that.
            return Ok(child.wait()?.code());
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Runs one test in this process, and reports the result.
pub fn run_one(suite: &Suite, test: &Test) -> ExitCode {
    let name = format!("{}::{}", suite.name, test.name);
    let error = match (test.run)() {
        Ok(()) => {
            println!("vm: test {name} ... ok");
            return ExitCode::SUCCESS;
        }
        Err(error) => error,
    };
    if let Some(Skipped(why)) = error.downcast_ref() {
        println!("vm: test {name} ... skipped: {}", one_line(why));
        return ExitCode::SUCCESS;
    }
    println!("vm: test {name} ... FAILED: {}", one_line(&format!("{error:#}")));
    ExitCode::FAILURE
}

/// Waits until something is so.
pub fn until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let since = Instant::now();
    while !is_so()? {
        ensure!(since.elapsed() < WATCHDOG, "it never was so: {what}");
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn one_line(text: &str) -> String {
    let lines = text.split(['\n', '\r']).map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("; ")
}
