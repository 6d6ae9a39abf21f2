//! Faulty devices: the checks must detect them.

use cuda_mock::{Level, isolated};
use nvme_emu::{FaultAction, FaultPlan, FaultRule, FaultWhen, LbaRange};
use ripieno_stack::CudaChoice;

use super::*;
use crate::timing;
use crate::top::Scrape;

const READ: u8 = 2;
const WRITE: u8 = 1;

/// Replays with every `every`-th command of this kind failing on each device.
fn replay(line: &str, opcode: u8, every: u64, then: FaultAction) -> Report {
    // Without the store's checksums, which would detect the fault before the replay's check does.
    replay_on(None, &format!("{line} --no-checksums"), opcode, every, then)
}

#[test]
fn with_checksums_wrong_bytes_are_misses() {
    let line = "--requests 50 --verify full";
    let report = replay_on(None, line, READ, 7, FaultAction::CorruptRead);
    assert!(report.tally().findings.mismatches == 0 && report.tally().io_errors > 0, "{report:?}");
}

fn replay_on(
    gpu: Option<&Arc<Gpu>>,
    line: &str,
    opcode: u8,
    every: u64,
    then: FaultAction,
) -> Report {
    let args = StoreArgs::from_line(&format!("-q --model tiny {line}")).unwrap();
    let limits = Limits::of(&args, None);
    let plan = plan(&args).unwrap();
    let sizing = Sizing::new(&args, &plan, limits.lba_bytes).unwrap();
    let devices = devices(&args, &sizing, None, None, None).unwrap();
    let Opened { pool, stack, opening, .. } = stack::open(&args, &sizing, devices, gpu).unwrap();
    let data = stack.store().superblock().data_region().unwrap();
    let when = FaultWhen {
        admin: Some(false),
        opcode: Some(opcode),
        every: Some(every),
        // Only data commands: a failed journal write ends all storing.
        lbas: Some(LbaRange { first: data.first.0, count: u64::MAX >> 1 }),
        ..FaultWhen::default()
    };
    for emu in stack.emus() {
        let rules = vec![FaultRule::new(when.clone(), then)];
        emu.set_faults(FaultPlan { seed: 1, rules, ..FaultPlan::default() });
    }
    let outcome =
        drive(&args, &plan, &stack, pool, &mut Interrupt::never()).expect("the replay goes on");
    let placement = stack.placement().clone();
    let setting = Setting { limits, placement, opening, gpu: None };
    let report = report(&args, &plan, &sizing, setting, outcome);
    stack.close().expect("the devices still work");
    report
}

#[test]
fn without_faults_nothing_is_found() {
    let report = replay("--requests 50 --verify full", READ, u64::MAX, FaultAction::CorruptRead);
    assert!(report.is_clean(), "{report:?}");
    assert!(report.tally().findings.bytes > 0 && report.verdict().contains("OK"));
}

#[test]
fn flipped_bits_are_found() {
    let report = replay("--requests 50 --verify full", READ, 7, FaultAction::CorruptRead);
    assert!(report.tally().findings.mismatches > 0, "{report:?}");
    assert!(!report.tally().findings.shown.is_empty() && report.verdict().contains("FAILED"));
}

#[test]
fn lost_writes_are_found() {
    let report = replay("--requests 50 --verify full", WRITE, 5, FaultAction::TornWrite);
    assert!(report.tally().findings.mismatches > 0, "{report:?}");
}

#[test]
fn misplaced_writes_are_found_even_by_samples() {
    let away = FaultAction::MisdirectedWrite { lba_delta: 2 };
    for verify in ["full", "sampled"] {
        let report = replay(&format!("--requests 50 --verify {verify}"), WRITE, 3, away);
        assert!(report.tally().findings.mismatches > 0, "{verify}: {report:?}");
    }
}

#[test]
fn without_checks_wrong_bytes_are_not_found() {
    let report = replay("--requests 50 --verify off", READ, 2, FaultAction::CorruptRead);
    assert_eq!((report.tally().findings.mismatches, report.tally().findings.bytes), (0, 0));
    assert!(report.verdict().contains("not checked"));
}

/// Reads that report success but move nothing. The pool has room for one request only, so the
/// second request is retrieved into memory that still has the first one's bytes.
#[test]
fn reads_that_moved_nothing_are_found_though_the_right_bytes_were_there() {
    let request =
        r#"{"timestamp": 0, "input_length": 2048, "output_length": 1, "hash_ids": [1, 2, 3, 4]}"#;
    let trace = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(trace.path(), format!("{request}\n{request}\n")).unwrap();
    let nothing = FaultAction::Status { code: 0, dnr: false };
    for verify in ["full", "sampled"] {
        let trace = trace.path().display();
        let line = format!("--trace {trace} --pool-blocks 4 --verify {verify}");
        let report = replay(&line, READ, 1, nothing);
        assert_eq!((report.tally().trace_blocks_hit, report.tally().io_errors), (4, 0));
        assert!(report.tally().findings.mismatches >= 16, "{verify}: {report:?}");
    }
}

/// Unrecovered read error: the block is lost and stored again; no wrong data is delivered.
#[test]
fn failed_transfers_are_counted_and_are_no_mismatches() {
    let failed = FaultAction::Status { code: 0x281, dnr: true };
    let report = replay("--requests 50 --verify full", READ, 40, failed);
    assert!(report.tally().io_errors > 0 && report.tally().findings.mismatches == 0, "{report:?}");
    assert!(!report.is_clean());
    let full = FaultAction::Status { code: 0x280, dnr: true };
    let report = replay("--requests 50 --verify full", WRITE, 40, full);
    assert!(report.tally().io_errors > 0 && report.tally().findings.mismatches == 0, "{report:?}");
}

/// KV pool in GPU memory. The mock's copies and kernels are delayed, so that a missing wait is
/// detected.
#[test]
fn a_gpu_finds_what_the_cpu_finds() {
    let copies = [("MOCK_COPY_DELAY_US", "500")];
    isolated("replay::tests::a_gpu_finds_what_the_cpu_finds", Level::Full, &copies, || {
        for (route, launch) in [("direct", "per-batch"), ("staged", "resident")] {
            let line = format!("--requests 30 --executor cuda --route {route} --launch {launch}");
            let line = format!("{line} --verify full --pool-blocks 40 --seed 3 --no-checksums");
            let gpu = Gpu::open(CudaChoice { ordinal: 0, sms: 4, is_resident: false }).unwrap();
            let on = |opcode, every, then| replay_on(Some(&gpu), &line, opcode, every, then);
            let clean = on(READ, u64::MAX, FaultAction::CorruptRead);
            assert!(clean.is_clean() && clean.tally().findings.bytes > 0, "{clean:?}");
            assert_eq!(clean.outcome.stats.plane.path.to_string(), route);
            let flipped = on(READ, 7, FaultAction::CorruptRead);
            assert!(
                flipped.tally().findings.mismatches > 0 && flipped.tally().io_errors == 0,
                "{flipped:?}"
            );
            let lost = on(WRITE, 5, FaultAction::TornWrite);
            assert!(lost.tally().findings.mismatches > 0, "{lost:?}");
            let status = FaultAction::Status { code: 0x281, dnr: true };
            let failed = on(READ, 40, status);
            assert!(
                failed.tally().io_errors > 0 && failed.tally().findings.mismatches == 0,
                "{failed:?}"
            );
        }
    });
}

#[test]
fn a_scrape_has_the_totals_of_the_report() {
    let dir = tempfile::tempdir().unwrap();
    let scrape = scrape_with_totals("--model tiny --requests 60", dir.path());
    assert!(scrape.or_zero("load_seconds_count") > 0.0);
    assert_eq!(scrape.get("compute_saved_seconds_count"), Some(0.0), "tiny is no real model");
    let trace = dir.path().join("trace.jsonl");
    let request = |at| {
        format!(
            "{{\"timestamp\":{at},\"input_length\":512,\"output_length\":1,\"hash_ids\":[7]}}\n"
        )
    };
    std::fs::write(&trace, request(0) + &request(1)).unwrap();
    let line = format!("--model llama-3-8b --trace {}", trace.display());
    let scrape = scrape_with_totals(&line, dir.path());
    assert_eq!(scrape.get("compute_saved_seconds_count"), Some(1.0));
    let prompt = timing::compute("llama-3-8b", 512).map(|time| time.as_secs_f64());
    assert_eq!(scrape.get("compute_saved_seconds_sum"), prompt);
}

/// Runs a replay, compares its metrics with its report, and returns them.
fn scrape_with_totals(line: &str, dir: &std::path::Path) -> Scrape {
    let line = format!("-q {line} --metrics {}", dir.join("metrics.sock").display());
    let args = StoreArgs::from_line(&line).unwrap();
    let (limits, plan) = (Limits::of(&args, None), plan(&args).unwrap());
    let sizing = Sizing::new(&args, &plan, limits.lba_bytes).unwrap();
    let devices = devices(&args, &sizing, None, None, None).unwrap();
    let Opened { pool, stack, opening, .. } = stack::open(&args, &sizing, devices, None).unwrap();
    let outcome = drive(&args, &plan, &stack, pool, &mut Interrupt::never()).unwrap();
    let placement = stack.placement().clone();
    let scrape = Scrape::read(stack.metrics().expect("asked for").address()).expect("it answers");
    let setting = Setting { limits, placement, opening, gpu: None };
    let hits = outcome.tally.trace_blocks_hit;
    let report = serde_json::to_value(report(&args, &plan, &sizing, setting, outcome)).unwrap();
    for (name, field) in [
        ("commands_total", "commands"),
        ("sq_doorbells_total", "sq_doorbells"),
        ("cq_doorbells_total", "cq_doorbells"),
        ("stored_bytes_total", "stored_bytes"),
        ("loaded_bytes_total", "retrieved_bytes"),
        ("journal_bytes_total", "journal_bytes"),
        ("evicted_blocks_total", "evicted_files"),
        ("recoveries_total", "recoveries"),
    ] {
        assert_eq!(scrape.get(name), report[field].as_f64(), "{name}");
    }
    let devices: f64 = (0..2)
        .map(|device| scrape.or_zero(&format!("device_commands_total{{device=\"{device}\"}}")))
        .sum();
    assert_eq!(Some(devices), report["commands"].as_f64());
    let shape = args.shape;
    assert_eq!(scrape.get("hit_tokens_total"), Some((hits * 512) as f64), "{shape:?}");
    stack.close().unwrap();
    scrape
}

#[test]
fn each_model_has_a_computing_time_of_its_own() {
    let seconds = |model, tokens| timing::compute(model, tokens).expect("dense").as_secs_f64();
    // As `ripieno pace` by default: 30 us, 735 us per 1,000 tokens, 473 us per 10 million pairs.
    let layer = 30e-6 + 8.0 * 735e-6 + 8000.0 * 8001.0 / 2e7 * 473e-6;
    let factor = seconds("llama-3-8b", 8000) / (32.0 * layer);
    assert!((factor - 1.0).abs() < 0.02, "{factor}");
    // 31.2 billion weights of layers, and 7.0.
    let factor = seconds("qwen3-32b", 1000) / seconds("llama-3-8b", 1000);
    assert!((4.2..4.6).contains(&factor), "{factor}");
    for model in ["tiny", "mini", "deepseek-v3-mla"] {
        assert_eq!(timing::compute(model, 1000), None, "{model} is no dense model of real size");
    }
}
