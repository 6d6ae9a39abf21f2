//! `ripieno replay` of a recorded trace, against an independent count of hits.
//!
//! The trace is `RIPIENO_TRACE`, or `shared/traces/conversation_trace.jsonl` beside the repository;
//! if neither exists, the test is reported as ignored.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use serde_json::Value;

/// Returns the path of the trace, or the path where it is missing.
fn trace() -> Result<PathBuf, PathBuf> {
    let beside = || root().join("../shared/traces/conversation_trace.jsonl");
    let path = std::env::var_os("RIPIENO_TRACE").map_or_else(beside, PathBuf::from);
    if path.is_file() { Ok(path) } else { Err(path) }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package is in the workspace")
}

/// Requests to replay on the mock GPU.
const GPU_REQUESTS: usize = 400;

/// Set in a process that acts as `ripieno` instead of a test.
const BE_RIPIENO: &str = "RIPIENO_TESTS_BE_RIPIENO";

/// Returns the program: this test itself, whose `main` calls that of `ripieno`. Cargo builds
/// programs only for the tests of their own package.
fn program() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(BE_RIPIENO, "1");
    command
}

/// Hits of an unlimited cache: a request's blocks count up to the first that does not follow at the
/// same place of an earlier request with the same beginning.
#[derive(Debug, Default, PartialEq, Eq)]
struct Count {
    requests: u64,
    blocks: u64,
    hits: u64,
}

fn count(text: &str) -> Count {
    let mut found = Count::default();
    // Each prefix seen so far is a node: (previous node, block) -> node.
    let mut nodes: HashMap<(usize, u64), usize> = HashMap::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let request: Value = serde_json::from_str(line).unwrap();
        let ids = request["hash_ids"].as_array().unwrap();
        let (mut node, mut hitting) = (0, true);
        for id in ids {
            let next = nodes.len() + 1;
            let known = *nodes.entry((node, id.as_u64().unwrap())).or_insert(next);
            hitting &= known != next;
            found.hits += u64::from(hitting);
            node = known;
        }
        found.requests += 1;
        found.blocks += ids.len() as u64;
    }
    found
}

/// Replays the trace, or its first lines, and compares the hits.
fn hits(path: &Path, lines: usize, command: &mut Command, flags: &[&str]) -> Value {
    let text = std::fs::read_to_string(path).unwrap();
    let first: Vec<&str> = text.lines().take(lines).collect();
    let expected = count(&first.join("\n"));
    let command = command
        .args(["replay", "--json", "--model", "tiny", "--progress", "never", "--trace"])
        .arg(path);
    command.args(flags);
    if lines < usize::MAX {
        command.args(["--requests", &expected.requests.to_string()]);
    }
    let output = command.output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {complaint}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |field: &str| report[field].as_u64().unwrap_or_else(|| panic!("no {field}"));
    let found = Count {
        requests: number("requests"),
        blocks: number("trace_blocks"),
        hits: number("trace_blocks_hit"),
    };
    assert_eq!(found, expected);
    assert!(number("verified_bytes") > 0, "nothing was checked");
    assert_eq!((number("mismatches"), number("io_errors")), (0, 0));
    report
}

/// Runs a test if the trace exists.
fn with_trace(test: fn(&Path)) -> Result<Completion, Failed> {
    match trace() {
        Ok(path) => {
            test(&path);
            Ok(Completion::Completed)
        }
        Err(path) => Ok(Completion::ignored_with(format!("no trace at {}", path.display()))),
    }
}

fn replay(path: &Path) {
    hits(path, usize::MAX, &mut program(), &[]);
}

/// Replays the beginning with the KV pool in GPU memory, over a mock of libcuda: filled, moved and
/// checked there, by both routes and both launch modes.
fn replay_on_a_gpu(path: &Path) {
    for (route, launch) in [("direct", "resident"), ("staged", "per-batch")] {
        let mut command = program();
        command.env("LD_LIBRARY_PATH", cuda_mock::folder(cuda_mock::Level::Full));
        let flags = ["--executor", "cuda", "--route", route, "--launch", launch];
        let flags = [&flags[..], &["--verify", "full"]].concat();
        let report = hits(path, GPU_REQUESTS, &mut command, &flags);
        assert_eq!(report["path"], route);
        assert_eq!(report["gpu"]["launch"], launch);
    }
}

/// Checks the count itself with obvious results.
fn counting() {
    let requests = ["[1, 2, 3]", "[1, 2, 4]", "[1, 2, 3, 5]", "[2, 3]", "[1, 9, 3]", "[]"];
    let lines = requests.map(|ids| format!(r#"{{"hash_ids": {ids}}}"#)).join("\n");
    assert_eq!(count(&lines), Count { requests: 6, blocks: 15, hits: 2 + 3 + 1 });
}

fn main() -> ExitCode {
    if std::env::var_os(BE_RIPIENO).is_some() {
        return ripieno::run();
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(1);
    let on_trace = |name, test| Trial::ignorable_test(name, move || with_trace(test));
    let tests = [
        Trial::test("a_cache_without_limits_is_counted", || {
            counting();
            Ok(())
        }),
        on_trace("replay_hits_what_a_cache_without_limits_hits", replay),
        on_trace("replay_on_a_gpu_hits_the_same", replay_on_a_gpu),
    ];
    libtest_mimic::run(&arguments, tests.into()).exit_code()
}
