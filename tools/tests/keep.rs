//! `ripieno replay --keep`: a process finds the blocks that an earlier one stored, however that
//! ended.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use serde_json::Value;
use tempfile::{NamedTempFile, TempDir};

/// Rounds of the test with kills; RIPIENO_SOAK=1 runs more, and RIPIENO_SEED others.
const KILLS: u32 = 3;
const KILLS_SOAK: u32 = 100;
/// Rounds after which a store directory is full of other rounds' blocks.
const KILLS_A_HOME: u32 = 10;

/// Makes a directory beside the build: the temporary one may be a tmpfs without direct I/O. Others
/// cannot access it, or the store would warn.
fn place() -> TempDir {
    let mut builder = tempfile::Builder::new();
    builder.permissions(fs::Permissions::from_mode(0o700));
    builder.tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn ripieno(dir: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.args(["replay", "--keep", "--path"]).arg(dir);
    if !line.contains("--model") {
        command.args(["--model", "tiny"]);
    }
    command.args(line.split_whitespace()).env_remove("RUST_LOG");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn report_of(output: &Output) -> Value {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{out}\n{err}");
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((count(&report, "mismatches"), count(&report, "io_errors")), (0, 0), "{out}");
    report
}

fn report(dir: &Path, line: &str) -> Value {
    let line = format!("{line} --lba 4096 --verify full --json");
    report_of(&ripieno(dir, &line).output().unwrap())
}

fn count(report: &Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("{field} is no count in {report}"))
}

fn refused(dir: &Path, line: &str, wanted: &str) {
    let output = ripieno(dir, line).output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{line}\n{err}");
    assert!(output.stdout.is_empty() && err.starts_with("error: "), "{err}");
    assert!(err.contains(wanted), "{line}: {err}");
}

#[test]
fn a_second_process_finds_everything() {
    let place = place();
    let first = report(place.path(), "--requests 60 --seed 3");
    assert_eq!((&first["store"], count(&first, "files_found")), (&"made".into(), 0));
    let second = report(place.path(), "--requests 60 --seed 3");
    assert_eq!(second["store"], "opened");
    assert_eq!(count(&second, "files_found"), count(&first, "final_check_blocks"));
    assert!(second["open_ms"].as_f64().unwrap() > 0.0);
    assert_eq!(second["trace_blocks_hit"], second["trace_blocks"]);
    assert_eq!(count(&second, "stored_bytes"), 0);
    assert_eq!(second["final_check_blocks"], first["final_check_blocks"]);
    assert_eq!(second["capacity_bytes"], first["capacity_bytes"]);
}

#[test]
fn another_store_than_the_one_that_is_there_is_refused() {
    let place = place();
    report(place.path(), "--requests 10");
    for (line, wanted) in [
        ("--devices 3", "the store has 2"),
        ("--lba 512", "the store has 4096"),
        ("--capacity 99MiB", "a store keeps its size"),
        ("--no-checksums", "the store was made with checksums"),
        ("--block-tokens 64", "blocks of another shape ("),
        ("--model llama-3-8b --requests 1 --capacity 64MiB", "blocks of another shape ("),
    ] {
        refused(place.path(), line, wanted);
    }
    // No block was lost.
    assert_eq!(count(&report(place.path(), "--requests 10"), "stored_bytes"), 0);
    let store_dir = place.path().join("home.json");
    std::fs::write(place.path().join("precious"), "x").unwrap();
    std::fs::remove_file(store_dir).unwrap();
    refused(place.path(), "", "precious");
    refused(Path::new("/proc/self"), "", "error: ");
}

fn trace(requests: impl Iterator<Item = [u64; 3]>) -> NamedTempFile {
    let mut trace = NamedTempFile::new().unwrap();
    let lengths = r#""timestamp": 1, "input_length": 1536, "output_length": 1"#;
    for ids in requests {
        writeln!(trace, r#"{{{lengths}, "hash_ids": {ids:?}}}"#).unwrap();
    }
    trace
}

/// Uses are kept, too: a store that was reopened evicts the same blocks as one that stayed open.
#[test]
fn a_restart_costs_no_hits() {
    let mut random = StdRng::seed_from_u64(5);
    let requests: Vec<[u64; 3]> = (0..240u64)
        .map(|request| {
            let again = random.random_range(0..3) > 0;
            let base = if again { random.random_range(1..40) } else { 100 + request };
            [base * 10, base * 10 + 1, base * 10 + 2]
        })
        .collect();
    let half = requests.len() / 2;
    let replay = |dir: &TempDir, requests: &[[u64; 3]]| {
        let trace = trace(requests.iter().copied());
        // No check at the end, which would use every block once more.
        let line = format!("--lba 4096 --capacity 2MiB --json --trace {}", trace.path().display());
        report_of(&ripieno(dir.path(), &line).output().unwrap())
    };
    let (uninterrupted, restarted) = (place(), place());
    let all = replay(&uninterrupted, &requests);
    let halves = [replay(&restarted, &requests[..half]), replay(&restarted, &requests[half..])];
    let hits = |report: &Value| count(report, "trace_blocks_hit");
    assert!(count(&all, "evicted_files") > 100 && hits(&all) > 100, "{all}");
    // Requests overlap, so the blocks in use during an eviction differ a little.
    let both = hits(&halves[0]) + hits(&halves[1]);
    assert!(both.abs_diff(hits(&all)) * 20 <= hits(&all), "{both} of {all}");
}

/// Kills a replay after `requests` of its requests were acknowledged. Returns how many were.
fn killed_after(dir: &Path, line: &str, requests: u64) -> u64 {
    let mut command = ripieno(dir, &format!("{line} --lba 4096"));
    command.env("RUST_LOG", "ripieno::replay=debug").env("NO_COLOR", "1");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut done = 0;
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let acknowledged = |line: &str| -> Option<u64> {
        line.contains("is permanent").then_some(())?;
        line.split("request=").nth(1)?.split_whitespace().next()?.parse().ok()
    };
    for line in lines.by_ref() {
        let line = line.unwrap();
        assert!(!line.starts_with("error"), "{line}");
        done = acknowledged(&line).map_or(done, |request| request + 1);
        if done >= requests {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // Lines that it wrote before it was killed.
    lines
        .map_while(Result::ok)
        .filter_map(|line| acknowledged(&line))
        .last()
        .map_or(done, |at| at + 1)
}

#[test]
fn what_was_acknowledged_before_a_kill_is_found_and_right() {
    let soak = std::env::var("RIPIENO_SOAK").is_ok_and(|value| value != "0");
    let kills = if soak { KILLS_SOAK } else { KILLS };
    let seed = ripieno_testkit::seed();
    let mut random = StdRng::seed_from_u64(seed);
    let mut store_dir = place();
    for round in 0..kills {
        if round > 0 && round % KILLS_A_HOME == 0 {
            store_dir = place();
        }
        // Blocks of this round only, the first of them shared by ten requests.
        let base = u64::from(round) * 100_000 + 1;
        let trace = trace((0..150).map(|request| {
            [base + request / 10, base + 10_000 + 2 * request, base + 10_001 + 2 * request]
        }));
        let line = format!("--trace {} --capacity 96MiB", trace.path().display());
        let done = killed_after(store_dir.path(), &line, random.random_range(1..60));
        let again = report(store_dir.path(), &format!("{line} --requests {done}"));
        assert_eq!(again["store"], "opened");
        let blocks = (&again["trace_blocks_hit"], count(&again, "stored_bytes"));
        let wanted = (&again["trace_blocks"], 0);
        assert_eq!(blocks, wanted, "seed {seed}, round {round}, {done} requests: {again}");
        if round + 1 == kills {
            // All blocks are right, also those that were not acknowledged.
            report(store_dir.path(), &line);
        }
    }
}
