//! Layers in order with an engine's streams, on a direct and on a staged pool. The GPU is a model
//! whose streams and moves do what the documentation of the traits promises, and nothing else.

#![allow(clippy::print_stdout, reason = "a failing test shows its seed")]

use crate::{rig, stack};

use std::{collections::BTreeSet, sync::mpsc::Receiver};

use gio_uring::{RawStream, Wait};
use nvme_driver::{Clock, Nanos};
use nvme_emu::{FaultAction, FaultPlan, FaultRule, FaultWhen, LbaRange};
use objstore::{
    BlockKey, Layer, LoadRequest, Order, Route, Store, StoreError, StoreRequest, Ticket,
};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};
use rig::{Rig, wait_all};
use ripieno_testkit::seeds;
use stack::{Plan, READ, blocks, keys, on};

/// Runs `test` on both paths with a pool on the GPU, with several orders of events each.
fn everywhere(test: impl Fn(&Plan, Route)) {
    for path in [Route::Direct, Route::Staged] {
        for seed in 1..=5 {
            test(&Plan { seed, ..Plan::default() }, path);
        }
    }
}

#[test]
fn every_byte_goes_there_and_back() {
    everywhere(|plan, path| {
        let mut rig = Rig::new(plan, path);
        let keys = keys(0..12);
        assert_eq!(rig.put(&keys, 0), 12);
        assert_eq!(rig.get(&keys, 40), 12, "{path}");
        let stats = rig.store.stats().unwrap();
        assert_eq!(stats.plane.path, path);
        // There and back, plus the proof's; one block is the self-test's.
        let objects = 2 * 13 * u64::from(rig.shape.rows());
        let proof = 2 * 2 * 2 * u64::from(rig.shape.segments);
        let moved = if path == Route::Staged { objects + proof } else { 0 };
        assert_eq!(rig.gpu.moved(), moved, "{path}");
        assert_eq!(rig.domain.refused(), 0);
    });
}

/// As in vLLM, all loads are started early, and each layer is awaited where it is used.
#[test]
fn a_load_that_was_started_early_is_joined_where_it_is_used() {
    everywhere(|plan, path| {
        let mut rig = Rig::new(plan, path);
        let keys = keys(0..9);
        rig.put(&keys, 0);
        let load = rig.load(&keys, 40);
        let (compute, other) = (rig.gpu.stream(1), rig.gpu.stream(2));
        rig.faults(Some(on(READ, FaultAction::Delay { ns: 20_000_000 })));
        let start = |layer| rig.store.start(&load, layer, Order::AfterStream(compute)).unwrap();
        let tickets: Vec<_> = (0..plan.shape.layers).map(Layer).map(start).collect();
        // Compute continues meanwhile.
        let nothing = rig.look(compute, 0, &[], Layer(0));
        rig.run(40);
        assert_eq!(nothing.try_recv(), Ok(true));
        assert!(rig.store.poll(&tickets[0]).unwrap().is_none(), "{path}: too fast to tell");
        let mut seen = Vec::new();
        for (ticket, layer) in tickets.iter().zip(rig.layers()) {
            rig.store.join(ticket, compute).unwrap();
            seen.push(rig.look(compute, 40, &keys, layer));
            rig.store.join(ticket, other).unwrap();
            seen.push(rig.look(other, 40, &keys, layer));
        }
        rig.run(10);
        seen.iter().for_each(|seen| assert!(seen.try_recv().is_err(), "{path}: saw it early"));
        assert!(rig.settle());
        seen.iter().for_each(|seen| assert_eq!(seen.try_recv(), Ok(true), "{path}"));
        // A layer that has ended can be joined as well.
        let last = rig.store.start(&load, Layer(0), Order::Unordered).unwrap();
        let deadline = rig.clock.now() + Nanos::from_millis(1000);
        while rig.store.poll(&last).unwrap().is_none() {
            rig.clock.pause(3, deadline);
        }
        rig.store.join(&last, other).unwrap();
        let seen = rig.look(other, 40, &keys, Layer(0));
        assert!(rig.settle());
        assert_eq!(seen.try_recv(), Ok(true));
        wait_all(&mut rig.store, tickets).unwrap();
    });
}

/// A request with nothing to move delays no stream.
#[test]
fn an_empty_layer_can_be_put_in_order() {
    everywhere(|plan, path| {
        let mut rig = Rig::new(plan, path);
        let keys = keys(0..4);
        rig.put(&keys, 0);
        let again = rig.store.allocate(&keys, &blocks(0, 4)).unwrap();
        assert_eq!(again.written(), 0);
        let compute = rig.gpu.stream(1);
        for layer in rig.layers() {
            let ticket = rig.store.start(&again, layer, compute).unwrap();
            rig.store.join(&ticket, compute).unwrap();
            rig.store.wait(ticket).unwrap();
        }
        rig.store.commit(again).unwrap();
        rig.run(20);
        assert!(rig.gpu.is_idle(), "{path}");
    });
}

#[test]
fn a_word_of_the_host_starts_a_layer() {
    everywhere(|plan, path| {
        let mut rig = Rig::new(plan, path);
        let keys = keys(0..9);
        rig.put(&keys, 0);
        let load = rig.load(&keys, 40);
        let wait = Wait { event: rig.store.plane().event().unwrap(), value: 3 };
        let ticket = rig.store.start(&load, Layer(0), &wait).unwrap();
        rig.run(300);
        assert!(!rig.holds(40, &keys, Layer(0)), "{path}");
        wait.event.set(3);
        rig.store.wait(ticket).unwrap();
        assert!(rig.holds(40, &keys, Layer(0)), "{path}");
        // An event of another store.
        let foreign = Rig::new(plan, path);
        let wait = Wait { event: foreign.store.plane().event().unwrap(), value: 0 };
        let error = rig.store.start(&load, Layer(1), &wait).unwrap_err();
        assert!(matches!(error, StoreError::Ring(_)), "{error}");
    });
}

/// A request that an engine has started and not yet waited for.
struct Pending {
    keys: Vec<BlockKey>,
    first: u32,
    /// Tickets, with the observation of a stream that waits for the layer.
    tickets: Vec<(Ticket, Option<Receiver<bool>>)>,
    /// Set for a save; `None` for a load.
    save: Option<StoreRequest>,
    /// Keeps a load's request alive.
    _load: Option<LoadRequest>,
}

/// An engine that saves and loads in random order, on any of its streams, some of them held up.
struct Engine {
    rig: Rig,
    rng: SmallRng,
    all: Vec<BlockKey>,
    stored: BTreeSet<BlockKey>,
    pending: Vec<Pending>,
    next_block: u32,
    gates: u32,
    faults: bool,
    checked: u32,
}

const REQUEST: usize = 5;

impl Engine {
    fn stream(&mut self) -> RawStream {
        // More streams than the store remembers.
        self.rig.gpu.stream(self.rng.random_range(1..100))
    }

    /// Sometimes holds up the stream until the engine waits for everything.
    fn hold_up(&mut self, stream: RawStream) {
        if self.rng.random_bool(0.3) {
            self.gates += 1;
            self.rig.gpu.gate(stream, self.gates);
        }
    }

    fn request(&mut self) -> (Vec<BlockKey>, u32) {
        if self.next_block as usize + REQUEST > self.rig.blocks as usize {
            self.wait_for_everything();
            self.next_block = 0;
        }
        let first = self.next_block;
        self.next_block += REQUEST as u32;
        let at = self.rng.random_range(0..5) * 4;
        (self.all[at..at + self.rng.random_range(1..=REQUEST)].to_vec(), first)
    }

    /// Starts a layer; if none that would make room ends by itself, waits for everything.
    fn start(
        &mut self,
        mut layer: impl FnMut(&mut Store) -> Result<Ticket, StoreError>,
    ) -> Option<Ticket> {
        match layer(&mut self.rig.store) {
            Err(StoreError::Busy { .. } | StoreError::StagingBusy { .. }) => {}
            other => return self.ok(other),
        }
        self.wait_for_everything();
        let again = layer(&mut self.rig.store);
        self.ok(again)
    }

    /// Accepts failures of requests if devices fail.
    fn ok<T>(&self, result: Result<T, StoreError>) -> Option<T> {
        match result {
            Ok(done) => Some(done),
            Err(
                StoreError::Transfer { .. }
                | StoreError::RequestFailed { .. }
                | StoreError::Forgotten,
            ) if self.faults => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Computes blocks on a stream, stores them, and overwrites the blocks as soon as allowed.
    fn save(&mut self) {
        let (keys, first) = self.request();
        let (stream, places) = (self.stream(), self.rig.places());
        self.hold_up(stream);
        let save = self.rig.store.allocate(&keys, &blocks(first, keys.len())).unwrap();
        let mut tickets = Vec::new();
        for layer in self.rig.layers() {
            let pairs: Vec<_> = keys.iter().copied().zip(blocks(first, keys.len())).collect();
            let computed = pairs.clone();
            self.rig.gpu.enqueue(stream, move |memory| {
                computed.iter().for_each(|(key, block)| places.fill(memory, *block, *key, layer));
            });
            let order = [Order::AfterStream, Order::InStream][self.rng.random_range(0..2)](stream);
            let Some(ticket) = self.start(|store| store.start(&save, layer, order)) else {
                // Abandoned with layers in flight.
                return;
            };
            let joins = self.rng.random_bool(0.5);
            if joins {
                self.rig.store.join(&ticket, stream).unwrap();
            }
            if joins || matches!(order, Order::InStream(_)) {
                self.rig.gpu.enqueue(stream, move |memory| {
                    pairs.iter().for_each(|(_, block)| places.wipe(memory, *block, layer));
                });
            }
            tickets.push((ticket, None));
        }
        let save = Some(save);
        self.pending.push(Pending { keys, first, tickets, save, _load: None });
    }

    /// Retrieves into blocks that a stream still uses, and has another stream check them.
    fn load(&mut self) {
        let (keys, first) = self.request();
        let (before, places) = (self.stream(), self.rig.places());
        let prefix = self.rig.store.lookup(&keys).unwrap();
        let found = keys[..prefix.len()].to_vec();
        assert!(found.iter().all(|key| self.stored.contains(key)), "never committed");
        let known = keys.iter().take_while(|key| self.stored.contains(key)).count();
        assert!(self.faults || known == found.len(), "a committed block is lost");
        self.hold_up(before);
        let load = self.rig.store.retrieve(&prefix, &blocks(first, found.len())).unwrap();
        drop(prefix);
        let mut tickets = Vec::new();
        for layer in self.rig.layers() {
            let used = blocks(first, found.len());
            self.rig.gpu.enqueue(before, move |memory| {
                used.iter().for_each(|block| places.wipe(memory, *block, layer));
            });
            let order = [Order::AfterStream, Order::InStream][self.rng.random_range(0..2)](before);
            let Some(ticket) = self.start(|store| store.start(&load, layer, order)) else {
                break;
            };
            let after = match order {
                Order::InStream(_) => before,
                _ => self.stream(),
            };
            if after != before {
                self.rig.store.join(&ticket, after).unwrap();
            }
            let looks = after != before || matches!(order, Order::InStream(_));
            let seen = looks.then(|| self.rig.look(after, first, &found, layer));
            tickets.push((ticket, seen));
        }
        let (keys, _load) = (found, Some(load));
        self.pending.push(Pending { keys, first, tickets, save: None, _load });
    }

    /// Opens all gates, waits for all tickets, and checks what the streams saw.
    fn wait_for_everything(&mut self) {
        self.rig.gpu.open(u32::MAX);
        for pending in std::mem::take(&mut self.pending) {
            let loads = pending._load.is_some();
            let mut seen = Vec::new();
            for (ticket, looked) in pending.tickets {
                let layer = ticket.layer;
                let waited = self.rig.store.wait(ticket);
                if self.ok(waited).is_some() && loads {
                    assert!(self.rig.holds(pending.first, &pending.keys, layer), "wrong bytes");
                    self.checked += 1;
                    seen.extend(looked);
                }
            }
            if let Some(save) = pending.save {
                let committed = self.rig.store.commit(save);
                if let Some(done) = self.ok(committed) {
                    let found = |key: &&BlockKey| self.rig.store.peek(&[**key]) == 1;
                    self.stored.extend(pending.keys[..done.accepted].iter().filter(found));
                }
            }
            assert!(self.rig.settle(), "a stream hangs");
            assert!(seen.iter().all(|seen| seen.try_recv() == Ok(true)), "a stream saw it early");
        }
        self.rig.store.plane().drain().unwrap();
        assert!(self.rig.settle(), "a stream hangs");
        self.gates = 0;
        self.rig.gpu.open(0);
    }
}

/// Saves and loads at random, with and without failing devices.
fn soak(seed: u64, path: Route, actions: &[FaultAction]) -> u32 {
    println!("seed {seed}, {path}, {actions:?}");
    let rig = Rig::new(&Plan { seed, ..Plan::default() }, path);
    let (rng, all) = (SmallRng::seed_from_u64(seed), keys(0..24));
    let (stored, pending, faults) = (BTreeSet::new(), Vec::new(), !actions.is_empty());
    let (next_block, gates, checked) = (0, 0, 0);
    let mut engine = Engine { rig, rng, all, stored, pending, next_block, gates, faults, checked };
    let data = engine.rig.store.superblock().data_region().unwrap();
    let data = LbaRange { first: data.first.0, count: u64::MAX >> 1 };
    let rule = |then: &FaultAction| {
        // Faults in data only: a failed journal ends all storing.
        let (admin, probability, lbas) = (Some(false), Some(0.01), Some(data));
        FaultRule::new(FaultWhen { admin, probability, lbas, ..FaultWhen::default() }, *then)
    };
    let rules: Vec<FaultRule> = actions.iter().map(rule).collect();
    let plan = FaultPlan { seed, rules, ..FaultPlan::default() };
    engine.rig.emus.iter().for_each(|emu| emu.set_faults(plan.clone()));
    for _ in 0..60 {
        match engine.rng.random_range(0..10) {
            0..4 => engine.save(),
            4..9 => engine.load(),
            _ => engine.wait_for_everything(),
        }
    }
    engine.wait_for_everything();
    assert_eq!(engine.rig.domain.refused(), 0);
    engine.rig.store.close().unwrap();
    engine.checked
}

#[test]
fn an_engine_sees_what_it_stored_whatever_its_streams_wait_for() {
    for path in [Route::Direct, Route::Staged] {
        let checked: u32 = seeds(1, 6).map(|seed| soak(seed, path, &[])).sum();
        assert!(checked > 100, "{path}: only {checked} layers");
    }
}

#[test]
fn no_stream_hangs_and_no_byte_is_wrong_when_devices_fail() {
    let actions = [
        FaultAction::Drop,
        FaultAction::WrongCid,
        FaultAction::Duplicate,
        FaultAction::Delay { ns: 300_000_000 },
        stack::READ_ERROR,
    ];
    for path in [Route::Direct, Route::Staged] {
        let checked: u32 = seeds(10_000, 6).map(|seed| soak(seed, path, &actions)).sum();
        assert!(checked > 20, "{path}: only {checked} layers");
    }
}
