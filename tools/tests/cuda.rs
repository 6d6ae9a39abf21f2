//! The command with `--executor cuda`, over a libcuda without a GPU (`kernels/mock`).

use std::process::{Command, Output};

use cuda_mock::Level;
use serde_json::{Value, json};

/// Runs the program with this libcuda and these environment variables.
fn run(level: Level, variables: &[(&str, &str)], line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.args(line.split_whitespace()).env_remove("RUST_LOG");
    if line.starts_with("replay") && !line.contains("--model") {
        command.args(["--model", "tiny"]);
    }
    command.env("LD_LIBRARY_PATH", cuda_mock::folder(level)).envs(variables.iter().copied());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a replay with --json that must succeed.
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

/// Checks that it exits with 2, with the cause and a hint.
fn refused(level: Level, variables: &[(&str, &str)], line: &str, wanted: &[&str]) {
    let output = run(level, variables, line);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{line}\n{err}");
    assert!(output.stdout.is_empty(), "{line}: {}", text(&output.stdout));
    let said = err.lines().any(|line| line.starts_with("error: "));
    assert!(said && err.contains("\n hint: "), "{line}: {err}");
    for wanted in wanted {
        assert!(err.contains(wanted), "{wanted}: {line}\n{err}");
    }
}

/// Returns true if this machine has an NVIDIA driver, which the loader finds in any case.
fn has_driver() -> bool {
    let folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/cuda/compat"];
    folders.iter().any(|folder| std::path::Path::new(folder).join("libcuda.so.1").exists())
}

#[test]
fn without_a_gpu_it_is_said_what_is_missing_and_what_to_use() {
    let line = "replay --executor cuda --requests 5";
    if !has_driver() {
        let wanted = ["no NVIDIA driver: libcuda.so.1 was not found; install the driver\
                      \n hint: use --executor host"];
        refused(Level::Nothing, &[], line, &wanted);
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
fn every_route_and_every_launch_move_the_same_bytes() {
    let mut results = Vec::new();
    for (route, pool) in [
        ("host", "KV pool in host memory, mapped into the GPU"),
        ("staged", "of pinned host memory"),
        ("direct", "KV pool in GPU memory"),
    ] {
        for launch in ["per-batch", "resident"] {
            let line = "--requests 40 --seed 5 --verify full --io-sms 3 --pool-blocks 20";
            let line = format!("{line} --route {route} --launch {launch}");
            let (report, err) = report(Level::Full, &[], &line);
            assert_eq!((&report["path"], &report["executor"]), (&route.into(), &"cuda".into()));
            let gpu = &report["gpu"];
            assert_eq!(gpu["launch"], launch);
            assert_eq!(count(&report, "queues_per_device"), 4, "a warp's checksums are slow");
            assert_eq!(gpu["partition"], "green context");
            assert_eq!((count(gpu, "io_sms_asked"), count(gpu, "io_sms_granted")), (3, 4));
            let memory = report["memory"].as_str().unwrap();
            assert!(memory.contains("queues in pinned host memory"), "{memory}");
            assert!(memory.contains(pool), "{memory}");
            assert!(!err.contains("note: "), "{err}");
            results.push(["trace_blocks_hit", "stored_bytes", "verified_bytes"].map(|field| {
                let count = count(&report, field);
                assert!(count > 0, "{field}");
                count
            }));
            assert_eq!(results.last(), results.first(), "{line}");
        }
    }
}

/// The GPU copies the blocks of the DRAM tier.
#[test]
fn host_memory_serves_hits() {
    let line = "--requests 40 --seed 5 --verify full --pool-blocks 20 --dram 96MiB";
    for route in ["staged", "direct"] {
        for launch in ["per-batch", "resident"] {
            let line = format!("{line} --route {route} --launch {launch}");
            let (report, _) = report(Level::Full, &[], &line);
            assert_eq!(report["path"], route);
            assert!(count(&report, "dram_retrieved_bytes") > 0, "{line}: {report}");
        }
    }
    // The GPU's streams cannot access a pool without an address on the GPU.
    let line = format!("replay --executor cuda {line} --route host");
    let said = text(&run(Level::Full, &[], &line).stderr);
    assert!(said.contains("dram") && said.contains("leave it 0"), "{said}");
}

#[test]
#[ignore = "takes seconds: a step of cargo xtask ci"]
fn shapes_windows_and_samples() {
    for line in [
        "--requests 60 --capacity 64KiB --pool-blocks 5 --verify full",
        "--requests 6 --model deepseek-v3-mla --block-tokens 16 --capacity 96MiB --verify full",
        "--requests 40 --devices 3 --queues 2 --depth 8 --descriptors prp \
         --block-tokens 256",
        "--requests 20 --verify off --coalesce off",
    ] {
        for route in ["staged", "direct"] {
            let (report, _) = report(Level::Full, &[], &format!("{line} --route {route}"));
            assert_eq!(report["path"], route, "{line}");
            assert!(count(&report, "stored_bytes") > 0, "{line}");
        }
    }
}

/// The best route that works is taken, and the reasons against better ones are reported. With
/// --route, no other route is taken.
#[test]
fn a_route_that_does_not_work_is_said() {
    let (best, err) = report(Level::Full, &[], "--requests 10 --verify full");
    assert_eq!(best["path"], "direct", "{err}");
    assert_eq!(best["routes_not_taken"].as_array().unwrap().len(), 0);
    // The first allocation of GPU memory fails.
    let no_memory = [("MOCK_CUDA_INJECT", "cuMemAlloc:0:2"), ("MOCK_GDR", "off")];
    let (next, err) = report(Level::Full, &no_memory, "--requests 10 --verify full");
    assert_eq!(next["path"], "staged", "{err}");
    assert!(err.contains("note: the route direct is not taken: allocating"), "{err}");
    assert!(err.contains("\n hint: "), "{err}");
    let not = &next["routes_not_taken"][0];
    assert_eq!(not["route"], "direct");
    assert!(not["why"].as_str().unwrap().contains("OUT_OF_MEMORY"), "{not}");
    let line = "replay --executor cuda --requests 10 --route direct";
    refused(Level::Full, &no_memory, line, &["--route direct", "OUT_OF_MEMORY"]);
    // The store tests a route before it uses it.
    let no_copies = [("MOCK_CUDA_INJECT", "cuMemcpyBatchAsync_v2:0:1")];
    let (next, err) = report(Level::Full, &no_copies, "--requests 10 --verify full");
    assert_eq!(next["path"], "staged", "{err}");
    assert!(err.contains("the route direct is not taken: emu0: copying"), "{err}");
    refused(Level::Full, &no_copies, line, &["--route direct", "copying"]);
}

/// Software controllers write into queues with the CPU, which must be able to map the GPU's memory
/// cached.
#[test]
fn queues_are_in_gpu_memory_where_the_host_reaches_it() {
    let line = "--requests 30 --verify full --queues 2";
    let (near, _) = report(Level::Full, &[("MOCK_GDR", "cached")], line);
    let memory = near["memory"].as_str().unwrap();
    assert!(memory.starts_with("queues in GPU memory, mapped by GDRCopy (cached)"), "{memory}");
    for gdr in ["write-combining", "off"] {
        let (far, _) = report(Level::Full, &[("MOCK_GDR", gdr)], line);
        let memory = far["memory"].as_str().unwrap();
        assert!(memory.starts_with("queues in pinned host memory"), "{memory}");
    }
}

#[test]
fn doorbells_out_of_reach_are_said() {
    let unreachable = [("MOCK_CUDA_INJECT", "cuMemHostRegister:0:801")];
    let line = "replay --executor cuda --requests 10";
    refused(Level::Full, &unreachable, line, &["the doorbells of emu0", "--executor host"]);
}

/// A kernel that crashes makes the GPU unusable: the replay reports the cause and shuts down.
#[test]
fn a_lost_gpu_ends_a_replay() {
    for launch in ["per-batch", "resident"] {
        // During its start, and while it runs.
        for call in [40, 2000] {
            let dies = [("MOCK_CUDA_INJECT", &*format!("cuStreamQuery:{call}:700"))];
            let line = format!("replay --executor cuda --requests 200 --launch {launch}");
            let output = run(Level::Full, &dies, &line);
            let err = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{err}");
            assert!(err.contains("error: ") && err.contains("ILLEGAL_ADDRESS"), "{err}");
        }
    }
}

#[test]
fn without_green_contexts_it_is_said() {
    let (report, _) = report(Level::Twelve, &[], "--requests 10 --route host");
    let gpu = &report["gpu"];
    assert_eq!((&gpu["partition"], count(gpu, "io_sms_granted")), (&"priority stream".into(), 132));
    assert!(gpu["partition_missing"].as_str().unwrap().contains("green contexts"), "{gpu}");
}

#[test]
fn people_are_told_about_the_gpu() {
    let output = run(Level::Full, &[], "replay --executor cuda --requests 10 --route host");
    let out = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{out}");
    for wanted in ["GPU 0 ", "a launch per batch on 4 of 132 SMs (4 asked for)", "pinned"] {
        assert!(out.contains(wanted), "{wanted} is not in\n{out}");
    }
    assert!(!out.contains("no GPU is involved"), "{out}");
}

fn doctor(level: Level, variables: &[(&str, &str)], line: &str) -> (Option<i32>, Value) {
    let output = run(level, variables, &format!("doctor --json {line}"));
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}{}", text(&output.stdout), text(&output.stderr))
    });
    (output.status.code(), report)
}

fn verdict<'a>(report: &'a Value, id: &str) -> (&'a str, &'a str) {
    let checks = report["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["id"] == id);
    let check = check.unwrap_or_else(|| panic!("{id} is not in {report}"));
    (check["verdict"].as_str().unwrap(), check["found"].as_str().unwrap())
}

#[test]
fn the_doctor_tries_every_route() {
    let (code, well) = doctor(Level::Full, &[], "--route direct");
    assert_eq!(code, Some(0), "{well}");
    assert_eq!(well["works"], json!(["direct", "staged", "host"]));
    // Checks that read files of the machine are left out: their results differ between machines.
    let checks = well["checks"].as_array().unwrap();
    let tried: Vec<_> = checks.iter().filter(|check| check["looked_at"] == json!([])).collect();
    assert!(tried.len() >= 11 && tried.len() < checks.len(), "{well}");
    for check in tried {
        assert_eq!(check["verdict"], "ok", "{check}");
    }
    assert!(verdict(&well, "direct-cuda").1.contains("every byte checked"), "{well}");
    assert!(verdict(&well, "resident").1.contains("every byte checked"), "{well}");
    let (code, old) = doctor(Level::Twelve, &[("MOCK_GDR", "off")], "");
    assert_eq!(code, Some(0), "{old}");
    assert_eq!(verdict(&old, "gdrcopy").0, "warn");
    let (verdict, found) = verdict(&old, "partition");
    assert!(verdict == "warn" && found.contains("green contexts"), "{found}");
}

#[test]
fn the_doctor_says_what_does_not_work_and_what_would_help() {
    let none = [("MOCK_CUDA_DEVICES", "0")];
    let (code, report) = doctor(Level::Full, &none, "");
    assert_eq!((code, &report["works"]), (Some(0), &json!(["host"])), "{report}");
    assert_eq!(verdict(&report, "driver").0, "fail");
    assert_eq!(verdict(&report, "kernel").0, "skip");
    assert_eq!(verdict(&report, "direct-cuda").0, "fail");
    assert_eq!(verdict(&report, "host-host").0, "ok");
    assert_eq!(doctor(Level::Full, &none, "--route staged").0, Some(1));
    assert_eq!(doctor(Level::Full, &none, "--route host").0, Some(0));
    // A kernel that crashes makes the GPU unusable, and nothing else.
    let dies = [("MOCK_CUDA_INJECT", "cuLaunchKernel:0:700")];
    let (code, report) = doctor(Level::Full, &dies, "");
    assert_eq!((code, &report["works"]), (Some(0), &json!(["host"])), "{report}");
    assert!(verdict(&report, "direct-cuda").1.contains("ILLEGAL_ADDRESS"), "{report}");
    let people = run(Level::Full, &none, "doctor");
    let out = text(&people.stdout);
    for wanted in ["sees no GPU", "fix: ", "Best route: host"] {
        assert!(out.contains(wanted), "{wanted} is not in\n{out}");
    }
}
