use std::collections::HashSet;

use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use super::*;
use crate::{
    cost::{Curve, IoCosts},
    op::Flow,
    table::Setting,
};

const MS: Duration = Duration::from_millis(1);
const MB: u64 = 1_000_000;

fn table(mixed: f64) -> SlackTable {
    let names = ["model", "gpu", "engine"].map(str::to_owned);
    let [model, gpu, engine] = names;
    let curve = |bandwidth| Curve::line(Duration::from_micros(80), bandwidth).unwrap();
    let costs = IoCosts { read: curve(10e9), write: curve(5e9), mixed };
    let mut table = SlackTable::new(Setting { model, gpu, engine, drives: Vec::new() }, costs);
    (0..9).for_each(|_| table.learn(shape(), 5 * MS));
    table
}

fn shape() -> StepShape {
    StepShape::of([(2048, 8192)])
}

fn scheduler(config: Config) -> Scheduler {
    Scheduler::new(config, table(0.4))
}

fn op(id: u64, bytes: u64, kind: Kind) -> Op {
    Op { id: OpId(id), flow: Flow { tenant: 0, request: id }, bytes, kind }
}

fn layer(step: u64, layer: u32) -> Kind {
    Kind::Layer { step: StepId(step), layer }
}

/// Returns the operations that start now.
fn started(scheduler: &mut Scheduler, now: Duration) -> Vec<u64> {
    let mut started = Vec::new();
    while let Decision::Start(id) = scheduler.next(now) {
        started.push(id.0);
    }
    started
}

/// Ends an operation of which all bytes moved.
fn ended(scheduler: &mut Scheduler, id: OpId, now: Duration) {
    let bytes = scheduler.in_flight[&id].op.bytes;
    scheduler.ended(id, bytes, now);
}

#[test]
fn reads_start_by_deadline_and_no_more_of_them_than_keep_the_devices_busy() {
    let mut it = scheduler(Config { read_depth_bytes: 20 * MB, ..Config::default() });
    it.announce(StepId(1), shape(), 10 * MS);
    it.announce(StepId(2), shape(), 12 * MS);
    for (id, kind) in [(3, layer(1, 3)), (1, layer(1, 0)), (2, layer(2, 0)), (4, layer(2, 3))] {
        it.add(op(id, 10 * MB, kind), MS).unwrap();
    }
    assert_eq!(started(&mut it, MS), [1, 2]);
    ended(&mut it, OpId(1), 2 * MS);
    assert_eq!(started(&mut it, 2 * MS), [3]);
    ended(&mut it, OpId(2), 3 * MS);
    it.add(op(9, MB, Kind::Soon), 3 * MS).unwrap();
    assert_eq!(started(&mut it, 3 * MS), [9], "it is due before layer 3");
    ended(&mut it, OpId(3), 3 * MS);
    assert_eq!(started(&mut it, 3 * MS), [4]);
}

#[test]
fn a_write_goes_beside_a_read_only_where_the_read_takes_no_longer_for_it() {
    for (mixed, expected) in [(0.4, vec![1]), (1.0, vec![1]), (2.0, vec![1, 7])] {
        let mut it = Scheduler::new(Config::default(), table(mixed));
        it.add(op(1, MB, Kind::Soon), Duration::ZERO).unwrap();
        it.add(op(7, MB, Kind::Write), Duration::ZERO).unwrap();
        assert_eq!(started(&mut it, Duration::ZERO), expected, "{mixed}");
    }
}

#[test]
fn writes_go_when_reads_have_slack_and_never_beside_them() {
    let mut it = scheduler(Config { read_depth_bytes: 10 * MB, ..Config::default() });
    it.announce(StepId(1), shape(), Duration::ZERO);
    it.layer_begins(StepId(1), 0, Duration::ZERO);
    it.add(op(1, 10 * MB, layer(1, 1)), Duration::ZERO).unwrap();
    it.add(op(2, 10 * MB, layer(1, 9)), Duration::ZERO).unwrap();
    it.add(op(7, 5 * MB, Kind::Write), Duration::ZERO).unwrap();
    assert_eq!(started(&mut it, Duration::ZERO), [1], "the write is not beside a read");
    ended(&mut it, OpId(1), MS);
    assert_eq!(started(&mut it, MS), [2], "a read that may start does");
    ended(&mut it, OpId(2), 2 * MS);
    assert_eq!(started(&mut it, 2 * MS), [7]);
}

#[test]
fn a_second_write_goes_if_nobody_reads_and_a_read_would_wait_no_longer_than_for_reads() {
    let config =
        Config { read_depth_bytes: 41 * MB, write_depth_bytes: 10 * MB, ..Config::default() };
    let mut it = scheduler(config);
    // 10 MB take 2.08 ms, of which an eighth are 0.26 ms; 41 MB of reads 4.18 ms, both 4.08 ms.
    let near = MS + 1821 * MS / 1000;
    (1..=3).for_each(|id| it.add(op(id, 10 * MB, Kind::Write), MS).unwrap());
    assert_eq!(started(&mut it, MS), [1]);
    let Decision::Wait(Some(then)) = it.next(MS) else { panic!("it waits") };
    assert!((MS + 1819 * MS / 1000..near).contains(&then), "{then:?}");
    assert_eq!(started(&mut it, near), [2], "two, and not three");
    it.add(op(9, MB, Kind::Soon), near).unwrap();
    assert_eq!(started(&mut it, near), [9]);
    ended(&mut it, OpId(1), 3 * MS);
    ended(&mut it, OpId(9), 3 * MS);
    (10..=11).for_each(|id| it.add(op(id, 40 * MB, Kind::Soon), 3 * MS).unwrap());
    assert_eq!(started(&mut it, 9 * MS), [10], "no write while somebody reads");

    let others = [
        (op(2, 11 * MB, Kind::Write), "a read would wait for longer"),
        (op(2, MB, Kind::Prefetch { by: 900 * MS }), "what is prefetched has its turn"),
    ];
    for (other, why) in others {
        let mut it = scheduler(config);
        it.add(op(1, 10 * MB, Kind::Write), MS).unwrap();
        assert_eq!(started(&mut it, MS), [1]);
        it.add(other, MS).unwrap();
        it.add(op(3, 10 * MB, Kind::Write), MS).unwrap();
        assert_eq!(it.next(near), Decision::Wait(None), "{why}");
    }
}

#[test]
fn what_cannot_wait_in_memory_is_not_stored() {
    let mut it = scheduler(Config { backlog_bytes: 10 * MB, ..Config::default() });
    it.add(op(1, 6 * MB, Kind::Write), MS).unwrap();
    let full = BacklogFull { waiting: 6 * MB, bytes: 5 * MB, limit: 10 * MB };
    assert_eq!(it.add(op(2, 5 * MB, Kind::Write), MS), Err(full));
    assert_eq!(started(&mut it, MS), [1]);
    assert_eq!(it.add(op(2, 5 * MB, Kind::Write), MS), Err(full), "it is still in memory");
    ended(&mut it, OpId(1), 2 * MS);
    it.add(op(2, 5 * MB, Kind::Write), 2 * MS).unwrap();
    assert_eq!((it.counts().writes_refused, it.pending()), (2, 1));
}

#[test]
fn prefetches_are_in_time_or_not_at_all() {
    let mut it = scheduler(Config::default());
    it.add(op(1, 10 * MB, Kind::Prefetch { by: 10 * MS }), MS).unwrap();
    it.add(op(2, 10 * MB, Kind::Prefetch { by: 2 * MS }), MS).unwrap();
    assert_eq!(it.next(MS), Decision::Drop(OpId(2)));
    assert_eq!(it.next(MS), Decision::Start(OpId(1)));
    (0..2).for_each(|_| assert_eq!(it.cancel(OpId(1)), Cancelled::InFlight));
    ended(&mut it, OpId(1), 2 * MS);
    assert_eq!(it.counts().wasted_bytes, 10 * MB, "once");
    assert_eq!((it.cancel(OpId(1)), it.pending()), (Cancelled::Unknown, 0));
}

#[test]
fn busy_devices_do_not_prefetch_until_they_have_been_idle() {
    let mut it = scheduler(Config::default());
    it.add(op(1, MB, Kind::Soon), Duration::ZERO).unwrap();
    assert_eq!(started(&mut it, Duration::ZERO), [1]);
    ended(&mut it, OpId(1), 500 * MS);
    it.add(op(2, MB, Kind::Prefetch { by: 900 * MS }), 500 * MS).unwrap();
    let Decision::Wait(Some(then)) = it.next(500 * MS) else { panic!("it waits") };
    assert!((505 * MS..520 * MS).contains(&then), "{then:?}");
    assert_eq!(started(&mut it, then), [2]);
}

#[test]
fn prefetches_that_keep_coming_do_not_keep_writes_from_the_devices() {
    {
        let backlog_bytes = 10 * MB;
        let config = Config { read_depth_bytes: 20 * MB, backlog_bytes, ..Config::default() };
        let mut it = scheduler(config);
        let prefetch = |id| op(id, 8 * MB, Kind::Prefetch { by: 1000 * MS });
        (2..4).for_each(|id| it.add(prefetch(id), MS).unwrap());
        assert_eq!(started(&mut it, MS), [2, 3]);
        it.add(op(1, 8 * MB, Kind::Write), MS).unwrap();
        (4..6).for_each(|id| it.add(prefetch(id), MS).unwrap());
        ended(&mut it, OpId(2), 2 * MS);
        assert!(started(&mut it, 2 * MS).is_empty(), "a write waits for what is in flight");
        ended(&mut it, OpId(3), 3 * MS);
        assert_eq!(started(&mut it, 3 * MS), [1]);
        ended(&mut it, OpId(1), 30 * MS);
        assert_eq!(started(&mut it, 60 * MS), [4, 5]);
    }
}

#[test]
fn prefetches_do_not_wait_for_prefetches_and_none_is_dropped_that_may_be_in_time() {
    let mut it = scheduler(Config::default());
    for id in 0..500 {
        // 880 us of each millisecond.
        let now = id as u32 * MS;
        it.add(op(id, 8 * MB, Kind::Prefetch { by: 900 * MS }), now).unwrap();
        assert_eq!(started(&mut it, now), [id], "nothing else wants the devices");
        ended(&mut it, OpId(id), now + 880 * MS / 1000);
    }
    // It takes 1.08 ms, with the margin 1.35.
    it.add(op(500, 10 * MB, Kind::Prefetch { by: 501_200 * MS / 1000 }), 500 * MS).unwrap();
    assert_eq!(started(&mut it, 500 * MS), [500]);
}

#[test]
fn a_short_request_is_not_behind_a_long_one_and_tenants_get_the_same() {
    let mut it = scheduler(Config { read_depth_bytes: 1, ..Config::default() });
    let add = |it: &mut Scheduler, id, tenant, request, now| {
        let flow = Flow { tenant, request };
        it.add(Op { flow, ..op(id, MB, Kind::Soon) }, now).unwrap();
    };
    (0..1000).for_each(|id| add(&mut it, id, 0, 0, Duration::ZERO));
    let mut now = Duration::ZERO;
    let mut one = |it: &mut Scheduler| {
        let [id] = started(it, now)[..] else { panic!("one at a time") };
        now += MS / 5;
        ended(it, OpId(id), now);
        (id, now)
    };
    for _ in 0..100 {
        one(&mut it);
    }
    let (_, then) = one(&mut it);
    add(&mut it, 5000, 0, 1, then);
    let place = (0..).find(|_| one(&mut it).0 == 5000).unwrap();
    assert!(place < 400, "its place is {place}");
    // Nine requests of one tenant, one of another.
    let mut it = scheduler(Config { read_depth_bytes: 1, ..Config::default() });
    for id in 0..900 {
        add(&mut it, id, 0, id % 9, Duration::ZERO);
        add(&mut it, 1000 + id, 1, 0, Duration::ZERO);
    }
    let second = (0..400).filter(|_| one(&mut it).0 >= 1000).count();
    assert!((150..250).contains(&second), "{second} of 400");
}

#[test]
fn the_engine_teaches_the_table() {
    let mut it = scheduler(Config::default());
    it.announce(StepId(1), shape(), Duration::ZERO);
    for number in 0..9 {
        it.layer_begins(StepId(1), number, 8 * MS * number);
        it.layer_ends(StepId(1), 8 * MS * number + 7 * MS);
        it.layer_ends(StepId(1), 8 * MS * number + 8 * MS);
    }
    assert_eq!(it.table().layer(shape()), Some(7 * MS));
}

#[test]
fn what_did_not_move_teaches_nothing() {
    let mut it = scheduler(Config::default());
    for (moved, is_learned) in [(0, false), (9 * MB, false), (10 * MB, true)] {
        let before = it.table().costs.clone();
        it.add(op(1, 10 * MB, Kind::Soon), MS).unwrap();
        assert_eq!(started(&mut it, MS), [1]);
        it.ended(OpId(1), moved, MS + MS / 2);
        assert_eq!(it.table().costs != before, is_learned, "{moved} bytes");
    }
}

/// An engine and devices with random behaviour, and the invariants.
struct Chaos {
    it: Scheduler,
    config: Config,
    chance: StdRng,
    now: Duration,
    waiting: HashMap<OpId, Op>,
    flying: HashMap<OpId, Op>,
    steps: Vec<StepId>,
    next: u64,
}

impl Chaos {
    fn new(seed: u64) -> Self {
        let mut chance = StdRng::seed_from_u64(seed);
        let config = Config {
            read_depth_bytes: chance.random_range(1..40) * MB,
            write_depth_bytes: chance.random_range(1..20) * MB,
            backlog_bytes: chance.random_range(1..100) * MB,
            ..Config::default()
        };
        let it = Scheduler::new(config, table(if chance.random_bool(0.2) { 2.0 } else { 0.4 }));
        let (waiting, flying) = (HashMap::new(), HashMap::new());
        Self { it, config, chance, now: MS, waiting, flying, steps: Vec::new(), next: 0 }
    }

    fn add(&mut self) {
        self.next += 1;
        let step = self.steps.get(self.chance.random_range(0..=self.steps.len()));
        let kind = match (self.chance.random_range(0..4), step) {
            (0, Some(step)) => Kind::Layer { step: *step, layer: self.chance.random_range(0..8) },
            (1, _) => Kind::Prefetch { by: self.now + MS * self.chance.random_range(0..50) },
            (2, _) => Kind::Write,
            _ => Kind::Soon,
        };
        let flow = Flow { tenant: self.chance.random_range(0..3), request: self.next / 4 };
        let op = Op { flow, ..op(self.next, self.chance.random_range(1..10 * MB), kind) };
        match self.it.add(op, self.now) {
            Ok(()) => drop(self.waiting.insert(op.id, op)),
            Err(full) => assert!(full.waiting + full.bytes > self.config.backlog_bytes),
        }
    }

    fn happen(&mut self) {
        self.now += Duration::from_micros(self.chance.random_range(0..3000));
        match self.chance.random_range(0..10) {
            0..4 => self.add(),
            4 => {
                self.steps.push(StepId(self.next));
                let shape = StepShape::of([(self.chance.random_range(1..4096), 100)]);
                self.it.announce(StepId(self.next), shape, self.now + MS * 3);
            }
            5 if !self.steps.is_empty() => {
                let step = self.steps[self.chance.random_range(0..self.steps.len())];
                match self.chance.random_range(0..3) {
                    0 => self.it.layer_begins(step, self.chance.random_range(0..8), self.now),
                    1 => self.it.layer_ends(step, self.now),
                    _ => self.it.step_ends(step),
                }
            }
            6 => {
                let id = OpId(self.chance.random_range(0..=self.next));
                let wanted = match (self.waiting.remove(&id), self.flying.contains_key(&id)) {
                    (Some(_), _) => Cancelled::Pending,
                    (None, true) => Cancelled::InFlight,
                    (None, false) => Cancelled::Unknown,
                };
                assert_eq!(self.it.cancel(id), wanted);
            }
            _ => self.end_one(),
        }
    }

    fn end_one(&mut self) {
        // Sorted: the order of a hash map is not reproducible.
        let mut flying: Vec<OpId> = self.flying.keys().copied().collect();
        flying.sort_unstable();
        if !flying.is_empty() {
            let id = flying[self.chance.random_range(0..flying.len())];
            let op = self.flying.remove(&id).expect("it is in flight");
            let moved = if self.chance.random_bool(0.1) { 0 } else { op.bytes };
            self.it.ended(id, moved, self.now);
        }
    }

    fn bytes(&self, wanted: usize) -> (u64, usize) {
        let ops: Vec<&Op> = self.flying.values().filter(|op| lane(op.kind) == wanted).collect();
        (ops.iter().map(|op| op.bytes).sum(), ops.len())
    }

    /// Runs the scheduler until it waits. Returns the time it waits for.
    fn decide(&mut self) -> Option<Duration> {
        let mut seen = HashSet::new();
        loop {
            let reads = self.it.reads.len();
            match self.it.next(self.now) {
                Decision::Wait(until) => return until,
                Decision::Drop(id) => {
                    let op = self.waiting.remove(&id).expect("it waited");
                    assert!(matches!(op.kind, Kind::Prefetch { .. }));
                }
                Decision::Start(id) => {
                    assert!(seen.insert(id), "{id:?} starts twice");
                    let op = self.waiting.remove(&id).expect("it waited");
                    self.flying.insert(id, op);
                    self.check(op, reads);
                }
            }
        }
    }

    fn check(&self, op: Op, reads: usize) {
        let Config { read_depth_bytes, write_depth_bytes, .. } = self.config;
        let costs = &self.it.table.costs;
        let wanted = lane(op.kind);
        let (bytes, count) = self.bytes(wanted);
        let limit = [read_depth_bytes, write_depth_bytes, read_depth_bytes][wanted];
        if bytes > limit && count > 1 {
            assert!(op.kind == Kind::Write, "{bytes} bytes in flight, and {limit} may be");
            // The wait of a read that arrives now.
            let took = costs.write.duration(bytes);
            assert!(took <= costs.read.duration(read_depth_bytes), "{bytes} bytes take {took:?}");
            let is_idle = reads == 0 && self.flying.len() == 2;
            assert!(is_idle, "beyond {limit}: {count} writes, or somebody reads");
        }
        match op.kind {
            Kind::Write => {
                let is_alone = self.bytes(0).0 == 0 && reads == 0;
                assert!(is_alone || costs.mixes_well(), "a write beside a read, or before one");
            }
            Kind::Soon => {
                let mut others = self.waiting.values().filter(|other| other.kind == Kind::Soon);
                let first = others.all(|other| other.flow != op.flow || other.id > op.id);
                assert!(first, "reads of a request keep their order");
            }
            _ => {}
        }
    }

    /// Adds nothing more; every pending operation must end.
    fn finish(&mut self) {
        for step in self.steps.clone() {
            self.it.step_ends(step);
        }
        for _ in 0..100_000 {
            let until = self.decide();
            if self.it.pending() == 0 {
                assert!(self.waiting.is_empty() && self.flying.is_empty());
                assert_eq!(self.it.waiting_writes, 0);
                return;
            }
            if self.flying.is_empty() {
                let until = until.expect("what waits for nothing never starts");
                assert!(until > self.now, "it would be asked for ever");
                self.now = until;
            }
            self.now += MS;
            self.end_one();
        }
        panic!("{} operations never end", self.it.pending());
    }
}

#[test]
fn whatever_happens_limits_hold_and_everything_ends() {
    let schedules = if std::env::var_os("RIPIENO_SOAK").is_some() { 1_000_000 } else { 2_000 };
    for seed in 0..schedules {
        let mut chaos = Chaos::new(seed);
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..chaos.chance.random_range(1..150) {
                chaos.happen();
                chaos.decide();
            }
            chaos.finish();
        }));
        assert!(run.is_ok(), "seed {seed}");
    }
}
