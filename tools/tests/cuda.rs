//! The command with `--executor cuda`, over a libcuda without a GPU (`kernels/mock`).

use std::process::{Command, Output};

use cuda_mock::Level;
use serde_json::Value;

/// The program with this libcuda and these variables.
fn run(level: Level, variables: &[(&str, &str)], line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.args(line.split_whitespace()).env_remove("RUST_LOG");
    command.env("LD_LIBRARY_PATH", cuda_mock::folder(level)).envs(variables.iter().copied());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a replay with --json that must go well.
fn report(level: Level, variables: &[(&str, &str)], line: &str) -> (Value, String) {
    let output = run(level, variables, &format!("replay --executor cuda --json {line}"));
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{line}\n{out}\n{err}");
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((count(&report, "mismatches"), count(&report, "io_errors")), (0, 0), "{out}");
    assert_eq!(report["requests"], report["requests_planned"]);
    (report, err)
}

fn count(report: &Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("{field} is no count in {report}"))
}

/// Ends with 2, says why, and what to do.
fn refused(level: Level, variables: &[(&str, &str)], line: &str, wanted: &[&str]) {
    let output = run(level, variables, line);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{line}\n{err}");
    assert!(output.stdout.is_empty(), "{line}: {}", text(&output.stdout));
    assert!(err.starts_with("error: ") && err.contains("\n hint: "), "{line}: {err}");
    for wanted in wanted {
        assert!(err.contains(wanted), "{wanted}: {line}\n{err}");
    }
}

/// Whether this machine has a driver of its own, which the loader finds in any case.
fn has_driver() -> bool {
    let folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/cuda/compat"];
    folders.iter().any(|folder| std::path::Path::new(folder).join("libcuda.so.1").exists())
}

#[test]
fn without_a_gpu_it_is_said_what_is_missing_and_what_to_use() {
    let line = "replay --executor cuda --requests 5";
    if !has_driver() {
        refused(Level::Nothing, &[], line, &["no NVIDIA driver", "libcuda", "--executor host"]);
    }
    refused(Level::Old, &[], line, &["too old", "--executor host"]);
    let none = [("MOCK_CUDA_DEVICES", "0")];
    refused(Level::Full, &none, line, &["sees no GPU", "--executor host"]);
    let broken = [("MOCK_CUDA_INJECT", "cuModuleLoadDataEx:0:222")];
    refused(Level::Full, &broken, line, &["PTX", "update the driver", "--executor host"]);
    refused(Level::Full, &[], "replay --executor cuda --gpu 3", &["GPU 3", "there are 1"]);
    refused(Level::Full, &[], "replay --executor cuda --io-sms 900", &["900 SMs", "1 to 132"]);
}

#[test]
fn the_pool_in_host_memory() {
    for launch in ["per-batch", "resident"] {
        let line =
            format!("--requests 40 --verify full --require host --io-sms 3 --launch {launch}");
        let (report, _) = report(Level::Full, &[], &line);
        assert_eq!((&report["path"], &report["executor"]), (&"host".into(), &"cuda".into()));
        let gpu = &report["gpu"];
        assert_eq!((&gpu["launch"], &gpu["partition"]), (&launch.into(), &"green context".into()));
        assert_eq!((count(gpu, "io_sms_asked"), count(gpu, "io_sms_granted")), (3, 4));
        let memory = report["memory"].as_str().unwrap();
        assert!(memory.contains("queues in pinned host memory"), "{memory}");
        assert!(count(&report, "verified_bytes") > 0);
    }
}

#[test]
fn without_green_contexts_it_is_said() {
    let (report, _) = report(Level::Twelve, &[], "--requests 10 --require host");
    let gpu = &report["gpu"];
    assert_eq!((&gpu["partition"], count(gpu, "io_sms_granted")), (&"priority stream".into(), 132));
    assert!(gpu["partition_missing"].as_str().unwrap().contains("green contexts"), "{gpu}");
}

#[test]
fn people_are_told_about_the_gpu() {
    let output = run(Level::Full, &[], "replay --executor cuda --requests 10 --require host");
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{out}");
    for wanted in ["GPU 0 ", "a launch per batch on 4 of 132 SMs (4 asked for)", "pinned"] {
        assert!(out.contains(wanted), "{wanted} is not in\n{out}");
    }
    assert!(!out.contains("no GPU is involved"), "{out}");
}
