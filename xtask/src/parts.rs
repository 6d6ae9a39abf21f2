//! The parts of a run of `cargo test`: its test programs and their durations.
//!
//! cargo prints a program's name on stderr before it starts, and libtest the time on stdout.

use std::time::Duration;

/// A test program that ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub name: String,
    pub took: Duration,
}

const DOC_TESTS: &str = "doc tests";

/// Returns the program in a line like `Running tests/a.rs (target/debug/deps/a-0123456789abcdef)`
/// or `Doc-tests a`.
pub fn name(line: &str) -> Option<String> {
    let plain = without_colors(line);
    let (verb, rest) = plain.trim().split_once(' ')?;
    match verb {
        "Running" => {
            let (path, file) = rest.strip_suffix(')')?.split_once(" (")?;
            let program = file.rsplit('/').next()?.rsplit_once('-')?.0;
            Some(format!("{path} ({program})"))
        }
        "Doc-tests" => Some(format!("{DOC_TESTS} ({rest})")),
        _ => None,
    }
}

/// Returns the time in the last line of a test program.
pub fn took(line: &str) -> Option<Duration> {
    let (_, seconds) = line.strip_prefix("test result: ")?.split_once("finished in ")?;
    let seconds = seconds.trim_end().strip_suffix('s')?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// Pairs programs with their times, in order. The doc tests come last, with one or two times per
/// crate: they form one part. Empty if a program ended without a time, because the other times are
/// then ambiguous.
pub fn pair(names: Vec<String>, mut took: Vec<Duration>) -> Vec<Part> {
    let programs = names.iter().position(|name| name.starts_with(DOC_TESTS)).unwrap_or(names.len());
    let has_doc_tests = programs < names.len();
    if took.len() < programs || (took.len() > programs && !has_doc_tests) {
        return Vec::new();
    }
    let doc_tests = Part { name: DOC_TESTS.into(), took: took.drain(programs..).sum() };
    let parts = names.into_iter().zip(took).map(|(name, took)| Part { name, took });
    parts.chain(has_doc_tests.then_some(doc_tests)).collect()
}

fn without_colors(line: &str) -> String {
    let mut parts = line.split('\u{1b}');
    let first = parts.next().unwrap_or_default().to_owned();
    // Each further part begins with an escape sequence, which ends with m.
    parts.fold(first, |text, part| text + part.split_once('m').map_or("", |(_, rest)| rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_named_as_cargo_names_them() {
        let running = "\u{1b}[1m\u{1b}[92m     Running\u{1b}[0m tests/cli.rs \
                       (target/debug/deps/cli-0123456789abcdef)\n";
        assert_eq!(name(running).unwrap(), "tests/cli.rs (cli)");
        let unit = "     Running unittests src/lib.rs (target/debug/deps/kv_tier-0123456789abcdef)";
        assert_eq!(name(unit).unwrap(), "unittests src/lib.rs (kv_tier)");
        assert_eq!(name("   Doc-tests objstore\n").unwrap(), "doc tests (objstore)");
        assert_eq!(name("   Compiling objstore v0.1.0\n"), None);
    }

    #[test]
    fn the_time_is_in_the_closing_line() {
        let line = "test result: ok. 1 passed; 0 failed; 0 ignored; finished in 61.25s\n";
        assert_eq!(took(line), Some(Duration::from_millis(61_250)));
        assert_eq!(took("test a ... ok"), None);
    }

    #[test]
    fn times_of_unknown_programs_are_not_told() {
        let second = Duration::from_secs(1);
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        assert_eq!(pair(names(&["a"]), vec![second]), [Part { name: "a".into(), took: second }]);
        assert_eq!(pair(names(&["a", "b"]), vec![second]), []);
        assert_eq!(pair(names(&["a"]), vec![second, second]), []);
        let parts = pair(names(&["a", "doc tests (a)", "doc tests (b)"]), vec![second; 4]);
        assert_eq!(parts.iter().map(|part| part.took.as_secs()).collect::<Vec<_>>(), [1, 3]);
    }
}
