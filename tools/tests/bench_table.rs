//! `ripieno bench table`, as a user or a script runs it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn run(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.args(line.split_whitespace()).env_remove("RUST_LOG").output().unwrap()
}

fn report(line: &str) -> Value {
    let output = run(&format!("{line} --json"));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{line}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Two devices, each of which reads 4 MB/s and writes 1 MB/s.
const MEDIUM: &str = "--model mini --medium 8MB,2MB,100us,0.4";

#[test]
fn what_is_measured_is_what_the_medium_does() {
    let found = report(&format!("bench table --pace {MEDIUM}"));
    assert_eq!((&found["simulated"], &found["object_bytes"]), (&true.into(), &1024.into()));
    for (direction, bytes_s) in [("read", 8e6), ("write", 2e6)] {
        let points = found[direction].as_array().unwrap();
        assert!(points.len() > 8, "{points:?}");
        for point in points {
            let (bytes, us) = (point["bytes"].as_f64().unwrap(), point["us"].as_f64().unwrap());
            let wanted = 100.0 + bytes / bytes_s * 1e6;
            // A small batch is not spread evenly over all devices.
            let most = if bytes < 65536.0 { 2.0 } else { 1.05 };
            assert!((0.98..most).contains(&(us / wanted)), "{direction} of {bytes}: {us} us");
        }
    }
    let mixed = found["mixed"].as_f64().unwrap();
    assert!((0.36..0.46).contains(&mixed), "{mixed}");
    let mix = found["mix"].as_array().unwrap();
    let reads: Vec<f64> = mix.iter().map(|mix| mix["reads"].as_f64().unwrap()).collect();
    assert_eq!(reads, [1.0, 0.75, 0.5, 0.25, 0.0]);
    let rate = |at: usize| mix[at]["bytes_s"].as_f64().unwrap();
    assert!((7.5e6..8.1e6).contains(&rate(0)) && (1.9e6..2.1e6).contains(&rate(4)), "{mix:?}");
    assert!(rate(2) < rate(0) / 2.0, "writes slow reads down: {mix:?}");
    let factor = |at: usize| mix[at]["factor"].as_f64().unwrap();
    assert!([0, 4].map(factor).iter().all(|alone| (alone - 1.0).abs() < 1e-9), "{mix:?}");
    assert!((0.3..0.8).contains(&factor(2)), "the devices like them apart: {mix:?}");
    assert_eq!(
        report(&format!("bench table --pace {MEDIUM}")),
        found,
        "virtual time repeats itself"
    );
}

#[test]
fn a_table_goes_to_the_replay_and_keeps_what_it_learns() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("slack.json");
    let table = |path: &Path| -> Value {
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    };
    let profile = format!("bench table --pace {MEDIUM} --out {}", path.display());
    report(&profile);
    let first = table(&path);
    assert_eq!(first["cells"].as_array().unwrap().len(), 0);
    report(&format!("pace {MEDIUM} --requests 20 --schedule slack --slack {}", path.display()));
    let learned = table(&path);
    assert!(learned["cells"].as_array().unwrap().len() > 3, "{learned}");
    report(&profile);
    let again = table(&path);
    assert_eq!((&again["cells"], &again["costs"]), (&learned["cells"], &first["costs"]));
    // A table of another model is not overwritten.
    let output = run(&format!("bench table --pace --model tiny --out {}", path.display()));
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(table(&path), again);
}

#[test]
#[ignore = "takes seconds: a step of cargo xtask ci"]
fn devices_are_measured_in_real_time_and_shown_as_tables() {
    let output = run("bench table --pool-blocks 64 --queues 2");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    for wanted in ["2 x Ripieno software controller", "batch", "75 %", "of the mean of each alone"]
    {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
}

#[test]
#[ignore = "takes seconds: a step of cargo xtask ci"]
fn without_writes_a_table_has_the_costs_of_reads_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("slack.json");
    let line = "bench table --model mini --block-tokens 256 --pool-blocks 256 --reads-only";
    let found = report(line);
    let read = found["read"].as_array().unwrap();
    let bytes: Vec<f64> = read.iter().map(|point| point["bytes"].as_f64().unwrap()).collect();
    // Two segments of 512 bytes.
    assert_eq!(bytes, [0, 1, 2, 3, 4, 5, 6].map(|power| f64::from(1024 << power)));
    assert!(read.iter().all(|point| point["us"].as_f64().unwrap() > 0.0), "{read:?}");
    assert!(found["write"].as_array().unwrap().is_empty() && found["mixed"].is_null(), "{found}");
    let text = String::from_utf8(run(line).stdout).unwrap();
    assert!(text.contains("nothing was written to the devices"), "{text}");
    // A new table would lack costs; one that is there keeps those of writes.
    let line = format!("{line} --out {}", path.display());
    let output = run(&line);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("needs the costs of writes") && !path.exists(), "{error}");
    let all = line.replace(" --reads-only", "");
    report(&all);
    let costs = || -> Value {
        let text = fs::read_to_string(&path).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["costs"].clone()
    };
    let before = costs();
    report(&line);
    let after = costs();
    assert_eq!((&before["write"], &before["mixed"]), (&after["write"], &after["mixed"]));
    assert_ne!(before["read"], after["read"]);
}

#[test]
fn what_only_requests_need_is_refused() {
    for flag in ["--requests 3", "--trace x", "--capacity 1GiB", "--keep --path /tmp"] {
        let output = run(&format!("bench table {flag}"));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{flag}: {error}");
        assert!(error.contains("serves no requests"), "{flag}: {error}");
    }
}

/// Writes layer times as an engine does: two shapes of prompts, and decode.
fn layer_times(path: &Path, gpu: &str, factor: f64) {
    let mut text = format!(
        "{{\"ripieno_layer_times\": 1, \"model\": \"m tp2\", \"gpu\": \"{gpu}\", \
         \"engine\": \"e 1\"}}\n"
    );
    for _ in 0..5 {
        for (requests, us) in [("[[256, 0]]", 500.0), ("[[256, 2048]]", 700.0), ("[[1, 9]]", 90.0)]
        {
            let us = us * factor;
            text += &format!("{{\"requests\": {requests}, \"layer_us\": {us}}}\n");
        }
    }
    fs::write(path, text).unwrap();
}

#[test]
fn layer_times_of_an_engine_go_into_the_table() {
    let directory = tempfile::tempdir().unwrap();
    let [times, other, slower, out] = ["times", "other", "slower", "slack.json"].map(|name| {
        let path = directory.path().join(name);
        path.to_str().unwrap().to_owned()
    });
    layer_times(Path::new(&times), "g", 1.0);
    layer_times(Path::new(&slower), "g", 1.5);
    layer_times(Path::new(&other), "h", 1.0);
    let refused = |line: &str, wanted: &str| {
        let output = run(line);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{line}: {error}");
        assert!(error.contains(wanted), "{line}: {error}");
    };
    refused(&format!("bench table --layer-times {times} --out {out}"), "no device is named");
    refused(&format!("bench table --against {times}"), "--layer-times");
    refused(&format!("bench table --layer-times {times},{other}"), "on h with e 1 follow those of");
    refused(&format!("bench table --layer-times {times} --against {other}"), "it is of m tp2 on h");
    let newer = fs::read_to_string(&times).unwrap().replacen("times\": 1", "times\": 2", 1);
    fs::write(&out, newer).unwrap();
    refused(&format!("bench table --layer-times {times} --against {out}"), "of version 2");
    fs::remove_file(&out).unwrap();
    // Devices first, layers later; or both in one run.
    let table = || serde_json::from_slice::<Value>(&fs::read(&out).unwrap()).unwrap();
    report(&format!("bench table --pace {MEDIUM} --out {out}"));
    let costs = table()["costs"].clone();
    report(&format!("bench table --layer-times {times} --out {out}"));
    let learned = table();
    assert_eq!((&learned["costs"], &learned["setting"]["model"]), (&costs, &"m tp2".into()));
    assert_eq!(learned["cells"].as_array().unwrap().len(), 3);
    refused(&format!("bench table --layer-times {other} --out {out}"), "profile this setting");
    assert_eq!(table(), learned);
    fs::remove_file(&out).unwrap();
    report(&format!("bench table --pace {MEDIUM} --layer-times {times} --out {out}"));
    assert_eq!(table(), learned);
    // A file of times, and a table.
    for against in [&times, &out] {
        let found = report(&format!("bench table --layer-times {slower} --against {against}"));
        for step in ["prefill", "decode"] {
            let off = found["layers"]["against_off"][step].as_f64().unwrap();
            assert!((off - 1.0 / 3.0).abs() < 0.01, "{against}: {found}");
        }
        assert!(found.get("read").is_none(), "no device was measured");
    }
    let text = run(&format!("bench table --layer-times {slower} --against {out}")).stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("against, us") && text.contains("-33 %"), "{text}");
}

#[test]
fn a_replay_computes_as_long_as_an_engine_did() {
    let directory = tempfile::tempdir().unwrap();
    let [times, slower, prompts] = ["times", "slower", "prompts"].map(|name| {
        let path = directory.path().join(name);
        path.to_str().unwrap().to_owned()
    });
    layer_times(Path::new(&times), "g", 1.0);
    layer_times(Path::new(&slower), "g", 2.0);
    let replay = |path: &str| {
        let line = "pace --requests 8 --schedule naive --medium 8GB,8GB,1us,1";
        let found = report(&format!("{line} --layers {path}"));
        found["runs"][0]["compute_s"].as_f64().unwrap()
    };
    let (once, twice) = (replay(&times), replay(&slower));
    assert!((twice / once - 2.0).abs() < 0.02, "{once} {twice}");
    // A table of prompts has no times for decoding.
    let text = fs::read_to_string(&times).unwrap();
    let lines = text.lines().filter(|line| !line.contains("[[1, 9]]"));
    fs::write(&prompts, lines.collect::<Vec<_>>().join("\n")).unwrap();
    let output = run(&format!("pace --layers {prompts}"));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("no steps with generation only"), "{error}");
    assert_eq!(output.status.code(), Some(2));
}
