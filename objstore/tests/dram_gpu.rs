//! The DRAM cache with a pool on a GPU: streams copy, in the layer's order.

use crate::{gpu, rig, schedule, stack};

use gpu::Defect;
use kv_schedule::Config;
use nvme_driver::{Clock as _, DmaSpace as _, Nanos};
use nvme_emu::FaultAction;
use objstore::{
    BlockId, BlockKey, DramMode, KvPool, Layer, LoadRequest, Order, Route, Row, Store, StoreError,
    Ticket,
};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};
use rig::{Rig, wait_all};
use ripieno_testkit::seeds;
use stack::{Plan, READ, READ_ERROR, WRITE, blocks, keys, on};

fn plan(blocks: u64, seed: u64) -> Plan {
    let mut plan = Plan { seed, ..Plan::default() };
    plan.options.dram = blocks * plan.shape.block_bytes();
    plan.options.wait_timeout = Nanos::from_millis(2_000);
    plan
}

/// Runs `test` on both paths with a pool on the GPU, with several orders of events each.
fn everywhere(room: u64, test: impl Fn(Rig, Route)) {
    for path in [Route::Direct, Route::Staged] {
        for seed in 1..=5 {
            test(Rig::new(&plan(room, seed), path), path);
        }
    }
}

#[test]
fn what_was_stored_or_read_is_retrieved_without_a_command() {
    everywhere(8, |mut rig, path| {
        let (keys, block) = (keys(0..14), rig.shape.block_bytes());
        assert_eq!(rig.put(&keys[..6], 0), 6);
        let before = rig.store.stats().unwrap();
        // No read may reach a device.
        rig.faults(Some(on(READ, READ_ERROR)));
        assert_eq!(rig.get(&keys[..6], 30), 6);
        rig.faults(None);
        let stats = rig.store.stats().unwrap();
        assert_eq!(
            (stats.plane.ring.total.commands, stats.plane.retrieved_bytes),
            (before.plane.ring.total.commands, 0),
            "{path}"
        );
        assert_eq!((stats.plane.dram.retrieved_bytes, stats.plane.dram.blocks), (6 * block, 6));

        // More than the cache has room for: a layer comes from both.
        assert_eq!(rig.put(&keys, 0), 14);
        assert_eq!(rig.get(&keys, 40), 14);
        let stats = rig.store.stats().unwrap();
        assert_eq!((stats.plane.dram.blocks, stats.plane.dram.evictions > 0), (8, true), "{path}");
        assert!(stats.plane.retrieved_bytes >= 6 * block, "{path}");
        assert_eq!(
            stats.plane.dram.retrieved_bytes + stats.plane.retrieved_bytes,
            20 * block,
            "{path}"
        );
        // The blocks that were read are cached now.
        assert_eq!(rig.get(&keys[..8], 30), 8);
        rig.faults(Some(on(READ, READ_ERROR)));
        assert_eq!(rig.get(&keys[..8], 40), 8);
        assert_eq!(rig.domain.refused(), 0);
    });
}

/// In this mode the engine's blocks take the link once.
#[test]
fn only_what_is_read_ahead_is_kept_if_that_was_asked_for() {
    for path in [Route::Direct, Route::Staged] {
        let mut plan = plan(8, 1);
        plan.options.dram_mode = DramMode::ReadAhead;
        let mut rig = Rig::new(&plan, path);
        let (keys, block) = (keys(0..6), rig.shape.block_bytes());
        let moved = rig.gpu.moved();
        rig.put(&keys, 0);
        assert_eq!(rig.get(&keys, 30), 6);
        assert_eq!(rig.gpu.moved() == moved, path == Route::Direct, "{path}: staged ones are");
        let stats = rig.store.stats().unwrap();
        assert_eq!(
            (stats.plane.dram.blocks, stats.plane.retrieved_bytes),
            (0, 6 * block),
            "{path}"
        );
        assert_eq!(rig.store.prefetch(&keys[..4], Nanos::from_millis(1000)).unwrap(), 4);
        rig.store.plane().drain().unwrap();
        assert_eq!(rig.get(&keys, 40), 6);
        let stats = rig.store.stats().unwrap();
        assert_eq!((stats.plane.dram.blocks, stats.plane.dram.hits), (4, 4), "{path}");
        assert_eq!(stats.plane.retrieved_bytes, 8 * block, "{path}");
    }
}

#[test]
fn a_layer_says_what_was_moved_wherever_it_came_from() {
    everywhere(2, |mut rig, path| {
        let keys = keys(0..5);
        assert_eq!(rig.put(&keys, 0), 5);
        let load = rig.load(&keys, 30);
        let ticket = rig.store.start(&load, Layer(1), Order::Unordered).unwrap();
        let done = rig.store.wait(ticket).unwrap();
        assert_eq!((done.objects, done.bytes), (10, 10 * 4096), "{path}");
    });
}

/// Hits and misses alike wait for work enqueued before, and work enqueued later waits for them.
#[test]
fn hits_are_in_the_order_of_the_stream() {
    for room in [3, 20] {
        everywhere(room, |mut rig, path| {
            let (old, new) = (keys(0..9), keys(20..29));
            rig.put(&old, 0);
            let [compute, other] = [1, 2].map(|n| rig.gpu.stream(n));
            let load = rig.load(&old, 40);
            // The blocks are in use until the gate opens: nothing may be written there.
            rig.fill(40, &new);
            rig.gpu.gate(compute, 1);
            let used = rig.look(compute, 40, &new, Layer(0));
            let first = rig.store.start(&load, Layer(0), compute).unwrap();
            let seen = rig.look(compute, 40, &old, Layer(0));
            let order = Order::AfterStream(compute);
            let second = rig.store.start(&load, Layer(1), order).unwrap();
            rig.store.join(&second, other).unwrap();
            let joined = rig.look(other, 40, &old, Layer(1));
            rig.run(30);
            assert!(rig.holds(40, &new, Layer(0)) && rig.holds(40, &new, Layer(1)), "{path}");
            assert!(seen.try_recv().is_err() && joined.try_recv().is_err(), "{path}: early");
            assert!(rig.store.poll(&first).unwrap().is_none());
            rig.gpu.open(1);
            assert!(rig.settle(), "{path}");
            for seen in [used, seen, joined] {
                assert_eq!(seen.try_recv(), Ok(true), "{path}, room {room}");
            }
            wait_all(&mut rig.store, vec![first, second]).unwrap();
        });
    }
}

#[test]
fn a_word_of_the_host_starts_a_layer() {
    for room in [3, 20] {
        everywhere(room, |mut rig, path| {
            let keys = keys(0..9);
            rig.put(&keys, 0);
            let load = rig.load(&keys, 40);
            let wait = gio_uring::Wait { event: rig.store.plane().event().unwrap(), value: 3 };
            let order = Order::AfterEvent(&wait);
            let ticket = rig.store.start(&load, Layer(0), order).unwrap();
            let event = wait.event.clone();
            drop(wait);
            rig.run(30);
            assert!(!rig.holds(40, &keys[8..], Layer(0)), "{path}");
            assert!(rig.store.poll(&ticket).unwrap().is_none());
            event.set(3);
            // A later stream still reads the event, so it must not be reused.
            drop(event);
            let other = rig.store.plane().event().unwrap();
            rig.store.wait(ticket).unwrap();
            assert!(rig.holds(40, &keys, Layer(0)), "{path}");
            assert!(!other.reached(1));
        });
    }
}

/// Starts all layers, and has the stream overwrite the blocks from `at` on as soon as it may: the
/// layer's order makes it wait, or a join does (`joined`).
fn overwritten(
    rig: &mut Rig,
    joined: bool,
    at: u32,
    new: &[BlockKey],
    start: impl Fn(&Store, Layer, Order<'_>) -> Result<Ticket, StoreError>,
) -> Vec<Ticket> {
    let compute = rig.gpu.stream(1);
    let layer = |layer| {
        let order = match joined {
            true => Order::AfterStream(compute),
            false => Order::InStream(compute),
        };
        let ticket = start(&rig.store, layer, order).unwrap();
        if joined {
            rig.store.join(&ticket, compute).unwrap();
        }
        let (places, new) = (rig.places(), new.to_vec());
        rig.gpu.enqueue(compute, move |memory| {
            let all = new.iter().zip(blocks(at, new.len()));
            all.for_each(|(key, block)| places.fill(memory, block, *key, layer));
        });
        ticket
    };
    rig.layers().map(layer).collect()
}

/// The engine overwrites its blocks as soon as the stream allows it: the cache keeps the bytes from
/// before.
#[test]
fn what_is_kept_was_copied_before_the_blocks_are_used_again() {
    for joined in [false, true] {
        everywhere(20, |mut rig, path| {
            let (stored, new) = (keys(0..6), keys(20..26));
            rig.fill(0, &stored);
            let save = rig.store.allocate(&stored, &blocks(0, 6)).unwrap();
            let tickets = overwritten(&mut rig, joined, 0, &new, |store, layer, order| {
                store.start(&save, layer, order)
            });
            wait_all(&mut rig.store, tickets).unwrap();
            rig.store.commit(save).unwrap();
            assert!(rig.settle());
            rig.faults(Some(on(READ, READ_ERROR)));
            assert_eq!(rig.get(&stored, 40), 6, "{path}");
            assert_eq!(rig.store.stats().unwrap().plane.retrieved_bytes, 0);
            rig.faults(None);
            // The devices have them, too.
            let others = keys(40..60);
            others.chunks(5).for_each(|others| _ = rig.put(others, 10));
            assert_eq!(rig.get(&others[..10], 40) + rig.get(&others[10..], 40), 20, "{path}");
            assert_eq!(rig.get(&stored, 40), 6, "{path}");
            assert!(rig.store.stats().unwrap().plane.retrieved_bytes > 0);
        });
    }
}

/// The same for a read: its bytes are cached although the stream goes on.
#[test]
fn what_is_read_is_kept_as_it_was_read() {
    for joined in [false, true] {
        everywhere(6, |mut rig, path| {
            let (stored, new) = (keys(0..6), keys(20..26));
            rig.put(&stored, 0);
            rig.put(&keys(40..46), 0);
            let load = rig.load(&stored, 40);
            let tickets = overwritten(&mut rig, joined, 40, &new, |store, layer, order| {
                store.start(&load, layer, order)
            });
            wait_all(&mut rig.store, tickets).unwrap();
            drop(load);
            assert!(rig.settle());
            let before = rig.store.stats().unwrap();
            assert_eq!(before.plane.retrieved_bytes, 6 * rig.shape.block_bytes(), "{path}");
            rig.faults(Some(on(READ, READ_ERROR)));
            assert_eq!(rig.get(&stored, 50), 6, "{path}");
        });
    }
}

/// A block of cache memory is reused only when no stream reads or writes it any more.
#[test]
fn memory_is_reused_only_behind_the_stream_that_uses_it() {
    everywhere(4, |mut rig, path| {
        let (old, new) = (keys(0..4), keys(10..14));
        rig.put(&old, 0);
        let late = rig.gpu.stream(1);
        rig.gpu.gate(late, 1);
        let load = rig.load(&old, 40);
        rig.store.start(&load, Layer(0), late).unwrap();
        // All of the cache is being read: nothing else gets in.
        rig.put(&new, 8);
        assert_eq!(rig.store.stats().unwrap().plane.dram.evictions, 0, "{path}");
        drop(load);
        rig.run(10);
        rig.put(&keys(20..24), 12);
        assert_eq!(
            rig.store.stats().unwrap().plane.dram.evictions,
            0,
            "{path}: given up, and still read"
        );
        rig.gpu.open(1);
        assert!(rig.settle());
        assert!(rig.holds(40, &old, Layer(0)), "{path}");
        rig.store.plane().drain().unwrap();
        rig.put(&keys(30..34), 16);
        assert!(rig.store.stats().unwrap().plane.dram.evictions > 0, "{path}");
    });
}

#[test]
fn what_was_prefetched_is_retrieved_without_a_command() {
    everywhere(4, |mut rig, path| {
        let (old, new, block) = (keys(0..4), keys(10..14), rig.shape.block_bytes());
        rig.put(&old, 0);
        rig.put(&new, 4);
        let moved = rig.gpu.moved();
        // Each prefetch has its own memory.
        assert_eq!(rig.store.prefetch(&old[..1], Nanos::from_millis(1000)).unwrap(), 1);
        assert_eq!(rig.store.prefetch(&old, Nanos::from_millis(1000)).unwrap(), 4);
        rig.store.plane().drain().unwrap();
        assert_eq!(rig.gpu.moved(), moved, "{path}: the devices reach it themselves");
        assert_eq!(rig.store.stats().unwrap().plane.dram.prefetched_bytes, 4 * block);
        rig.faults(Some(on(READ, READ_ERROR)));
        assert_eq!(rig.get(&old, 30), 4, "{path}");
        let stats = rig.store.stats().unwrap();
        assert_eq!((stats.plane.dram.hits, stats.plane.retrieved_bytes), (4, 0), "{path}");
    });
}

/// Every byte is compared by [`Rig::get`]: a file that was evicted and rewritten must not be served
/// with its old bytes.
#[test]
fn files_that_are_reused_are_served_as_what_they_are() {
    for (seed, room) in seeds(1, 4).zip([12, 60].into_iter().cycle()) {
        for path in [Route::Direct, Route::Staged] {
            let mut random = SmallRng::seed_from_u64(seed);
            let mut plan = plan(room, seed);
            plan.format.capacity_bytes = Some(48 * plan.shape.block_bytes());
            let mut rig = Rig::new(&plan, path);
            let all: Vec<_> = (0..12).map(|n| keys(100 * n..100 * n + 10)).collect();
            for _ in 0..80 {
                let keys = &all[random.random_range(0..all.len())];
                match random.random_range(0..8) {
                    0 => drop(rig.store.remove(keys).unwrap()),
                    1..4 => drop(rig.put(keys, 0)),
                    // It is in flight when the next operation begins.
                    4 => drop(rig.store.prefetch(keys, Nanos(random.random_range(0..1 << 20)))),
                    _ => drop(rig.get(keys, 30)),
                }
                assert!(rig.store.stats().unwrap().plane.dram.blocks as u64 <= room);
            }
            rig.store.sync_journal().unwrap();
            rig.store.plane().drain().unwrap();
            let stats = rig.store.stats().unwrap();
            assert_eq!(stats.files.active, 0);
            assert!(
                stats.files.evicted > 0 && stats.plane.dram.retrieved_bytes > 0,
                "{seed}: {stats:?}"
            );
        }
    }
}

/// Devices fail and are recovered while streams are held up: the cache keeps nothing that they copy
/// later.
#[test]
fn a_recovery_keeps_nothing_that_was_not_moved() {
    for opcode in [READ, WRITE] {
        everywhere(8, |mut rig, path| {
            let (a, b, c) = (keys(0..4), keys(10..14), keys(20..22));
            rig.put(&c, 20);
            rig.put(&b, 0);
            rig.put(&a, 4);
            // First hits only, then hits and misses.
            let (hits, new) = (rig.load(&a, 40), keys(30..32));
            rig.fill(20, &new);
            let save = rig.store.allocate(&new, &blocks(20, 2)).unwrap();
            let both = rig.load(&b, 50);
            assert_eq!(rig.store.stats().unwrap().plane.dram.hits, 6, "{path}");
            let broken = rig.load(&c, 30);
            let late = rig.gpu.stream(1);
            rig.gpu.gate(late, 1);
            rig.faults(Some(on(opcode, FaultAction::Drop).limit(1)));
            let failing = match opcode {
                READ => rig.store.start(&broken, Layer(0), Order::Unordered).unwrap(),
                _ => rig.store.start(&save, Layer(0), Order::Unordered).unwrap(),
            };
            let mut tickets = Vec::new();
            for load in [&hits, &both] {
                tickets.push(rig.store.start(load, Layer(0), late).unwrap());
            }
            rig.store.wait(failing).unwrap_err();
            assert_eq!(rig.store.stats().unwrap().plane.recoveries, 1, "{path}");
            rig.faults(None);
            rig.gpu.open(1);
            assert!(rig.settle(), "{path}: a stream hangs");
            let mut tickets = tickets.into_iter();
            // This one does not involve the devices.
            rig.store.wait(tickets.next().unwrap()).unwrap();
            assert!(rig.holds(40, &a, Layer(0)), "{path}");
            // On the staged path, the devices may have been done with it before.
            let ended = rig.store.wait(tickets.next().unwrap());
            assert!(
                ended.is_err() || path == Route::Staged && rig.holds(50, &b, Layer(0)),
                "{path}"
            );
            drop((hits, both, broken, save));
            assert_eq!(rig.get(&a, 40), 4, "{path}");
            // Files that were being read may be misses now; hits must be right.
            rig.get(&b, 40);
            rig.get(&c, 40);
            assert_eq!(rig.store.lookup(&new).unwrap().len(), 0);
            assert_eq!(rig.domain.refused(), 0);
        });
    }
}

#[test]
fn a_stream_that_refuses_keeps_nothing_in_flight() {
    for path in [Route::Direct, Route::Staged] {
        for after in 0..14 {
            let mut rig = Rig::new(&plan(3, 1), path);
            let keys = keys(0..6);
            rig.put(&keys, 0);
            let compute = rig.gpu.stream(1);
            let load = rig.load(&keys, 40);
            rig.gpu.break_it(Defect::RefusesAfter(after));
            let layers: Vec<_> = rig.layers().collect();
            let started: Result<Vec<_>, _> =
                layers.iter().map(|layer| rig.store.start(&load, *layer, compute)).collect();
            rig.gpu.break_it(Defect::None);
            if let Err(error) = started {
                assert!(
                    matches!(error, StoreError::Stream { .. } | StoreError::Failed { .. }),
                    "{path}, {after}: {error}"
                );
            }
            assert!(rig.settle(), "{path}, {after}: a stream hangs");
            drop(load);
            if rig.store.plane().drain().is_ok() {
                assert_eq!(rig.get(&keys, 50), 6, "{path}, {after}");
                assert_eq!(rig.store.stats().unwrap().files.active, 0);
            }
        }
    }
}

#[test]
fn nothing_is_freed_before_the_streams_are_past_it() {
    everywhere(4, |mut rig, path| {
        let keys = keys(0..4);
        rig.put(&keys, 0);
        let late = rig.gpu.stream(1);
        let load = rig.load(&keys, 40);
        rig.gpu.gate(late, 1);
        let ticket = rig.store.start(&load, Layer(0), late).unwrap();
        let Rig { store, gpu, .. } = rig;
        let living = gpu.living();
        // Closed while the stream is held up: it still reads the memory.
        store.close().unwrap_err();
        drop((ticket, load));
        assert_eq!(gpu.living(), living, "{path}");
        gpu.open(1);
        while !gpu.is_idle() {
            gpu.step();
        }
    });
    everywhere(4, |mut rig, path| {
        let keys = keys(0..4);
        rig.put(&keys, 0);
        assert_eq!(rig.get(&keys, 40), 4);
        let Rig { store, gpu, .. } = rig;
        let living = gpu.living();
        store.close().unwrap().pool.unregister().unwrap();
        // The pool, its staging memory, and the cache.
        let freed = if path == Route::Staged { 3 } else { 2 };
        assert_eq!(gpu.living(), living - freed, "{path}");
    });
}

/// The scheduler counts bytes, not operations: it starts more layers than the plane has room for.
#[test]
fn a_layer_that_finds_no_free_operation_is_copied_later() {
    everywhere(64, |mut rig, _| {
        schedule::pace(&rig.store, Config { read_depth_bytes: u64::MAX, ..Config::default() });
        let all: Vec<_> = (0..6).map(|n| keys(10 * n..10 * n + 2)).collect();
        all.iter().for_each(|keys| assert_eq!(rig.put(keys, 0), 2));
        let loads: Vec<_> =
            all.iter().zip(0..).map(|(keys, n)| rig.load(keys, 30 + 2 * n)).collect();
        let plane = rig.store.plane().clone();
        // The layers that were stored.
        assert_eq!(plane.advance().unwrap().in_flight, 0);
        let pairs = loads.iter().flat_map(|one| rig.layers().map(move |layer| (one, layer)));
        let start = |(one, layer): (&LoadRequest, _)| {
            rig.store.start(one, layer, Order::Unordered).unwrap()
        };
        let tickets: Vec<_> = pairs.map(start).collect();
        let first = plane.advance().unwrap();
        assert!(tickets.len() > plan(0, 1).options.iocbs as usize);
        assert_eq!(first.in_flight + first.ended.len(), tickets.len(), "none waits for its turn");
        let mut ended = first.ended;
        for idle in 0.. {
            ended.extend(plane.advance().unwrap().ended);
            if ended.len() == tickets.len() {
                break;
            }
            assert!(idle < 10_000, "{ended:?}");
            rig.clock.pause(idle, Nanos::MAX);
        }
        for ticket in ended {
            assert_eq!(rig.store.poll(&ticket).unwrap().unwrap().objects, 4);
        }
        for (keys, n) in all.iter().zip(0..) {
            rig.layers().for_each(|layer| assert!(rig.holds(30 + 2 * n, keys, layer)));
        }
    });
}

/// Streams treat a pool in pinned host memory that the GPU reaches like any other.
#[test]
fn a_pool_in_pinned_memory_is_copied_to_by_streams() {
    let plan = plan(8, 1);
    let parts = rig::Parts::new(&plan);
    let bytes = plan.shape.block_bytes() as usize * plan.blocks as usize;
    let memory = parts.domain.import(parts.gpu.alloc_pinned(bytes)).unwrap();
    let pool = KvPool::contiguous(memory, &plan.shape, plan.blocks).unwrap();
    let base = pool.device(BlockId(0), Row(0)).unwrap();
    let mut rig = parts.store(&plan, pool, base, rig::inline).unwrap();
    let keys = keys(0..6);
    rig.put(&keys, 0);
    let compute = rig.gpu.stream(1);
    rig.gpu.gate(compute, 1);
    let load = rig.load(&keys, 40);
    let ticket = rig.store.start(&load, Layer(0), compute).unwrap();
    let seen = rig.look(compute, 40, &keys, Layer(0));
    rig.run(10);
    assert!(!rig.holds(40, &keys[..1], Layer(0)));
    rig.gpu.open(1);
    assert!(rig.settle());
    assert_eq!(seen.try_recv(), Ok(true));
    rig.store.wait(ticket).unwrap();
    let stats = rig.store.stats().unwrap();
    assert_eq!((stats.plane.path, stats.plane.retrieved_bytes), (Route::Host, 0));
}

#[test]
fn a_pool_elsewhere_is_refused() {
    let plan = plan(4, 1);
    let parts = rig::Parts::new(&plan);
    let memory = ripieno_testkit::KvMemory::new(&*parts.domain, plan.shape, plan.blocks);
    let refused = parts.store(&plan, memory.pool.clone(), nvme_driver::DevicePtr(0), rig::inline);
    let refused = refused.err().unwrap().to_string();
    assert!(refused.contains("dram") && refused.contains("GPU"), "{refused}");
}
