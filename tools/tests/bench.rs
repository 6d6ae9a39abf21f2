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

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn every_pattern_size_and_depth_is_measured() {
    let found = report("--rw read,randwrite --bs 4k,64k --iodepth 1,8 --devices 3 --queues 2");
    let points = found["points"].as_array().unwrap();
    assert_eq!(points.len(), 8);
    for point in points {
        let (iops, bytes) = (number(&point["iops"]), number(&point["bs_bytes"]));
        assert!(iops > 0.0 && (number(&point["bytes_s"]) / (iops * bytes) - 1.0).abs() < 1e-6);
        let latency = &point["latency_us"];
        let order = ["min", "p50", "p90", "p99", "p99.9", "p99.99", "max"];
        let times = order.map(|name| number(&latency[name]));
        assert!(times[0] > 0.0 && times.is_sorted(), "{latency}");
        assert!(number(&point["compared_bytes"]) > 0.0 && number(&point["zeros"]) == 0.0);
        // One command for each transfer; those in flight at the ends are counted once.
        let commands = number(&point["commands"]);
        let transfers = iops * number(&point["seconds"]);
        assert!((commands - transfers).abs() <= 12.0 * number(&point["iodepth"]), "{point}");
    }
}

#[test]
fn all_of_every_device_is_written_before_it_is_measured() {
    for line in ["--devices 3 --queues 3 --bs 64k", "--devices 1 --bs 4k"] {
        let found = report(&format!("--rw randread {line}"));
        assert!(number(&found["points"][0]["zeros"]) == 0.0, "{line}: {found}");
    }
}

#[test]
fn transfers_above_the_devices_limit_take_several_commands() {
    let found = report("--rw randread --bs 1m --mdts 128KiB --iodepth 2 --devices 1");
    let point = &found["points"][0];
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
        ("--overwrite", "software controllers start empty"),
        ("--device block:/dev/null --rw randwrite", "would be overwritten"),
        ("--device block:/dev/null", "it is not a block device"),
        ("--device block:/no/such/device", "block:/no/such/device"),
        ("--device block:/dev/null,emu", "are measured apart"),
        ("--device vfio:0000:00:00.0 --overwrite", "names reads only"),
        ("--bs 1000", "a multiple of 512"),
        ("--bs 512", "LBAs of 4096 bytes"),
        ("--bs 16m --size 8MiB", "give a larger --size"),
        ("--iodepth 1023 --bs 16m --devices 64", "of memory"),
        ("--require staged --executor cuda", "no pool that objects are staged for"),
        ("--runtime -1", "expected seconds"),
        ("--runtime 0", "more than 0 seconds"),
    ] {
        let output = run(&format!("bench raw {line}"));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{line}: {error}");
        assert!(error.contains(said), "{line}: {error}");
        assert!(output.stdout.is_empty(), "{line}");
    }
}
