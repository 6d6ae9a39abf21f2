//! The guarantees of a store, one by one, on the whole stack.

use crate::stack;

use std::time::Duration;

use gio_uring::Wait;
use nvme_driver::{Clock, Nanos};
use nvme_emu::{EmuConfig, FaultAction, SglSupport};
use objstore::{
    BlockId, FormatError, Geometry, KvShape, Layer, LayoutError, NewPin, Order, Outcome, PinLimits,
    Route, StoreError, StoreOptions,
};
use stack::{Plan, READ, Stack, blocks, keys, on};

#[test]
fn what_was_committed_is_found_and_every_byte_is_right() {
    let mut stack = Stack::new(&Plan::default());
    let keys = keys(0..20);
    assert_eq!(stack.put(&keys, 0), 20);
    assert_eq!(stack.get(&keys, 30), 20);
    // A prefix ends at the first key that differs.
    let mut other = keys.clone();
    other[7].0[0] ^= 1;
    assert_eq!(stack.get(&other, 30), 7);
    let stats = stack.store.stats().unwrap();
    let bytes = 20 * stack.shape.block_bytes();
    assert_eq!(
        (stats.plane.stored_bytes, stats.plane.retrieved_bytes),
        (bytes, bytes + bytes * 7 / 20)
    );
    assert_eq!((stats.lookups.calls, stats.lookups.blocks, stats.lookups.hits), (2, 40, 27));
    assert_eq!((stats.files.stored, stats.files_free()), (20, stats.files.files - 20));
    assert_eq!((stats.files.active, stats.files.free_runs), (0, 1));
    assert_eq!(stats.plane.path, Route::Host);
    assert_eq!(stack.refused_dma(), 0);
    // Adjacent files are merged: at best one command per layer, segment and device, and no more
    // doorbells than commands.
    let objects = (20 + 20 + 7) * u64::from(stack.shape.rows());
    assert!(
        stats.plane.ring.total.commands < objects / 2,
        "{} commands, {objects} objects",
        stats.plane.ring.total.commands
    );
    assert!(stats.plane.ring.total.sq_doorbells <= stats.plane.ring.total.commands);
}

#[test]
fn nothing_is_visible_before_the_commit_and_only_all_of_it_after() {
    let mut stack = Stack::new(&Plan::default());
    let keys = keys(0..6);
    let save = stack.begin(&keys, 0);
    assert_eq!((save.accepted(), save.written()), (6, 6));
    stack.write_all(&save).unwrap();
    assert_eq!(stack.store.lookup(&keys).unwrap().len(), 0);
    assert_eq!(stack.store.peek(&keys[..1]), 0);
    stack.store.commit(save).unwrap();
    assert_eq!(stack.get(&keys, 10), 6);
}

#[test]
fn a_commit_without_all_layers_is_refused_and_frees_the_files() {
    let mut stack = Stack::new(&Plan::default());
    let keys = keys(0..6);
    let layers = || (0..3).map(Layer);
    for missing in layers() {
        let save = stack.begin(&keys, 0);
        for layer in layers().filter(|layer| *layer != missing) {
            let _ = stack.store.start(&save, layer, Order::Unordered).unwrap();
        }
        let error = stack.store.commit(save).unwrap_err();
        let named = matches!(error, StoreError::Incomplete { layer } if layer == missing);
        assert!(named, "without layer {missing}: {error}");
        let stats = stack.store.stats().unwrap();
        assert_eq!((stats.files_free(), stats.files.writing), (stats.files.files, 0));
        assert_eq!(stack.get(&keys, 10), 0);
    }
}

#[test]
fn a_commit_waits_for_tickets_nobody_waited_for() {
    let mut stack = Stack::new(&Plan::default());
    let keys = keys(0..6);
    let save = stack.begin(&keys, 0);
    for layer in (0..stack.shape.layers).map(Layer) {
        let _ = stack.store.start(&save, layer, Order::Unordered).unwrap();
    }
    stack.store.commit(save).unwrap();
    assert_eq!(stack.get(&keys, 10), 6);
}

#[test]
fn a_key_is_stored_once() {
    let mut stack = Stack::new(&Plan::default());
    let all = keys(0..10);
    assert_eq!(stack.put(&all[..4], 0), 4);
    // Stored keys, one that another request is storing, one that occurs twice.
    let other = stack.begin(&all[8..9], 20);
    let mut request = all.clone();
    request.push(all[5]);
    let save = stack.begin(&request, 0);
    assert_eq!((save.accepted(), save.written()), (11, 5));
    stack.write_all(&save).unwrap();
    stack.store.commit(save).unwrap();
    // The other request has not committed.
    assert_eq!(stack.get(&all, 32), 8);
    stack.write_all(&other).unwrap();
    stack.store.commit(other).unwrap();
    assert_eq!(stack.get(&all, 32), 10);
    assert_eq!(stack.store.stats().unwrap().files.stored, 10);
    // All of it again: nothing to write.
    let again = stack.begin(&all, 0);
    assert_eq!((again.accepted(), again.written()), (10, 0));
    stack.write_all(&again).unwrap();
    assert_eq!(stack.store.commit(again).unwrap().written, 0);
    let stats = stack.store.stats().unwrap();
    assert_eq!(stats.plane.stored_bytes, 10 * stack.shape.block_bytes());
    assert_eq!(stats.files_free(), stats.files.files - 10);
}

#[test]
fn a_writing_that_relied_on_an_aborted_one_leaves_a_miss() {
    let mut stack = Stack::new(&Plan::default());
    let keys = keys(0..3);
    let first = stack.begin(&keys[..1], 0);
    let second = stack.begin(&keys, 10);
    assert_eq!((second.accepted(), second.written()), (3, 2));
    drop(first);
    stack.write_all(&second).unwrap();
    stack.store.commit(second).unwrap();
    assert_eq!(stack.get(&keys, 20), 0);
    assert_eq!(stack.store.peek(&keys[1..2]), 1);
    assert_eq!(stack.put(&keys[..1], 0), 1);
    assert_eq!(stack.get(&keys, 20), 3);
    assert_eq!(stack.store.stats().unwrap().files.stored, 3);
}

/// Returns a plan with 2 devices, groups of 4 files, 8 files in all.
fn tiny() -> Plan {
    let mut plan = Plan::default();
    plan.format.group = Some(4);
    plan.format.capacity_bytes = Some(8 * plan.shape.block_bytes());
    plan
}

#[test]
fn eviction_takes_what_was_unused_longest_and_tails_first() {
    let mut stack = Stack::new(&tiny());
    let (a, b, c) = (keys(0..4), keys(10..14), keys(20..22));
    stack.put(&a, 0);
    stack.put(&b, 0);
    assert_eq!(stack.get(&a, 20), 4);
    // Two files must be evicted: the tail of b.
    assert_eq!(stack.put(&c, 0), 2);
    assert_eq!(stack.get(&b, 20), 2);
    assert_eq!(stack.get(&a, 20), 4);
    assert_eq!(stack.get(&c, 20), 2);
    assert_eq!(stack.store.stats().unwrap().files.evicted, 2);
}

#[test]
fn referenced_files_stay() {
    let mut stack = Stack::new(&tiny());
    let (a, b, c) = (keys(0..4), keys(10..14), keys(20..30));
    stack.put(&a, 0);
    stack.put(&b, 0);
    let pinned = stack.store.lookup(&b[..3]).unwrap();
    let prefix = stack.store.lookup(&a).unwrap();
    // Only b's last file may be evicted; the request gets its head.
    assert_eq!(stack.put(&c, 0), 1);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.files.active, stats.files.evicted), (7, 1));
    stack.read(&prefix, 40).unwrap();
    drop(prefix);
    assert_eq!(stack.store.evict(100).unwrap(), 5);
    assert_eq!(stack.get(&b, 20), 3);
    drop(pinned);
    assert_eq!(stack.store.evict(100).unwrap(), 3);
    stack.store.sync_journal().unwrap();
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.files_free(), stats.files.free_runs), (8, 1));
}

#[test]
fn a_pin_whose_time_is_over_hinders_nobody() {
    let mut stack = Stack::new(&tiny());
    let (a, b) = (keys(0..6), keys(10..18));
    stack.put(&a, 0);
    let (ttl, namespaces) = (Duration::from_secs(60), &[stack.store.namespace()]);
    let new = NewPin { owner: 0, namespaces, keys: &a, ttl, bytes_max: None, wait: false };
    let limits = PinLimits { bytes: Some(u64::MAX), ..PinLimits::default() };
    for evict in [true, false] {
        stack.put(&a, 0);
        assert_eq!(stack.store.pin_for(&new, &limits).unwrap().outcome, Outcome::Accepted);
        assert_eq!((stack.store.evict(8).unwrap(), stack.put(&b, 0)), (0, 2));
        assert_eq!(stack.store.evict(2).unwrap(), 2);
        let end = stack.clock.now() + Nanos::from_millis(60_000);
        while stack.clock.now() < end {
            stack.clock.pause(u32::MAX, end);
        }
        // Nothing looked at the store meanwhile.
        match evict {
            true => assert_eq!(stack.store.evict(8).unwrap(), 6),
            false => assert_eq!(stack.put(&b, 0), 8),
        }
    }
}

#[test]
fn a_transfer_keeps_its_files_without_its_prefix() {
    let mut stack = Stack::new(&tiny());
    let (a, b) = (keys(0..4), keys(10..18));
    stack.put(&a, 0);
    let prefix = stack.store.lookup(&a).unwrap();
    let blocks = blocks(20, 4);
    let load = stack.store.retrieve(&prefix, &blocks).unwrap();
    drop(prefix);
    // There is room for four more blocks, but not for eight.
    assert_eq!(stack.store.evict(100).unwrap(), 0);
    assert_eq!(stack.put(&b, 0), 4);
    for layer in (0..stack.shape.layers).map(Layer) {
        let ticket = stack.store.start(&load, layer, Order::Unordered).unwrap();
        stack.store.wait(ticket).unwrap();
    }
    assert!(a.iter().zip(&blocks).all(|(key, block)| stack.holds(*block, *key)));
    drop(load);
    assert_eq!(stack.store.evict(100).unwrap(), 8);
}

/// When a client dies, jobs are abandoned that a call of it is about to end.
#[test]
fn jobs_that_end_together_with_one_that_was_abandoned_release_what_they_hold() {
    let mut stack = Stack::new(&Plan::default());
    let keys = keys(0..6);
    stack.put(&keys, 0);
    let prefix = stack.store.lookup(&keys).unwrap();
    let loads = [10, 20].map(|first| stack.store.retrieve(&prefix, &blocks(first, 6)).unwrap());
    let jobs = [&loads[0], &loads[1]].map(|load| load.ticket(Layer(0)).job);
    let error = stack.store.end(&[jobs[0], jobs[0]]).unwrap_err();
    assert!(error.to_string().starts_with(&format!("job {} was given", jobs[0].0)), "{error}");
    stack.store.plane().abandon(jobs[1]);
    let error = stack.store.end(&jobs).unwrap_err();
    assert!(error.to_string().starts_with(&format!("job {} was given", jobs[1].0)), "{error}");
    drop((loads, prefix));
    assert_eq!(stack.store.stats().unwrap().files.active, 0);
}

#[test]
fn a_request_does_not_evict_its_own_head() {
    let mut stack = Stack::new(&tiny());
    let (a, b) = (keys(0..6), keys(10..14));
    stack.put(&a[..4], 0);
    stack.put(&b, 0);
    // The head is the oldest in the store, and two files must be evicted.
    assert_eq!(stack.put(&a, 0), 6);
    assert_eq!(stack.get(&a, 20), 6);
    assert_eq!(stack.get(&b, 20), 2);
}

#[test]
fn a_layer_starts_only_after_its_event() {
    let mut stack = Stack::new(&Plan::default());
    let keys = keys(0..4);
    let blocks = blocks(0, 4);
    blocks.iter().for_each(|block| stack.wipe(*block));
    let event = stack.store.plane().event().unwrap();
    let save = stack.store.allocate(&keys, &blocks).unwrap();
    let mut tickets = Vec::new();
    for layer in 0..stack.shape.layers {
        let wait = Wait { event: event.clone(), value: layer + 1 };
        tickets.push(stack.store.start(&save, Layer(layer), &wait).unwrap());
    }
    for looks in 0..200 {
        stack.clock.pause(looks, Nanos::MAX);
        assert!(tickets.iter().all(|ticket| stack.store.poll(ticket).unwrap().is_none()));
    }
    // The engine computes only now, and signals each layer.
    keys.iter().zip(&blocks).for_each(|(key, block)| stack.fill(*block, *key));
    for (layer, ticket) in tickets.into_iter().enumerate() {
        event.set(layer as u32 + 1);
        stack.store.wait(ticket).unwrap();
    }
    stack.store.commit(save).unwrap();
    assert_eq!(stack.get(&keys, 20), 4);
}

#[test]
fn a_request_larger_than_the_store_gets_its_head_or_nothing() {
    let mut stack = Stack::new(&tiny());
    let all = keys(0..12);
    assert_eq!(stack.put(&all, 0), 8);
    assert_eq!(stack.get(&all, 20), 8);
    let held = stack.store.lookup(&all).unwrap();
    let none = stack.begin(&keys(50..52), 0);
    assert_eq!((none.accepted(), none.written()), (0, 0));
    stack.store.commit(none).unwrap();
    drop(held);
    // Hits beyond the point where the room ends are not kept.
    stack.store.remove(&all[..2]).unwrap();
    assert_eq!(stack.put(&keys(60..62), 0), 2);
    let held = stack.store.lookup(&keys(60..62)).unwrap();
    let pinned: Vec<_> = all[2..8].iter().map(|key| stack.store.lookup(&[*key]).unwrap()).collect();
    let none = stack.begin(&all, 0);
    assert_eq!((none.accepted(), none.written()), (0, 0));
    assert_eq!(stack.store.stats().unwrap().files.active, 8);
    drop((held, pinned));
}

#[test]
fn removed_keys_are_gone_but_not_under_a_reader() {
    let mut stack = Stack::new(&tiny());
    let all = keys(0..8);
    stack.put(&all, 0);
    let prefix = stack.store.lookup(&all).unwrap();
    let blocks = blocks(20, 8);
    let load = stack.store.retrieve(&prefix, &blocks).unwrap();
    assert_eq!(stack.store.remove(&all[..2]).unwrap(), 2);
    assert_eq!(stack.store.lookup(&all).unwrap().len(), 0);
    // Their files are not reused while the transfer reads them.
    let other = keys(30..34);
    assert_eq!(stack.put(&other, 40), 0);
    for layer in (0..stack.shape.layers).map(Layer) {
        let ticket = stack.store.start(&load, layer, Order::Unordered).unwrap();
        let done = stack.store.wait(ticket).unwrap();
        assert_eq!(done.objects, 8 * u64::from(stack.shape.segments));
        assert!(all.iter().zip(&blocks).all(|(key, block)| stack.kv.holds(*block, layer, *key, 0)));
    }
    // But a new transfer of them is refused.
    let stale = stack.store.retrieve(&prefix, &blocks).unwrap_err();
    assert!(matches!(stale, StoreError::Stale { position: 0, .. }), "{stale}");
    drop((prefix, load));
    assert_eq!(stack.put(&other, 40), 4);
    assert_eq!(stack.get(&other, 20), 4);
}

#[test]
fn part_of_a_prefix() {
    let mut stack = Stack::new(&Plan::default());
    let keys = keys(0..9);
    stack.put(&keys, 0);
    let prefix = stack.store.lookup(&keys).unwrap();
    let blocks = [BlockId(50), BlockId(33), BlockId(41)];
    let load = stack.store.retrieve_from(&prefix, 4, &blocks).unwrap();
    for layer in (0..stack.shape.layers).map(Layer) {
        let ticket = stack.store.start(&load, layer, Order::Unordered).unwrap();
        stack.store.wait(ticket).unwrap();
    }
    for (key, block) in keys[4..7].iter().zip(blocks) {
        assert!(stack.holds(block, *key));
    }
    let error = stack.store.retrieve_from(&prefix, 7, &blocks).unwrap_err();
    assert!(error.to_string().starts_with("3 blocks were given for 2 "), "{error}");
}

#[test]
fn handles_dropped_in_flight_are_drained_by_the_store() {
    let mut stack = Stack::new(&tiny());
    let (a, b) = (keys(0..4), keys(10..14));
    stack.put(&a, 0);
    for _ in 0..20 {
        let save = stack.begin(&b, 10);
        let _ = stack.store.start(&save, Layer(1), Order::Unordered).unwrap();
        drop(save);
        let prefix = stack.store.lookup(&a).unwrap();
        let load = stack.store.retrieve(&prefix, &blocks(20, 4)).unwrap();
        let ticket = stack.store.start(&load, Layer(0), Order::Unordered).unwrap();
        drop((prefix, load));
        stack.store.plane().drain().unwrap();
        let error = stack.store.wait(ticket).unwrap_err();
        assert!(matches!(error, StoreError::Ended { layer: Layer(0) }), "{error}");
    }
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.files_free(), stats.files.stored, stats.files.active), (4, 4, 0));
    assert_eq!(stack.get(&a, 20), 4);
}

#[test]
fn tickets_can_be_polled_and_layers_moved_in_any_order() {
    let mut stack = Stack::new(&Plan::default());
    let keys = keys(0..6);
    stack.put(&keys, 0);
    let prefix = stack.store.lookup(&keys).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(20, 6)).unwrap();
    for layer in [2, 0, 1, 1].map(Layer) {
        let ticket = stack.store.start(&load, layer, Order::Unordered).unwrap();
        let twice = stack.store.start(&load, layer, Order::Unordered).unwrap_err();
        assert!(matches!(twice, StoreError::InFlight { .. }), "{twice}");
        let mut looks = 0;
        while stack.store.poll(&ticket).unwrap().is_none() {
            stack.clock.pause(looks, Nanos::MAX);
            looks += 1;
            assert!(looks < 10_000);
        }
        assert_eq!(stack.store.wait(ticket).unwrap().layer, layer);
    }
    assert!(keys.iter().zip(blocks(20, 6)).all(|(key, block)| stack.holds(block, *key)));
}

#[test]
fn a_layer_waits_for_room_and_its_caller_is_told_if_there_is_none() {
    let mut plan = Plan::default();
    plan.options.iocbs = 2;
    // Before a command times out.
    plan.options.wait_timeout = Nanos::from_millis(50);
    let mut stack = Stack::new(&plan);
    let (keys, waits) =
        (keys(0..2), |stack: &Stack| stack.store.plane().stats().unwrap().times.slot_waits.count);
    stack.put(&keys, 0);
    let prefix = stack.store.lookup(&keys).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(20, 2)).unwrap();
    let before = waits(&stack);
    let tickets =
        [0, 1, 2].map(|at| stack.store.start(&load, Layer(at), Order::Unordered).unwrap());
    assert_eq!(waits(&stack), before + 1, "two layers are in flight at a time");
    let _ = tickets.map(|ticket| stack.store.wait(ticket).unwrap());

    stack.faults(Some(on(READ, FaultAction::Drop)));
    let stuck = [0, 1].map(|at| stack.store.start(&load, Layer(at), Order::Unordered).unwrap());
    let busy = stack.store.start(&load, Layer(2), Order::Unordered).unwrap_err();
    assert!(matches!(busy, StoreError::Busy { in_flight: 2 }), "{busy}");
    let _ = stuck.map(|ticket| stack.store.wait(ticket).unwrap_err());
    stack.faults(None);
    // The failure of a layer is the reason, not that another one found no room for so long.
    stack.put(&keys, 0);
    let prefix = stack.store.lookup(&keys).unwrap();
    let load = stack.store.retrieve(&prefix, &blocks(20, 2)).unwrap();
    stack.faults(Some(on(READ, FaultAction::Drop)));
    let error = stack.store.move_all(&load).unwrap_err();
    assert!(matches!(error, StoreError::Transfer { .. }), "{error}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let mut stack = Stack::new(&Plan::default());
    let mut other = Stack::new(&Plan::default());
    let keys = keys(0..2);
    stack.put(&keys, 0);
    let prefix = stack.store.lookup(&keys).unwrap();
    fn wrong<T>(result: Result<T, StoreError>) -> String {
        result.map(|_| ()).unwrap_err().to_string()
    }
    let twice = [BlockId(3), BlockId(3)];
    assert!(wrong(stack.store.retrieve(&prefix, &twice)).contains("destination of two"));
    let outside = [BlockId(3), BlockId(64)];
    assert!(wrong(stack.store.retrieve(&prefix, &outside)).contains("64 blocks are registered"));
    assert!(wrong(stack.store.retrieve(&prefix, &blocks(0, 3))).contains("3 blocks"));
    assert!(wrong(other.store.retrieve(&prefix, &blocks(0, 2))).contains("another store"));
    let load = stack.store.retrieve(&prefix, &blocks(0, 2)).unwrap();
    let layer = stack.store.start(&load, Layer(3), Order::Unordered).unwrap_err().to_string();
    assert!(layer.contains("layer 3") && layer.contains("has 3"), "{layer}");
    let ticket = stack.store.start(&load, Layer(0), Order::Unordered).unwrap();
    let foreign = other.store.wait(ticket).unwrap_err().to_string();
    assert!(foreign.contains("has ended"), "{foreign}");
    // A request of the other store with the same number.
    other.put(&keys, 0);
    let found = other.store.lookup(&keys).unwrap();
    let own = other.store.retrieve(&found, &blocks(8, 2)).unwrap();
    assert!(wrong(other.store.start(&load, Layer(0), Order::Unordered)).contains("another store"));
    let save = stack.store.allocate(&stack::keys(5..6), &blocks(9, 1)).unwrap();
    assert!(wrong(other.store.start(&save, Layer(0), Order::Unordered)).contains("another store"));
    assert!(wrong(other.store.commit(save)).contains("another store"));
    let ticket = other.store.start(&own, Layer(0), Order::Unordered).unwrap();
    other.store.wait(ticket).unwrap();
    let few = stack.store.allocate(&keys, &blocks(0, 1)).unwrap_err().to_string();
    assert!(few.contains("1 blocks were given for 2 keys"), "{few}");
}

#[test]
fn capacity_below_one_file_is_an_error_that_says_so() {
    let mut plan = Plan::default();
    let file = plan.shape.block_bytes();
    plan.format.capacity_bytes = Some(file - 1);
    let error = Stack::open(&plan).err().unwrap();
    let StoreError::Format(FormatError::Layout(LayoutError::TooSmall { needed, given, .. })) =
        error
    else {
        panic!("{error}");
    };
    assert_eq!((needed, given), (file, file - 1));
    plan.format.capacity_bytes = Some(file);
    let mut stack = Stack::open(&plan).unwrap();
    assert_eq!(stack.put(&keys(0..2), 0), 1);
    assert_eq!(stack.get(&keys(0..2), 10), 1);
}

#[test]
fn closing_gives_controllers_back_that_can_be_used_again() {
    let plan = Plan::default();
    let mut stack = Stack::new(&plan);
    stack.put(&keys(0..4), 0);
    let Stack { store, kv, clock, domain, emus, shape } = stack;
    let controllers = store.close().unwrap().controllers;
    assert_eq!(controllers.len(), 2);
    let store = objstore::Store::open(objstore::StoreConfig {
        devices: controllers.into_iter().map(objstore::StoreDevice::new).collect(),
        clock: clock.clone(),
        executor: ripieno_testkit::inline_executor(clock.clone()),
        shape,
        pool: kv.pool.clone(),
        gpu: None,
        options: plan.options,
        namespace: objstore::Namespace::default(),
    })
    .unwrap();
    let mut stack = Stack { store, shape, kv, domain, emus, clock };
    assert_eq!(stack.get(&keys(0..4), 10), 4, "the store is there again");
    stack.put(&keys(4..8), 0);
    assert_eq!(stack.get(&keys(0..8), 10), 8);
}

/// Shapes and drives with different requirements: padding with and without bit buckets, 512-byte
/// LBAs, objects larger than MDTS, one segment, PRPs, dword SGLs.
#[test]
fn every_shape_comes_back_as_it_was_from_every_drive() {
    let shape = |layers, segments, object_bytes| {
        let block_tokens = 16;
        KvShape { layers, segments, object_bytes, block_tokens }
    };
    let good: fn(&mut EmuConfig) = |_| {};
    let prp: fn(&mut EmuConfig) = |drive| drive.sgl = SglSupport::None;
    let plain: fn(&mut EmuConfig) = |drive| {
        (drive.sgl, drive.bit_bucket) = (SglSupport::Dword, false);
        drive.mdts_bytes = Some(64 << 10);
    };
    for (devices, lba_bytes, shape, drive) in [
        (1, 512, shape(2, 2, 512), good),
        (3, 4096, shape(2, 2, 4096), good),
        (2, 4096, shape(3, 1, 18 * 1024), good),
        (2, 4096, shape(2, 2, 6001), good),
        (1, 512, shape(1, 1, 516), good),
        (4, 4096, shape(1, 2, 640 * 1024), good),
        (2, 4096, shape(2, 2, 32 * 1024), prp),
        (1, 512, shape(2, 1, 4096), prp),
        (2, 4096, shape(2, 2, 6000), plain),
        (3, 512, shape(1, 2, 100 * 1024), plain),
    ] {
        let plan = Plan { devices, lba_bytes, shape, drive, ..Plan::default() };
        let mut stack = Stack::new(&plan);
        let geometry: Geometry = *stack.store.geometry();
        let wanted = keys(0..5);
        let stored = stack.put(&wanted, 3);
        assert!(stored > 0, "{geometry:?}");
        assert_eq!(stack.get(&wanted, 20), stored, "{geometry:?}");
        assert_eq!(stack.refused_dma(), 0);
    }
}

#[test]
fn a_pool_that_a_drive_cannot_describe_is_refused() {
    let prp: fn(&mut EmuConfig) = |drive| drive.sgl = SglSupport::None;
    let shape = KvShape { layers: 1, segments: 1, object_bytes: 6000, block_tokens: 16 };
    let error = Stack::open(&Plan { shape, drive: prp, ..Plan::default() }).err().unwrap();
    assert!(matches!(error, StoreError::Ring(_)), "{error}");
    assert!(error.to_string().contains("PRP"), "{error}");
}

#[test]
fn default_options_suit_a_default_controller() {
    let options = StoreOptions { virtual_time: true, ..StoreOptions::default() };
    let mut stack = Stack::new(&Plan { options, ..Plan::default() });
    assert_eq!(stack.put(&keys(0..4), 0), 4);
    assert_eq!(stack.get(&keys(0..4), 10), 4);
}
