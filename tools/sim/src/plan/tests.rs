use std::sync::LazyLock;

use super::*;
use crate::{
    engine::Request,
    gpu::{Gpu, LLAMA_3_8B},
    parameters::Parameters,
    workload::{Documents, Workload},
};

fn machine(parameters: &Parameters) -> Machine<'_> {
    Machine {
        parameters,
        model: LLAMA_3_8B,
        gpu: Gpu::h100(),
        layers: None,
        known: None,
        kv_bytes: 10 << 30,
        dram_bytes: 0,
        drives: 0,
        drive_bytes: 7_000_000_000_000,
    }
}

fn limits(ttft_p99: Option<f64>) -> Limits {
    Limits { ttft_p99, writes_a_day: 1.0 }
}

fn found(rate: f64, writes_a_day: f64, choices: &Choices) -> Vec<Choice> {
    let loogle = Workload::documents("loogle");
    let documents = Documents { count: 16, tokens: (5_000, 60_000), questions: 5.0, ..loogle };
    let of = |seed| Counted::new(documents.requests(rate, 64, seed), Duration::ZERO);
    let workloads = [1, 2].map(of);
    let parameters = Parameters::default();
    let machine = machine(&parameters);
    let limits = Limits { writes_a_day, ..limits(None) };
    let of = |hardware| Choice::of(&machine, &workloads, &limits, (hardware, choices.restart));
    let found: Vec<Choice> = choices.all(1).into_iter().map(of).collect();
    assert_eq!(found.len(), choices.runs());
    found
}

/// All combinations, at a rate that some of them serve.
static FOUND: LazyLock<Vec<Choice>> = LazyLock::new(|| {
    let choices = Choices {
        dram: vec![16 << 30, 200 << 30],
        drives: vec![1, 2],
        gpus: vec![2],
        restart: None,
    };
    found(0.6, 1.0, &choices)
});

/// Returns two drives, or none.
fn drives() -> Choices {
    Choices { dram: Vec::new(), drives: vec![2], gpus: Vec::new(), restart: None }
}

fn at(found: &[Choice], dram: u64, drives: u32) -> &Choice {
    let is = |it: &&Choice| (it.hardware.dram >> 30, it.hardware.drives) == (dram, drives);
    found.iter().find(is).unwrap()
}

#[test]
fn what_is_recommended_keeps_the_limit_and_nothing_cheaper_does() {
    let found = &*FOUND;
    let mut ends: Vec<f64> = found.iter().map(|it| it.p99()[1]).collect();
    ends.sort_unstable_by(f64::total_cmp);
    let mut recommended = 0;
    for limit in ends.iter().map(|limit| limit + 1e-6) {
        let limits = limits(Some(limit));
        let notes = advice(found, &limits, 1);
        let Some(best) = cheapest(found, &limits) else {
            assert!(notes[0].starts_with("Recommended: none"), "{notes:?}");
            continue;
        };
        recommended += 1;
        assert!(best.p99()[1] <= limit && !best.is_saturated());
        let better =
            |it: &&Choice| it.keeps(&limits) && !it.is_saturated() && it.million() < best.million();
        assert_eq!(found.iter().find(better).map(|it| it.hardware), None);
        assert!(notes[0].contains(&best.hardware.name(1)), "{notes:?}");
    }
    assert!(recommended > 0);
    let never = limits(Some(ends[0] / 2.0));
    assert!(cheapest(found, &never).is_none());
    assert!(advice(found, &never, 1)[0].starts_with("Recommended: none"));
}

#[test]
fn more_of_a_tier_has_no_fewer_hits_and_costs_more_an_hour() {
    let found = &*FOUND;
    let at = |dram, drives| at(found, dram, drives);
    let hits = |it: &Choice| it.median(|run| run.summary.hits);
    let hour = |it: &Choice| it.median(|run| run.hour);
    for (less, more) in [
        (at(0, 0), at(16, 0)),
        (at(16, 0), at(200, 0)),
        (at(0, 0), at(0, 1)),
        (at(16, 0), at(16, 2)),
    ] {
        assert!(hits(less) <= hits(more) && hour(less) < hour(more));
    }
    let ttft = |it: &Choice| it.median(|run| run.summary.ttft.mean);
    assert!(ttft(at(0, 2)) < ttft(at(0, 0)));
    let host = |it: &Choice| it.median(|run| run.summary.host_hits);
    assert!(host(at(200, 2)) > host(at(16, 2)));
    // Questions about known documents are answered sooner than first ones.
    let again = |it: &Choice| it.median(|run| run.summary.ttft_again.p50);
    assert!(again(at(0, 2)) < at(0, 2).median(|run| run.summary.ttft.p95));
    let two = found.iter().find(|it| it.hardware.gpus == 2).unwrap();
    assert!(ttft(two) < ttft(at(0, 0)) && hour(two) > 9.9);
}

#[test]
fn more_than_is_served_is_told_from_what_is_served() {
    let found = found(8.0, 1.0, &drives());
    assert!(found.iter().all(Choice::is_saturated));
    let notes = advice(&found, &limits(None), 1);
    assert!(notes[0].starts_with("Recommended: ") && !notes[0].contains("none"), "{notes:?}");
    assert!(notes.iter().any(|note| note.starts_with("More requests arrive than any")));
    let calm = self::found(0.05, 1.0, &drives());
    assert!(!calm.iter().any(Choice::is_saturated));
    // Both serve what comes, and drives cost 23 % more.
    let notes = advice(&calm, &limits(None), 1);
    assert!(notes[0].starts_with("Recommended: the GPU's memory alone"), "{notes:?}");
}

#[test]
fn drives_that_are_written_more_often_than_rated_cost_more() {
    let with = |writes_a_day| at(&found(0.6, writes_a_day, &drives()), 0, 2).clone();
    let [rated, worn] = [1e3, 1e-3].map(with);
    assert!(worn.drive_writes() > 1e-3 && worn.drive_writes() == rated.drive_writes(), "{worn:?}");
    // 14 TB of drives are $1.148 an hour.
    let price = |it: &Choice| it.runs[0].hour - 5.0;
    let times = worn.runs[0].written / 14e12 / 1e-3;
    assert!((price(&rated) / 1.148 - 1.0).abs() < 1e-6, "{rated:?}");
    assert!((price(&worn) / (1.148 * times) - 1.0).abs() < 1e-6, "{worn:?}");
    let limits = Limits { writes_a_day: 1e-3, ..limits(None) };
    let notes = advice(&[worn, rated], &limits, 1);
    assert!(notes.iter().any(|note| note.starts_with("Drives are written more often")));
}

#[test]
fn equal_costs_are_ties_and_saturated_ones_are_not_recommended() {
    let summary = Summary {
        ttft: Default::default(),
        ttft_again: Default::default(),
        itl: Default::default(),
        queue_growth: 0.0,
        backlog: 0.0,
        hbm_hits: 0.0,
        host_hits: 0.0,
        drive_hits: 0.0,
        peer_hits: 0.0,
        hits: 0.0,
        bubble: 0.0,
        requests_per_second: 1.0,
        tokens_per_second: 1.0,
    };
    let choice = |drives: u32, million: [f64; 2], queue_growth: f64| {
        let summary = Summary { queue_growth, backlog: queue_growth * 2.0, ..summary };
        let run = |million| Run {
            summary,
            written: 0.0,
            drive_writes: 0.0,
            hour: 1.0,
            million,
            restart: None,
        };
        let hardware = Hardware { gpus: 1, dram: 0, drives };
        Choice { hardware, runs: million.map(run).to_vec() }
    };
    let found = [
        choice(0, [0.5, 0.5], 0.2),
        choice(1, [1.0, 1.1], 0.0),
        choice(2, [1.095, 1.2], 0.01),
        choice(3, [1.3, 1.4], 0.0),
    ];
    let notes = advice(&found, &limits(None), 1);
    assert!(notes[0].starts_with("Recommended: 1 drive: "), "{notes:?}");
    assert!(
        notes[1].starts_with("These cost the same") && notes[1].ends_with("differ by: 2 drives.")
    );
    assert!(notes[2].ends_with("long that was: the GPU's memory alone."), "{notes:?}");
}

#[test]
fn after_a_restart_drives_have_what_host_memory_lost() {
    let takes = Duration::from_secs(30);
    let choices =
        Choices { dram: vec![200 << 30], drives: vec![2], gpus: Vec::new(), restart: Some(takes) };
    let found = found(0.3, 1.0, &choices);
    let both = |dram: u64, drives: u32| at(&found, dram, drives).runs[0].restart.unwrap();
    let hits = |it: &Summary| it.hits;
    let [lost, kept] = [both(200, 0), both(0, 2)].map(|it| it.map(|half| hits(&half)));
    assert!(lost[1] < lost[0] - 0.05, "{lost:?}");
    assert!((kept[1] - kept[0]).abs() < 0.01, "{kept:?}");
    // Drives below host memory have what it lost.
    let [usual, restarted] = both(200, 2);
    assert!(restarted.host_hits < usual.host_hits && restarted.drive_hits > usual.drive_hits);
    assert!((hits(&restarted) - hits(&usual)).abs() < 0.01, "{restarted:?} {usual:?}");
    // Requests that arrive while the engine is away wait.
    assert!(restarted.ttft.p99 > 20.0 && usual.ttft.p99 < 20.0, "{restarted:?} {usual:?}");
}

#[test]
fn a_time_that_no_request_has_is_a_dash() {
    let parameters = Parameters::default();
    let request = |at: u64| Request {
        arrival: Duration::from_secs(at),
        input: 100,
        output: 1,
        blocks: vec![at],
        leaves: None,
        after: None,
    };
    let workload = Counted::new((0..9).map(request).collect(), Duration::ZERO);
    let found = plan(&machine(&parameters), &drives(), &limits(None), &[workload], |_| {});
    // None repeats another, and none has a second token.
    assert_eq!(found.tables[1].rows[0][7..11], ["-"; 4]);
    assert_ne!(found.tables[0].rows[0][2], "-");
}
