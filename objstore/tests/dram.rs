//! The DRAM cache: hits need no reads and have the right bytes, and the devices have all blocks,
//! too.

mod stack;

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
    plan.options.dram_bytes = blocks * plan.shape.block_bytes();
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
    assert_eq!((stats.commands, stats.retrieved_bytes), (before.commands, 0));
    assert_eq!((stats.dram.retrieved_bytes, stats.dram.blocks), (6 * block, 6));

    // More than the cache has room for: the rest comes from the devices.
    assert_eq!(stack.put(&keys, 0), 20);
    assert_eq!(stack.get(&keys, 30), 20);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.dram.blocks, stats.dram.evictions > 0), (8, true));
    assert!(stats.retrieved_bytes >= 12 * block);
    assert_eq!(stats.dram.retrieved_bytes + stats.retrieved_bytes, 26 * block);
    // The blocks that were read are cached now, the head of the prefix first.
    assert_eq!(stack.get(&keys[..8], 30), 8);
    let stats = stack.store.stats().unwrap();
    assert_eq!(stack.get(&keys[..8], 30), 8);
    let again = stack.store.stats().unwrap();
    assert_eq!(again.retrieved_bytes, stats.retrieved_bytes);
    assert_eq!(stack.refused_dma(), 0);
}

#[test]
fn a_layer_says_what_was_moved_wherever_it_came_from() {
    let mut stack = Stack::new(&plan(2));
    let keys = keys(0..5);
    assert_eq!(stack.put(&keys, 0), 5);
    let prefix = stack.store.lookup(&keys).unwrap();
    let transfer = stack.store.retrieve(&prefix, &stack::blocks(30, 5)).unwrap();
    let ticket = stack.store.retrieve_layer(&transfer, objstore::Layer(1)).unwrap();
    let done = stack.store.wait(ticket).unwrap();
    assert_eq!((done.objects, done.bytes, done.device_bytes), (10, 10 * 4096, 6 * 4096));
}

#[test]
fn what_was_not_moved_well_is_not_kept() {
    let mut stack = Stack::new(&plan(8));
    let keys = keys(0..4);
    let writing = stack.begin(&keys, 0);
    stack.faults(Some(on(WRITE, WRITE_FAULT)));
    stack.write_all(&writing).unwrap_err();
    stack.faults(None);
    stack.store.commit(writing).unwrap_err();
    assert_eq!(stack.store.stats().unwrap().dram.blocks, 0);
    // Neither are incomplete ones.
    let writing = stack.begin(&keys, 0);
    let ticket = stack.store.store_layer(&writing, objstore::Layer(0)).unwrap();
    stack.store.wait(ticket).unwrap();
    drop(writing);
    assert_eq!(stack.store.stats().unwrap().dram.blocks, 0);
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
    stack.store.drain().unwrap();
    let before = stack.store.stats().unwrap();
    assert_eq!(before.dram.prefetched_bytes, 4 * block);
    assert_eq!((before.dram.blocks, before.files_referenced, before.blocks_hit), (4, 0, 0));
    assert_eq!(before.retrieved_bytes, 0);
    // Again: they are cached.
    assert_eq!(stack.store.prefetch(&old, soon).unwrap(), 4);
    stack.faults(Some(on(READ, READ_ERROR)));
    assert_eq!(stack.get(&old, 30), 4);
    stack.faults(None);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.commands, stats.dram.hits), (before.commands, 4));
    assert_eq!((stats.dram.prefetched_bytes, stats.dram.wasted_bytes), (4 * block, 0));
    // The blocks are protected for the caller, but not forever.
    stack.put(&keys(30..34), 0);
    assert_eq!(stack.get(&old, 30), 4);
    assert_eq!(stack.store.stats().unwrap().retrieved_bytes, 0);
    pass(&stack, soon);
    stack.put(&keys(40..44), 0);
    assert_eq!(stack.get(&old, 30), 4);
    assert_eq!(stack.store.stats().unwrap().retrieved_bytes, 4 * block);
    assert_eq!(stack.refused_dma(), 0);
}

#[test]
fn what_was_read_ahead_for_nothing_is_counted() {
    let mut stack = Stack::new(&plan(4));
    stack.put(&keys(0..4), 0);
    stack.put(&keys(10..14), 0);
    assert_eq!(stack.store.prefetch(&keys(0..2), Nanos(0)).unwrap(), 2);
    stack.store.drain().unwrap();
    pass(&stack, Nanos(1));
    stack.put(&keys(20..24), 0);
    let stats = stack.store.stats().unwrap();
    assert_eq!(stats.dram.wasted_bytes, 2 * stack.shape.block_bytes());
}

#[test]
fn what_could_not_be_read_ahead_is_not_kept_and_is_read_when_it_is_needed() {
    let mut stack = Stack::new(&plan(4));
    stack.put(&keys(0..4), 0);
    stack.put(&keys(10..14), 0);
    stack.faults(Some(on(READ, READ_ERROR)));
    assert_eq!(stack.store.prefetch(&keys(0..2), Nanos(0)).unwrap(), 2);
    stack.store.drain().unwrap();
    stack.faults(None);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.dram.prefetched_bytes, stats.dram.blocks, stats.files_lost), (0, 2, 0));
    assert_eq!(stats.files_referenced, 0);
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
    assert_eq!((stats.dram.blocks, stats.dram.misses, stats.retrieved_bytes), (0, 4, 4 * block));
    assert_eq!(stack.store.prefetch(&keys[..2], Nanos::from_millis(1000)).unwrap(), 2);
    stack.store.drain().unwrap();
    assert_eq!(stack.get(&keys, 30), 4);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.dram.blocks, stats.dram.hits, stats.retrieved_bytes), (2, 2, 6 * block));
    assert_eq!(stack.store.remove(&keys).unwrap(), 4);
    stack.put(&keys, 0);
    assert_eq!(stack.get(&keys, 30), 4);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.dram.blocks, stats.dram.hits), (0, 2));
}

#[test]
fn what_the_store_holds_no_more_takes_no_memory() {
    let mut stack = Stack::new(&plan(8));
    stack.put(&keys(0..6), 0);
    assert_eq!(stack.store.remove(&keys(0..4)).unwrap(), 4);
    stack.put(&keys(10..11), 0);
    assert_eq!(stack.store.stats().unwrap().dram.blocks, 3);
    // A file that is still referenced keeps its cached block.
    let prefix = stack.store.lookup(&keys(4..6)).unwrap();
    assert_eq!(stack.store.remove(&keys(4..6)).unwrap(), 2);
    assert_eq!(stack.get(&keys(10..11), 30), 1);
    assert_eq!(stack.store.stats().unwrap().dram.blocks, 3);
    drop(prefix);
    assert_eq!(stack.get(&keys(10..11), 30), 1);
    assert_eq!(stack.store.stats().unwrap().dram.blocks, 1);
}

/// Every byte is compared by [`Stack::get`]: a file that was evicted and rewritten must not be
/// served with its old bytes.
#[test]
fn files_that_are_reused_are_served_as_what_they_are() {
    // A cache smaller than the store, and a larger one.
    let modes = [DramMode::WriteThrough, DramMode::ReadAhead, DramMode::WriteBack];
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
            assert!(stack.store.stats().unwrap().dram.blocks as u64 <= room);
        }
        stack.store.sync_journal().unwrap();
        stack.store.drain().unwrap();
        let stats = stack.store.stats().unwrap();
        assert_eq!((stats.files_referenced, stats.dram.dirty), (0, 0));
        let has_all = room > 48 && mode != DramMode::ReadAhead;
        assert_eq!(stats.dram.prefetched_bytes > 0, !has_all, "seed {seed}: {stats:?}");
        let written_back = stats.dram.written_back_bytes > 0;
        assert_eq!(written_back, mode == DramMode::WriteBack, "seed {seed}: {stats:?}");
        assert!(stats.evictions > 0 && stats.dram.retrieved_bytes > 0, "seed {seed}: {stats:?}");
    }
}

#[test]
fn nothing_of_it_is_needed_after_a_crash() {
    for mode in [DramMode::WriteThrough, DramMode::WriteBack] {
        not_needed(mode);
    }
}

/// The cache is not needed for committed blocks that were written back, either.
fn not_needed(dram_mode: DramMode) {
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
                dram_bytes: 64 * shape.block_bytes(),
                dram_mode,
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
    if dram_mode == DramMode::WriteBack {
        // It is not permanent yet, and lost in a crash.
        std::mem::forget(stack);
        stack = open(false);
        assert_eq!(stack.get(&keys, 30), 0);
        assert_eq!(stack.put(&keys, 0), 10);
        stack.store.sync_journal().unwrap();
    }
    // The process ends without closing anything.
    std::mem::forget(stack);
    let mut stack = open(false);
    assert_eq!(stack.get(&keys, 30), 10);
    assert_eq!(stack.store.stats().unwrap().dram.retrieved_bytes, 0);
    // Closing makes all of it permanent.
    let more = ripieno_testkit::keys(20..30);
    assert_eq!(stack.put(&more, 0), 10);
    stack.store.close().unwrap();
    let mut stack = open(false);
    assert_eq!(stack.get(&more, 30), 10);
}

#[test]
fn what_cannot_be_is_refused() {
    let mut small = plan(1);
    small.options.dram_bytes -= 1;
    let refused = Stack::open(&small).err().unwrap().to_string();
    assert!(refused.contains("dram_bytes") && refused.contains("have no room"), "{refused}");
    let mut without = written_back(4);
    without.format.checksums = false;
    let refused = Stack::open(&without).err().unwrap().to_string();
    assert!(refused.contains("dram_mode") && refused.contains("checksums"), "{refused}");
    let mut stack = Stack::new(&plan(4));
    assert_eq!(stack.put(&keys(0..2), 0), 2);
    let prefix = stack.store.lookup(&keys(0..2)).unwrap();
    let transfer = stack.store.retrieve(&prefix, &stack::blocks(30, 2)).unwrap();
    let wait = gio_uring::Wait { event: stack.store.event().unwrap(), value: 1 };
    let order = Order::AfterEvent(&wait);
    let error = stack.store.retrieve_layer_on(&transfer, objstore::Layer(0), order).unwrap_err();
    assert!(matches!(error, StoreError::Config { field: "dram_bytes", .. }), "{error}");
}

/// Write-back: stored blocks are copied to memory, and written to the devices later.
fn written_back(blocks: u64) -> Plan {
    let mut plan = plan(blocks);
    plan.options.dram_mode = DramMode::WriteBack;
    plan
}

/// Storing continues write-back, even if that leaves no memory for more dirty blocks.
#[test]
fn what_has_no_room_is_written_through_and_others_are_written_back_meanwhile() {
    let mut stack = Stack::new(&written_back(16));
    let dirty = |stack: &Stack| stack.store.stats().unwrap().dram.dirty;
    assert_eq!((stack.put(&keys(0..8), 0), dirty(&stack)), (8, 8));
    let writing = stack.begin(&keys(8..16), 0);
    stack.write_all(&writing).unwrap();
    assert_eq!(dirty(&stack), 8, "the others are written through");
    stack.store.commit(writing).unwrap();
    assert_eq!(dirty(&stack), 0);
    assert_eq!((stack.put(&keys(16..24), 0), dirty(&stack)), (8, 8));
}

#[test]
fn what_is_stored_is_in_memory_before_a_device_has_it() {
    let mut stack = Stack::new(&written_back(16));
    let (keys, block) = (keys(0..6), stack.shape.block_bytes());
    let before = stack.store.stats().unwrap();
    let writing = stack.begin(&keys, 0);
    let ticket = stack.store.store_layer(&writing, objstore::Layer(1)).unwrap();
    let done = stack.store.poll(&ticket).unwrap().unwrap();
    assert_eq!((done.objects, done.bytes, done.device_bytes), (12, 12 * 4096, 0));
    stack.write_all(&writing).unwrap();
    // The engine may use its blocks again.
    stack::blocks(0, 6).into_iter().for_each(|block| stack.wipe(block));
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.commands, stats.stored_bytes, stats.dram.dirty), (before.commands, 0, 6));
    stack.store.commit(writing).unwrap();
    // It is found, and served, before it is written.
    stack.faults(Some(on(READ, READ_ERROR)));
    assert_eq!(stack.get(&keys, 30), 6);
    stack.faults(None);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.files_stored, stats.dram.dirty), (6, 6));
    stack.store.sync_journal().unwrap();
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.stored_bytes, stats.dram.written_back_bytes), (6 * block, 6 * block));
    assert_eq!((stats.dram.dirty, stats.dram.blocks), (0, 6));
    assert_eq!(stack.get(&keys, 30), 6);
    assert_eq!(stack.store.stats().unwrap().commands, stats.commands);
    // The devices have it, too: others replace it in the cache.
    let others = ripieno_testkit::keys(100..116);
    others.chunks(4).for_each(|others| _ = stack.put(others, 0));
    stack.store.sync_journal().unwrap();
    assert_eq!(stack.get(&others, 30), 16);
    assert_eq!(stack.get(&keys, 30), 6);
    assert!(stack.store.stats().unwrap().retrieved_bytes > 0);
    assert_eq!(stack.refused_dma(), 0);
}

/// Write-back of any number of requests delays later reads by no more than one batch.
#[test]
fn what_is_written_back_is_written_in_parts() {
    let mut plan = Plan::default();
    plan.shape.object_bytes = 256 << 10;
    plan.format = format(plan.shape);
    let block = plan.shape.block_bytes();
    (plan.options.dram_bytes, plan.options.dram_mode) = (40 * block, DramMode::WriteBack);
    let mut stack = Stack::new(&plan);
    let depth = kv_schedule::Config::default().write_depth_bytes / block;
    // One request is larger than a batch, the others are written together.
    for keys in [keys(0..8), keys(10..12), keys(20..23)] {
        assert_eq!(stack.put(&keys, 0), keys.len());
    }
    let written = |stack: &Stack| stack.store.stats().unwrap().dram.written_back_bytes / block;
    let mut parts = vec![written(&stack)];
    for idle in 0.. {
        stack.store.poll_events().unwrap();
        let before: u64 = parts.iter().sum();
        parts.extend(Some(written(&stack) - before).filter(|part| *part > 0));
        if stack.store.stats().unwrap().dram.dirty == 0 {
            break;
        }
        assert!(idle < 100_000, "{parts:?}, and never more");
        stack.clock.pause(idle % 4, Nanos::MAX);
    }
    assert_eq!((depth, parts), (5, vec![0, 5, 5, 3]));
    for keys in [keys(0..8), keys(10..12), keys(20..23)] {
        assert_eq!(stack.get(&keys, 30), keys.len());
    }
}

/// The limit holds for any number of requests at a time.
#[test]
fn at_most_half_of_the_memory_has_what_no_device_has() {
    for seed in seeds(1, 4) {
        let mut random = StdRng::seed_from_u64(seed);
        let mut stack = Stack::new(&Plan { seed, ..written_back(12) });
        let (mut open, mut most, mut through) = (Vec::new(), 0, 0);
        for n in 0..150 {
            let keys = keys(10 * n..10 * n + random.random_range(1..6));
            match random.random_range(0..8) {
                0..4 => {
                    let before = stack.store.stats().unwrap().stored_bytes;
                    let writing = stack.begin(&keys, 0);
                    stack.write_all(&writing).unwrap();
                    through += stack.store.stats().unwrap().stored_bytes - before;
                    open.push((writing, keys));
                }
                4 => open.clear(),
                _ if open.is_empty() => {}
                5 => drop(open.swap_remove(random.random_range(0..open.len()))),
                _ => {
                    let at = random.random_range(0..open.len());
                    let (writing, keys) = open.swap_remove(at);
                    stack.store.commit(writing).unwrap();
                    assert_eq!(stack.get(&keys, 30), keys.len());
                }
            }
            let dirty = stack.store.stats().unwrap().dram.dirty;
            assert!(dirty <= 6, "seed {seed}: {dirty}");
            most = most.max(dirty);
        }
        assert!(most == 6 && through > 0, "seed {seed}: at most {most}, {through} through");
        open.clear();
        stack.store.sync_journal().unwrap();
        assert_eq!(stack.store.stats().unwrap().dram.dirty, 0, "seed {seed}");
    }
}

#[test]
fn what_could_not_be_written_back_is_tried_again_and_then_a_miss() {
    let mut stack = Stack::new(&written_back(16));
    let (lucky, lost) = (keys(0..4), keys(10..14));
    stack.faults(Some(on(WRITE, WRITE_FAULT).limit(1)));
    assert_eq!(stack.put(&lucky, 0), 4);
    stack.store.sync_journal().unwrap();
    assert_eq!(stack.get(&lucky, 30), 4);
    // A fault in the data region affects writes by the I/O kernel, not those of the journal.
    let data = stack.data_lba();
    let lbas = Some(nvme_emu::LbaRange { first: data, count: 1 << 20 });
    let when =
        nvme_emu::FaultWhen { opcode: Some(WRITE), lbas, admin: Some(false), ..Default::default() };
    stack.faults(Some(nvme_emu::FaultRule::new(when, WRITE_FAULT)));
    assert_eq!(stack.put(&lost, 0), 4);
    assert_eq!(stack.get(&lost, 30), 4);
    let prefix = stack.store.lookup(&lost).unwrap();
    let error = stack.store.sync_journal().unwrap_err();
    assert!(matches!(error, StoreError::Transfer { .. }), "{error}");
    stack.faults(None);
    // A holder of the prefix gets an error.
    let error = stack.read(&prefix, 30).unwrap_err();
    assert!(matches!(error, StoreError::Stale { .. }), "{error}");
    drop(prefix);
    assert_eq!(stack.get(&lost, 30), 0);
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.dram.dirty, stats.dram.blocks, stats.files_writing), (0, 4, 0));
    assert_eq!(stats.files_free, stats.files - 4);
    assert_eq!(stack.put(&lost, 0), 4);
    stack.store.sync_journal().unwrap();
    assert_eq!(stack.get(&lost, 30), 4);
}

/// A lost command ends in a recovery of all controllers; blocks in memory survive it.
#[test]
fn what_was_being_written_back_is_not_lost_with_a_recovery() {
    let mut stack = Stack::new(&written_back(16));
    let keys = keys(0..6);
    stack.faults(Some(on(WRITE, nvme_emu::FaultAction::Drop).limit(1)));
    assert_eq!(stack.put(&keys, 0), 6);
    stack.store.sync_journal().unwrap();
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.recoveries, stats.files_stored, stats.dram.dirty), (1, 6, 0));
    assert_eq!(stack.get(&keys, 30), 6);
}

#[test]
fn what_is_dropped_before_it_was_written_is_not_written() {
    let mut stack = Stack::new(&written_back(16));
    let (old, new, block) = (keys(0..12), keys(20..24), stack.shape.block_bytes());
    // More than the limit of dirty blocks: it is written through.
    let busy = stack.begin(&old, 0);
    // While an engine waits for a transfer, nothing is written back.
    let slow = nvme_emu::FaultAction::Delay { ns: 50_000_000 };
    stack.faults(Some(on(WRITE, slow).limit(1)));
    let ticket = stack.store.store_layer(&busy, objstore::Layer(0)).unwrap();
    assert_eq!(stack.put(&new, 40), 4);
    assert_eq!(stack.store.remove(&new[..3]).unwrap(), 3);
    stack.store.wait(ticket).unwrap();
    drop(busy);
    stack.store.pin(&new[3..]).unwrap();
    stack.store.sync_journal().unwrap();
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.dram.spared_bytes, stats.dram.dirty), (3 * block, 0));
    assert_eq!((stats.dram.written_back_bytes, stack.get(&new[3..], 40)), (block, 1));
    assert_eq!(stack.store.usage().unwrap().pinned, 1);
    // Now all of the request is dropped.
    let busy = stack.begin(&old, 0);
    stack.faults(Some(on(WRITE, slow).limit(1)));
    let ticket = stack.store.store_layer(&busy, objstore::Layer(0)).unwrap();
    assert_eq!(stack.put(&new[..3], 40), 3);
    stack.store.clear().unwrap();
    stack.store.wait(ticket).unwrap();
    drop(busy);
    stack.store.drain().unwrap();
    let stats = stack.store.stats().unwrap();
    assert_eq!((stats.dram.spared_bytes, stats.dram.dirty), (6 * block, 0));
    assert_eq!(stats.dram.written_back_bytes, block);
    assert_eq!((stats.files_stored, stats.files_writing, stats.files_referenced), (0, 0, 0));
}

/// A waiting engine meanwhile prevents write-back.
#[test]
fn what_is_dropped_before_it_was_written_makes_room_and_is_not_written() {
    let mut plan = written_back(24);
    plan.format.capacity_bytes = Some(20 * plan.shape.block_bytes());
    let mut stack = Stack::new(&plan);
    let files = stack.store.stats().unwrap().files as usize;
    let (new, block) = (keys(20..24), stack.shape.block_bytes());
    // More than the limit of dirty blocks: it is written through.
    let busy = stack.begin(&keys(0..files as u32 - 4), 0);
    let slow = nvme_emu::FaultAction::Delay { ns: 50_000_000 };
    stack.faults(Some(on(WRITE, slow).limit(1)));
    let ticket = stack.store.store_layer(&busy, objstore::Layer(0)).unwrap();
    assert_eq!((stack.put(&new, 40), stack.store.remove(&new).unwrap()), (4, 4));
    assert_eq!(stack.put(&keys(30..34), 44), 4);
    let stats = stack.store.stats().unwrap().dram;
    assert_eq!((stats.spared_bytes, stats.written_back_bytes), (4 * block, 0));
    stack.store.wait(ticket).unwrap();
    drop(busy);
    stack.store.sync_journal().unwrap();
    assert_eq!(stack.get(&keys(30..34), 40), 4);
}

/// A store that is full of dirty blocks makes room.
#[test]
fn what_is_not_written_yet_makes_room() {
    let mut plan = written_back(32);
    plan.format.capacity_bytes = Some(8 * plan.shape.block_bytes());
    let mut stack = Stack::new(&plan);
    let files = stack.store.stats().unwrap().files;
    for n in 0..6 {
        let keys = keys(100 * n..100 * n + files);
        assert_eq!(stack.put(&keys, 0), files as usize, "time {n}");
        assert_eq!(stack.get(&keys, 30), files as usize);
    }
    assert_eq!(stack.store.stats().unwrap().evictions, u64::from(5 * files));
}
