//! A scheduler decides when layers move.

mod schedule;
mod stack;

use std::time::Duration;

use kv_schedule::{Cancelled, Config, Flow, Kind, OpId, StepId, StepShape};
use nvme_driver::{Clock, Nanos};
use objstore::{Layer, PacedEnd, PacedStore, StoreError};
use stack::{Plan, READ, READ_ERROR, Stack, blocks, keys, on};

const FLOW: Flow = Flow { tenant: 0, request: 1 };

fn paced(stack: &Stack, config: Config) -> PacedStore {
    PacedStore::new(stack.store.clone(), schedule::scheduler(config))
}

fn now(stack: &Stack) -> Duration {
    stack.clock.now().duration()
}

/// Advances the time until everything has ended, and returns the order of the ends.
fn finish(stack: &Stack, store: &mut PacedStore) -> Vec<(OpId, PacedEnd)> {
    let mut ended = Vec::new();
    for idle in 0.. {
        store.poll(now(stack)).unwrap();
        ended.extend(store.ended());
        if store.scheduler().pending() == 0 {
            break;
        }
        assert!(idle < 100_000, "{} operations never end", store.scheduler().pending());
        stack.clock.pause(idle, Nanos::MAX);
    }
    ended
}

fn layers(stack: &Stack) -> impl Iterator<Item = Layer> + use<> {
    (0..stack.shape.layers).map(Layer)
}

#[test]
fn what_goes_through_it_is_there_and_reads_go_before_writes() {
    let mut stack = Stack::new(&Plan::default());
    let (old, new) = (keys(0..8), keys(8..16));
    stack.put(&old, 0);
    // One read and one write at a time.
    let config = Config { read_depth_bytes: 1, write_depth_bytes: 1, ..Config::default() };
    let mut store = paced(&stack, config);
    let save = stack.begin(&new, 8);
    let mut writes = Vec::new();
    for layer in layers(&stack) {
        writes.push(store.store_layer(&save, layer, FLOW, now(&stack)).unwrap());
    }
    store.poll(now(&stack)).unwrap();
    assert_eq!(store.in_flight(), 1, "nothing is in the first write's way");
    let prefix = stack.store.lookup(&old).unwrap();
    let targets = blocks(20, 8);
    targets.iter().for_each(|block| stack.wipe(*block));
    let load = stack.store.retrieve(&prefix, &targets).unwrap();
    let step = StepId(1);
    store.announce(step, StepShape::of([(512, 128)]), now(&stack));
    let mut reads = Vec::new();
    for layer in layers(&stack) {
        let kind = Kind::Layer { step, layer: layer.0 };
        reads.push(store.retrieve_layer(&load, layer, FLOW, kind, now(&stack)).unwrap());
    }
    let mut ended: Vec<(OpId, PacedEnd)> = Vec::new();
    for idle in 0..100_000 {
        store.poll(now(&stack)).unwrap();
        ended.extend(store.ended());
        let has_ended = |id: &OpId| ended.iter().any(|(ended, _)| ended == id);
        let save = usize::from(!has_ended(&writes[0]));
        if reads.iter().all(has_ended) {
            break;
        }
        assert_eq!(store.in_flight(), 1 + save, "a read, and what was there before it");
        stack.clock.pause(idle, Nanos::MAX);
    }
    ended.extend(finish(&stack, &mut store));
    let order = |of: &[OpId]| -> Vec<OpId> {
        ended.iter().map(|(id, _)| *id).filter(|id| of.contains(id)).collect()
    };
    assert_eq!(order(&reads), reads);
    let after: Vec<OpId> = reads.iter().chain(&writes[1..]).copied().collect();
    assert_eq!(order(&after), after, "reads came last, and are needed first");
    assert_eq!(ended.len(), reads.len() + writes.len());
    for (_, end) in &ended {
        assert!(matches!(end, PacedEnd::Moved(done) if done.objects == 16), "{end:?}");
    }
    for (key, block) in old.iter().zip(targets) {
        assert!(stack.holds(block, *key), "{block}");
    }
    stack.store.commit(save).unwrap();
    assert_eq!(stack.get(&new, 30), 8);
}

#[test]
fn nothing_moves_before_it_may_and_a_layer_that_waits_can_be_called_off() {
    let mut stack = Stack::new(&Plan::default());
    stack.put(&keys(0..4), 0);
    let mut store = paced(&stack, Config { read_depth_bytes: 1, ..Config::default() });
    let prefix = stack.store.lookup(&keys(0..4)).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(10, 4)).unwrap();
    let ids: Vec<OpId> = layers(&stack)
        .map(|layer| store.retrieve_layer(&load, layer, FLOW, Kind::Soon, now(&stack)).unwrap())
        .collect();
    store.poll(now(&stack)).unwrap();
    assert_eq!((store.in_flight(), store.scheduler().pending()), (1, 3));
    assert_eq!(store.cancel(ids[0]), Cancelled::InFlight);
    assert_eq!(store.cancel(ids[2]), Cancelled::Pending);
    let ended: Vec<OpId> = finish(&stack, &mut store).into_iter().map(|(id, _)| id).collect();
    assert_eq!(ended, ids[..2]);
}

#[test]
fn more_than_may_wait_is_refused_and_a_failure_is_its_layers() {
    let mut stack = Stack::new(&Plan::default());
    stack.put(&keys(0..4), 0);
    // The backlog is limited to one layer of four blocks.
    let layer_bytes = 4 * 2 * 4096;
    let mut store = paced(&stack, Config { backlog_bytes: layer_bytes, ..Config::default() });
    let save = stack.begin(&keys(4..8), 4);
    store.store_layer(&save, Layer(0), FLOW, now(&stack)).unwrap();
    let full = store.store_layer(&save, Layer(1), FLOW, now(&stack)).unwrap_err();
    assert!(matches!(full, StoreError::Backlog(full) if full.limit == layer_bytes), "{full}");
    finish(&stack, &mut store);
    drop(save);
    let prefix = stack.store.lookup(&keys(0..4)).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(10, 4)).unwrap();
    stack.faults(Some(on(READ, READ_ERROR)));
    store.retrieve_layer(&load, Layer(0), FLOW, Kind::Soon, now(&stack)).unwrap();
    let ended = finish(&stack, &mut store);
    let [(_, PacedEnd::Failed(StoreError::Transfer { .. }))] = &ended[..] else {
        panic!("{ended:?}");
    };
    // A transfer that is dropped before its turn.
    store.retrieve_layer(&load, Layer(1), FLOW, Kind::Soon, now(&stack)).unwrap();
    drop(load);
    let ended = finish(&stack, &mut store);
    assert!(matches!(&ended[..], [(_, PacedEnd::Failed(_))]), "{ended:?}");
}
