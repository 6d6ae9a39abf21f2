use std::collections::BTreeMap;

use kv_catalog::PolicyKind;
use kv_schedule::{Config, Curve, Decision, IoCosts, Setting, SlackTable};
use proptest::prelude::*;

use super::*;
use crate::tier::{Class, TierConfig};

const MS: Duration = Duration::from_millis(1);
const MB: u64 = 1_000_000;

fn scheduler(latency_us: u64, bandwidth: f64) -> Scheduler {
    let curve = || Curve::line(Duration::from_micros(latency_us), bandwidth).unwrap();
    let costs = IoCosts { read: curve(), write: curve(), mixed: 1.0 };
    let [model, gpu, engine] = ["model", "gpu", "engine"].map(str::to_owned);
    let setting = Setting { model, gpu, engine, drives: Vec::new() };
    let config = Config { high_water: 1.0, ..Config::default() };
    Scheduler::new(config, SlackTable::new(setting, costs))
}

/// Blocks of 1 MB; the drives have 1 GB/s, the link 10 GB/s.
struct World {
    tier: Tier<u32>,
    drives: Scheduler,
    link: Scheduler,
    it: Lookahead<u32>,
    /// Batches in flight, by end time.
    ends: BTreeMap<(Duration, OpId), Batch<u32>>,
    now: Duration,
}

impl World {
    fn new(blocks: u32) -> Self {
        let config = TierConfig { blocks, block_bytes: MB, policy: PolicyKind::Lru };
        let mut it = Lookahead::new(LookaheadConfig { batch_blocks: 2, ..Default::default() });
        it.iteration(10 * MS);
        Self {
            tier: Tier::new(config),
            drives: scheduler(80, 1e9),
            link: scheduler(5, 10e9),
            it,
            ends: BTreeMap::new(),
            now: Duration::ZERO,
        }
    }

    fn prefetch(&mut self, id: u64, keys: &[u32], when: When) {
        self.it.prefetch(RequestId(id), keys, when, &mut self.tier, self.now);
    }

    /// Makes all decisions that are possible now.
    fn decide(&mut self) {
        self.it.plan(&mut self.tier, &mut self.drives, Some(&mut self.link), self.now);
        for scheduler in [&mut self.drives, &mut self.link] {
            loop {
                match scheduler.next(self.now) {
                    Decision::Start(id) => {
                        let batch = self.it.start(id, MS, &mut self.tier).unwrap();
                        let bytes = batch.blocks.len() as u64 * MB;
                        let took = scheduler.table().costs.read.duration(bytes);
                        self.ends.insert((self.now + took, id), batch);
                    }
                    Decision::Drop(id) => self.it.dropped(id),
                    Decision::Wait(_) => break,
                }
            }
        }
    }

    fn end_first(&mut self, is_good: bool) -> bool {
        let Some(((time, id), batch)) = self.ends.pop_first() else { return false };
        self.now = self.now.max(time);
        let moved = self.it.ended(id, is_good, &mut self.tier);
        match batch.hop {
            Hop::Drives => self.drives.ended(id, moved, self.now),
            Hop::Link => self.link.ended(id, moved, self.now),
        }
        true
    }

    fn until(&mut self, time: Duration) {
        self.decide();
        while self.ends.first_key_value().is_some_and(|((end, _), _)| *end <= time) {
            self.end_first(true);
            self.decide();
        }
        self.now = self.now.max(time);
    }

    fn run(&mut self, id: u64) -> Option<Missing<u32>> {
        self.it.run(RequestId(id), &mut self.tier, &mut self.drives, Some(&mut self.link))
    }

    fn cancel(&mut self, id: u64) {
        self.it.cancel(RequestId(id), &mut self.tier, &mut self.drives, Some(&mut self.link));
    }
}

#[test]
fn two_hops_are_done_before_the_request_runs() {
    let mut world = World::new(10);
    world.prefetch(1, &[0, 1, 2], When::In(6));
    world.until(20 * MS);
    let counts = world.it.counts();
    assert_eq!((counts.drives_bytes, counts.link_bytes), (3 * MB, 0), "K is 4 for the link");
    world.until(30 * MS);
    assert_eq!(world.it.counts().link_bytes, 0, "there is no block on the GPU");
    world.it.allocated(RequestId(1));
    world.until(40 * MS);
    assert_eq!(world.it.counts().link_bytes, 3 * MB);
    assert_eq!(world.run(1), Some(Missing { blocks: vec![], in_flight: vec![] }));
    assert_eq!((world.it.counts().ready_blocks, world.it.pending()), (3, 0));
    assert_eq!(world.tier.class(0), Some(Class::Idle), "it may be used again");
}

#[test]
fn a_request_that_was_ignored_has_nothing_on_the_gpu() {
    let mut world = World::new(10);
    world.it = Lookahead::new(LookaheadConfig::default());
    world.prefetch(1, &[0, 1, 2], When::In(1));
    world.until(20 * MS);
    assert_eq!(world.run(1), None);
}

#[test]
fn blocks_are_looked_for_only_in_the_window_of_their_request() {
    let mut world = World::new(10);
    world.prefetch(1, &[0], When::At(100 * MS));
    let Admission::Fill(memory) = world.tier.admit(Block { key: 0, again: MS, by: None }) else {
        panic!("there is room");
    };
    world.tier.filled(memory, true);
    world.until(19 * MS);
    assert_eq!(world.tier.class(0), Some(Class::Idle));
    world.until(20 * MS);
    world.decide();
    assert_eq!(world.tier.class(0), Some(Class::Expected), "K is 8 for the drives");
}

#[test]
fn what_others_asked_for_before_stays_when_a_request_goes() {
    let mut world = World::new(10);
    let Admission::Fill(memory) = world.tier.admit(Block { key: 0, again: MS, by: None }) else {
        panic!("there is room");
    };
    world.tier.filled(memory, true);
    world.prefetch(1, &[0, 1], When::At(15 * MS));
    world.until(10 * MS);
    world.cancel(1);
    let classes = [0, 1].map(|key| world.tier.class(key));
    assert_eq!(classes, [Some(Class::Idle), Some(Class::Evictable)]);
}

#[test]
fn what_is_too_late_is_not_begun() {
    let mut world = World::new(10);
    // A batch takes 2.1 ms on the drives, and 0.5 ms on the link.
    world.prefetch(1, &[0, 1, 2, 3, 4], When::At(4 * MS));
    world.it.allocated(RequestId(1));
    world.until(4 * MS);
    let counts = world.it.counts();
    assert_eq!((counts.drives_bytes, counts.dropped), (3 * MB, 1), "one block can be");
    assert_eq!(world.run(1), Some(Missing { blocks: vec![2, 3], in_flight: vec![] }));
    assert_eq!((counts.link_bytes, world.it.counts().late_blocks), (3 * MB, 2));
}

#[test]
fn the_first_to_run_is_the_first_to_be_read() {
    let mut world = World::new(10);
    for (id, ms) in [(1, 40), (2, 10), (3, 20)] {
        world.prefetch(id, &[10 * id as u32, 10 * id as u32 + 1], When::At(ms * MS));
    }
    world.decide();
    let order: Vec<u64> = world.ends.values().map(|batch| batch.request.0).collect();
    assert_eq!(order.len(), 3);
    let mut ids: Vec<(OpId, u64)> =
        world.ends.iter().map(|((_, id), batch)| (*id, batch.request.0)).collect();
    ids.sort_unstable();
    assert_eq!(ids.iter().map(|(_, request)| *request).collect::<Vec<_>>(), [2, 3, 1]);
}

#[test]
fn a_time_that_was_said_again_is_the_one_that_counts() {
    let other = Op { id: OpId(1), flow: Flow::default(), bytes: MB, kind: Kind::Soon };
    let busy = || {
        let mut world = World::new(64);
        let config = Config { read_depth_bytes: 2 * MB, ..*world.drives.config() };
        world.drives = Scheduler::new(config, world.drives.table().clone());
        world.drives.add(other, world.now).unwrap();
        assert_eq!(world.drives.next(world.now), Decision::Start(OpId(1)));
        world
    };
    // Later: the first deadline passes without loss.
    let mut world = busy();
    world.prefetch(1, &[0, 1, 2, 3], When::At(30 * MS));
    world.decide();
    world.prefetch(1, &[0, 1, 2, 3], When::At(70 * MS));
    world.decide();
    world.now = 31 * MS;
    world.drives.ended(OpId(1), MB, world.now);
    world.until(60 * MS);
    assert_eq!((world.it.counts().dropped, world.tier.used()), (0, 4));
    // Sooner: it overtakes the request that was planned first, and takes 30 ms.
    let mut world = busy();
    world.prefetch(1, &(0..30).collect::<Vec<_>>(), When::At(60 * MS));
    world.prefetch(2, &[50, 51], When::At(75 * MS));
    world.decide();
    world.prefetch(2, &[50, 51], When::At(10 * MS));
    world.now = 2 * MS;
    world.drives.ended(OpId(1), MB, world.now);
    world.until(10 * MS);
    assert!(world.tier.contains(51));
}

#[test]
fn a_block_of_two_requests_is_read_once_and_kept_for_the_other_one() {
    let mut world = World::new(3);
    world.prefetch(1, &[0, 1], When::At(20 * MS));
    world.prefetch(2, &[0, 2], When::At(30 * MS));
    world.until(10 * MS);
    assert_eq!(world.it.counts().drives_bytes, 3 * MB);
    world.cancel(1);
    let classes = [0, 1, 2].map(|key| world.tier.class(key).unwrap());
    assert_eq!(classes, [Class::Expected, Class::Evictable, Class::Expected]);
    world.it.allocated(RequestId(2));
    world.until(30 * MS);
    assert!(world.run(2).unwrap().blocks.is_empty());
}

#[test]
fn an_aborted_request_moves_no_more_and_its_bytes_are_counted() {
    let mut world = World::new(10);
    world.prefetch(1, &[0, 1, 2, 3], When::At(50 * MS));
    world.it.allocated(RequestId(1));
    world.until(12 * MS);
    world.until(15 * MS);
    assert_eq!(world.it.counts().link_bytes, 4 * MB);
    world.prefetch(2, &(4..40).collect::<Vec<_>>(), When::At(50 * MS));
    world.decide();
    let before = world.it.counts();
    world.cancel(1);
    world.cancel(2);
    world.until(100 * MS);
    let counts = world.it.counts();
    assert_eq!(counts.drives_bytes, before.drives_bytes, "nothing is begun");
    assert_eq!((counts.wasted_link_bytes, world.it.pending()), (4 * MB, 0));
    assert_eq!((world.drives.pending(), world.link.pending()), (0, 0));
    // Blocks in flight for the aborted request are the first victims.
    for key in 100..110 {
        world.prefetch(u64::from(key), &[key], When::At(200 * MS));
    }
    world.until(125 * MS);
    world.until(150 * MS);
    assert!((100..110).all(|key| world.tier.contains(key)));
    assert_eq!(world.tier.counts().wasted_bytes, counts.drives_bytes - 4 * MB);
}

#[test]
fn a_full_tier_is_asked_again_only_when_the_request_is_announced_again() {
    let mut world = World::new(1);
    world.prefetch(1, &[0], When::At(10 * MS));
    world.prefetch(2, &[1], When::At(20 * MS));
    world.until(5 * MS);
    assert_eq!((world.it.counts().drives_bytes, world.tier.counts().refusals), (MB, 1));
    world.run(1);
    world.until(8 * MS);
    assert!(!world.tier.contains(1));
    world.prefetch(2, &[1], When::At(20 * MS));
    world.until(15 * MS);
    assert!(world.tier.contains(1));
}

#[test]
fn blocks_that_were_refused_do_not_make_the_drives_fast() {
    let mut world = World::new(1);
    let cost = |world: &World| world.drives.table().costs.read.duration(MB);
    let before = cost(&world);
    for id in 0..20 {
        let first = 2 * id as u32;
        world.prefetch(id, &[first, first + 1], When::At(world.now + 60 * MS));
        world.until(world.now + 100 * MS);
        world.cancel(id);
    }
    assert_eq!(world.it.counts().drives_bytes, 20 * MB, "one of two");
    assert_eq!(cost(&world), before);
}

#[derive(Debug, Clone)]
enum Event {
    Prefetch(u64, u32, u32, u64),
    Allocate(u64),
    Cancel(u64),
    Run(u64),
    End(bool),
    Pass(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let id = 0..6_u64;
    prop_oneof![
        4 => (id.clone(), 0..12_u32, 1..8_u32, 0..60_u64)
            .prop_map(|(id, first, blocks, ms)| Event::Prefetch(id, first, blocks, ms)),
        3 => id.clone().prop_map(Event::Allocate),
        2 => id.clone().prop_map(Event::Cancel),
        2 => id.prop_map(Event::Run),
        4 => proptest::bool::weighted(0.9).prop_map(Event::End),
        3 => (0..20_u64).prop_map(Event::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn everything_ends_and_nothing_is_held(
        events in prop::collection::vec(event(), 1..120),
        blocks in 0..12_u32,
    ) {
        let mut world = World::new(blocks);
        for event in events {
            match event {
                Event::Prefetch(id, first, blocks, ms) => {
                    let keys: Vec<u32> = (first..first + blocks).collect();
                    world.prefetch(id, &keys, When::At(world.now + Duration::from_millis(ms)));
                }
                Event::Allocate(id) => world.it.allocated(RequestId(id)),
                Event::Cancel(id) => world.cancel(id),
                Event::Run(id) => {
                    let in_flight = world.run(id).map_or(Vec::new(), |missing| missing.in_flight);
                    let is_moving = |id: &OpId| world.ends.keys().any(|(_, other)| other == id);
                    prop_assert!(in_flight.iter().all(is_moving));
                }
                Event::End(is_good) => {
                    world.end_first(is_good);
                }
                Event::Pass(ms) => world.now += Duration::from_millis(ms),
            }
            world.decide();
            prop_assert!(world.tier.used() <= blocks);
        }
        (0..6).for_each(|id| world.cancel(id));
        while world.end_first(true) {
            world.decide();
        }
        prop_assert_eq!(world.it.pending(), 0);
        prop_assert_eq!(world.drives.pending() + world.link.pending(), 0);
        let classes: Vec<Class> = (0..20).filter_map(|key| world.tier.class(key)).collect();
        prop_assert!(!classes.iter().any(|class| *class <= Class::Expected), "{:?}", classes);
    }
}
