//! `ripieno pace`, as a user or a script runs it.

use std::fmt::Write as _;
use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

fn run(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.arg("pace").args(line.split_whitespace()).env_remove("RUST_LOG");
    command.output().unwrap()
}

fn report(line: &str) -> Value {
    let output = run(&format!("{line} --json"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(output.status.code(), Some(0), "{line}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn number(run: &Value, field: &str) -> f64 {
    let found = field.split('.').fold(run, |value, name| &value[name]);
    found.as_f64().unwrap_or_else(|| panic!("{field} is no number in {run}"))
}

fn refused(line: &str, wanted: &str) {
    let output = run(line);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{line}: {error}");
    assert!(error.contains(wanted), "{line}: {error}");
}

#[test]
fn the_same_arguments_give_the_same_numbers() {
    let line = "--model mini --requests 40 --speed 2";
    let first = report(line);
    assert_eq!(report(line), first);
    assert_ne!(report(&format!("{line} --seed 2"))["runs"], first["runs"]);
}

#[test]
#[ignore = "takes seconds: a step of cargo xtask ci"]
fn the_scheduler_waits_less_under_load_and_never_more() {
    for speed in ["0.5", "2", "4"] {
        let found = report(&format!("--model mini --requests 150 --speed {speed}"));
        let [slack, naive] = [&found["runs"][0], &found["runs"][1]];
        assert_eq!((&slack["schedule"], &naive["schedule"]), (&"slack".into(), &"naive".into()));
        for field in ["bubble_s", "ttft_ms.mean", "ttft_ms.p99", "took_s"] {
            let (ours, theirs) = (number(slack, field), number(naive, field));
            assert!(ours <= theirs * 1.01, "speed {speed}, {field}: {ours} and {theirs}");
        }
        let waited = number(slack, "bubble_s") / number(naive, "bubble_s");
        assert!(speed != "4" || waited < 0.8, "{waited}");
        for run in [slack, naive] {
            assert_eq!((number(run, "requests"), number(run, "io_errors")), (150.0, 0.0));
            let layers = run["bubble_layers_s"].as_array().unwrap();
            let sum: f64 = layers.iter().map(|layer| layer.as_f64().unwrap()).sum();
            assert_eq!(layers.len(), 32);
            assert!((sum - number(run, "bubble_s")).abs() < 1e-9);
        }
    }
}

#[test]
#[ignore = "takes seconds: a step of cargo xtask ci"]
fn by_hit_rate_the_scheduler_is_never_worse_by_a_hundredth() {
    let line = "--model mini --requests 11 --hit-rates";
    let found = report(&format!("{line} 50,75,90,93.75,95,96.9,98.3,100"));
    let rows = found["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 8 * 3);
    for row in rows {
        for field in ["ttft_ms", "bubble_ms"] {
            let [slack, naive] = ["slack", "naive"].map(|it| number(&row[it], field));
            assert!(slack <= naive * 1.01, "{field}: {row}");
        }
        let hits = number(&row["slack"], "hit_ratio") * 100.0;
        assert!((hits - number(row, "hit_rate")).abs() < 0.05, "{row}");
        if row["hit_rate"] == 93.75 {
            let [slack, naive] = ["slack", "naive"].map(|it| number(&row[it], "ttft_ms"));
            assert!(slack < naive * 0.7, "{row}");
        }
    }
    // Same as in the simulator (docs/results/sim.md).
    let [slack, naive] = ["slack", "naive"].map(|it| number(&found["crossover"], it));
    assert!((96.0..97.2).contains(&slack) && (94.4..95.4).contains(&naive), "{slack}, {naive}");
    for row in found["mixed"].as_array().unwrap() {
        let [slack, naive, best] =
            ["slack", "naive", "best"].map(|it| number(row, &format!("{it}_bytes_s")));
        assert!((best * 0.97..best * 1.001).contains(&slack) && slack >= naive * 0.99, "{row}");
        assert!(row["writes"] != 0.25 || naive < slack * 0.5, "{row}");
    }
}

#[test]
fn what_waiting_requests_load_is_read_ahead_to_host_memory() {
    let line = "--model mini --requests 150 --speed 4";
    let found = report(&format!("{line} --dram 4MB"));
    let [slack, naive] = [&found["runs"][0], &found["runs"][1]];
    let [ahead, wasted] = ["prefetched_bytes", "wasted_bytes"].map(|it| number(slack, it));
    assert!(ahead > 1e6 && wasted < ahead / 20.0, "{slack}");
    assert!(number(slack, "bubble_s") < number(naive, "bubble_s") / 4.0, "{slack} {naive}");
    for run in [slack, naive] {
        let [read, dram] = ["read_bytes", "dram_bytes"].map(|it| number(run, it));
        assert!(dram > read / 2.0 && dram < read, "{run}");
    }
    assert_eq!(naive["prefetched_bytes"], 0, "nobody looks ahead");
    let found = report(&format!("{line} --dram 4MB --dram-mode read-ahead"));
    let dram = [0, 1].map(|at| number(&found["runs"][at], "dram_bytes"));
    assert!(dram[0] > 1e6 && dram[1] == 0.0, "only that is kept: {found}");
    for run in report(line)["runs"].as_array().unwrap() {
        for field in ["dram_bytes", "prefetched_bytes", "wasted_bytes", "late_batches"] {
            assert_eq!(run[field], 0, "{field}");
        }
    }
}

#[test]
fn layer_times_are_known_within_a_hundred_requests() {
    let found = report("--model mini --requests 200 --schedule slack");
    let run = &found["runs"][0];
    assert!(number(run, "slack_error_p50") < 0.01, "{run}");
    assert!(number(run, "slack_error_max") < 0.05, "{run}");
}

/// Makes a trace of two requests with the same prompt, the second long after the first: it loads
/// all blocks except the last, which has to be computed.
fn again(tokens: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let ids: Vec<u64> = (0..tokens.div_ceil(512)).collect();
    let mut text = String::new();
    for time in [0, 100_000] {
        write!(text, r#"{{"timestamp": {time}, "input_length": {tokens}, "output_length": 1,"#)
            .unwrap();
        writeln!(text, r#" "hash_ids": {ids:?}}}"#).unwrap();
    }
    fs::write(file.path(), text).unwrap();
    file
}

#[test]
fn times_are_what_arithmetic_says() {
    // 63 blocks of 2 KiB a layer; 512 tokens are computed, in 1 ms or in 20 ms a layer.
    let trace = again(64 * 512);
    let (layers, bytes) = (32.0, 63.0 * 2048.0);
    let (load, latency) = (bytes / 20e6, 80e-6);
    for (layer_ms, wanted) in [
        // Each layer waits for its load.
        (1.0, layers * load + latency + 1e-3),
        // Only the first layer waits.
        (20.0, load + latency + layers * 20e-3),
    ] {
        let line = format!(
            "--model mini --trace {} --step-tokens 65536 --medium 20MB,10MB,80us,0.4 \
             --layer-time {layer_ms}ms,0us,0us",
            trace.path().display()
        );
        for run in report(&line)["runs"].as_array().unwrap() {
            assert_eq!(number(run, "hit_ratio"), 63.0 / 128.0);
            // The first one loads nothing.
            let ttft = 2.0 * number(run, "ttft_ms.mean") / 1e3 - layers * layer_ms / 1e3;
            assert!((ttft / wanted - 1.0).abs() < 0.01, "{ttft}, and not {wanted}: {run}");
            let bubble = wanted - layers * layer_ms / 1e3;
            let found = number(run, "bubble_s");
            assert!((found / bubble - 1.0).abs() < 0.02, "{found}, and not {bubble}: {run}");
        }
    }
}

#[test]
fn what_was_learned_is_kept_for_the_same_setting() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("slack.json");
    let line = |model: &str, more: &str| {
        format!("--model {model} --requests 20 --slack {} {more}", path.display())
    };
    let first = report(&line("mini", "--schedule slack"));
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains("\"ripieno_slack\":1"), "{text}");
    // The times of the table take precedence over those of the command line.
    let again = report(&line("mini", "--schedule slack --layer-time 1s,0us,0us"));
    let ratio = number(&again["runs"][0], "compute_s") / number(&first["runs"][0], "compute_s");
    assert!((0.8..1.2).contains(&ratio), "{ratio}");
    refused(&line("tiny", ""), "profile this setting");
    fs::write(&path, "{}").unwrap();
    refused(&line("mini", ""), "this is no slack table");
}

#[test]
fn what_has_no_virtual_time_is_refused() {
    for (line, wanted) in [
        ("--devices vfio:65:00.0", "does not support virtual time"),
        ("--path /tmp", "unexpected argument"),
        ("--executor cuda", "unexpected argument"),
        ("--layer-time 1ms", "three times"),
        ("--medium 1GB,1GB", "four values"),
        ("--speed 0", "expected a number"),
        ("--speed -1", "from 0.000001"),
        ("--hit-rates 101", "from 1 to 100"),
        ("--hit-rates --speed 2", "cannot be used with"),
        ("--model llama-3-8b --requests 5", "--pool-blocks"),
    ] {
        refused(line, wanted);
    }
    let line = ["replay", "--speed", "2"];
    let output = Command::new(env!("CARGO_BIN_EXE_ripieno")).args(line).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "a replay has no arrival times");
}

#[test]
fn the_table_shows_the_runs_beside_each_other() {
    let output = run("--model mini --requests 10");
    let text = String::from_utf8(output.stdout).unwrap();
    for wanted in ["slack", "naive", "time to first token", "of that hidden", "virtual time"] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
}

/// A gap takes no time: with steps of a second there would be 26 million of them.
#[test]
fn a_trace_of_any_clock_with_a_long_gap_is_paced() {
    let file = again(1024);
    let text = fs::read_to_string(file.path()).unwrap();
    let epoch = 1_790_000_000_000_u64;
    let text = text.replace("\"timestamp\": 0", &format!("\"timestamp\": {epoch}"));
    let later = epoch + 300 * 24 * 3_600_000;
    let text = text.replace("\"timestamp\": 100000", &format!("\"timestamp\": {later}"));
    fs::write(file.path(), text).unwrap();
    let found = report(&format!("--model mini --trace {}", file.path().display()));
    for run in found["runs"].as_array().unwrap() {
        assert_eq!(number(run, "requests"), 2.0);
        assert!((2.59e7..2.6e7).contains(&number(run, "took_s")), "{run}");
    }
    fs::write(file.path(), fs::read_to_string(file.path()).unwrap().replace("1024", "20")).unwrap();
    refused(&format!("--trace {}", file.path().display()), "blocks of 16 tokens?");
}
