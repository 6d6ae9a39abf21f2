//! `ripieno sim` with a trace, and `ripieno sim plan`.

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;

fn sim(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ripieno")).arg("sim").args(args).output().unwrap()
}

fn json(args: &[&str]) -> Value {
    let output = sim(&[args, &["--json"]].concat());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{error}");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    found[0].clone()
}

/// Makes a trace of conversations of three turns each.
fn trace() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let line = |number: u64| {
        let (talk, turn) = (number % 10, number / 10);
        let ids: Vec<u64> = (0..(turn + 1) * 8).map(|at| talk * 1000 + at).collect();
        let input = ids.len() * 512;
        format!(
            "{{\"timestamp\": {}, \"input_length\": {input}, \"output_length\": 20, \
             \"hash_ids\": {ids:?}}}\n",
            number * 500
        )
    };
    fs::write(file.path(), (0..30).map(line).collect::<String>()).unwrap();
    file
}

/// Returns the number in this row and column of a table.
fn cell(outcome: &Value, table: usize, row: &str, column: &str) -> f64 {
    let table = &outcome["tables"][table];
    let columns = table["columns"].as_array().unwrap();
    let at = columns.iter().position(|it| it == column).unwrap();
    let mut rows = table["rows"].as_array().unwrap().iter();
    rows.find(|it| it[0] == row).unwrap()[at].as_str().unwrap().parse().unwrap()
}

#[test]
fn a_trace_is_served_with_all_policies() {
    let file = trace();
    let path = file.path().to_str().unwrap();
    let found = json(&[path, "--rate", "1", "--stretch"]);
    assert_eq!(cell(&found, 1, "recompute", "together, %"), 0.0);
    // The second and the third turn find the previous turn's tokens: 4 and 8 of 24 thousand.
    let hits = cell(&found, 1, "ours", "together, %");
    assert!((49.0..=50.0).contains(&hits), "{hits}");
    assert!(cell(&found, 0, "ours", "TTFT, ms") < cell(&found, 0, "recompute", "TTFT, ms"));
    let setting = found["setting"].to_string();
    assert!(setting.contains("times those of the trace") && setting.contains("--stretch"));
    assert_eq!(found, json(&[path, "--rate", "1", "--stretch"]));
}

#[test]
fn layers_take_as_long_as_an_engine_says() {
    let file = trace();
    let path = file.path().to_str().unwrap();
    let layers = tempfile::NamedTempFile::new().unwrap();
    let served = |layer_us: u32, more: &[&str]| {
        let head = r#"{"ripieno_layer_times":1,"model":"m","gpu":"g","engine":"e"}"#;
        let step =
            |requests: &str| format!("{{\"requests\":{requests},\"layer_us\":{layer_us}}}\n");
        let prompts = ["[[4096,0]]", "[[8192,0]]", "[[4096,8192]]"];
        let tokens = ["[[1,4096]]", "[[1,8192]]", "[[1,12288]]"];
        let steps: String = prompts.into_iter().chain(tokens).map(step).collect();
        fs::write(layers.path(), format!("{head}\n{steps}")).unwrap();
        let slow = ["--rate", "0.01", "--stretch"];
        let args = [path, "--layers", layers.path().to_str().unwrap()];
        json(&[&args[..], &slow, more].concat())
    };
    let [short, long] = [1000, 2000].map(|layer_us| served(layer_us, &[]));
    assert!(long["setting"].to_string().contains("as long as those of m on g with e"));
    let of = |outcome, what| cell(outcome, 0, "recompute", what);
    for what in ["TTFT, ms", "inter-token latency, ms"] {
        let ratio = of(&long, what) / of(&short, what);
        assert!((1.9..2.1).contains(&ratio), "{what}: {ratio}");
    }
    // 32 layers per step.
    assert!((31.0..33.0).contains(&of(&short, "inter-token latency, ms")));
    let more = served(1000, &["--gpus", "2"]);
    assert_eq!(of(&more, "TTFT, ms"), of(&short, "TTFT, ms"), "they are the engine's GPUs");
    let missing = sim(&[path, "--layers", "/no/such.jsonl"]);
    let error = String::from_utf8(missing.stderr).unwrap();
    assert!(
        missing.status.code() == Some(2) && error.contains("--layers /no/such.jsonl"),
        "{error}"
    );
}

#[test]
fn clients_that_go_away_are_counted() {
    let (file, folder) = (trace(), tempfile::tempdir().unwrap());
    let (path, page) = (file.path().to_str().unwrap(), folder.path().join("page.html"));
    let args =
        [path, "--kv-memory", "2GiB", "--abort", "80", "--abort-within", "0.5", "--seed", "3"];
    let found = json(&[&args[..], &["--html", page.to_str().unwrap()]].concat());
    for policy in ["recompute", "SSD", "ours", "ours + host memory, ahead"] {
        let aborted = cell(&found, 0, policy, "aborted");
        assert!((10.0..=24.0).contains(&aborted), "{policy}: {aborted}");
    }
    let in_vain = |policy| cell(&found, 1, policy, "loaded in vain, GB");
    assert!(in_vain("SSD") >= 1.0 && in_vain("HBM") == 0.0, "{}", found["tables"][1]);
    assert!(found["setting"].to_string().contains("80 % of the clients go away"));
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains(">aborted</th>") && page.contains(">loaded in vain, GB</th>"));
    assert!(found["tables"] == json(&args)["tables"], "the same again");
}

#[test]
fn a_plan_recommends_what_keeps_the_limit() {
    let file = trace();
    let path = file.path().to_str().unwrap();
    let plan = |limit| {
        let args = ["plan", path, "--dram", "8GiB", "--drives", "1", "--ttft-p99", limit];
        json(&args)["notes"][0].as_str().unwrap().to_owned()
    };
    let all = plan("1000");
    assert!(all.starts_with("Recommended: the GPU's memory alone: "), "{all}");
    let none = plan("0.0001");
    assert!(
        none.starts_with("Recommended: none: no combination that serves what arrives has a TTFT"),
        "{none}"
    );
}

#[test]
fn a_plan_shows_a_restart() {
    let file = trace();
    let args = ["plan", file.path().to_str().unwrap(), "--dram", "8GiB", "--drives", "1"];
    assert_eq!(json(&args)["tables"].as_array().unwrap().len(), 2);
    let found = json(&[&args[..], &["--restart"]].concat());
    let title = found["tables"][2]["title"].as_str().unwrap();
    assert!(title.contains("after a restart") && title.contains("60 s"), "{title}");
    let usual = cell(&found, 2, "1 drive", "hits, %");
    assert!(usual > 0.0, "{}", found["tables"][2]);
}

#[test]
fn a_cluster_is_compared_by_router_and_link() {
    let file = trace();
    let path = file.path().to_str().unwrap();
    let args = ["cluster", path, "--engines", "1,3", "--link", "0.001,100", "--dram", "8GiB"];
    let found = json(&args);
    let rows = found["tables"][0]["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * 3 * 3);
    let of = |row: &str, column: &str| cell(&found, 0, row, column);
    for row in rows {
        let row = row[0].as_str().unwrap();
        let places = ["own GPU, %", "own tiers, %", "other engines, %", "computed, %"];
        let all: f64 = places.iter().map(|column| of(row, column)).sum();
        assert!((99.7..100.3).contains(&all), "{row}: {all}");
        let is_alone = row.starts_with("1 engine,") || row.ends_with("no link");
        assert!(!is_alone || of(row, "network, GB") == 0.0, "{row}");
    }
    // Each turn comes to another engine than the one before.
    assert!(of("3 engines, round robin, 100 Gbps", "other engines, %") > 20.0, "{rows:?}");
    assert!(of("3 engines, round robin, no link", "computed, %") > 90.0, "{rows:?}");
    assert!(of("3 engines, round robin, 0.001 Gbps", "computed sooner, blocks") > 0.0, "{rows:?}");
    assert_eq!(found, json(&args), "the same again");
    let never = json(&[&args[..], &["--directory-delay", "1000"]].concat());
    assert_eq!(cell(&never, 0, "3 engines, round robin, 100 Gbps", "other engines, %"), 0.0);
}

#[test]
fn bad_input_is_named() {
    let file = trace();
    let path = file.path().to_str().unwrap();
    let refused = |args: &[&str], wanted: &str| {
        let output = sim(args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(wanted) && error.contains("hint: "), "{error}");
    };
    refused(&["/no/such.jsonl"], "trace /no/such.jsonl: cannot be read");
    refused(&["tutti-99"], "tutti-99: no such scenario, workload or file");
    refused(&["plan", "tutti-99"], "tutti-99: no such scenario, workload or file");
    refused(&["cluster", "tutti-99"], "tutti-99: no such scenario, workload or file");
    refused(&["chatt"], "workload or file; is it chat?");
    refused(&["plan", "tutti-13"], "a scenario has its own machine");
    for flag in ["--gpu=H200", "--drives=8", "--rate=9", "--abort=50", "--seed=2", "--gpus=4"] {
        let wanted = format!("{}: a scenario has its own machine", flag.split('=').next().unwrap());
        refused(&["tutti-13", flag], &wanted);
    }
    refused(&["--html=/tmp/x.html"], "--html: there is nothing to report");
    refused(&[path, "--warm-up", "100"], "--warm-up 100: the last request comes after");
    refused(&[path, "--kv-memory", "300MiB"], "request 1: 4096 tokens of prompt and 20 of output");
    refused(&["plan", path, "--model", "llama-3-70b"], "its weights leave no room");
    for (flag, value, wanted) in [
        ("--engines", "65", "expected a whole number from 1 to 64"),
        ("--link", "0", "expected above 0"),
        ("--link", "1e9", "expected 0.001 to 100000"),
        ("--directory-delay", "-1", "is no time"),
    ] {
        let output = sim(&["cluster", path, &format!("{flag}={value}")]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && error.contains(wanted), "{error}");
    }
    for (flag, wanted) in [("--model", "llama-3-8b, llama-3-70b"), ("--gpu", "H100")] {
        let error = String::from_utf8(sim(&[path, flag, "what"]).stderr).unwrap();
        assert!(error.contains(&format!("[possible values: {wanted}")), "{error}");
    }
    let shown = String::from_utf8(sim(&[path, "--gpu", "h200", "--dram", "8GiB"]).stdout).unwrap();
    assert!(shown.contains(" 8 GiB of host memory") && shown.contains("H200"), "{shown}");
    let mut text = fs::read_to_string(path).unwrap();
    text.insert_str(text.find('\n').unwrap() + 1, "{\"timestamp\": 1}\n");
    fs::write(path, text).unwrap();
    refused(&[path], ":2: field `input_length` is missing");
}

#[test]
fn drives_and_parameters_are_the_given_ones() {
    let (file, folder) = (trace(), tempfile::tempdir().unwrap());
    let path = file.path().to_str().unwrap();
    let small = [path, "--rate", "0.2", "--stretch", "--kv-memory", "2GiB"];
    let with = |more: &[&str]| json(&[&small[..], more].concat());
    let ttft = |outcome: &Value| cell(outcome, 0, "ours", "TTFT, ms");
    let slow = with(&["--drive-read", "100MB", "--drive-write", "100MB", "--latency", "5ms"]);
    assert!(ttft(&slow) > 1.5 * ttft(&with(&[])), "{} {}", ttft(&slow), ttft(&with(&[])));
    let setting = slow["setting"].to_string();
    assert!(setting.contains("drive.read is 1e8 bytes/s (measured: --drive-read)"), "{setting}");
    let few = with(&["--iops", "100"]);
    assert!(ttft(&few) > 1.5 * ttft(&with(&[])), "{}", ttft(&few));

    let name = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let parameters = name("mine.json");
    let text = r#"{"drive.read": {"value": 1e8, "basis": "measured", "source": "fio"},
        "drive.write": {"value": 1e8, "basis": "measured", "source": "fio"},
        "drive.latency": {"value": 5000, "basis": "measured", "source": "fio"}}"#;
    fs::write(&parameters, text).unwrap();
    assert_eq!(with(&["--parameters", &parameters])["tables"], slow["tables"]);

    // The table of two drives that share 200 MB/s; and the same for the scheduler alone.
    let curve = |us: u64| {
        let points = [(4096, us * 1000), (1 << 30, us * 1000 + (1 << 30) * 5)];
        serde_json::json!({"points": points, "factor": 1.0})
    };
    let table = serde_json::json!({
        "ripieno_slack": 1,
        "setting": {"model": "m", "gpu": "g", "engine": "e", "drives": ["d", "d"]},
        "cells": [],
        "costs": {"read": curve(5020), "write": curve(5020), "mixed": 0.4},
    });
    let slack = name("slack.json");
    fs::write(&slack, table.to_string()).unwrap();
    let off = ttft(&with(&["--table", &slack])) / ttft(&slow) - 1.0;
    assert!(off.abs() < 0.02, "{off}");
    let believed = ttft(&with(&["--scheduler-table", &slack]));
    assert!((believed / ttft(&with(&[])) - 1.0).abs() < 0.05, "the drives are as fast as before");

    let all = sim(&["parameters"]);
    let all: Value = serde_json::from_slice(&all.stdout).unwrap();
    assert_eq!(all["drive.mixed"]["basis"], "calibrated");
    for (flags, wanted) in [
        (["--mixed", "3"], "--mixed: drive.mixed: 3 is not above 0, or too large"),
        (["--parameters", &slack], "no file of parameters"),
        (["--table", &parameters], "no slack table"),
    ] {
        let output = sim(&[&small[..], &flags].concat());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(wanted) && error.contains("hint: "), "{error}");
    }
}

/// Unix time, as a recorder of requests writes it.
#[test]
fn times_of_any_clock_are_those_from_the_first_request_on() {
    let file = trace();
    let text = fs::read_to_string(file.path()).unwrap();
    let epoch = tempfile::NamedTempFile::new().unwrap();
    let moved = text.lines().map(|line| {
        let mut request: Value = serde_json::from_str(line).unwrap();
        request["timestamp"] = (request["timestamp"].as_u64().unwrap() + 1_790_000_000_000).into();
        format!("{request}\n")
    });
    fs::write(epoch.path(), moved.collect::<String>()).unwrap();
    let [first, moved] = [&file, &epoch].map(|file| file.path().to_str().unwrap());
    let tables = |args: &[&str]| json(args)["tables"].clone();
    for args in [&["--rate", "1"][..], &[]] {
        assert_eq!(tables(&[&[moved], args].concat()), tables(&[&[first], args].concat()));
    }
    let choices = ["--dram", "64GiB", "--drives", "1", "--more-gpus", "2", "--seeds", "1"];
    let plan = |path| tables(&[&["plan", path], &choices[..]].concat());
    assert_eq!(plan(moved), plan(first));
    let cluster = |path| tables(&["cluster", path, "--engines", "2", "--link", "100"]);
    assert_eq!(cluster(moved), cluster(first));
}

#[test]
fn a_trace_that_is_none_of_ours_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let line = |time: u64, ids: usize| {
        let ids: Vec<usize> = (0..ids).collect();
        format!(
            "{{\"timestamp\": {time}, \"input_length\": 1024, \"output_length\": 5, \
             \"hash_ids\": {ids:?}}}\n"
        )
    };
    for (text, what, hint) in [
        (line(0, 64) + &line(1, 64), ":1: 64 `hash_ids`", "blocks of 16 tokens?"),
        (line(0, 2) + &line(86_400_000_000_000, 2), ":2: field `timestamp`", "by one clock"),
    ] {
        fs::write(file.path(), text).unwrap();
        for command in [&[][..], &["plan"], &["cluster"]] {
            let output = sim(&[command, &[file.path().to_str().unwrap()]].concat());
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(2), "{error}");
            assert!(error.contains(what) && error.contains(hint), "{error}");
        }
    }
}
