//! A scheduler decides when layers move.

use crate::{schedule, stack};

use gio_uring::Progress;
use kv_schedule::{Config, Flow, StepId, StepShape};
use nvme_driver::{Clock, Nanos};
use nvme_emu::FaultAction;
use objstore::{Layer, LayerDone, Order, StoreError, Ticket};
use schedule::{pace, pending};
use stack::{Plan, READ, READ_ERROR, Stack, blocks, keys, on};

const FLOW: Flow = Flow { tenant: 0, request: 1 };

/// One read and one write at a time.
const ONE: fn() -> Config =
    || Config { read_depth_bytes: 1, write_depth_bytes: 1, ..Config::default() };

/// Advances the time until everything has ended, and returns the order of the ends.
fn finish(stack: &Stack) -> Vec<Ticket> {
    let mut ended = Vec::new();
    for idle in 0.. {
        ended.extend(stack.store.plane().advance().unwrap().ended);
        if pending(&stack.store) == 0 {
            break;
        }
        assert!(idle < 100_000, "{} operations never end", pending(&stack.store));
        stack.clock.pause(idle, Nanos::MAX);
    }
    ended
}

fn result(stack: &Stack, ticket: Ticket) -> Result<LayerDone, StoreError> {
    stack.store.poll(&ticket).map(|done| done.expect("it has ended"))
}

fn in_flight(stack: &Stack) -> usize {
    stack.store.plane().advance().unwrap().in_flight
}

fn layers(stack: &Stack) -> impl Iterator<Item = Layer> + use<> {
    (0..stack.shape.layers).map(Layer)
}

#[test]
fn reads_go_before_writes_that_wait_and_all_of_it_arrives() {
    let mut stack = Stack::new(&Plan::default());
    let (old, new) = (keys(0..8), keys(8..16));
    stack.put(&old, 0);
    pace(&stack.store, ONE());
    let save = stack.begin(&new, 8);
    let writes: Vec<Ticket> = layers(&stack)
        .map(|layer| stack.store.start(&save, layer, Order::Unordered).unwrap())
        .collect();
    assert_eq!(in_flight(&stack), 1, "nothing is in the first write's way");
    let prefix = stack.store.lookup(&old).unwrap();
    let targets = blocks(20, 8);
    targets.iter().for_each(|block| stack.wipe(*block));
    let load = stack.store.retrieve(&prefix, &targets).unwrap();
    let (step, now) = (StepId(1), stack.clock.now().duration());
    let plane = stack.store.plane().clone();
    let shape = StepShape::of([(512, 128)]);
    plane.with_scheduler(|it| it.announce(step, shape, now)).unwrap().unwrap();
    plane.assign(load.ticket(Layer(0)).job, FLOW, Some(step)).unwrap();
    // Requested in reverse order: a step needs its layers in theirs.
    let mut reads: Vec<Ticket> = layers(&stack)
        .map(|layer| Layer(stack.shape.layers - 1 - layer.0))
        .map(|layer| stack.store.start(&load, layer, Order::Unordered).unwrap())
        .collect();
    reads.reverse();
    let mut ended = Vec::new();
    for idle in 0..100_000 {
        let advanced = plane.advance().unwrap();
        ended.extend(advanced.ended);
        if reads.iter().all(|read| ended.contains(read)) {
            break;
        }
        let save = usize::from(!ended.contains(&writes[0]));
        assert_eq!(advanced.in_flight, 1 + save, "a read, and what was there before it");
        stack.clock.pause(idle, Nanos::MAX);
    }
    ended.extend(finish(&stack));
    let order = |of: &[Ticket]| -> Vec<Ticket> {
        ended.iter().filter(|ticket| of.contains(ticket)).copied().collect()
    };
    assert_eq!(order(&reads), reads);
    let after: Vec<Ticket> = reads.iter().chain(&writes[1..]).copied().collect();
    assert_eq!(order(&after), after, "reads came last, and are needed first");
    assert_eq!(ended.len(), reads.len() + writes.len());
    for ticket in ended {
        assert_eq!(result(&stack, ticket).unwrap().objects, 16);
    }
    for (key, block) in old.iter().zip(targets) {
        assert!(stack.holds(block, *key), "{block}");
    }
    stack.store.commit(save).unwrap();
    assert_eq!(stack.get(&new, 30), 8);
}

#[test]
fn nothing_moves_before_its_turn_and_nothing_of_an_abandoned_job() {
    let mut stack = Stack::new(&Plan::default());
    stack.put(&keys(0..4), 0);
    pace(&stack.store, ONE());
    let prefix = stack.store.lookup(&keys(0..4)).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(10, 4)).unwrap();
    let tickets: Vec<Ticket> = layers(&stack)
        .map(|layer| stack.store.start(&load, layer, Order::Unordered).unwrap())
        .collect();
    assert_eq!((in_flight(&stack), pending(&stack.store)), (1, tickets.len()));
    let again = stack.store.start(&load, Layer(2), Order::Unordered).unwrap_err();
    assert!(matches!(again, StoreError::InFlight { layer: Layer(2) }), "{again}");
    let before = stack.store.stats().unwrap().plane.ring.total.commands;
    drop(load);
    assert_eq!(pending(&stack.store), 1, "what is in flight ends");
    assert_eq!(finish(&stack), tickets[..1]);
    let moved = stack.store.stats().unwrap().plane.ring.total.commands - before;
    assert!(moved <= 4 * 2, "{moved} commands for one layer");
    assert_eq!(stack.store.stats().unwrap().files.active, 4, "of the prefix");
}

#[test]
fn a_layer_that_someone_waits_for_starts_at_once() {
    let mut stack = Stack::new(&Plan::default());
    stack.put(&keys(0..4), 0);
    pace(&stack.store, ONE());
    let prefix = stack.store.lookup(&keys(0..4)).unwrap();
    let targets = blocks(10, 4);
    targets.iter().for_each(|block| stack.wipe(*block));
    let load = stack.store.retrieve(&prefix, &targets).unwrap();
    let save = stack.begin(&keys(4..8), 4);
    let tickets: Vec<Ticket> = layers(&stack)
        .map(|layer| stack.store.start(&load, layer, Order::Unordered).unwrap())
        .collect();
    let stores: Vec<Ticket> = layers(&stack)
        .map(|layer| stack.store.start(&save, layer, Order::Unordered).unwrap())
        .collect();
    assert_eq!(in_flight(&stack), 1);
    // The last layer: it would have been the last one, by its turn.
    let last = *tickets.last().unwrap();
    stack.store.wait(last).unwrap();
    assert!(stack.store.poll(&tickets[1]).unwrap().is_none(), "its turn comes later");
    assert!(pending(&stack.store) >= stores.len(), "no write has ended");
    // The engine needs the blocks of the writes.
    stack.store.plane().hurry(stores[0].job).unwrap();
    let waiting = pending(&stack.store) - in_flight(&stack);
    assert!(waiting < tickets.len(), "{waiting} still wait");
    finish(&stack);
    for (key, block) in keys(0..4).iter().zip(targets) {
        assert!(stack.holds(block, *key), "{block}");
    }
    stack.store.commit(save).unwrap();
    assert_eq!(stack.get(&keys(4..8), 30), 4);
}

/// A job of writes ends in its turn, and one of reads as soon as possible.
#[test]
fn the_end_of_a_job_waits_for_layers_that_wait() {
    let mut stack = Stack::new(&Plan::default());
    stack.put(&keys(0..4), 0);
    pace(&stack.store, ONE());
    let save = stack.begin(&keys(4..8), 4);
    let prefix = stack.store.lookup(&keys(0..4)).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(10, 4)).unwrap();
    let reads: Vec<Ticket> = layers(&stack)
        .map(|layer| stack.store.start(&load, layer, Order::Unordered).unwrap())
        .collect();
    layers(&stack).for_each(|layer| _ = stack.store.start(&save, layer, Order::Unordered).unwrap());
    // It ends although nobody advances the pacer, and after all reads, which had their turn.
    stack.store.commit(save).unwrap();
    for read in reads {
        assert_eq!(result(&stack, read).unwrap().objects, 8);
    }
    assert_eq!(stack.get(&keys(4..8), 30), 4);
}

#[test]
fn more_than_may_wait_is_refused_and_a_failure_is_its_layers() {
    let mut stack = Stack::new(&Plan::default());
    stack.put(&keys(0..4), 0);
    // The backlog is limited to one layer of four blocks.
    let layer_bytes = 4 * 2 * 4096;
    pace(&stack.store, Config { backlog_bytes: layer_bytes, ..ONE() });
    let save = stack.begin(&keys(4..8), 4);
    stack.store.start(&save, Layer(0), Order::Unordered).unwrap();
    let full = stack.store.start(&save, Layer(1), Order::Unordered).unwrap_err();
    assert!(matches!(full, StoreError::Backlog(full) if full.limit == layer_bytes), "{full}");
    finish(&stack);
    drop(save);
    let prefix = stack.store.lookup(&keys(0..4)).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(10, 4)).unwrap();
    stack.faults(Some(on(READ, READ_ERROR)));
    let [first, second] =
        [0, 1].map(|n| stack.store.start(&load, Layer(n), Order::Unordered).unwrap());
    assert_eq!(finish(&stack), [first, second]);
    let error = result(&stack, first).unwrap_err();
    assert!(matches!(error, StoreError::Transfer { .. }), "{error}");
    // It waited, and was not started after that.
    let error = result(&stack, second).unwrap_err();
    assert!(matches!(error, StoreError::Transfer { failure } if failure.layer == Layer(0)));
}

#[test]
fn a_device_that_hangs_is_noticed_by_who_only_advances() {
    let mut stack = Stack::new(&Plan::default());
    stack.put(&keys(0..4), 0);
    pace(&stack.store, ONE());
    let prefix = stack.store.lookup(&keys(0..4)).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(10, 4)).unwrap();
    stack.faults(Some(on(READ, FaultAction::Drop)));
    let tickets: Vec<Ticket> = layers(&stack)
        .map(|layer| stack.store.start(&load, layer, Order::Unordered).unwrap())
        .collect();
    let mut ended = Vec::new();
    for idle in 0..200_000 {
        let advanced = stack.store.plane().advance().unwrap();
        ended.extend(advanced.ended);
        if ended.len() == tickets.len() {
            break;
        }
        let idle = if advanced.progress == Progress::Moved { 0 } else { idle };
        stack.clock.pause(idle, Nanos::MAX);
    }
    assert_eq!(ended.len(), tickets.len());
    tickets.iter().for_each(|ticket| drop(result(&stack, *ticket).unwrap_err()));
    stack.faults(None);
    assert_eq!(stack.get(&keys(0..4), 30), 4);
}

#[test]
fn a_store_that_is_closed_moves_what_waits_first() {
    let mut stack = Stack::new(&Plan::default());
    pace(&stack.store, ONE());
    let save = stack.begin(&keys(4..8), 4);
    layers(&stack).for_each(|layer| _ = stack.store.start(&save, layer, Order::Unordered).unwrap());
    let plane = stack.store.plane().clone();
    assert_eq!(pending(&stack.store), 3);
    let written = || stack.store.stats().unwrap().plane.stored_bytes;
    let before = written();
    stack.store.plane().drain().unwrap();
    assert_eq!((written() - before, pending(&stack.store)), (4 * stack.shape.block_bytes(), 0));
    stack.store.clone().close().unwrap();
    assert!(plane.advance().is_err());
    drop(save);
}

/// More layers are hurried than the plane has room for: a load goes before those that found none,
/// and a drain waits for all of them.
#[test]
fn loads_do_not_wait_for_saves_that_found_no_room() {
    let mut stack = Stack::new(&Plan::default());
    stack.put(&keys(0..4), 0);
    pace(&stack.store, Config::default());
    let mut saves = Vec::new();
    let mut writes = Vec::new();
    for number in 0..8 {
        let first = 10 + 4 * number;
        let save = stack.begin(&keys(first..first + 4), first);
        for layer in layers(&stack) {
            writes.push(stack.store.start(&save, layer, Order::Unordered).unwrap());
        }
        stack.store.plane().hurry(writes.last().unwrap().job).unwrap();
        saves.push(save);
    }
    assert!(writes.len() > Plan::default().options.iocbs as usize);
    let prefix = stack.store.lookup(&keys(0..4)).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(50, 4)).unwrap();
    let reads: Vec<Ticket> = layers(&stack)
        .map(|layer| stack.store.start(&load, layer, Order::Unordered).unwrap())
        .collect();
    stack.store.plane().hurry(reads[0].job).unwrap();
    let ended = finish(&stack);
    let last = |of: &[Ticket]| ended.iter().rposition(|ticket| of.contains(ticket));
    assert!(last(&reads) < last(&writes), "{ended:?}");
    assert_eq!(ended.len(), reads.len() + writes.len());
    for save in saves {
        assert_eq!(stack.store.commit(save).unwrap().written, 4);
    }

    let save = stack.begin(&keys(60..64), 10);
    let others: Vec<_> = (0..8).map(|n| stack.begin(&keys(70 + 2 * n..72 + 2 * n), 20)).collect();
    for save in others.iter().chain([&save]) {
        layers(&stack)
            .for_each(|layer| _ = stack.store.start(save, layer, Order::Unordered).unwrap());
    }
    stack.store.plane().drain().unwrap();
    assert_eq!((in_flight(&stack), pending(&stack.store)), (0, 0), "something waits");
    stack.store.commit(save).unwrap();
}
