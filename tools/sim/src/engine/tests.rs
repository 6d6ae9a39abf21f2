use super::*;
use crate::{
    gpu::{H100, LLAMA_3_8B},
    workload::Documents,
};

const SETUP: Setup = Setup {
    model: LLAMA_3_8B,
    gpu: H100,
    kv_bytes: 20 << 30,
    block_tokens: 64,
    step_tokens: 8192,
    requests_max: 16,
};

/// Prompts of a few documents, one after another.
fn requests(count: u64, every: Duration) -> Vec<Request> {
    let request = |number: u64| {
        let input = 2048 + (number % 7) as u32 * 1000;
        let shared = u64::from(input / 64) / 2;
        let name = |at: u64| {
            if at < shared { ((number % 5) << 32) | at } else { ((9 + number) << 32) | at }
        };
        let blocks = (0..u64::from(input / 64)).map(name).collect();
        Request { arrival: every * number as u32, input, output: 50, blocks }
    };
    (0..count).map(request).collect()
}

const ALL: [Policy; 9] = [
    Policy::RECOMPUTE,
    Policy::HBM,
    Policy::DRAM,
    Policy::SSD,
    Policy::GDS,
    Policy::NAIVE,
    Policy::OURS,
    Policy::AHEAD,
    Policy::ORACLE,
];

#[test]
fn every_request_is_served_and_every_token_accounted_for() {
    let requests = requests(60, Duration::from_millis(100));
    for policy in ALL {
        let report = Run::serve(&SETUP, &policy, &requests);
        for (request, served) in requests.iter().zip(&report.served) {
            assert!(served.ttft > Duration::ZERO && served.decode > Duration::ZERO, "{policy:?}");
            assert!(served.hbm_tokens + served.loaded_tokens < request.input);
        }
        let loaded: u64 = report.served.iter().map(|it| u64::from(it.loaded_tokens)).sum();
        assert!(report.read_bytes >= loaded * SETUP.model.token_bytes(), "{}", policy.name);
        assert!(report.compute + report.bubble <= report.took);
        let any = report.served.iter().any(|it| it.hbm_tokens + it.loaded_tokens > 0);
        assert_eq!(any, policy != Policy::RECOMPUTE, "{}", policy.name);
    }
}

#[test]
fn the_same_requests_give_the_same_report() {
    let documents = Documents {
        count: 40,
        tokens: (300, 30_000),
        mean: 3000.0,
        spread: 0.8,
        question: 100,
        answer: 40,
        questions: 4.0,
    };
    let requests = documents.requests(8.0, 64, 7);
    let digest = |policy: Policy| {
        let policy = &Policy { keeps_hbm: false, ..policy };
        // FNV-1a, of all there is in the report.
        let report = format!("{:?}", Run::watch(&SETUP, policy, &requests, 100));
        report.bytes().fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| {
            (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        })
    };
    // To be set anew when the model or the scheduler changes, and for no other reason.
    let found = [Policy::GDS, Policy::NAIVE, Policy::OURS].map(digest);
    let expected = [0x773c_7b4c_29cc_4f7b, 0xe4da_7811_cb67_67e9, 0x35f7_4180_0cc4_bf28];
    assert_eq!(found, expected);
}

#[test]
fn blocks_are_stored_once_and_found_by_the_next_request() {
    let again = |arrival| Request { arrival, ..requests(1, Duration::ZERO)[0].clone() };
    let requests = [again(Duration::ZERO), again(Duration::from_secs(10))];
    let policy = Policy { keeps_hbm: false, ..Policy::OURS };
    let report = Run::serve(&SETUP, &policy, &requests);
    let blocks = u64::from(requests[0].input / 64);
    assert_eq!(report.write_bytes, blocks * 64 * SETUP.model.token_bytes());
    // The last token has to be computed.
    assert_eq!(report.served[1].loaded_tokens, (requests[0].input - 1) / 64 * 64);
    assert!(report.served[1].ttft < report.served[0].ttft / 2);
}

#[test]
fn more_requests_than_fit_wait_and_none_is_lost() {
    let small = Setup { kv_bytes: 2 << 30, ..SETUP };
    let requests = requests(50, Duration::ZERO);
    let report = Run::serve(&small, &Policy::OURS, &requests);
    assert!(report.served.iter().all(|it| it.decode > Duration::ZERO));
}

#[test]
fn the_scheduler_is_never_worse_than_everything_at_once() {
    for (every, output) in [(20, 1), (60, 10), (150, 50), (400, 50)] {
        let mut requests = requests(80, Duration::from_millis(every));
        requests.iter_mut().for_each(|request| request.output = output);
        let mean = |policy: Policy| {
            let policy = Policy { keeps_hbm: false, ..policy };
            let report = Run::serve(&SETUP, &policy, &requests);
            let ttft: f64 = report.served.iter().map(|it| it.ttft.as_secs_f64()).sum();
            (ttft, report.bubble.as_secs_f64())
        };
        let (ours, naive) = (mean(Policy::OURS), mean(Policy::NAIVE));
        assert!(ours.0 <= naive.0 * 1.01, "every {every} ms: TTFT {ours:?} {naive:?}");
        assert!(ours.1 <= naive.1 * 1.01, "every {every} ms: bubble {ours:?} {naive:?}");
    }
}

#[test]
fn what_is_watched_is_in_the_order_of_causes() {
    let again = |arrival| Request { arrival, ..requests(2, Duration::ZERO)[1].clone() };
    let mut requests = [again(Duration::ZERO), again(Duration::from_secs(10))];
    let end = requests[1].blocks.len() - 1;
    requests[1].blocks[end] = 77;
    let policy = Policy { keeps_hbm: false, ..Policy::OURS };
    let report = Run::watch(&SETUP, &policy, &requests, 1);
    let of = |work: Work, layer: u32| {
        let mut spans = report.spans.iter();
        *spans.find(|span| (span.work, span.layer) == (work, layer)).expect("it was done")
    };
    for layer in 0..SETUP.model.layers {
        let [read, compute, write] =
            [Work::Read, Work::Compute, Work::Write].map(|work| of(work, layer));
        assert!(read.from < read.to && read.to <= compute.from, "layer {layer}");
        assert!(compute.to <= write.from && write.from < write.to, "layer {layer}");
    }
    assert_eq!(report.spans.len(), 3 * SETUP.model.layers as usize);
    let sum = |of: fn(&Second) -> u64| report.seconds.iter().map(of).sum::<u64>();
    assert_eq!(sum(|it| it.read_bytes), report.read_bytes);
    assert_eq!(sum(|it| it.write_bytes), report.write_bytes);
    assert_eq!(report.seconds.iter().map(|it| it.compute).sum::<Duration>(), report.compute);
}

#[test]
#[should_panic(expected = "has no room for")]
fn a_request_larger_than_the_memory_is_refused() {
    let small = Setup { kv_bytes: 100 << 20, ..SETUP };
    let _ = Run::serve(&small, &Policy::HBM, &requests(1, Duration::ZERO));
}
