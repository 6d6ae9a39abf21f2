use super::*;
use crate::{
    gpu::{Gpu, LLAMA_3_8B},
    workload::{Documents, LOOGLE},
};

fn machine(parameters: &Parameters) -> Machine<'_> {
    Machine {
        parameters,
        model: LLAMA_3_8B,
        gpu: Gpu::h100(),
        layers: None,
        known: None,
        kv_bytes: 40 << 30,
        dram_bytes: 0,
        drives: 0,
        drive_bytes: 7_000_000_000_000,
    }
}

fn found(rate: f64) -> (Vec<Choice>, Vec<Request>) {
    let documents = Documents { count: 40, questions: 5.0, ..LOOGLE };
    let requests = documents.requests(rate, 64, 1);
    let choices = Choices { dram: vec![16 << 30, 200 << 30], drives: vec![1, 2] };
    let parameters = Parameters::default();
    let all = choices.all();
    let of = |tiers| Choice::of(&machine(&parameters), &parameters.prices(), &requests, tiers);
    let found: Vec<Choice> = all.map(of).collect();
    assert_eq!(found.len(), choices.runs());
    (found, requests)
}

#[test]
fn what_is_recommended_keeps_the_limit_and_nothing_cheaper_does() {
    let (found, requests) = found(0.6);
    let mut limits: Vec<f64> = found.iter().map(|it| it.summary.ttft.p99).collect();
    limits.sort_unstable_by(f64::total_cmp);
    for limit in limits.iter().map(|limit| limit + 1e-6) {
        let best = cheapest(&found, Some(limit)).expect("one has this TTFT");
        assert!(best.summary.ttft.p99 <= limit);
        let better = |it: &&Choice| it.summary.ttft.p99 <= limit && it.million < best.million;
        assert_eq!(found.iter().find(better).map(|it| (it.dram, it.drives)), None);
        let note = &advice(&found, Some(limit), &requests)[0];
        assert!(note.contains(&name(best.dram, best.drives)), "{note}");
    }
    let never = limits[0] / 2.0;
    assert!(cheapest(&found, Some(never)).is_none());
    assert!(advice(&found, Some(never), &requests)[0].starts_with("Recommended: none"));
    // A rate above what a GPU alone can serve.
    let most = cheapest(&found, None).unwrap();
    assert!(found.iter().all(|it| it.million >= most.million));
}

#[test]
fn more_of_a_tier_has_no_fewer_hits_and_costs_more_an_hour() {
    let (found, _) = found(0.6);
    let at = |dram: u64, drives| {
        found.iter().find(|it| (it.dram >> 30, it.drives) == (dram, drives)).unwrap()
    };
    for (less, more) in [
        (at(0, 0), at(16, 0)),
        (at(16, 0), at(200, 0)),
        (at(0, 0), at(0, 1)),
        (at(16, 0), at(16, 2)),
    ] {
        assert!(less.summary.hits() <= more.summary.hits() && less.hour < more.hour);
    }
    assert!(at(0, 2).summary.ttft.mean < at(0, 0).summary.ttft.mean);
    assert!(at(200, 2).summary.host_hits > at(16, 2).summary.host_hits);
}
