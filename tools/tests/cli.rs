//! Runs the command as a user or a script would.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use ripieno_testkit::until;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::NamedTempFile;

fn ripieno(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.arg("replay").args(line.split_whitespace()).env_remove("RUST_LOG");
    // The objects of the default model are large.
    if !line.contains("--model") && !line.contains("help") {
        command.args(["--model", "tiny"]);
    }
    command
}

/// Runs any of the commands.
fn command(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.args(words).env_remove("RUST_LOG").output().unwrap()
}

fn run(line: &str) -> Output {
    ripieno(line).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs with --json and checks the invariants of every successful replay.
fn report(line: &str) -> Value {
    let output = run(&format!("{line} --json"));
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{line}\n{out}\n{err}");
    assert_eq!(out.trim_end().lines().count(), 1, "one JSON object and nothing else: {out}");
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((count(&report, "mismatches"), count(&report, "io_errors")), (0, 0), "{out}");
    assert_eq!(report["requests"], report["requests_planned"]);
    assert!(count(&report, "trace_blocks_hit") <= count(&report, "trace_blocks_hit_unlimited"));
    if count(&report, "evicted_files") + count(&report, "blocks_left_out") == 0 {
        assert_eq!(report["trace_blocks_hit"], report["trace_blocks_hit_unlimited"]);
        let misses = count(&report, "trace_blocks") - count(&report, "trace_blocks_hit");
        assert_eq!(count(&report, "stored_bytes"), misses * trace_block_bytes(&report));
    }
    let hits = count(&report, "trace_blocks_hit") * trace_block_bytes(&report);
    assert!(count(&report, "retrieved_bytes") >= hits);
    if report["verify"] == "full" {
        let moved = count(&report, "retrieved_bytes") + count(&report, "final_check_bytes");
        assert_eq!(count(&report, "verified_bytes"), moved);
    }
    report
}

fn count(report: &Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("{field} is no count in {report}"))
}

fn trace_block_bytes(report: &Value) -> u64 {
    let rows = count(report, "layers") * count(report, "segments");
    512 / count(report, "block_tokens") * rows * count(report, "object_bytes")
}

fn trace(lines: &[&str]) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    for line in lines {
        writeln!(file, "{line}").unwrap();
    }
    file
}

fn request(ids: &[u64]) -> String {
    let tokens = 512 * ids.len();
    format!(
        r#"{{"timestamp": 1, "input_length": {tokens}, "output_length": 1, "hash_ids": {ids:?}}}"#
    )
}

/// Checks that bad input exits with 2, an `error:` with these words, and an empty stdout. Returns
/// stderr.
fn refused(line: &str, wanted: &str) -> String {
    let output = run(line);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{line}\n{err}");
    assert!(output.stdout.is_empty(), "{line}: {}", text(&output.stdout));
    assert!(err.starts_with("error: "), "{line}: {err}");
    assert!(err.contains(wanted), "{line}: {err}");
    err
}

fn refused_with_hint(line: &str, wanted: &str) {
    assert!(refused(line, wanted).contains("\n hint: "), "{line}");
}

#[test]
fn help_states_units_examples_and_exit_codes() {
    let output = run("--help");
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0));
    for wanted in ["Exit codes:", "Examples:", "130", "--verify", "MiB", "memcpy"] {
        assert!(out.contains(wanted), "{wanted} is not in {out}");
    }
    let nothing = Command::new(env!("CARGO_BIN_EXE_ripieno")).output().unwrap();
    assert_eq!(nothing.status.code(), Some(2));
    assert!(text(&nothing.stderr).contains("replay"));
}

#[test]
fn every_help_fits_two_screens() {
    let all =
        ["replay", "pace", "bench table", "sim", "sim plan", "format", "inspect", "fsck", "scrub"];
    for name in all.into_iter().chain([
        "sim cluster",
        "identify",
        "doctor",
        "bench",
        "bench raw",
        "bench layers",
        "top",
        "serve",
        "ctl",
    ]) {
        let words: Vec<&str> = name.split(' ').chain(["--help"]).collect();
        let out = text(&command(&words).stdout);
        assert!(out.lines().count() <= 100, "{name}: {} lines", out.lines().count());
        assert!(out.lines().all(|line| line.chars().count() <= 100), "{name}: {out}");
    }
}

#[test]
fn options_of_a_store_are_listed_in_80_columns() {
    let json: Value = serde_json::from_slice(&command(&["options", "--json"]).stdout).unwrap();
    let names: Vec<&str> =
        json.as_array().unwrap().iter().map(|option| option["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"capacity"), "{names:?}");
    let list = text(&command(&["options"]).stdout);
    assert!(list.lines().all(|line| line.chars().count() <= 80), "{list}");
    let heads = list.lines().filter(|line| !line.starts_with(' '));
    let listed: Vec<&str> = heads.map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(listed, names);
}

#[test]
fn what_is_in_dram_is_not_read_from_the_devices() {
    let line = "--requests 300 --verify full --seed 3";
    let (without, with) = (report(line), report(&format!("{line} --dram 64MiB")));
    assert_eq!(count(&without, "dram_hits") + count(&without, "dram_misses"), 0);
    // All blocks stored fit.
    assert_eq!(count(&with, "dram_misses"), 0);
    assert_eq!(with["dram_retrieved_bytes"], with["retrieved_bytes"]);
    assert_eq!(with["retrieved_bytes"], without["retrieved_bytes"]);
    assert!(count(&with, "commands") < count(&without, "commands"));
    let some = report(&format!("{line} --dram 100KiB"));
    assert!(count(&some, "dram_hits") > 0 && count(&some, "dram_misses") > 0, "{some}");
    assert!(count(&some, "dram_blocks") * trace_block_bytes(&some) <= 100 << 10);
    let text = text(&run("--requests 300 --dram 64MiB").stdout);
    assert!(text.contains("from DRAM"), "{text}");
}

#[test]
fn bad_flags_are_refused() {
    for (line, wanted) in [
        ("--block-tokens 48", "--block-tokens 48"),
        ("--block-tokens 1", "multiple of 4"),
        ("--descriptors prp --lba 4096", "cannot pad"),
        ("--capacity 4095", "needs 4096 bytes"),
        ("--model llama-3-8b --capacity 1MiB", "needs 8388608 bytes"),
        ("--model qwen3-32b --requests 10000", "of memory"),
        ("--pool-blocks 4000000000", "of memory"),
        ("--dram 900TiB", "900 TiB of --dram"),
        ("--dram 1KiB", "a block of model tiny has 4 KiB"),
        ("--coalesce 1", "one object has 1 KiB"),
        // The tables need the memory.
        ("--capacity 900TiB --model llama-3-8b --dram 900TiB", "for tables of 11"),
        // Far more keys than fit into memory; none is made.
        ("--requests 1000000000", "for the keys of 1000000000 requests"),
        ("--requests 18446744073709551615", "for the keys of 18446744073709551615 requests"),
    ] {
        refused_with_hint(line, wanted);
    }
    // These are refused by the parser or the stack, in their own format.
    for (line, wanted) in [
        ("--devices vfio:0000:65", "or vfio:0000:65:00.0"),
        ("--devices vfio:65:00.0 --path x", "a directory or drives"),
        ("--gpu 0", "no GPU runs"),
        ("--route direct", "to this pool there is host"),
        ("--capacity lots", "such as 64MiB"),
        ("--capacity -5MiB", "such as 64MiB"),
        ("--capacity 1.5", "such as 64MiB"),
        ("--dram -1", "such as 64MiB"),
        ("--requests 1k", "without a unit"),
        ("--requests -3", "without a unit"),
        ("--dram 1MiB --dram-mode back", "write-through, read-ahead"),
        ("--dram-mode read-ahead", "give dram, too"),
        ("--seed=-3", "0 or more"),
        ("--seed -3", "0 or more"),
        ("--verify maybe", "full"),
        ("--executor mpi", "cuda"),
        ("--model llama-9", "no such model"),
        ("--devices 65", "1 to 64"),
        ("--queues 65", "from 1 to 64"),
        ("--depth 3", "power of two"),
        ("--lba 1024", "512 or 4096"),
        ("--requests 0", "1 or more"),
        ("--path /no/such/dir", "No such file"),
        ("--no-such-flag", "unexpected argument"),
    ] {
        refused(line, wanted);
    }
}

/// Exceeding a resource limit of the process is bad input, and the message names the limit. No file
/// is left behind.
#[test]
fn limits_of_the_process_are_refused_and_named() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let media = format!("--path {}", directory.path().display());
    for (limit, flags, wanted) in [
        ("-f 1", &media[..], "--path "),
        ("-n 4", &media, "Too many open files"),
        ("-v 100000", "--capacity 1GiB", "ulimit -v"),
    ] {
        // The tests may have inherited open files. `-n 4` allows one besides the standard ones: 3,
        // which is closed here.
        let replay = "exec \"$0\" replay --model tiny --lba 4096 --requests 20";
        let line = format!("exec 3>&-; ulimit {limit}; {replay} {flags}");
        let mut shell = Command::new("sh");
        shell.args(["-c", &line, env!("CARGO_BIN_EXE_ripieno")]).env_remove("RUST_LOG");
        let output = shell.output().unwrap();
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{limit} {flags}: {}\n{err}", output.status);
        assert!(err.contains("error: ") && err.contains(wanted), "{limit} {flags}\n{err}");
        assert!(err.contains("\n hint: "), "{limit} {flags}\n{err}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "{limit}");
    }
}

#[test]
fn full_outputs_are_named_and_no_panic() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for words in [&["--help"][..], &["replay", "--help"], &["--version"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
        let output = command.args(words).stdout(full()).output().unwrap();
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {err}");
        assert!(err.starts_with("error: cannot write to stdout"), "{err}");
    }
    let output = ripieno("--requests 5").stdout(full()).output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains("error: cannot write to stdout: No space left on device"), "{err}");
    // Only notes and logs are lost, not the report and the exit code.
    for (line, code) in [("--requests 5 --json", 0), ("--requests 5 -vv", 0), ("--gpu 1", 2)] {
        let output = ripieno(line).stderr(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{line}");
        assert_eq!(output.stdout.is_empty(), code != 0, "{line}");
    }
}

#[test]
fn bad_traces_are_refused_by_file_line_and_field() {
    let good = request(&[0, 1]);
    for (bad, wanted) in [
        (good.replace("[0, 1]", "[0, -1]"), "hash_ids"),
        (good.replace("1024", "\"long\""), "input_length"),
        (good.replace("1024", "32"), "blocks of 16 tokens?"),
        (good.replace("\"hash_ids\"", "\"ids\""), "field `hash_ids` is missing"),
        ("{".to_owned(), "not a JSON object"),
    ] {
        let file = trace(&[&good, &bad, &good]);
        let name = file.path().display();
        refused_with_hint(&format!("--trace {name}"), wanted);
        refused_with_hint(&format!("--trace {name}"), &format!("{name}:2: "));
    }
    let empty = trace(&[]);
    refused_with_hint(&format!("--trace {}", empty.path().display()), "holds no request");
    refused_with_hint("--trace /no/such/trace", "No such file");
}

#[test]
fn a_trace_hits_as_a_cache_without_limits_does() {
    let lines = [&[1, 2, 3][..], &[4, 2, 3], &[1, 2, 9], &[], &[4, 2, 3, 1], &[1, 2, 3]];
    let lines: Vec<String> = lines.iter().map(|ids| request(ids)).collect();
    let file = trace(&lines.iter().map(String::as_str).collect::<Vec<_>>());
    for flags in ["", "--block-tokens 64 --descriptors sgl", "--executor inline --devices 3"] {
        let report = report(&format!("--trace {} --verify full {flags}", file.path().display()));
        assert_eq!(count(&report, "trace_blocks"), 3 + 3 + 3 + 4 + 3);
        assert_eq!(count(&report, "trace_blocks_hit"), 2 + 3 + 3, "{flags}");
        assert_eq!(count(&report, "evicted_files"), 0);
        // Eight distinct blocks (1, 2, 3; 4, 2, 3; 9; 1), each checked once more at the end.
        let blocks = 8 * 512 / count(&report, "block_tokens");
        assert_eq!(count(&report, "final_check_blocks"), blocks);
    }
}

#[test]
fn the_report_has_every_promised_field() {
    let report = report("--requests 20");
    for field in [
        "path",
        "executor",
        "devices",
        "model",
        "requests",
        "trace_blocks",
        "trace_blocks_hit",
        "stored_bytes",
        "retrieved_bytes",
        "verified_bytes",
        "mismatches",
        "evicted_files",
        "retrieve_gib_s",
        "store_gib_s",
        "memcpy_gib_s",
        "commands",
        "sq_doorbells",
        "cq_doorbells",
        "wall_s",
        "hit_ratio",
        "objects",
        "capacity_bytes",
        "needed_bytes",
        "object_bytes",
        "layers",
        "segments",
        "block_tokens",
        "seed",
        "verify",
        "media",
        "lba_bytes",
        "commands_per_sq_doorbell",
        "objects_per_sq_doorbell",
        "io_errors",
        "version",
    ] {
        assert!(!report[field].is_null(), "{field} is missing in {report}");
    }
    assert_eq!((&report["path"], &report["executor"]), (&"host".into(), &"host".into()));
    for rate in ["retrieve_gib_s", "store_gib_s", "memcpy_gib_s", "wall_s"] {
        assert!(report[rate].as_f64().unwrap() > 0.0, "{rate}: {report}");
    }
    let doorbells = count(&report, "sq_doorbells");
    assert!(0 < doorbells && doorbells <= count(&report, "commands"));
    assert!(count(&report, "verified_bytes") < count(&report, "retrieved_bytes"), "sampled");
}

#[test]
fn every_way_of_moving_bytes_moves_the_same() {
    let mut results = Vec::new();
    for flags in [
        "--devices 1 --queues 1 --depth 2",
        "--devices 3 --executor inline",
        "--coalesce off",
        "--lba 4096",
        "--descriptors prp --block-tokens 256",
        "--mdts 8KiB --block-tokens 128",
        "--pool-blocks 3",
    ] {
        let report = report(&format!("--requests 60 --seed 5 --verify full {flags}"));
        let result = ["trace_blocks", "trace_blocks_hit", "stored_bytes", "retrieved_bytes"]
            .map(|field| count(&report, field));
        results.push(result);
        assert_eq!(result, results[0], "{flags}");
    }
}

#[test]
fn real_shapes_are_replayed() {
    for (model, lba) in [("llama-3-8b", 4096), ("deepseek-v3-mla", 4096)] {
        let report = report(&format!(
            "--model {model} --requests 6 --capacity 96MiB --verify full --block-tokens 16"
        ));
        assert_eq!((count(&report, "lba_bytes"), &report["model"]), (lba, &model.into()));
        assert!(count(&report, "stored_bytes") > 0);
    }
}

#[test]
fn too_little_room_means_eviction_and_not_wrong_bytes() {
    // Some requests are longer than the capacity of 64 blocks.
    for flags in ["", "--pool-blocks 5", "--executor inline --block-tokens 128"] {
        let report =
            report(&format!("--requests 300 --capacity 256KiB --verify full --seed 9 {flags}"));
        assert!(count(&report, "evicted_files") > 0, "{flags}");
        assert!(count(&report, "final_check_bytes") <= 256 << 10);
        assert!(count(&report, "trace_blocks_hit") > 0);
    }
    let one = report("--requests 30 --capacity 4KiB --verify full");
    assert_eq!(count(&one, "final_check_blocks"), 1);
    assert!(count(&one, "blocks_left_out") > 0);
}

#[test]
fn file_media_leave_nothing_behind() {
    // The temporary directory may be a tmpfs without direct I/O.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path: &Path = directory.path();
    let line = format!("--requests 30 --lba 4096 --verify full --path {}", path.display());
    let report = report(&line);
    assert!(report["media"].as_str().unwrap().starts_with("file:"));
    assert_eq!(std::fs::read_dir(path).unwrap().count(), 0);
}

#[test]
fn people_get_a_table_and_a_verdict() {
    let output = run("--requests 20 --verify full");
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0));
    for wanted in ["tiny", "of memcpy", "Integrity: OK: every retrieved byte was checked"] {
        assert!(out.contains(wanted), "{wanted} is not in\n{out}");
    }
    // No progress bar without a terminal.
    assert!(!text(&output.stderr).contains('\r'));
    let unchecked = text(&run("--requests 5 --verify off").stdout);
    assert!(unchecked.contains("Integrity: not checked"), "{unchecked}");
}

/// The trace never ends, and there is nothing to shut down yet.
#[test]
fn ctrl_c_ends_the_reading_of_a_trace() {
    let mut child = ripieno("--trace -").stdin(Stdio::piped()).spawn().unwrap();
    let mut writer = child.stdin.take().unwrap();
    // More than a pipe holds, so the trace is being read.
    for _ in 0..2000 {
        writeln!(writer, "{}", request(&[1, 2])).unwrap();
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::INT).unwrap();
    // The pipe is not closed before: the signal must have ended it.
    until("it ends", || child.try_wait().unwrap().is_some());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(writer);
}

const LONG: &str =
    "--model tiny --requests 200000 --capacity 8MiB --queues 1 --depth 2 --coalesce off --json";

/// Runs `program` and sends it a signal after its first note, once it handles signals.
fn interrupted(program: &mut Command, signal: Signal) -> Output {
    let mut child = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    stderr.read_line(&mut String::new()).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn each_signal_is_reported_with_its_exit_code() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::HUP, 129)] {
        // The tests may run under nohup, which ignores SIGHUP.
        let mut command = Command::new("env");
        command.args(["--default-signal", env!("CARGO_BIN_EXE_ripieno"), "replay"]);
        command.args(LONG.split_whitespace()).env_remove("RUST_LOG");
        let output = interrupted(&mut command, signal);
        assert_eq!(output.status.code(), Some(code), "{signal:?}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["interrupted"], true);
    }
    // Under nohup, SIGHUP stays ignored.
    let mut nohup = Command::new("nohup");
    nohup.arg(env!("CARGO_BIN_EXE_ripieno")).args([
        "replay",
        "--model",
        "tiny",
        "--requests",
        "100",
        "--json",
    ]);
    let output = interrupted(&mut nohup, Signal::HUP);
    assert_eq!(output.status.code(), Some(0));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["interrupted"], false);
}

#[test]
fn an_interrupted_table_says_that_there_is_no_result() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("table");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.args(["bench", "table", "--model", "llama-3-8b", "--json", "-v", "--out"]).arg(&out);
    let output = interrupted(command.env_remove("RUST_LOG"), Signal::INT);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{err}");
    let error: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(error["error"]["kind"], "interrupted", "{error}");
    assert!(error["error"]["message"].as_str().unwrap().contains("there is no result"), "{error}");
    assert!(!out.exists());
}

#[test]
fn ctrl_c_ends_in_an_orderly_way() {
    let mut child = ripieno(LONG).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // After its first note, it shuts down cleanly on a signal. A little later it moves bytes.
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    stderr.read_line(&mut String::new()).unwrap();
    std::thread::sleep(Duration::from_millis(1000));
    let threads = format!("/proc/{}/task", child.id());
    until(
        "only the first thread has no name of its own: none draws a bar that is not shown",
        || {
            let unnamed = std::fs::read_dir(&threads).unwrap().filter(|task| {
                let name = std::fs::read_to_string(task.as_ref().unwrap().path().join("comm"));
                name.is_ok_and(|name| name == "ripieno\n")
            });
            unnamed.count() == 1
        },
    );
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["interrupted"], true);
    assert!(count(&report, "requests") < count(&report, "requests_planned"));
}

#[test]
fn devices_are_shown_to_people_and_programs() {
    let out = command(&["identify"]);
    assert_eq!(out.status.code(), Some(0));
    assert!(text(&out.stdout).contains("Ripieno software controller"));
    let out = command(&["identify", "--reset-subsystem"]);
    assert_eq!(out.status.code(), Some(0));
    assert!(text(&out.stderr).contains("resetting the NVM subsystem"));
    let out = command(&["identify", "--devices", "2", "--json"]);
    let shown: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(shown["devices"].as_array().unwrap().len(), 2);
    assert_eq!(shown["devices"][1]["namespaces"][0]["lba_bytes"], 512);
}

/// The address exists on no machine: the driver has to report that, and nothing may hang.
#[test]
fn a_drive_that_is_not_there_is_named() {
    for name in ["identify", "replay"] {
        let out = command(&[name, "--devices", "vfio:ffff:ff:1f.7"]);
        let err = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{err}");
        assert!(err.starts_with("error: ") && err.contains("vfio"), "{err}");
    }
}

/// With --json, an error is JSON, too, and the only output on stdout.
#[test]
fn an_error_is_an_object_with_json() {
    for (words, code, kind, wanted) in [
        ("replay --json --trace /no/such", 2, "usage", "trace /no/such: cannot be read"),
        ("replay --json --capacity lots", 2, "usage", "invalid value 'lots' for '--capacity"),
        ("replay --json --no-such-flag", 2, "usage", "unexpected argument '--no-such-flag'"),
        ("sim no-such-scenario --json", 2, "usage", "no such scenario"),
        ("bench table --json --trace x", 2, "usage", "serves no requests"),
        ("inspect --json --path /tmp/no/such", 2, "usage", "no store"),
        ("fsck --json", 2, "usage", "path: it is missing"),
    ] {
        let output = command(&words.split_whitespace().collect::<Vec<_>>());
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "{words}: {err}");
        let error: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{words}: {out}"));
        assert_eq!(error["error"]["kind"], kind, "{words}");
        assert!(error["error"]["message"].as_str().unwrap().contains(wanted), "{words}: {out}");
        assert!(error["error"]["hint"].is_string(), "{words}: {out}");
        assert!(err.starts_with("error: "), "{words}: {err}");
    }
}

/// Closes the pipe early, as `head` does.
#[test]
fn a_reader_that_goes_away_changes_no_exit_code() {
    for (words, code) in [
        ("replay --model tiny --requests 5", 0),
        ("replay --model tiny --requests 5 --json", 0),
        ("sim", 0),
        ("identify", 0),
        ("--help", 0),
        ("doctor", 141),
    ] {
        // No reader from the start: a short report would be written before a later close.
        let (reader, writer) = UnixStream::pair().unwrap();
        reader.shutdown(Shutdown::Both).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
        command.args(words.split_whitespace()).stdout(OwnedFd::from(writer)).stderr(Stdio::piped());
        let output = command.spawn().unwrap().wait_with_output().unwrap();
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{words}: {err}");
        assert!(!err.contains("error") && !err.contains("panicked"), "{words}: {err}");
    }
}

#[test]
fn logs_are_chosen_by_words_that_mean_something() {
    for value in ["garbage", "debug,garbage=warn", "ripieno=loud"] {
        let output = ripieno("--requests 2").env("RUST_LOG", value).output().unwrap();
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{err}");
        assert!(err.starts_with(&format!("warning: RUST_LOG={value} is ignored: ")), "{err}");
    }
    let output = ripieno("--requests 2 -q").env("RUST_LOG", "nvme_driver=debug").output().unwrap();
    let err = text(&output.stderr);
    assert!(err.contains("DEBUG") && !err.contains("ignored"), "{err}");
}

/// A hint with a flag of another command names that command.
#[test]
fn hints_name_flags_of_the_same_command() {
    let root = ripieno::command();
    for words in [
        "inspect --path /tmp/no/such",
        "inspect --path /",
        "fsck --devices tape",
        "scrub --devices emu",
        "scrub --path /tmp --devices vfio:65:00.0",
        "format --path /dev/null",
        "format --devices emu",
        "bench raw --devices tape",
        "bench raw --bs 16MiB --size 8MiB",
        "bench raw --block /no/such",
        "bench raw --devices vfio:ffff:ff:1f.7",
        "bench table --trace x",
        "bench layers --trace x",
        "bench layers --model qwen3-32b --tokens 16000000",
        "bench table --model tiny,mini",
        "bench table --pool-blocks 4000000000",
        "bench table --pool-blocks 15",
        "replay --pool-blocks 4000000000",
        "replay --devices vfio:ffff:ff:1f.7",
        "identify --devices vfio:ffff:ff:1f.7",
        "doctor --devices tape",
        "sim plan - --html /no/such/x",
        "sim cluster chat --kv-memory 1MiB",
    ] {
        let output = command(&words.split_whitespace().collect::<Vec<_>>());
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words}: {err}");
        let mut asked = &root;
        for word in words.split_whitespace() {
            asked = asked.find_subcommand(word).unwrap_or(asked);
        }
        let hint = err.split("hint: ").nth(1).unwrap_or_default().split("; or").next().unwrap();
        let mut others = false;
        for word in hint.split([' ', ',', ')', ';']) {
            others |= word == "ripieno" || word == "(ripieno" || word == "replay";
            let Some(flag) = word.strip_prefix("--") else { continue };
            let has = asked.get_arguments().any(|arg| arg.get_long() == Some(flag));
            assert!(has || others, "{words}: no --{flag} there: {err}");
            let refuses = asked.get_name() == "table" && ["capacity", "requests"].contains(&flag);
            assert!(!refuses, "{words}: it refuses --{flag}: {err}");
        }
    }
}

#[test]
fn the_version_says_what_was_built() {
    let output = command(&["--version"]);
    let said = text(&output.stdout);
    let (version, features) = said.split_once('\n').unwrap();
    assert!(features.starts_with("features: ") && features.contains("vfio"), "{said}");
    let rest = version.strip_prefix(concat!("ripieno ", env!("CARGO_PKG_VERSION"))).unwrap();
    let commit = rest.strip_prefix(" (").and_then(|rest| rest.strip_suffix(')'));
    assert!(
        rest.is_empty() || commit.is_some_and(|it| it.chars().all(|c| c.is_ascii_hexdigit())),
        "{said}"
    );
    assert_eq!(text(&command(&["-V"]).stdout).trim_end(), version);
}

#[test]
fn completions_and_manual_pages_have_all_commands() {
    let place = tempfile::tempdir().unwrap();
    let pages = place.path().join("share/man1");
    let written = command(&["man", pages.to_str().unwrap()]);
    assert_eq!(written.status.code(), Some(0), "{}", text(&written.stderr));
    for program in [ripieno::command(), nvme_bind::command()] {
        let page = |name: &str| std::fs::read_to_string(pages.join(name)).unwrap();
        let whole = page(&format!("{}.1", program.get_name()));
        for shell in ["bash", "zsh", "fish"] {
            let output = command(&["completions", shell, program.get_name()]);
            assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
            for inner in program.get_subcommands() {
                assert!(text(&output.stdout).contains(inner.get_name()), "{shell}: {inner}");
            }
        }
        for inner in program.get_subcommands() {
            assert!(whole.contains(inner.get_name()), "{inner}");
            let name = format!("{}-{}", program.get_name(), inner.get_name());
            let page = page(&format!("{name}.1"));
            assert!(page.contains(&format!(".TH {name} 1")), "{page}");
            assert!(page.contains("\n.SH OPTIONS\n"), "{page}");
        }
    }
    let printed = text(&command(&["man"]).stdout);
    let written = std::fs::read_to_string(pages.join("ripieno.1")).unwrap();
    assert_eq!(printed.trim_end(), written.trim_end());
}
