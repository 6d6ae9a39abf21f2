//! Runs the tests of a suite and tells the console, in the words of xtask/src/vm/console.rs.

use std::any::Any;
use std::fmt;
use std::panic;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::Result;

use crate::kmsg::Kmsg;

/// Tests that share a machine.
#[derive(Debug)]
pub struct Suite {
    pub name: &'static str,
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

/// The error of a test that has nothing to run on.
#[derive(Debug)]
pub struct Skipped(pub String);

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skipped {}

/// What one test may take; translated code is slow, and other machines may be slower.
const SECONDS_MAX: u64 = 60;
const KERNEL_LINES: usize = 25;

/// Runs the tests whose name contains `filter`; how many failed.
pub fn run(suite: &Suite, filter: Option<&str>) -> u32 {
    let tests: Vec<&Test> = suite
        .tests
        .iter()
        .filter(|test| filter.is_none_or(|text| test.name.contains(text)))
        .collect();
    println!("vm: suite {} has {} tests", suite.name, tests.len());
    let mut failed = 0;
    for test in tests {
        failed += u32::from(!passes(suite, test));
    }
    println!("vm: suite {} ended", suite.name);
    failed
}

fn passes(suite: &Suite, test: &Test) -> bool {
    let name = format!("{}::{}", suite.name, test.name);
    println!("vm: running {name}");
    let log = Kmsg::from_now();
    let watch = watch(name.clone());
    let outcome = panic::catch_unwind(test.run);
    drop(watch);
    let outcome = outcome.unwrap_or_else(|panic| Err(anyhow::anyhow!("panic: {}", words(&*panic))));
    let error = match outcome {
        Ok(()) => {
            println!("vm: test {name} ... ok");
            return true;
        }
        Err(error) => error,
    };
    if let Some(Skipped(why)) = error.downcast_ref() {
        println!("vm: test {name} ... skipped: {}", one_line(why));
        return true;
    }
    tell_kernel_log(log);
    println!("vm: test {name} ... FAILED: {}", one_line(&format!("{error:#}")));
    false
}

fn tell_kernel_log(log: Result<Kmsg>) {
    let lines = log.map(|mut log| log.lines()).unwrap_or_default();
    let from = lines.len().saturating_sub(KERNEL_LINES);
    lines[from..].iter().for_each(|line| println!("kernel: {line}"));
}

/// Ends this process, and with it the machine, if it is not dropped in time. Tests are functions
/// that wait in the kernel; there is no other way to end one.
fn watch(name: String) -> mpsc::Sender<()> {
    let (stop, stopped) = mpsc::channel::<()>();
    let log = Kmsg::from_now();
    thread::spawn(move || {
        let limit = Duration::from_secs(SECONDS_MAX);
        if stopped.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            tell_kernel_log(log);
            println!("vm: test {name} ... FAILED: it did not end within {SECONDS_MAX} s");
            std::process::exit(1);
        }
    });
    stop
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "without words".to_owned())
}

fn one_line(text: &str) -> String {
    text.split(['\n', '\r'])
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join("; ")
}
