//! Clients that disconnect.

use kv_tier::Class;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use super::*;
use crate::workload::abort;

const MS: Duration = Duration::from_millis(1);

/// Asserts that no block is pinned: without `stored`, all capacity can be reserved.
fn nothing_held(index: &mut Index, stored: &[BlockKey], files: u64, what: &str) {
    index.remove(stored);
    let (write, room, new) = index.begin(&keys((0..files).map(|at| u64::MAX / 2 + at)));
    assert_eq!((room as u64, new as u64), (files, files), "{what}");
    index.abort(write);
}

fn nothing_moves(link: &link::Link, what: &str) {
    assert_eq!(link.scheduler.pending(), 0, "{what}");
    assert!(link.moving.numbers(|_| true).is_empty(), "{what}");
    assert_eq!(link.next_event(), None, "{what}");
}

fn nothing_is_left(mut run: Engine<'_, ModelTiers>, what: &str) {
    assert!(run.active.is_empty() && run.step.is_none() && run.leaving.is_empty(), "{what}");
    let block_bytes = run.setup.model.token_bytes() * u64::from(run.setup.block_tokens);
    nothing_held(run.hbm.index.as_mut().unwrap(), &[], run.setup.kv_bytes / block_bytes, what);
    let Some(mut tiers) = run.tiers else { return };
    nothing_moves(&tiers.link, what);
    let unit_bytes = run.setup.model.token_bytes() * u64::from(tiers.tier.unit_tokens);
    if let Some(host) = &tiers.host {
        nothing_moves(&host.link, what);
        assert!(host.filling.numbers(|_| true).is_empty(), "{what}");
        assert_eq!(host.memory.ahead.pending(), 0, "{what}");
        for request in run.requests {
            for key in tiers.units(request) {
                let class = host.memory.tier.class(key);
                assert!(!matches!(class, Some(Class::Active | Class::Expected)), "{what} {key:?}");
            }
        }
    }
    assert!(tiers.stores.numbers(|_| true).is_empty(), "{what}");
    let stored: Vec<BlockKey> = run.requests.iter().flat_map(|it| tiers.units(it)).collect();
    let capacity = run.setup.storage.capacity(tiers.tier.path);
    nothing_held(&mut tiers.index, &stored, capacity / unit_bytes, what);
}

#[test]
fn who_goes_away_leaves_nothing_behind() {
    let (mut waiting, mut running, mut in_vain) = (0, 0, 0);
    for seed in 0..300 {
        let mut chance = StdRng::seed_from_u64(seed);
        let policy = ALL[chance.random_range(0..ALL.len())];
        // Small enough to fill up; the tier of host memory alone has as much as drives.
        let host_bytes = chance.random_range(1..8) << 30;
        let host_bytes = if policy.host.is_some() { host_bytes } else { 8 << 30 };
        let storage = Storage { host_bytes, drive_bytes: 8 << 30, ..SETUP.storage };
        let setup = Setup {
            storage,
            kv_bytes: SETUP.model.token_bytes() * 64 * chance.random_range(160..600),
            requests_max: chance.random_range(1..24),
            step_tokens: chance.random_range(512..8192),
            ..*SETUP
        };
        let every = MS * chance.random_range(5..400);
        let mut requests = requests(chance.random_range(20..80), every);
        requests.iter_mut().for_each(|it| it.output = chance.random_range(1..900));
        let part = chance.random_range(0.05..1.0);
        abort(&mut requests, part, MS * chance.random_range(10..20_000), seed);
        let what = format!("seed {seed}: {}, {setup:?}", policy.name);
        let mut run = Engine::over_model(&setup, &policy, &requests, usize::MAX);
        let Ok(()) = run.run(&mut || true);
        let Report { served, aborted_waiting, aborted_running, in_vain_bytes, .. } = &run.report;
        let aborted = served.iter().filter(|it| it.is_aborted).count() as u64;
        assert_eq!(aborted, aborted_waiting + aborted_running, "{what}");
        for (request, served) in requests.iter().zip(served) {
            assert!(request.leaves.is_some() || !served.is_aborted, "{what}");
            assert!(served.is_aborted || served.ttft > Duration::ZERO, "{what}");
            let all = served.ttft + served.decode;
            let in_time = request.leaves.is_none_or(|leaves| all <= leaves);
            assert!(served.is_aborted || in_time, "{what}: {request:?} {served:?}");
        }
        waiting += aborted_waiting;
        running += aborted_running;
        in_vain += in_vain_bytes;
        nothing_is_left(run, &what);
    }
    assert!(waiting > 100 && running > 100 && in_vain > 1 << 30, "{waiting} {running} {in_vain}");
}

#[test]
fn what_has_not_begun_for_who_goes_away_is_not_read() {
    let [first, second] = [3, 4].map(|number: usize| requests(5, Duration::ZERO)[number].clone());
    let bytes = |request: &Request| u64::from((request.input - 1) / 64 * 64) * 131_072;
    let all = bytes(&first) + bytes(&second);
    let policy = Policy { keeps_hbm: false, ..Policy::AHEAD };
    // Both prefixes are stored, then requested at the same time: one read starts immediately.
    let run = |leaves: [Option<Duration>; 2]| {
        let at = |request: &Request, seconds, leaves| Request {
            arrival: Duration::from_secs(seconds),
            leaves,
            ..request.clone()
        };
        let again = [at(&first, 20, leaves[0]), at(&second, 20, leaves[1])];
        let requests = [at(&first, 0, None), at(&second, 10, None)].into_iter().chain(again);
        let report = serve(&SETUP, &policy, &requests.collect::<Vec<_>>());
        assert_eq!(report.aborted_running, leaves.iter().flatten().count() as u64);
        (report.read_bytes, report.in_vain_bytes)
    };
    assert_eq!(run([None, None]), (all, 0));
    assert_eq!(run([None, Some(MS)]), (bytes(&first), 0), "it did not begin");
    assert_eq!(run([Some(MS), None]), (all, bytes(&first)), "it had begun");
}

#[test]
fn when_the_first_that_waits_goes_away_the_next_one_is_taken_on() {
    let request = |seconds, input: u32, output, leaves| {
        let blocks = (0..u64::from(input / 64)).map(|at| u64::from(input) << 32 | at).collect();
        Request {
            arrival: Duration::from_secs(seconds),
            input,
            output,
            blocks,
            leaves,
            after: None,
        }
    };
    let setup = Setup { kv_bytes: SETUP.model.token_bytes() * 64 * 200, ..*SETUP };
    let requests = [
        request(0, 6400, 5000, None),
        request(1, 12_000, 10, Some(Duration::from_secs(1))),
        request(1, 640, 10, None),
    ];
    let served = serve(&setup, &Policy::HBM, &requests).served;
    assert!(served[1].is_aborted && served[1].ttft == Duration::ZERO, "{served:?}");
    let (first, last) = (served[0].ttft + served[0].decode, served[2].ttft);
    assert!(last >= Duration::from_secs(1) && last < Duration::from_millis(1200), "{served:?}");
    assert!(first > Duration::from_secs(10), "it would have to wait: {served:?}");
}
