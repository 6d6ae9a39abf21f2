use std::sync::Mutex;

use kv_catalog::BlockKey;
use kv_schedule::Kind;

use super::*;
use crate::{
    engine::{LayerTimes, Memory, Purpose, Served, serve},
    gpu::{Gpu, LLAMA_3_8B},
    lane::GBPS,
    parameters::Parameters,
    storage::Storage,
    workload::{Workload, abort},
};

fn setup() -> Setup<'static> {
    Setup {
        model: LLAMA_3_8B,
        gpu: Gpu::h100(),
        layers: None,
        storage: Parameters::default().storage(2, 1),
        known: None,
        kv_bytes: 6 << 30,
        block_tokens: 64,
        step_tokens: 8192,
        requests_max: 64,
    }
}

fn link(gbps: f64) -> Option<LaneModel> {
    Some(Parameters::default().net(gbps * GBPS))
}

fn cluster(engines: usize, router: Router, link: Option<LaneModel>) -> Cluster {
    Cluster { engines, router, link, delay: Duration::from_millis(100) }
}

fn chat(seed: u64) -> Vec<Request> {
    Workload::named("chat").unwrap().requests(250, 0.5, 64, seed)
}

fn sum(served: &[Served], of: fn(&Served) -> u32) -> u64 {
    served.iter().map(|it| u64::from(of(it))).sum()
}

fn hits(found: &Clustered) -> u64 {
    sum(&found.report.served, |it| it.hbm_tokens + it.loaded_tokens)
}

/// Checks at the end of each run that the directory missed no event.
pub(super) fn check_directory(engines: &[Engine<'_, ModelTiers>], directory: &Directory) {
    for (at, engine) in engines.iter().enumerate() {
        let index = &engine.tiers.as_ref().unwrap().index;
        let blocks = engine.requests.iter().flat_map(|it| it.blocks.iter().copied());
        for key in keys(blocks) {
            let engines = directory.contents.get(&key).map_or(0, |it| it[1]);
            assert_eq!(engines >> at & 1, index.find(&[key]) as u64);
        }
    }
}

#[test]
fn one_engine_serves_as_without_a_cluster() {
    let mut requests = chat(1);
    abort(&mut requests, 0.1, Duration::from_secs(3), 1);
    for policy in [Policy::OURS, Policy::AHEAD, Policy::LOOKAHEAD] {
        let alone = serve(&setup(), &policy, &requests);
        for router in [Router::RoundRobin, Router::LeastLoaded, Router::Prefix] {
            let found =
                serve_cluster(&setup(), &policy, &requests, &cluster(1, router, link(100.0)));
            let what = |it: &Report| {
                let Report { served, took, compute, bubble, read_bytes, .. } = it;
                format!("{:?}", (served, took, compute, bubble, read_bytes))
            };
            assert_eq!(what(&found.report), what(&alone), "{} {router:?}", policy.name);
            assert_eq!(found.computes, [alone.compute]);
            assert_eq!(found.report.peer_bytes, 0);
        }
    }
}

/// Counts the tokens of all steps.
#[derive(Debug, Default)]
struct Tokens(Mutex<u64>);

impl LayerTimes for Tokens {
    fn layer(&self, step: StepShape) -> Option<Duration> {
        *self.0.lock().unwrap() += u64::from(step.tokens);
        None
    }
}

#[test]
fn tokens_and_bytes_add_up() {
    let tokens = Tokens::default();
    let setup = Setup { layers: Some(&tokens), ..setup() };
    // The first token is computed with the prompt: no step has any other.
    let requests: Vec<Request> =
        chat(2).into_iter().map(|it| Request { output: 1, ..it }).collect();
    let cluster = cluster(4, Router::RoundRobin, link(100.0));
    let found = serve_cluster(&setup, &Policy::OURS, &requests, &cluster);
    let served = &found.report.served;
    let input: u64 = requests.iter().map(|it| u64::from(it.input)).sum();
    assert_eq!(hits(&found) + *tokens.0.lock().unwrap(), input);
    let [loaded, peer] = [sum(served, |it| it.loaded_tokens), sum(served, |it| it.peer_tokens)];
    assert!(0 < peer && peer < loaded, "{peer} of {loaded}");
    let token = setup.model.token_bytes();
    assert_eq!(found.report.peer_bytes, peer * token);
    assert_eq!(found.peers.sent.iter().sum::<u64>(), peer * token);
    assert_eq!(found.report.read_bytes, (loaded - peer) * token);
    let again = serve_cluster(&setup, &Policy::OURS, &requests, &cluster);
    assert_eq!(format!("{found:?}"), format!("{again:?}"));
}

#[test]
fn a_late_directory_gives_misses_alone() {
    // Room for few of the blocks: they are dropped soon.
    let storage = Storage { drive_bytes: 3 << 30, ..setup().storage };
    let setup = Setup { storage, ..setup() };
    let with = |delay: Duration| {
        let cluster = Cluster { delay, ..cluster(4, Router::RoundRobin, link(400.0)) };
        serve_cluster(&setup, &Policy::OURS, &chat(3), &cluster)
    };
    let [now, late, never] = [0, 20, 1 << 30].map(|delay| with(Duration::from_secs(delay)));
    assert!(now.peers.late == 0 && now.report.peer_bytes > 0, "{:?}", now.peers);
    assert!(late.peers.late > 0 && late.report.peer_bytes > 0, "{:?}", late.peers);
    assert!(never.peers.late == 0 && never.report.peer_bytes == 0, "{:?}", never.peers);
    assert!(hits(&now) > hits(&never));
}

#[test]
fn what_an_engine_dropped_is_not_fetched() {
    let seconds = Duration::from_secs;
    let keys = keys([1, 2, 3]);
    let events = |is_stored: bool| keys.iter().map(|key| (*key, is_stored)).collect::<Vec<_>>();
    let mut directory = Directory::new(seconds(10), 3);
    directory.publish(seconds(0), 1, [Vec::new(), events(true)]);
    directory.publish(seconds(1), 1, [Vec::new(), events(false)[1..].to_vec()]);
    directory.publish(seconds(1), 2, [events(true), Vec::new()]);
    let directory = Rc::new(RefCell::new(directory));
    let tier = Policy::OURS.tier.unwrap();
    let mut peers = Peers::new(Rc::clone(&directory), 0, &setup(), &tier, link(100.0).unwrap());
    let mut fetched = |at: u64, computes: Option<u64>| {
        let computes = |_| computes.map(Duration::from_millis);
        let found = peers.fetch(&keys, 8 << 20, computes, seconds(at));
        let counts = directory.borrow().counts.clone();
        (found, counts.late, counts.computed)
    };
    assert_eq!(fetched(9, Some(1000)), (0, 0, 0), "it is not known yet");
    assert_eq!(fetched(10, Some(1000)), (1, 2, 0), "two of three are gone");
    assert_eq!(fetched(11, Some(1000)), (1, 2, 0), "it is known that they are");
    assert_eq!(fetched(12, None), (0, 2, 1), "nobody knows how long computing takes");
    assert_eq!(fetched(13, Some(0)), (0, 2, 2), "computing is faster");
    assert_eq!(directory.borrow().counts.sent, [0, 2 * (8 << 20), 0]);
    assert_eq!(directory.borrow_mut().known(seconds(13), 2, &keys), [3, 3]);
    assert_eq!(directory.borrow_mut().known(seconds(13), 1, &keys), [0, 1]);
}

#[test]
fn nothing_is_fetched_that_is_computed_sooner() {
    let requests = chat(4);
    let with = |link| {
        let cluster = cluster(4, Router::RoundRobin, link);
        serve_cluster(&setup(), &Policy::OURS, &requests, &cluster)
    };
    let [none, slow, fast] = [None, link(0.01), link(400.0)].map(with);
    assert!(slow.peers.computed > 1000 && slow.report.peer_bytes == 0, "{:?}", slow.peers);
    assert_eq!(format!("{:?}", slow.report), format!("{:?}", none.report));
    assert!(fast.report.peer_bytes > 0 && hits(&fast) > hits(&none), "{:?}", fast.peers);
    assert!(fast.report.compute < none.report.compute);
}

#[test]
fn a_router_that_knows_prefixes_has_more_hits() {
    for seed in 1..=6 {
        let requests = chat(seed);
        let with =
            |router| serve_cluster(&setup(), &Policy::OURS, &requests, &cluster(4, router, None));
        let [turns, prefix] = [Router::RoundRobin, Router::Prefix].map(|it| hits(&with(it)));
        assert!(prefix > turns, "seed {seed}: {prefix} and {turns}");
    }
}

#[test]
fn requests_that_come_together_go_to_different_engines() {
    let request = |number: u64| Request {
        arrival: Duration::from_secs(1),
        input: 4096,
        output: 10,
        blocks: (0..64).map(|at| number << 24 | at).collect(),
        leaves: None,
        after: None,
    };
    let requests: Vec<Request> = (0..8).map(request).collect();
    for router in [Router::RoundRobin, Router::LeastLoaded, Router::Prefix] {
        let cluster = cluster(4, router, None);
        let found = serve_cluster(&setup(), &Policy::OURS, &requests, &cluster);
        assert!(found.computes.iter().all(|it| *it == found.computes[0]), "{:?}", found.computes);
        assert!(found.computes[0] > Duration::ZERO);
    }
}

#[test]
fn blocks_on_the_gpu_count_more_than_those_on_slow_drives() {
    let mut storage = setup().storage;
    storage.direct.read = 6e9;
    let (setup, requests) = (Setup { storage, ..setup() }, chat(1));
    let engine = Engine::over_model(&setup, &Policy::OURS, &requests, usize::MAX);
    let [gpu, drives, nowhere] =
        [[100, 100], [0, 100], [0, 0]].map(|found| engine.prompt(6500, found));
    assert!(gpu < drives && drives < nowhere, "{gpu:?} {drives:?} {nowhere:?}");
}

#[test]
fn a_chunk_is_a_message() {
    let directory = Rc::new(RefCell::new(Directory::new(Duration::ZERO, 2)));
    let net = link(100.0).unwrap();
    let tier = Policy::OURS.tier.unwrap();
    let mut link = Peers::new(directory, 0, &setup(), &tier, net).link;
    link.add(Purpose::Whole, Kind::Soon, 0, (256 / 64, 32), Duration::ZERO);
    link.pump(Duration::ZERO, None::<&mut Memory<BlockKey>>);
    let bytes = 256 * LLAMA_3_8B.token_bytes();
    let wanted = net.set_up.as_secs_f64() + bytes as f64 / (100.0 * GBPS);
    let found = link.next_event().unwrap().as_secs_f64();
    assert!((found / wanted - 1.0).abs() < 1e-3, "{found} {wanted}");
}
