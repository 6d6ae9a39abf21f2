//! The DRAM cache: hits need no reads and have the right bytes, and the devices have all blocks,
//! too.

use crate::stack;

use std::sync::Arc;

use nvme_driver::{Clock as _, Controller, ControllerOptions, Nanos};
use nvme_emu::{EmuConfig, EmuDomain, MemoryMedia, SimClock};
use objstore::{
    DramMode, KvShape, Namespace, Order, Store, StoreConfig, StoreDevice, StoreError, StoreOptions,
};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use ripieno_testkit::{Drives, KvMemory, format, inline_executor, seeds};
use stack::{Plan, READ, READ_ERROR, Stack, WRITE, WRITE_FAULT, keys, on};

fn plan(blocks: u64) -> Plan {
    let mut plan = Plan::default();
    plan.options.dram = blocks * plan.shape.block_bytes();
    plan
}

/// Advances the time.
fn pass(stack: &Stack, time: Nanos) {
    let until = stack.clock.now() + time;
    for idle in 0.. {
        if stack.clock.now() > until {
            break;
        }
        stack.clock.pause(idle, Nanos::MAX);
    }
}

#[test]
fn what_was_stored_or_retrieved_is_retrieved_without_a_command() {
    let mut stack = Stack::new(&plan(8));
    let keys = keys(0..20);
    let block = stack.shape.block_bytes();
    assert_eq!(stack.put(&keys[..6], 0), 6);
    let before = stack.store.stats().unwrap();
    // No read may reach a device.
    stack.faults(Some(on(READ, READ_ERROR)));
    assert_eq!(stack.get(&keys[..6], 30), 6);
    stack.faults(None);
    let stats = stack.store.stats().unwrap();
    assert_eq!(
        (stats.plane.ring.total.commands, stats.plane.retrieved_bytes),
        (before.plane.ring.total.commands, 0)
    );
    assert_eq!((stats.plane.dram.retrieved_bytes, stats.plane.dram.blocks), (6 * block, 6));

    // More than the cache has room for: the rest comes from the devices.
    assert_eq!(stack.put(&keys, 0), 20);
    assert_eq!(stack.get(&keys, 30), 20);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.plane.dram.blocks, stats.plane.dram.evictions > 0), (8, true));
    assert!(stats.plane.retrieved_bytes >= 12 * block);
    assert_eq!(stats.plane.dram.retrieved_bytes + stats.plane.retrieved_bytes, 26 * block);
    // The blocks that were read are cached now, the head of the prefix first.
    assert_eq!(stack.get(&keys[..8], 30), 8);
    let stats = stack.store.stats().unwrap();
    assert_eq!(stack.get(&keys[..8], 30), 8);
    let again = stack.store.stats().unwrap();
    assert_eq!(again.plane.retrieved_bytes, stats.plane.retrieved_bytes);
    assert_eq!(stack.refused_dma(), 0);
}

#[test]
fn a_layer_says_what_was_moved_wherever_it_came_from() {
    let mut stack = Stack::new(&plan(2));
    let keys = keys(0..5);
    assert_eq!(stack.put(&keys, 0), 5);
    let prefix = stack.store.lookup(&keys).unwrap();
    let load = stack.store.retrieve(&prefix, &stack::blocks(30, 5)).unwrap();
    let ticket = stack.store.start(&load, objstore::Layer(1), Order::Unordered).unwrap();
    let done = stack.store.wait(ticket).unwrap();
    assert_eq!((done.objects, done.bytes, done.device_bytes), (10, 10 * 4096, 6 * 4096));
}

#[test]
fn what_was_not_moved_well_is_not_kept() {
    let mut stack = Stack::new(&plan(8));
    let keys = keys(0..4);
    let save = stack.begin(&keys, 0);
    stack.faults(Some(on(WRITE, WRITE_FAULT)));
    stack.write_all(&save).unwrap_err();
    stack.faults(None);
    stack.store.commit(save).unwrap_err();
    assert_eq!(stack.store.stats().unwrap().plane.dram.blocks, 0);
    // Neither are incomplete ones.
    let save = stack.begin(&keys, 0);
    let ticket = stack.store.start(&save, objstore::Layer(0), Order::Unordered).unwrap();
    stack.store.wait(ticket).unwrap();
    drop(save);
    assert_eq!(stack.store.stats().unwrap().plane.dram.blocks, 0);
    assert_eq!(stack.put(&keys, 0), 4);
    assert_eq!(stack.get(&keys, 30), 4);
}

#[test]
fn what_was_prefetched_is_retrieved_without_a_command() {
    let mut stack = Stack::new(&plan(4));
    let (old, new, block) = (keys(0..4), keys(10..14), stack.shape.block_bytes());
    stack.put(&old, 0);
    stack.put(&new, 4);
    let soon = Nanos::from_millis(1000);
    let absent = stack.store.stats().unwrap();
    assert_eq!(stack.store.prefetch(&keys(20..24), soon).unwrap(), 0);
    assert_eq!(stack.store.stats().unwrap(), absent, "nothing is done for what is not stored");
    // Only the leading run, which ends at a miss.
    let asked = [old.clone(), keys(20..21), new.clone()].concat();
    assert_eq!(stack.store.prefetch(&asked, soon).unwrap(), 4);
    stack.store.plane().drain().unwrap();
    let before = stack.store.stats().unwrap();
    assert_eq!(before.plane.dram.prefetched_bytes, 4 * block);
    assert_eq!((before.plane.dram.blocks, before.files.active, before.lookups.hits), (4, 0, 0));
    assert_eq!(before.plane.retrieved_bytes, 0);
    // Again: they are cached.
    assert_eq!(stack.store.prefetch(&old, soon).unwrap(), 4);
    stack.faults(Some(on(READ, READ_ERROR)));
    assert_eq!(stack.get(&old, 30), 4);
    stack.faults(None);
    let stats = stack.store.stats().unwrap();
    assert_eq!(
        (stats.plane.ring.total.commands, stats.plane.dram.hits),
        (before.plane.ring.total.commands, 4)
    );
    assert_eq!((stats.plane.dram.prefetched_bytes, stats.plane.dram.wasted_bytes), (4 * block, 0));
    // The blocks are protected for the caller, but not forever.
    stack.put(&keys(30..34), 0);
    assert_eq!(stack.get(&old, 30), 4);
    assert_eq!(stack.store.stats().unwrap().plane.retrieved_bytes, 0);
    pass(&stack, soon);
    stack.put(&keys(40..44), 0);
    assert_eq!(stack.get(&old, 30), 4);
    assert_eq!(stack.store.stats().unwrap().plane.retrieved_bytes, 4 * block);
    assert_eq!(stack.refused_dma(), 0);
}

#[test]
fn what_was_read_ahead_for_nothing_is_counted() {
    let mut stack = Stack::new(&plan(4));
    stack.put(&keys(0..4), 0);
    stack.put(&keys(10..14), 0);
    assert_eq!(stack.store.prefetch(&keys(0..2), Nanos(0)).unwrap(), 2);
    stack.store.plane().drain().unwrap();
    pass(&stack, Nanos(1));
    stack.put(&keys(20..24), 0);
    let stats = stack.store.stats().unwrap();
    assert_eq!(stats.plane.dram.wasted_bytes, 2 * stack.shape.block_bytes());
}

#[test]
fn what_could_not_be_read_ahead_is_not_kept_and_is_read_when_it_is_needed() {
    let mut stack = Stack::new(&plan(4));
    stack.put(&keys(0..4), 0);
    stack.put(&keys(10..14), 0);
    stack.faults(Some(on(READ, READ_ERROR)));
    assert_eq!(stack.store.prefetch(&keys(0..2), Nanos(0)).unwrap(), 2);
    stack.store.plane().drain().unwrap();
    stack.faults(None);
    let stats = stack.store.stats().unwrap();
    assert_eq!(
        (stats.plane.dram.prefetched_bytes, stats.plane.dram.blocks, stats.lookups.files_lost),
        (0, 2, 0)
    );
    assert_eq!(stats.files.active, 0);
    assert_eq!(stack.get(&keys(0..4), 30), 4);
    assert_eq!(stack.get(&keys(10..14), 30), 4);
}

#[test]
fn only_what_is_read_ahead_is_kept_if_that_was_asked_for() {
    let mut plan = plan(4);
    plan.options.dram_mode = DramMode::ReadAhead;
    let mut stack = Stack::new(&plan);
    let (keys, block) = (keys(0..4), stack.shape.block_bytes());
    stack.put(&keys, 0);
    assert_eq!(stack.get(&keys, 30), 4);
    let stats = stack.store.stats().unwrap();
    assert_eq!(
        (stats.plane.dram.blocks, stats.plane.dram.misses, stats.plane.retrieved_bytes),
        (0, 4, 4 * block)
    );
    assert_eq!(stack.store.prefetch(&keys[..2], Nanos::from_millis(1000)).unwrap(), 2);
    stack.store.plane().drain().unwrap();
    assert_eq!(stack.get(&keys, 30), 4);
    let stats = stack.store.stats().unwrap();
    assert_eq!(
        (stats.plane.dram.blocks, stats.plane.dram.hits, stats.plane.retrieved_bytes),
        (2, 2, 6 * block)
    );
    assert_eq!(stack.store.remove(&keys).unwrap(), 4);
    stack.put(&keys, 0);
    assert_eq!(stack.get(&keys, 30), 4);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.plane.dram.blocks, stats.plane.dram.hits), (0, 2));
}

#[test]
fn what_the_store_holds_no_more_takes_no_memory() {
    let mut stack = Stack::new(&plan(8));
    stack.put(&keys(0..6), 0);
    assert_eq!(stack.store.remove(&keys(0..4)).unwrap(), 4);
    stack.put(&keys(10..11), 0);
    assert_eq!(stack.store.stats().unwrap().plane.dram.blocks, 3);
    // A file that is still referenced keeps its cached block.
    let prefix = stack.store.lookup(&keys(4..6)).unwrap();
    assert_eq!(stack.store.remove(&keys(4..6)).unwrap(), 2);
    assert_eq!(stack.get(&keys(10..11), 30), 1);
    assert_eq!(stack.store.stats().unwrap().plane.dram.blocks, 3);
    drop(prefix);
    assert_eq!(stack.get(&keys(10..11), 30), 1);
    assert_eq!(stack.store.stats().unwrap().plane.dram.blocks, 1);
}

/// Every byte is compared by [`Stack::get`]: a file that was evicted and rewritten must not be
/// served with its old bytes.
#[test]
fn files_that_are_reused_are_served_as_what_they_are() {
    // A cache smaller than the store, and a larger one.
    let modes = [DramMode::WriteThrough, DramMode::ReadAhead];
    let rooms = modes.into_iter().flat_map(|mode| [(12, mode), (60, mode)]);
    for (seed, (room, mode)) in seeds(1, 12).zip(rooms.cycle()) {
        let mut random = StdRng::seed_from_u64(seed);
        let mut plan = Plan { seed, ..plan(room) };
        plan.format.capacity_bytes = Some(48 * plan.shape.block_bytes());
        plan.options.dram_mode = mode;
        let mut stack = Stack::new(&plan);
        let all: Vec<_> = (0..12).map(|n| keys(100 * n..100 * n + 10)).collect();
        for _ in 0..120 {
            let keys = &all[random.random_range(0..all.len())];
            match random.random_range(0..8) {
                0 => drop(stack.store.remove(keys).unwrap()),
                1..4 => drop(stack.put(keys, 0)),
                // It is in flight when the next operation begins.
                4 => drop(stack.store.prefetch(keys, Nanos(random.random_range(0..1 << 20)))),
                _ => drop(stack.get(keys, 30)),
            }
            assert!(stack.store.stats().unwrap().plane.dram.blocks as u64 <= room);
        }
        stack.store.sync_journal().unwrap();
        stack.store.plane().drain().unwrap();
        let stats = stack.store.stats().unwrap();
        assert_eq!(stats.files.active, 0);
        let has_all = room > 48 && mode != DramMode::ReadAhead;
        assert_eq!(stats.plane.dram.prefetched_bytes > 0, !has_all, "seed {seed}: {stats:?}");
        assert!(
            stats.files.evicted > 0 && stats.plane.dram.retrieved_bytes > 0,
            "seed {seed}: {stats:?}"
        );
    }
}

#[test]
fn nothing_of_it_is_needed_after_a_crash() {
    let bytes = MemoryMedia::new(64 << 20).unwrap();
    let shape = KvShape { layers: 2, segments: 2, object_bytes: 4096, block_tokens: 16 };
    let open = |create: bool| {
        let clock = SimClock::new(1);
        let configs = vec![EmuConfig::new("drive").namespace(bytes.clone(), 4096)];
        let drives = Drives::simulated(EmuDomain::new("crash"), configs, &clock);
        let attach =
            |bus| Controller::attach(bus, clock.clone(), ControllerOptions::default()).unwrap();
        let devices = drives.buses().into_iter().map(attach).map(StoreDevice::new).collect();
        let kv = KvMemory::new(&*drives.domain, shape, 64);
        let config = StoreConfig {
            devices,
            clock: clock.clone(),
            executor: inline_executor(clock.clone()),
            shape,
            namespace: Namespace::default(),
            pool: kv.pool.clone(),
            gpu: None,
            options: StoreOptions {
                virtual_time: true,
                dram: 64 * shape.block_bytes(),
                ..StoreOptions::default()
            },
        };
        let store = match create {
            true => Store::create(config, &format(shape)),
            false => Store::open(config),
        };
        let (store, domain) = (store.unwrap(), Arc::clone(&drives.domain));
        Stack { store, shape, kv, domain, emus: Vec::new(), clock }
    };
    let keys = keys(0..10);
    let mut stack = open(true);
    assert_eq!(stack.put(&keys, 0), 10);
    // The process ends without closing anything.
    std::mem::forget(stack);
    let mut stack = open(false);
    assert_eq!(stack.get(&keys, 30), 10);
    assert_eq!(stack.store.stats().unwrap().plane.dram.retrieved_bytes, 0);
    let more = ripieno_testkit::keys(20..30);
    assert_eq!(stack.put(&more, 0), 10);
    stack.store.close().unwrap();
    let mut stack = open(false);
    assert_eq!(stack.get(&more, 30), 10);
}

#[test]
fn what_cannot_be_is_refused() {
    let mut small = plan(1);
    small.options.dram -= 1;
    let refused = Stack::open(&small).err().unwrap().to_string();
    assert!(refused.contains("dram") && refused.contains("have no room"), "{refused}");
    let mut stack = Stack::new(&plan(4));
    assert_eq!(stack.put(&keys(0..2), 0), 2);
    let prefix = stack.store.lookup(&keys(0..2)).unwrap();
    let load = stack.store.retrieve(&prefix, &stack::blocks(30, 2)).unwrap();
    let wait = gio_uring::Wait { event: stack.store.plane().event().unwrap(), value: 1 };
    let order = Order::AfterEvent(&wait);
    let error = stack.store.start(&load, objstore::Layer(0), order).unwrap_err();
    assert!(matches!(error, StoreError::Config { field: "dram", .. }), "{error}");
}
