//! Compares the simulator and the replay of the same run: one models engine and drives, the other
//! has the store, the driver and the I/O kernel over software controllers. Both use the scheduler.

use std::fmt::Write as _;
use std::fs;
use std::process::Command;
use std::time::Duration;

use kv_schedule::{Config, Curve, IoCosts, Setting, SlackTable, StepShape};
use kv_tier::LookaheadConfig;
use objstore::{DramMode, StoreOptions};
use ripieno_sim::{
    Documents, Gpu, LLAMA_3_8B, LaneModel, LayerTimes, Parameters, Policy, Report, Request, Setup,
    Tier, serve,
};
use serde_json::Value;

const BLOCK_TOKENS: u32 = 512;

/// Decoding by its FLOPs alone: layer times are the same sum for all steps.
fn gpu() -> Gpu {
    Gpu { bandwidth: 1e30, ..Gpu::h100() }
}

fn setup(layers: Option<&SlackTable>) -> Setup<'_> {
    Setup {
        model: LLAMA_3_8B,
        gpu: gpu(),
        layers: layers.map(|layers| layers as &dyn LayerTimes),
        storage: Parameters::default().storage(2, 1),
        known: None,
        kv_bytes: 200 << 30,
        block_tokens: BLOCK_TOKENS,
        step_tokens: 8192,
        requests_max: 16,
    }
}

fn requests(rate: f64, question: u32) -> Vec<Request> {
    let documents = Documents {
        count: 12,
        tokens: (4_000, 30_000),
        mean: 12_000.0,
        spread: 0.6,
        question,
        answer: 40,
        questions: 10.0,
    };
    documents.requests(rate, BLOCK_TOKENS, 1)
}

/// Returns the GPU's layer times as flags of the replay.
fn layer_time() -> Vec<String> {
    let layer = |tokens, attended| {
        let step = StepShape { tokens, attended, is_prefill: true };
        gpu().layer(&LLAMA_3_8B, step).as_secs_f64() * 1e6
    };
    let fixed = layer(0, 0);
    let times =
        format!("{fixed}us,{}us,{}us", layer(1000, 0) - fixed, layer(0, 10_000_000) - fixed);
    let flags = ["--layer-time", "--decode-layer-time"];
    flags.into_iter().flat_map(|flag| [flag.to_owned(), times.clone()]).collect()
}

/// Writes the requests as a trace; the last block of a prompt is partial and not shared.
fn trace(requests: &[Request]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut text = String::new();
    for (number, request) in requests.iter().enumerate() {
        let Request { arrival, input, output, blocks, .. } = request;
        let mut ids = blocks.clone();
        ids.resize(input.div_ceil(BLOCK_TOKENS) as usize, u64::MAX - number as u64);
        let time = arrival.as_secs_f64() * 1e3;
        let lengths = format!(r#""input_length": {input}, "output_length": {output}"#);
        writeln!(text, r#"{{"timestamp": {time}, {lengths}, "hash_ids": {ids:?}}}"#).unwrap();
    }
    fs::write(file.path(), text).unwrap();
    file
}

/// Layer times as of an engine: not the sum of three terms.
fn engine_layers() -> SlackTable {
    let [model, gpu, engine] = ["a model", "a GPU", "an engine"].map(str::to_owned);
    let curve = || Curve::line(Duration::ZERO, 1e9).unwrap();
    let costs = IoCosts { read: curve(), write: curve(), mixed: 1.0 };
    let mut table = SlackTable::new(Setting { model, gpu, engine, drives: Vec::new() }, costs);
    let octaves = |most| (0..most).map(|octave| 1_u32 << octave);
    for (input, prefix) in octaves(14).flat_map(|input| octaves(16).map(move |it| (input, it))) {
        let StepShape { tokens, attended, is_prefill } = StepShape::of([(input, prefix)]);
        let sum = 300.0 + 2.0 * f64::from(tokens) + attended as f64 / 5e4;
        // Up to a third more or less, depending on the shape.
        let off = f64::from((input / 3 + prefix / 7) % 5) / 6.0 - 0.33;
        let layer = Duration::from_secs_f64(sum * (1.0 + off) * 1e-6);
        table.learn(StepShape { tokens, attended, is_prefill }, layer);
    }
    table
}

/// Runs the replay, with the scheduler and without.
fn replay(requests: &[Request], layers: &[String]) -> [Value; 2] {
    let file = trace(requests);
    let mut command = Command::new(env!("CARGO_BIN_EXE_ripieno"));
    command.args(["pace", "--json", "--trace"]).arg(file.path());
    command.args(layers);
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    [0, 1].map(|at: usize| report["runs"][at].clone())
}

/// Runs the simulation, with the replay's queue depths in bytes.
fn simulate(setup: &Setup<'_>, requests: &[Request], policy: Policy) -> Report {
    let tier = policy.tier.map(|tier| {
        let LaneModel { read, write, .. } = setup.storage.lane(tier.path);
        let schedule = match tier.schedule.reads_first {
            false => tier.schedule,
            true => Config {
                read_depth_bytes: (read * 16e-3) as u64,
                write_depth_bytes: (write * 2e-3) as u64,
                backlog_bytes: (write * 0.5) as u64,
                ..tier.schedule
            },
        };
        Tier { unit_tokens: BLOCK_TOKENS, schedule, ..tier }
    });
    serve(setup, &Policy { keeps_hbm: false, tier, ..policy }, requests)
}

fn mean_ms(times: impl ExactSizeIterator<Item = Duration>) -> f64 {
    let count = times.len() as f64;
    times.sum::<Duration>().as_secs_f64() * 1e3 / count
}

/// Returns the metrics of a run: name, value of the replay, value of the simulator.
fn both(run: &Value, report: &Report, requests: &[Request]) -> [(&'static str, f64, f64); 6] {
    let loaded: u64 = report.served.iter().map(|it| u64::from(it.loaded_tokens)).sum();
    let input: u64 = requests.iter().map(|it| u64::from(it.input)).sum();
    let ttft = mean_ms(report.served.iter().map(|it| it.ttft));
    let number = |value: &Value| value.as_f64().unwrap();
    // The replay's model has a 1024th of the bytes.
    let scale = 1024.0;
    [
        ("TTFT", number(&run["ttft_ms"]["mean"]), ttft),
        ("bubble", number(&run["bubble_s"]), report.bubble.as_secs_f64()),
        ("compute", number(&run["compute_s"]), report.compute.as_secs_f64()),
        ("hits", number(&run["hit_ratio"]), loaded as f64 / input as f64),
        ("read", number(&run["read_bytes"]) * scale, report.read_bytes as f64),
        ("written", number(&run["write_bytes"]) * scale, report.write_bytes as f64),
    ]
}

/// Checks that both agree. `layers`: flags of the replay that are equivalent to `setup`.
fn agree(setup: &Setup<'_>, layers: &[String], (rate, question): (f64, u32)) {
    let requests = requests(rate, question);
    for (run, policy) in replay(&requests, layers).iter().zip([Policy::OURS, Policy::NAIVE]) {
        let report = simulate(setup, &requests, policy);
        for (what, replayed, simulated) in both(run, &report, &requests) {
            let (ratio, name) = (replayed / simulated, policy.name);
            let text = format!("{name}, {rate}/s, {question}: {what} {replayed}, {simulated}");
            assert!((0.99..1.01).contains(&ratio), "{text}");
        }
    }
}

/// Settings of the policies that the simulator finds best; docs/design/simulator.md has the others.
#[test]
fn simulated_policies_are_the_defaults_of_a_store() {
    // Those of `ripieno_stack::pace`.
    let (store, config, ahead) =
        (StoreOptions::default(), Config::default(), LookaheadConfig::default());
    let simulated = Policy::LOOKAHEAD;
    let (drives, host) = (simulated.tier.unwrap(), simulated.host.unwrap());
    assert_eq!([drives.eviction, host.eviction], [store.policy; 2]);
    assert_eq!((store.dram_mode, host.lookahead), (DramMode::WriteThrough, Some(ahead)));
    for schedule in [drives.schedule, host.schedule] {
        assert_eq!(schedule.reads_first, config.reads_first);
        assert_eq!(schedule.high_water, config.high_water);
    }
}

#[test]
#[ignore = "takes seconds: a step of cargo xtask ci"]
fn simulator_and_replay_agree_within_one_per_cent() {
    for workload in [(0.5, 300), (3.0, 300), (6.0, 300), (2.0, 2000)] {
        agree(&setup(None), &layer_time(), workload);
    }
}

#[test]
fn with_the_layer_times_of_an_engine_they_agree_as_well() {
    let (table, file) = (engine_layers(), tempfile::NamedTempFile::new().unwrap());
    fs::write(file.path(), table.to_json()).unwrap();
    let flags = ["--layers", file.path().to_str().unwrap()].map(str::to_owned);
    for workload in [(0.5, 300), (2.0, 2000)] {
        agree(&setup(Some(&table)), &flags, workload);
    }
}
