//! `bench gpu` over a mock of libcuda: every line of it runs, and its figures are ignored.

use std::process::Command;

use cuda_mock::Level;
use serde_json::Value;

type Variables<'a> = &'a [(&'a str, &'a str)];

fn bench(level: Level, args: &[&str]) -> (i32, Value, String) {
    bench_with(level, args, &[])
}

fn bench_with(level: Level, args: &[&str], variables: Variables<'_>) -> (i32, Value, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_ripieno-bench"))
        .args(["gpu", "--tiny", "--json", "--rounds", "1"])
        .args(args)
        .env("LD_LIBRARY_PATH", cuda_mock::folder(level))
        .envs(variables.iter().copied())
        .output()
        .expect("it starts");
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    let json = serde_json::from_str(&out).unwrap_or(Value::Null);
    (output.status.code().unwrap_or(-1), json, format!("{out}\n{err}"))
}

/// Returns the names of all ratios, and checks that each is a number.
fn ratios(json: &Value) -> Vec<String> {
    let all = json["ratios"].as_array().expect("ratios");
    for ratio in all {
        assert!(ratio["value"].as_f64().is_some_and(|value| value > 0.0), "{ratio}");
    }
    all.iter().map(|ratio| ratio["name"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn commands_are_built_and_reaped() {
    for level in [Level::Full, Level::Twelve] {
        let (code, json, text) = bench(level, &["--only", "rate"]);
        assert_eq!(code, 0, "{text}");
        assert_eq!(json["mock"], true, "{text}");
        let names = ratios(&json);
        for wanted in ["1 SMs", "2 SMs"] {
            assert!(names.iter().any(|name| name.contains(wanted)), "{wanted}: {names:?}");
        }
        let notes = json["notes"].to_string();
        assert_eq!(notes.contains("no partition"), level == Level::Twelve, "{notes}");
    }
}

#[test]
fn small_operations_are_timed_with_and_without_a_resident_kernel() {
    for flags in [&["--only", "operation"][..], &["--only", "operation", "--per-batch"]] {
        let (code, json, text) = bench(Level::Full, flags);
        assert_eq!(code, 0, "{text}");
        assert_eq!(ratios(&json), ["operation of 32 commands a warp, 4 warps against 1"]);
        assert!(text.contains("round 1: 4 warps"), "printed as it goes: {text}");
    }
}

#[test]
fn bytes_are_retrieved_and_copied() {
    let (code, json, text) = bench(Level::Full, &["--only", "retrieve"]);
    assert_eq!(code, 0, "{text}");
    let names = ratios(&json);
    for wanted in ["staged", "direct", "resident", "launch per batch"] {
        assert!(names.iter().any(|name| name.contains(wanted)), "{wanted}: {names:?}");
    }
}

#[test]
fn the_callers_time_is_taken() {
    let (code, json, text) = bench(Level::Full, &["--only", "caller"]);
    assert_eq!(code, 0, "{text}");
    let names = ratios(&json);
    let with = |word: &str| names.iter().filter(|name| name.contains(word)).count();
    assert_eq!((with("64 against 4 blocks"), with("resident against")), (4, 2), "{names:?}");
}

/// A part that cannot run is reported, fails the command, and does not stop the others.
#[test]
fn one_part_fails_and_the_others_do_not() {
    let output = bench_with(
        Level::Full,
        &["--only", "rate", "--only", "retrieve"],
        &[("MOCK_CUDA_INJECT", "cuOccupancyMaxActiveBlocksPerMultiprocessor:0:801")],
    );
    let (code, json, text) = output;
    assert_eq!(code, 1, "{text}");
    let failed = json["failed"].as_array().expect("what failed");
    assert_eq!(failed.len(), 1, "{text}");
    assert!(failed[0].as_str().is_some_and(|why| why.contains("commands a second")), "{text}");
    assert!(ratios(&json).iter().any(|name| name.contains("retrieve into HBM")), "{text}");
}

#[test]
fn figures_of_a_stand_in_are_not_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("gpu.json");
    let (code, _, text) = bench_with(Level::Full, &["--keep", &file.display().to_string()], &[]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("stand-in") && !file.exists(), "{text}");
}

#[test]
fn without_a_gpu_it_says_so() {
    let (code, _, text) = bench(Level::Nothing, &[]);
    // A machine with a GPU measures.
    if code != 0 {
        assert!(text.contains("need an NVIDIA GPU"), "{text}");
    }
}
