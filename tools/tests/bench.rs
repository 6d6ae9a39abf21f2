//! `ripieno bench`, as a user or a script runs it.

use std::process::{Command, Output};

use serde_json::Value;

fn run(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.args(line.split_whitespace()).env_remove("RUST_LOG").output().unwrap()
}

fn report(line: &str) -> Value {
    let output = run(&format!("bench raw --size 8MiB {line} --runtime 0.3 --ramp 0 --json"));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{line}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn rows(line: &str) -> (Vec<Value>, Value) {
    let output = run(&format!("bench {line} --json"));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{line}: {error}");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = found["rows"].as_array().unwrap().clone();
    for row in &rows {
        assert!(row["wrong"].as_array().unwrap().is_empty() && number(&row["bytes_s"]) > 0.0);
    }
    (rows, found)
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn every_pattern_size_and_depth_is_measured() {
    let found = report("--rw read,randwrite --bs 4k,64k --iodepth 1,8 --devices 3 --queues 2");
    let points = found["rows"].as_array().unwrap();
    assert_eq!(points.len(), 8);
    for point in points {
        let (iops, bytes) = (number(&point["iops"]), number(&point["bs_bytes"]));
        assert!(iops > 0.0 && (number(&point["bytes_s"]) / (iops * bytes) - 1.0).abs() < 1e-6);
        let order = ["min", "p50", "p90", "p99", "p99.9", "p99.99", "max"];
        let times = order.map(|name| number(&point[format!("{name}_us")]));
        assert!(times[0] > 0.0 && times.is_sorted(), "{point}");
        assert!(number(&point["compared_bytes"]) > 0.0 && number(&point["zeros"]) == 0.0);
        // One command for each transfer; those in flight at the ends are counted once.
        let commands = number(&point["commands"]);
        let transfers = iops * number(&point["seconds"]);
        assert!((commands - transfers).abs() <= 12.0 * number(&point["iodepth"]), "{point}");
    }
}

#[test]
fn a_result_says_what_made_it() {
    let found = report("--rw randread --bs 4k --seed 7 --path /var/tmp");
    let (run, setting) = (&found["run"], &found["setting"]);
    for key in ["date", "host", "kernel", "command"] {
        assert!(run[key].as_str().is_some_and(|text| !text.is_empty()), "{key}: {run}");
    }
    assert!(setting["file_system"].is_string() && setting["lba_bytes"] == 4096, "{setting}");
    assert!(found["load"]["seed"] == 7 && found["notes"].to_string().contains("checked: "));
    // That of a store, unless something else is asked for: then a log counts.
    for (line, executor, is_logged) in
        [("", "file", false), ("--mdts 8KiB", "inline", true), ("--executor host", "host", true)]
    {
        let found = report(&format!("--rw randread --bs 4k --path /var/tmp {line}"));
        assert_eq!(found["setting"]["executor"], executor);
        let notes = found["notes"].to_string();
        assert_eq!(notes.contains("against the devices' SMART logs"), is_logged, "{notes}");
    }
    let text = run_raw("");
    assert!(text.contains("of this machine's memory, not of a drive"), "{text}");
    assert!(!run_raw("--path /var/tmp").contains("not of a drive"));
}

/// Returns what `bench raw` prints for people.
fn run_raw(line: &str) -> String {
    let flags = "--rw randread --bs 4k --size 8MiB --runtime 50ms --ramp 0";
    let output = run(&format!("bench raw {flags} {line}"));
    String::from_utf8_lossy(&output.stdout).replace("\n--", " --")
}

#[test]
fn all_of_every_device_is_written_before_it_is_measured() {
    for line in ["--devices 3 --queues 3 --bs 64k", "--devices 1 --bs 4k"] {
        let found = report(&format!("--rw randread {line}"));
        assert!(number(&found["rows"][0]["zeros"]) == 0.0, "{line}: {found}");
    }
}

#[test]
fn transfers_above_the_devices_limit_take_several_commands() {
    let found = report("--rw randread --bs 1m --mdts 128KiB --iodepth 2 --devices 1");
    let point = &found["rows"][0];
    let transfers = number(&point["iops"]) * number(&point["seconds"]);
    let each = number(&point["commands"]) / transfers;
    assert!((7.0..9.0).contains(&each) || transfers < 20.0, "{point}");
}

#[test]
fn a_sweep_has_a_knee_and_a_mixture_is_compared() {
    let found = report("--rw randread,randwrite,randrw --bs 4k --iodepth 1,4,16 --rwmixread 70");
    let knees = found["knees"].as_array().unwrap();
    assert_eq!(knees.len(), 3);
    assert!(knees.iter().all(|knee| number(&knee["of_highest"]) >= 0.9));
    let mixed = found["mixed"].as_array().unwrap();
    assert_eq!(mixed.len(), 3);
    assert!(mixed.iter().all(|it| number(&it["factor"]) > 0.0 && it["rw"] == "randrw"));
}

#[test]
fn bad_input_is_refused_in_words() {
    for (line, said) in [
        ("--iodepth 1023 --queues 64", "is the most"),
        ("--overwrite store", "software controllers start empty"),
        ("--block /dev/null --rw randwrite", "would be overwritten"),
        ("--block /dev/null", "it is not a block device"),
        ("--block /no/such/device", "--block /no/such/device"),
        ("--block /dev/null --devices 2", "cannot be used with"),
        ("--devices vfio:0000:00:00.0 --overwrite anything", "names reads only"),
        ("--bs 4kb", "powers of 1024 are written 4k"),
        ("--bs 1000", "a multiple of 512"),
        ("--bs 512", "LBAs of 4096 bytes"),
        ("--bs 16m --size 8MiB", "--size: 8 MiB of"),
        ("--path /tmp --size 900TiB", "are needed, but"),
        ("--iodepth 1023 --bs 16m --devices 64", "of memory"),
        ("--route staged --executor cuda", "no pool that objects are staged for"),
        ("--runtime -1", "is no time"),
        ("--runtime 0", "more than 0 seconds"),
    ] {
        let output = run(&format!("bench raw {line}"));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{line}: {error}");
        assert!(error.contains(said), "{line}: {error}");
        assert!(output.stdout.is_empty(), "{line}");
    }
}

#[test]
fn contexts_of_all_shapes_and_lengths_are_measured() {
    let line = "layers --model mini,tiny --block-tokens 256,512 --tokens 2048,512 --rounds 2";
    let (found, _) = rows(&format!("{line} --coalesce off"));
    assert_eq!(found.len(), 16);
    for row in &found {
        // One command for each object, and nothing else is sent.
        let layers = if row["model"] == "mini" { 32.0 } else { 2.0 };
        let blocks = number(&row["tokens"]) / number(&row["block_tokens"]);
        assert_eq!(number(&row["commands"]), 2.0 * layers * blocks, "{row}");
        let bytes = 4.0 * layers * number(&row["tokens"]);
        let seconds = layers * number(&row["layer_us"]) * 1e-6;
        assert!((bytes / seconds / number(&row["bytes_s"]) - 1.0).abs() < 1e-6, "{row}");
    }
    let directions: Vec<&Value> = found[..2].iter().map(|row| &row["direction"]).collect();
    assert_eq!(directions, ["retrieve", "store"]);
}

/// Objects are padded to blocks of the device; a software controller does not count the padding of
/// reads, which it discards.
#[test]
fn objects_smaller_than_a_block_of_the_device_are_measured() {
    let (found, _) = rows("layers --model mini --block-tokens 16 --tokens 1024 --rounds 2");
    assert_eq!(found.len(), 2);
}

#[test]
fn contexts_in_files_are_measured() {
    let line = "layers --model mini --block-tokens 64 --tokens 512 --rounds 1 --path /var/tmp";
    let (found, report) = rows(line);
    assert!(found.len() == 2 && report["setting"]["executor"] == "file", "{report}");
}

#[test]
fn a_page_has_the_table_and_plots() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let page_of = |line: &str| {
        let output = run(&format!("bench {line} --html {}", page.display()));
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::read_to_string(&page).unwrap()
    };
    let raw = "raw --size 8MiB --rw randread,randwrite --bs 4k --runtime 0.1 --ramp 0";
    let found = page_of(&format!("{raw} --iodepth 1,4"));
    assert_eq!(found.matches("<svg").count(), 3, "IOPS, bandwidth, latency");
    for part in ["by depth of a queue", "randread, size 4 KiB", ">p99.9</th>", "checked: commands"]
    {
        assert!(found.contains(part), "{part}: {found}");
    }
    let found = page_of(raw);
    assert!(!found.contains("<svg") && found.contains(">IOPS</th>"), "one depth is no line");
    let found = page_of("layers --model mini --block-tokens 256 --tokens 512,2048 --rounds 2");
    assert!(
        found.matches("<svg").count() == 1 && found.contains("mini, block 256, store"),
        "{found}"
    );
}

#[test]
fn a_length_that_does_not_fit_is_left_out() {
    let line = "layers --model llama-3-8b --block-tokens 64 --tokens 1024,16000000 --rounds 1";
    let (found, report) = rows(line);
    assert_eq!(found.len(), 2);
    let notes = report["notes"].to_string();
    assert!(notes.contains("from 16,000,000 tokens on"), "{notes}");
}

#[test]
fn descriptors_are_compared() {
    let (found, _) =
        rows("layers --by-descriptors --tokens 1024 --rounds 1 --block-tokens 64 --devices 1");
    let list: Vec<[f64; 3]> = found
        .iter()
        .map(|row| ["commands", "list_bytes", "area_bytes"].map(|name| number(&row[name])))
        .collect();
    assert_eq!(list.len(), 8);
    // 16 blocks of 64 objects of 32 pages: alone, an SGL is in the command, and a PRP list has 31.
    assert_eq!(list[2], [1024.0, 0.0, 1048576.0]);
    assert_eq!(list[6], [1024.0, 1024.0 * 31.0 * 8.0, 1048576.0]);
    let merged = |at: usize| list[at][0] < 1024.0 && list[at][1] > 0.0;
    assert!(merged(0) && merged(1) && list[0][1] < list[4][1], "{list:?}");
}

/// A fio that writes down its arguments, checks that its file exists, and reports 1,000 IOPS.
const FIO: &str = r#"#!/bin/sh
[ "$1" = --version ] && { echo fio-3.0; exit 0; }
for word; do
    case $word in --filename=*) [ "$(wc -c <"${word#*=}")" = 8388608 ] || exit 9 ;; esac
done
echo "$@" >>"${0%/*}/calls"
echo "fio: a warning before the report"
echo '{"jobs": [{"error": 0, "job_runtime": 2000, "usr_cpu": 10, "sys_cpu": 40,
    "read": {"io_bytes": 500000000, "iops": 750.5, "runtime": 1000},
    "write": {"io_bytes": 0, "iops": 249.5, "runtime": 0}}]}'
"#;

/// Runs `bench raw` with only this fio in `PATH`.
fn with_fio(script: Option<&str>, line: &str) -> (Output, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    if let Some(script) = script {
        let path = folder.path().join("fio");
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
    }
    let line = format!("bench raw --size 8MiB --bs 4k --runtime 70ms --ramp 0 --json {line}");
    let path = format!("{}:/usr/bin:/bin", folder.path().display());
    let path = script.map_or(folder.path().display().to_string(), |_| path);
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.args(line.split_whitespace()).env_remove("RUST_LOG").env("PATH", path);
    let output = command.output().unwrap();
    let calls = std::fs::read_to_string(folder.path().join("calls")).unwrap_or_default();
    (output, calls.lines().map(str::to_owned).collect())
}

#[test]
fn fio_does_the_same_on_the_same_files() {
    let line = "--against fio --path /var/tmp --devices 2 --rw randrw --rwmixread 75 --iodepth 4";
    let (output, calls) = with_fio(Some(FIO), line);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let row = &found["rows"][0];
    assert_eq!((number(&row["fio_iops"]), number(&row["fio_cpu_s_gb"])), (1000.0, 2.0));
    assert!((number(&row["against_fio"]) - number(&row["iops"]) / 1000.0).abs() < 1e-9, "{row}");
    assert!(found["notes"].to_string().contains("against fio-3.0"), "{found}");
    assert_eq!(calls.len(), 3);
    for call in &calls {
        let words: Vec<&str> = call.split(' ').collect();
        for word in [
            "--direct=1",
            "--rw=randrw",
            "--rwmixread=75",
            "--bs=4096",
            "--iodepth=4",
            "--numjobs=1",
            "--runtime=70ms",
            "--ramp_time=0ms",
            "--size=8388608",
        ] {
            assert!(words.contains(&word), "{word}: {call}");
        }
        assert_eq!(words.iter().filter(|it| it.starts_with("--filename=")).count(), 2, "{call}");
    }
}

#[test]
fn a_fio_that_cannot_measure_is_an_error() {
    let refused = |script, line: &str, code, text: &str| {
        let (output, _) = with_fio(script, &format!("--against fio {line}"));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), error.contains(text)), (Some(code), true), "{error}");
    };
    refused(None, "--path /var/tmp", 2, "apt-get install");
    refused(Some(FIO), "", 2, "--path or --block");
    let fails = FIO.replace("echo \"fio: a warning", "echo >&2 no io_uring; exit 1; echo \"");
    refused(Some(&fails), "--path /var/tmp", 1, "no io_uring");
    let nothing = FIO.replace("\"error\": 0", "\"error\": 5");
    refused(Some(&nothing), "--path /var/tmp", 1, "error 5");
}
