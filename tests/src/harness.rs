//! A test runner for `harness = false`: what libtest prints, and a test may be ignored at run time.
#![allow(clippy::print_stdout, reason = "results of tests go to stdout, as libtest's do")]

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::Instant,
};

/// How a test that did not panic ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It ran, and what it checks is true.
    Passed,
    /// It could not run, for this reason.
    Ignored(String),
}

/// One test. Panicking is failing.
#[derive(Clone, Copy)]
pub struct Test {
    /// What it is called.
    pub name: &'static str,
    /// What it does.
    pub run: fn() -> Outcome,
}

/// The part of libtest's command line that `cargo test` users rely on.
#[derive(Debug, Default)]
struct Arguments {
    list: bool,
    exact: bool,
    filters: Vec<String>,
    skip: Vec<String>,
}

impl Arguments {
    fn parse(words: impl Iterator<Item = String>) -> Self {
        // Options whose value is the next word and makes no difference here.
        const VALUED: [&str; 5] = ["--test-threads", "--format", "--color", "-Z", "--logfile"];
        let mut found = Self::default();
        let mut words = words.peekable();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--list" => found.list = true,
                "--exact" => found.exact = true,
                "--skip" => found.skip.extend(words.next()),
                valued if VALUED.contains(&valued) => drop(words.next()),
                option if option.starts_with('-') => {}
                _ => found.filters.push(word),
            }
        }
        found
    }

    fn wants(&self, name: &str) -> bool {
        let fits = |filter: &String| {
            if self.exact { name == filter } else { name.contains(filter.as_str()) }
        };
        (self.filters.is_empty() || self.filters.iter().any(fits)) && !self.skip.iter().any(fits)
    }
}

/// Runs the `tests` that the command line asks for, one after the other.
#[must_use]
pub fn main(tests: &[Test]) -> ExitCode {
    let arguments = Arguments::parse(std::env::args().skip(1));
    let wanted: Vec<_> = tests.iter().filter(|test| arguments.wants(test.name)).collect();
    if arguments.list {
        for test in &wanted {
            println!("{}: test", test.name);
        }
        return ExitCode::SUCCESS;
    }
    let start = Instant::now();
    println!("\nrunning {} tests", wanted.len());
    let (mut passed, mut failed, mut ignored) = (0, 0, 0);
    for test in &wanted {
        match catch_unwind(AssertUnwindSafe(test.run)) {
            Ok(Outcome::Passed) => {
                passed += 1;
                println!("test {} ... ok", test.name);
            }
            Ok(Outcome::Ignored(why)) => {
                ignored += 1;
                println!("test {} ... ignored, {why}", test.name);
            }
            Err(panic) => {
                failed += 1;
                println!("test {} ... FAILED\n{}", test.name, message(&*panic));
            }
        }
    }
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {verdict}. {passed} passed; {failed} failed; {ignored} ignored; \
         0 measured; {} filtered out; finished in {:.2}s\n",
        tests.len() - wanted.len(),
        start.elapsed().as_secs_f64()
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(101) }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "it panicked".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_of_cargo_test() {
        let parse = |line: &str| Arguments::parse(line.split_whitespace().map(str::to_owned));
        assert!(parse("").wants("anything"));
        assert!(parse("--nocapture -q --test-threads 1 --format terse").wants("anything"));
        assert!(parse("con --skip qemu").wants("conforms"));
        assert!(!parse("con --skip qemu").wants("conforms in qemu"));
        assert!(!parse("--exact con").wants("conforms"));
        assert!(parse("--list").list);
    }
}
