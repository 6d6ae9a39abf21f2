mod aborts;

use std::sync::LazyLock;

use kv_schedule::Kind;

use super::*;
use crate::{gpu::LLAMA_3_8B, parameters::Parameters, policy::HostMemory, workload::Documents};

static SETUP: LazyLock<Setup<'static>> = LazyLock::new(|| Setup {
    model: LLAMA_3_8B,
    gpu: Gpu::h100(),
    layers: None,
    storage: Parameters::default().storage(2, 1),
    known: None,
    kv_bytes: 20 << 30,
    block_tokens: 64,
    step_tokens: 8192,
    requests_max: 16,
});

/// Returns prompts of a few documents, at regular times.
fn requests(count: u64, every: Duration) -> Vec<Request> {
    let request = |number: u64| {
        let input = 2048 + (number % 7) as u32 * 1000;
        let shared = u64::from(input / 64) / 2;
        let name = |at: u64| {
            if at < shared { ((number % 5) << 32) | at } else { ((9 + number) << 32) | at }
        };
        let blocks = (0..u64::from(input / 64)).map(name).collect();
        Request {
            arrival: every * number as u32,
            input,
            output: 50,
            blocks,
            leaves: None,
            after: None,
        }
    };
    (0..count).map(request).collect()
}

const ALL: [Policy; 11] = [
    Policy::RECOMPUTE,
    Policy::HBM,
    Policy::DRAM,
    Policy::SSD,
    Policy::GDS,
    Policy::NAIVE,
    Policy::OURS,
    Policy::AHEAD,
    Policy::WITH_HOST,
    Policy::LOOKAHEAD,
    Policy::ORACLE,
];

#[test]
fn every_request_is_served_and_every_token_accounted_for() {
    let requests = requests(60, Duration::from_millis(100));
    for policy in ALL {
        let report = serve(&SETUP, &policy, &requests);
        for (request, served) in requests.iter().zip(&report.served) {
            assert!(served.ttft > Duration::ZERO && served.decode > Duration::ZERO, "{policy:?}");
            assert!(served.hbm_tokens + served.loaded_tokens < request.input);
        }
        let loaded: u64 = report.served.iter().map(|it| u64::from(it.loaded_tokens)).sum();
        let read = report.read_bytes + report.host_read_bytes;
        assert!(read >= loaded * SETUP.model.token_bytes(), "{}", policy.name);
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
        // FNV-1a over the complete report.
        let mut report = watch(&SETUP, policy, &requests, 100);
        for (was, request) in report.served.iter_mut().zip(&requests) {
            assert_eq!(std::mem::take(&mut was.arrival), request.arrival);
        }
        let last = *report.seconds.last_key_value().expect("it computed").0;
        let second = |at| report.seconds.get(&at).copied().unwrap_or_default();
        let seconds: Vec<Second> = (0..=last).map(second).collect();
        let [sparse, dense] = [format!("{:?}", report.seconds), format!("{seconds:?}")];
        let report = format!("{report:?}").replace("arrival: 0ns, ", "").replace(&sparse, &dense);
        report.bytes().fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| {
            (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        })
    };
    // Update only after a change of the model or the scheduler.
    let found = [Policy::GDS, Policy::NAIVE, Policy::OURS].map(digest);
    let expected = [0x459a_0cda_7450_88b2, 0x87b8_1b5a_e1f2_cdb0, 0x2b9b_0f6a_f2e3_4875];
    assert_eq!(found, expected);
}

#[test]
fn blocks_are_stored_once_and_found_by_the_next_request() {
    let again = |arrival| Request { arrival, ..requests(1, Duration::ZERO)[0].clone() };
    let requests = [again(Duration::ZERO), again(Duration::from_secs(10))];
    let policy = Policy { keeps_hbm: false, ..Policy::OURS };
    let report = serve(&SETUP, &policy, &requests);
    let blocks = u64::from(requests[0].input / 64);
    assert_eq!(report.write_bytes, blocks * 64 * SETUP.model.token_bytes());
    // At least one token must be computed.
    assert_eq!(report.served[1].loaded_tokens, (requests[0].input - 1) / 64 * 64);
    assert!(report.served[1].ttft < report.served[0].ttft / 2);
}

#[test]
fn what_two_tiers_load_is_what_was_found_in_each() {
    let requests = requests(120, Duration::from_millis(100));
    let policy = Policy { keeps_hbm: false, ..Policy::WITH_HOST };
    let with = |host_bytes| {
        let storage = Storage { host_bytes, ..SETUP.storage };
        serve(&Setup { storage, ..*SETUP }, &policy, &requests)
    };
    // Room for a part of the requested blocks.
    let report = with(2 << 30);
    let sum = |of: fn(&Served) -> u32| report.served.iter().map(|it| u64::from(of(it))).sum();
    let (loaded, host): (u64, u64) = (sum(|it| it.loaded_tokens), sum(|it| it.host_tokens));
    let token = SETUP.model.token_bytes();
    // All loaded tokens are in full blocks, so no more bytes are moved.
    assert!(host > 0 && host < loaded, "{host} of {loaded}");
    assert_eq!(report.host_read_bytes, host * token);
    assert_eq!(report.read_bytes, (loaded - host) * token);
    let second = |of: fn(&Second) -> u64| report.seconds.values().map(of).sum::<u64>();
    assert_eq!(second(|it| it.host_read_bytes), report.host_read_bytes);
    assert_eq!(second(|it| it.host_write_bytes), report.host_write_bytes);
    // With room for everything, the drives are not read.
    let all = with(64 << 30);
    assert_eq!((all.read_bytes, all.host_read_bytes), (0, loaded * token));
}

/// Returns the seconds until the last of the given operations ends, each repeated ten times: loads
/// or stores of units on the drives (0), or in host memory (1).
fn moved(drives: f64, ops: &[(usize, Kind, u64)]) -> f64 {
    let tier = Policy::WITH_HOST.tier.unwrap();
    let mut setup = *SETUP;
    (setup.storage.direct.read, setup.storage.direct.write) = (drives, drives);
    // Without a scheduler's influence on the link.
    let schedule = Policy::NAIVE.tier.unwrap().schedule;
    let host = HostMemory { schedule, ..Policy::WITH_HOST.host.unwrap() };
    let mut tiers = ModelTiers::new(&setup, tier, Some(&host));
    let host = tiers.host.as_mut().unwrap();
    let links = [&mut tiers.link, &mut host.link];
    for (at, kind, units) in ops {
        for _ in 0..10 {
            assert!(links[*at].add(Purpose::Whole, *kind, 0, (*units, 1), Duration::ZERO));
        }
    }
    let Ok(()) = tiers.pump();
    let mut last = Duration::ZERO;
    while let Some(now) = tiers.wait(None) {
        last = now;
        tiers.link.ended::<BlockKey>(now, None);
        tiers.host.as_mut().unwrap().link.ended::<BlockKey>(now, None);
        let Ok(()) = tiers.pump();
    }
    last.as_secs_f64()
}

#[test]
fn drives_and_copies_from_host_memory_share_the_link_of_the_gpu() {
    // Ten times 1,024 units of 256 KiB.
    let bytes = 10.0 * 1024.0 * 64.0 * SETUP.model.token_layer_bytes() as f64;
    for kind in [Kind::Soon, Kind::Write] {
        for (drives, units, wanted) in [
            // The link has 50 GB/s; the drives have the given bandwidth.
            (10e9, [1024, 1024], bytes / 10e9),
            (40e9, [1024, 1024], 2.0 * bytes / 50e9),
            (40e9, [1024, 0], bytes / 40e9),
            (40e9, [0, 1024], bytes / 50e9),
            // 25 GB/s each until the drives have ended; then the copies get 50.
            (50e9, [512, 1024], 1.5 * bytes / 50e9),
        ] {
            let took = moved(drives, &[(0, kind, units[0]), (1, kind, units[1])]);
            assert!((took / wanted - 1.0).abs() < 0.02, "{kind:?} {units:?}: {took}, {wanted}");
        }
    }
}

#[test]
fn loads_and_stores_have_a_direction_of_the_link_each() {
    let bytes = 10.0 * 1024.0 * 64.0 * SETUP.model.token_layer_bytes() as f64;
    let (load, store) = (Kind::Soon, Kind::Write);
    for (ops, wanted) in [
        (vec![(1, load, 1024), (1, store, 1024)], bytes / 50e9),
        (vec![(1, load, 1024), (1, store, 512)], bytes / 50e9),
        (vec![(0, load, 1024), (1, store, 1024)], bytes / 40e9),
        // The drives process reads and writes one after the other.
        (vec![(0, load, 1024), (0, store, 1024)], 2.0 * bytes / 40e9),
    ] {
        let took = moved(40e9, &ops);
        assert!((took / wanted - 1.0).abs() < 0.02, "{ops:?}: {took}, {wanted}");
    }
}

#[test]
fn looking_ahead_is_never_worse_by_a_hundredth_and_helps_who_waits() {
    let mut better = 0.0_f64;
    for (every, requests_max, capacity) in [
        (30, 16, 2),
        (100, 16, 2),
        (300, 16, 2),
        (60, 16, 6),
        (100, 16, 20),
        (100, 4, 2),
        (150, 2, 4),
        (300, 2, 2),
        (400, 1, 4),
    ] {
        let mut setup = Setup { requests_max, ..*SETUP };
        setup.storage.host_bytes = capacity << 30;
        setup.storage.direct.read = 7e9;
        let run = |policy: Policy, every: u64| {
            let mut requests = requests(150, Duration::from_millis(every));
            for (number, request) in (0..).zip(&mut requests) {
                // Nearly all of it was stored.
                let shared = request.blocks.len() - 4;
                let name = |at: u64| ((number % 5) << 32) | at;
                let blocks = request.blocks.iter_mut().zip(0..);
                blocks.take(shared).for_each(|(it, at)| *it = name(at));
            }
            let policy = Policy { keeps_hbm: false, ..policy };
            let report = serve(&setup, &policy, &requests);
            let ttft: Duration = report.served.iter().map(|it| it.ttft).sum();
            [ttft.as_secs_f64(), report.ahead_bytes as f64, report.wasted_bytes as f64]
        };
        // Three rates, because a request that gets into an earlier step shifts all later ones.
        let sum = |policy: Policy| {
            let runs = [every * 19 / 20, every, every * 21 / 20].map(|every| run(policy, every));
            [0, 1, 2].map(|at| runs.iter().map(|run| run[at]).sum::<f64>())
        };
        let [without, with] = [Policy::WITH_HOST, Policy::LOOKAHEAD].map(sum);
        let what = format!("every {every} ms, {requests_max}, {capacity}: {without:?} {with:?}");
        assert!(with[0] <= without[0] * 1.01, "{what}");
        assert!(without[1] == 0.0 && with[2] <= with[1], "{what}");
        better = better.max(1.0 - with[0] / without[0]);
    }
    // Host memory refuses what is worth less than its blocks, so that less is left to gain.
    assert!(better > 0.09, "{better}");
}

#[test]
fn more_requests_than_fit_wait_and_none_is_lost() {
    let small = Setup { kv_bytes: 2 << 30, ..*SETUP };
    let requests = requests(50, Duration::ZERO);
    let report = serve(&small, &Policy::OURS, &requests);
    assert!(report.served.iter().all(|it| it.decode > Duration::ZERO));
}

#[test]
fn the_scheduler_is_never_worse_than_everything_at_once() {
    for (every, output) in [(20, 1), (60, 10), (150, 50), (400, 50)] {
        let mut requests = requests(80, Duration::from_millis(every));
        requests.iter_mut().for_each(|request| request.output = output);
        let mean = |policy: Policy| {
            let policy = Policy { keeps_hbm: false, ..policy };
            let report = serve(&SETUP, &policy, &requests);
            let ttft: f64 = report.served.iter().map(|it| it.ttft.as_secs_f64()).sum();
            (ttft, report.bubble.as_secs_f64())
        };
        let (ours, naive) = (mean(Policy::OURS), mean(Policy::NAIVE));
        assert!(ours.0 <= naive.0 * 1.01, "every {every} ms: TTFT {ours:?} {naive:?}");
        assert!(ours.1 <= naive.1 * 1.01, "every {every} ms: bubble {ours:?} {naive:?}");
    }
}

#[test]
fn who_finds_no_block_begins_again_and_ends() {
    // All prompts fit together, but not with their output.
    let mut requests = requests(12, Duration::ZERO);
    for (number, request) in (1..).zip(&mut requests) {
        request.output = 1500 + number * 40;
        request.blocks.iter_mut().for_each(|name| *name |= u64::from(number) << 48);
    }
    let prompts: u32 = requests.iter().map(|it| it.input.div_ceil(64)).sum();
    let outputs: u32 = requests.iter().map(|it| it.output.div_ceil(64)).sum();
    let block = SETUP.model.token_bytes() * 64;
    for policy in ALL {
        let serve = |blocks: u32| {
            let setup = Setup { kv_bytes: block * u64::from(blocks), ..*SETUP };
            serve(&setup, &policy, &requests)
        };
        let enough = serve(prompts + outputs + 12);
        assert_eq!(enough.preemptions, 0, "{}", policy.name);
        let short = serve(prompts + outputs / 3);
        assert!(short.preemptions > 0 && short.preemptions < 40, "{}", short.preemptions);
        for (served, request) in short.served.iter().zip(&requests) {
            // No step is shorter than the overhead of its layers.
            let least = SETUP.gpu.layer_overhead * SETUP.model.layers * (request.output - 1);
            assert!(served.ttft > Duration::ZERO && served.decode > least, "{served:?}");
        }
        assert!(short.took > enough.took, "{}: {:?} {:?}", policy.name, short.took, enough.took);
        assert!(short.compute > enough.compute, "what was preempted is computed again");
    }
}

#[test]
fn more_requests_than_there_is_memory_for_are_served_however_they_come() {
    for blocks in [160, 200, 300] {
        let kv_bytes = SETUP.model.token_bytes() * 64 * blocks;
        for requests_max in [2, 16, 64] {
            let setup = Setup { kv_bytes, requests_max, step_tokens: 2048, ..*SETUP };
            let mut requests = requests(80, Duration::from_millis(40));
            requests.iter_mut().for_each(|request| request.output = 700);
            for policy in [Policy::HBM, Policy::GDS, Policy::AHEAD, Policy::LOOKAHEAD] {
                let report = serve(&setup, &policy, &requests);
                assert!(report.served.iter().all(|it| it.decode > Duration::ZERO));
                let tokens: u64 = report.served.iter().map(|it| u64::from(it.loaded_tokens)).sum();
                let read = report.read_bytes + report.host_read_bytes;
                assert!(read >= tokens * setup.model.token_bytes(), "{}", policy.name);
            }
        }
    }
}

#[test]
fn what_is_watched_is_in_the_order_of_causes() {
    let again = |arrival| Request { arrival, ..requests(2, Duration::ZERO)[1].clone() };
    let mut requests = [again(Duration::ZERO), again(Duration::from_secs(10))];
    let end = requests[1].blocks.len() - 1;
    requests[1].blocks[end] = 77;
    let policy = Policy { keeps_hbm: false, ..Policy::OURS };
    let report = watch(&SETUP, &policy, &requests, 1);
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
    let sum = |of: fn(&Second) -> u64| report.seconds.values().map(of).sum::<u64>();
    assert_eq!(sum(|it| it.read_bytes), report.read_bytes);
    assert_eq!(sum(|it| it.write_bytes), report.write_bytes);
    assert_eq!(report.seconds.values().map(|it| it.compute).sum::<Duration>(), report.compute);
}

#[test]
fn a_restart_empties_memory_and_its_requests_wait() {
    let requests = requests(40, Duration::from_millis(500));
    let usual = serve(&SETUP, &Policy::OURS, &requests);
    let takes = Duration::from_secs(30);
    let after = |at: Duration| serve_restarted(&SETUP, &Policy::OURS, &requests, (at, takes));
    // Nobody comes after it.
    let last = after(Duration::from_secs(3600));
    assert_eq!((last.took, last.write_bytes), (usual.took, usual.write_bytes));
    let half = requests[20].arrival;
    let restarted = after(half);
    assert_eq!(restarted.served.len(), requests.len());
    for (at, (was, it)) in restarted.served.iter().zip(&requests).enumerate() {
        let is_later = at >= 20;
        assert_eq!(is_later, it.arrival + was.ttft > half + takes, "{at}: {was:?}");
        assert!(is_later || was.ttft < takes, "{at}: {was:?}");
    }
    // Blocks of the GPU come from the drives.
    let [before, first] = [&usual, &restarted].map(|it| it.served[20]);
    assert!(first.hbm_tokens == 0 && before.hbm_tokens > 0, "{before:?} {first:?}");
    assert!(first.loaded_tokens >= before.hbm_tokens, "{before:?} {first:?}");
}

#[test]
#[should_panic(expected = "has no room for")]
fn a_request_larger_than_the_memory_is_refused() {
    let small = Setup { kv_bytes: 100 << 20, ..*SETUP };
    let _ = serve(&small, &Policy::HBM, &requests(1, Duration::ZERO));
}

#[test]
fn seconds_without_anything_take_no_memory() {
    let mut requests = requests(4, Duration::from_millis(100));
    for request in &mut requests[2..] {
        request.arrival += Duration::from_secs(300 * 24 * 3600);
    }
    let report = serve(&SETUP, &Policy::OURS, &requests);
    let (last, count) = (*report.seconds.last_key_value().unwrap().0, report.seconds.len());
    assert!(last >= 300 * 24 * 3600 && count < 100, "{count} seconds up to {last}");
}

/// An index has an entry for each block that has room: 2^32 of them take hundreds of gigabytes.
#[test]
fn a_machine_is_as_large_as_its_requests_need() {
    let requests = requests(40, Duration::from_millis(100));
    let with = |bytes: u64| {
        let storage = Storage { host_bytes: bytes, drive_bytes: bytes, ..SETUP.storage };
        Setup { kv_bytes: bytes.min(u64::MAX - 1), storage, ..*SETUP }
    };
    for policy in [Policy::DRAM, Policy::WITH_HOST] {
        let [all, more] = [1 << 40, u64::MAX].map(|it| serve(&with(it), &policy, &requests));
        let served = |it: &Report| format!("{:?} {:?}", it.took, it.served);
        assert_eq!(served(&all), served(&more), "{}", policy.name);
    }
}

#[test]
fn a_turn_comes_when_the_one_before_has_ended() {
    let seconds = Duration::from_secs;
    let turns = |thinks: [Option<u64>; 3]| {
        let all = requests(3, Duration::ZERO).into_iter().zip(thinks).enumerate();
        let turn = |(at, (it, thinks)): (usize, (Request, Option<u64>))| Request {
            arrival: seconds(thinks.unwrap_or(0) * at as u64),
            after: thinks.map(|thinks| (at - 1, seconds(thinks))),
            ..it
        };
        all.map(turn).collect::<Vec<_>>()
    };
    let ends = |was: &Served| was.arrival + was.ttft + was.decode;
    let served = serve(&SETUP, &Policy::AHEAD, &turns([None, Some(5), Some(5)])).served;
    for pair in served.windows(2) {
        assert_eq!(pair[1].arrival, ends(&pair[0]) + seconds(5));
        assert!(pair[1].ttft > Duration::ZERO && pair[1].ttft < seconds(5), "{pair:?}");
    }
    // A recorded time holds, unless the turn before has not ended by then.
    let late = [0, 1, 100].map(seconds);
    let mut recorded = turns([None, Some(0), Some(0)]);
    recorded.iter_mut().zip(late).for_each(|(it, arrival)| it.arrival = arrival);
    recorded[0].output = 1000;
    let served = serve(&SETUP, &Policy::HBM, &recorded).served;
    assert_eq!(served[1].arrival, ends(&served[0]));
    assert_eq!(served[2].arrival, seconds(100));
    // Also behind a router, and across a restart.
    let open = turns([None, Some(5), Some(5)]);
    let cluster =
        Cluster { engines: 2, router: Router::RoundRobin, link: None, delay: Duration::ZERO };
    let served = serve_cluster(&SETUP, &Policy::AHEAD, &open, &cluster).report.served;
    assert!(served.windows(2).all(|pair| pair[1].arrival == ends(&pair[0]) + seconds(5)));
    let restart = (seconds(1), seconds(30));
    let served = serve_restarted(&SETUP, &Policy::AHEAD, &open, restart).served;
    assert_eq!(served[1].arrival, ends(&served[0]) + seconds(5));
    assert!(served[1].ttft > seconds(20), "it waits for the engine: {served:?}");
    assert_eq!(served[2].arrival, ends(&served[1]) + seconds(5));
}
