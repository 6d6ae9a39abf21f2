//! Paths: proven before they are reported; the limits of staging; and engine memory is returned
//! only when nothing uses it.
#![allow(unsafe_code, reason = "memory whose end is watched is made of other memory")]

use std::{
    any::Any,
    sync::{Arc, Mutex},
};

use crate::{gpu, rig, stack};

use gpu::Defect;
use nvme_driver::{DmaSpace, ExternalMemory, Nanos};

use nvme_emu::{Emu, EmuConfig, FaultAction, FaultPlan, LbaRange, SglSupport};
use objstore::{
    BlockId, KvPool, KvShape, Layer, Order, PoolLayout, Route, Store, StoreConfig, StoreError,
};
use rig::{Parts, Rig, SLOTS, inline};
use stack::{Plan, READ, WRITE, blocks, keys, on};

fn route(path: Route, defect: Defect, corrupt: impl Fn(&Parts)) -> Result<(), String> {
    let plan = Plan::default();
    let parts = Parts::new(&plan);
    let (pool, base) = parts.pool(&plan, path);
    parts.gpu.break_it(defect);
    corrupt(&parts);
    match parts.store(&plan, pool, base, inline) {
        Ok(rig) => {
            assert_eq!(rig.store.stats().unwrap().plane.path, path);
            Ok(())
        }
        Err(StoreError::Route { path: tried, why }) => {
            assert_eq!(tried, path);
            Err(why)
        }
        // The superblock could not be read.
        Err(error @ StoreError::Format(_)) => Err(error.to_string()),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_route_that_does_not_work_is_not_taken() {
    for path in [Route::Direct, Route::Staged] {
        route(path, Defect::None, |_| {}).unwrap();
        for action in [FaultAction::CorruptRead, FaultAction::TornWrite, stack::READ_ERROR] {
            let opcode = if action == FaultAction::TornWrite { WRITE } else { READ };
            let why = route(path, Defect::None, |parts| {
                let mut rule = on(opcode, action);
                // The path is proven in the scratch region, before any other part of the store.
                rule.when.lbas = Some(LbaRange { first: 64, count: 64 });
                let rules = vec![rule];
                parts.emus[1].set_faults(FaultPlan { seed: 1, rules, ..FaultPlan::default() });
            });
            let why = why.expect_err(&format!("{path}, {action:?}"));
            assert!(why.contains("emu1"), "{why}");
        }
        let why = route(path, Defect::NoCopies, |_| {}).unwrap_err();
        assert!(!why.is_empty());
    }
    // The driver's queue (1) works, but the one that the I/O kernel reads through does not.
    for path in [Route::Direct, Route::Staged] {
        for action in [FaultAction::CorruptRead, FaultAction::Drop, stack::READ_ERROR] {
            let why = route(path, Defect::None, |parts| {
                let mut rule = on(READ, action);
                (rule.when.qid, rule.when.nth) = (Some(3), Some(1));
                let rules = vec![rule];
                parts.emus[1].set_faults(FaultPlan { seed: 1, rules, ..FaultPlan::default() });
            });
            let why = why.expect_err(&format!("{path}, {action:?}"));
            assert!(why.contains("emu1: the I/O kernel"), "{why}");
        }
    }
    for defect in [
        Defect::NoMoves,
        Defect::NoMovesBack,
        Defect::BlocksInOrder,
        Defect::OneRow,
        Defect::RefusesAfter(0),
        Defect::RefusesAfter(3),
    ] {
        let why = route(Route::Staged, defect, |_| {}).unwrap_err();
        assert!(why.contains("moving objects of layer"), "{defect:?}: {why}");
        // Nothing is moved on the direct path.
        route(Route::Direct, defect, |_| {}).unwrap();
    }
}

#[test]
fn the_proof_leaves_the_pool_as_it_was() {
    for path in [Route::Direct, Route::Staged] {
        let plan = Plan::default();
        let parts = Parts::new(&plan);
        let (pool, base) = parts.pool(&plan, path);
        let bytes = plan.shape.block_bytes() as usize * plan.blocks as usize;
        let before: Vec<u8> = (0..bytes).map(|at| (at / 3 % 251) as u8).collect();
        parts.gpu.memory.write(base, &before);
        let rig = parts.store(&plan, pool, base, inline).unwrap();
        assert!(rig.gpu.memory.read(base, bytes) == before, "{path}");
    }
}

/// Shapes and drives at the limits of the descriptors.
#[test]
fn staged_objects_of_all_sizes() {
    let shape =
        |segments, object_bytes| KvShape { layers: 3, segments, object_bytes, block_tokens: 1 };
    let prp: fn(&mut EmuConfig) = |config| config.sgl = SglSupport::None;
    let any: fn(&mut EmuConfig) = |_| {};
    for (shape, lba_bytes, drive, buffers) in [
        (shape(2, 4096), 4096, prp, 4),
        (shape(2, 12 << 10), 512, prp, 4),
        (shape(1, 4096 + 512), 512, any, 1),
        (shape(1, 4000), 4096, any, 2),
        (shape(3, 100 << 10), 4096, any, 2),
        (shape(2, 512), 512, any, 3),
    ] {
        let mut plan = Plan { shape, lba_bytes, drive, ..Plan::default() };
        plan.options.staging_buffers = buffers;
        let mut rig = Rig::new(&plan, Route::Staged);
        let keys = keys(0..SLOTS);
        assert_eq!(rig.put(&keys, 0), SLOTS as usize, "{shape:?}");
        assert_eq!(rig.get(&keys, 40), SLOTS as usize, "{shape:?}");
        assert_eq!(rig.domain.refused(), 0);
    }
}

#[test]
fn requests_have_to_fit_into_staging_buffers() {
    let mut rig = Rig::new(&Plan::default(), Route::Staged);
    let keys = keys(0..40);
    let error = rig.store.allocate(&keys, &blocks(0, 40)).unwrap_err();
    assert!(matches!(error, StoreError::Staging { blocks: 40, slots: SLOTS }), "{error}");
    let stats = rig.store.stats().unwrap();
    assert_eq!(
        (stats.files_free(), stats.files.writing),
        (stats.files.files, 0),
        "nothing is left of it"
    );
    for part in keys.chunks(SLOTS as usize) {
        rig.put(part, 0);
    }
    // Blocks that are already stored need no room.
    let mut more = keys.clone();
    more.extend(stack::keys(50..53));
    assert_eq!(rig.store.allocate(&more, &blocks(0, 43)).unwrap().written(), 3);
    let prefix = rig.store.lookup(&keys).unwrap();
    let error = rig.store.retrieve(&prefix, &blocks(0, 40)).unwrap_err();
    assert!(matches!(error, StoreError::Staging { blocks: 40, .. }), "{error}");
    for first in (0..40).step_by(SLOTS as usize) {
        let count = (40 - first).min(SLOTS as usize);
        rig.wipe(0, count);
        let load = rig.store.retrieve_from(&prefix, first, &blocks(0, count)).unwrap();
        for layer in rig.layers() {
            let ticket = rig.store.start(&load, layer, Order::Unordered).unwrap();
            rig.store.wait(ticket).unwrap();
            assert!(rig.holds(0, &keys[first..first + count], layer));
        }
    }
}

/// A buffer is not reused before the stream that moves its objects is past the move.
#[test]
fn staging_buffers_run_out_and_come_back() {
    let mut plan = Plan::default();
    plan.options.staging_buffers = 2;
    for seed in 1..6 {
        let mut rig = Rig::new(&Plan { seed, ..plan.clone() }, Route::Staged);
        let sets: Vec<_> = (0..3).map(|n| keys(n * 100..n * 100 + 8)).collect();
        sets.iter().for_each(|keys| assert_eq!(rig.put(keys, 0), 8));
        let compute = rig.gpu.stream(1);
        rig.gpu.gate(compute, 1);
        let loads: Vec<_> = (0..3).map(|at| rig.load(&sets[at], 10 + 10 * at as u32)).collect();
        let mut tickets = Vec::new();
        for load in &loads[..2] {
            tickets.push(rig.store.start(load, Layer(0), compute).unwrap());
        }
        // Their data is in staging memory by now, but their blocks are in use.
        rig.run(200);
        let error = rig.store.start(&loads[2], Layer(0), Order::Unordered).unwrap_err();
        assert!(matches!(error, StoreError::StagingBusy { buffers: 2 }), "{error}");
        assert!(rig.store.poll(&tickets[0]).unwrap().is_none());
        rig.gpu.open(1);
        rig::wait_all(&mut rig.store, tickets).unwrap();
        let ticket = rig.store.start(&loads[2], Layer(0), Order::Unordered).unwrap();
        rig.store.wait(ticket).unwrap();
        for (at, keys) in sets.iter().enumerate() {
            assert!(rig.holds(10 + 10 * at as u32, keys, Layer(0)), "request {at}, seed {seed}");
        }
    }
}

#[test]
fn what_cannot_be_staged_is_refused_in_words() {
    let plan = Plan::default();
    let parts = Parts::new(&plan);
    let shape = plan.shape;
    let staging = |len| parts.domain.import(parts.gpu.alloc_pinned(len)).unwrap();
    let rows: Vec<u64> = (0..6).map(|row| row * 64 * 4096).collect();
    let layout =
        |rows: &[u64], blocks| PoolLayout { rows: rows.to_vec(), block_stride: 4096, blocks };
    let pool = |memory: ExternalMemory, staging, rows: &[u64], blocks| {
        KvPool::staged(memory, staging, &shape, layout(rows, blocks))
    };
    let bytes = 6 * 64 * 4096;
    let short = pool(parts.gpu.alloc(bytes - 4096).0, staging(1 << 20), &rows, 64).unwrap_err();
    assert!(short.to_string().starts_with("row 5, "), "{short}");
    let twice = pool(parts.gpu.alloc(bytes).0, staging(1 << 20), &[0; 6], 64).unwrap_err();
    assert!(twice.to_string().contains("overlap"), "{twice}");
    let host = parts.domain.alloc(1 << 20).unwrap();
    let error = pool(parts.gpu.alloc(bytes).0, host.clone(), &rows, 64).unwrap_err();
    assert!(error.to_string().contains("has no address on the GPU"), "{error}");
    let error = KvPool::on_gpu(host.clone(), &shape, layout(&rows, 2)).unwrap_err();
    assert!(error.to_string().contains("has no address on the GPU"), "{error}");
    let far = parts.domain.import(parts.gpu.alloc(1 << 20).0).unwrap();
    let error = pool(parts.gpu.alloc(bytes).0, far, &rows, 64).unwrap_err();
    assert!(error.to_string().contains("has no address in this process"), "{error}");

    // The minimum is one page for each row of four buffers.
    let least = KvPool::staging_bytes(&shape, 1, 4) as usize;
    assert_eq!(least, 4 * 2 * 4096);
    for (len, fits) in [(least, true), (least - 4096, false)] {
        let parts = Parts::new(&plan);
        let staging = parts.domain.import(parts.gpu.alloc_pinned(len)).unwrap();
        let memory = parts.gpu.alloc(bytes).0;
        let pool = KvPool::staged(memory, staging, &shape, layout(&rows, 64)).unwrap();
        let opened = parts.store(&plan, pool, nvme_driver::DevicePtr(0), inline);
        match opened {
            Ok(_) => assert!(fits, "{len} bytes"),
            Err(error) => {
                assert!(!fits, "{error}");
                assert!(error.to_string().contains(&least.to_string()), "{error}");
            }
        }
    }
}

#[test]
fn without_a_gpu_there_are_no_streams() {
    let plan = Plan::default();
    let parts = Parts::new(&plan);
    let stream = parts.gpu.stream(1);
    let (pool, _) = parts.pool(&plan, Route::Staged);
    let open = |parts: Parts, pool, plan: &Plan| {
        let inline = parts.clock.clone();
        let config = StoreConfig {
            devices: parts.devices,
            clock: parts.clock,
            executor: Box::new(move || {
                Ok(Box::new(gio_kernels::InlineExecutor::new(inline.clone())) as Box<_>)
            }),
            shape: plan.shape,
            pool,
            gpu: None,
            options: plan.options.clone(),
            namespace: objstore::Namespace::default(),
        };
        Store::create(config, &ripieno_testkit::format(plan.shape))
    };
    let error = open(parts, pool, &plan).unwrap_err();
    assert!(matches!(error, StoreError::Config { field: "gpu", .. }), "{error}");
    // Memory that only a GPU addresses cannot be accessed without it.
    let parts = Parts::new(&plan);
    let (pool, _) = parts.pool(&plan, Route::Direct);
    let error = open(parts, pool, &plan).unwrap_err();
    assert!(matches!(error, StoreError::Route { path: Route::Direct, .. }), "{error}");

    let parts = Parts::new(&plan);
    let memory = parts.domain.alloc(6 * 64 * 4096).unwrap();
    let pool = KvPool::contiguous(memory, &plan.shape, 64).unwrap();
    let store = open(parts, pool, &plan).unwrap();
    assert_eq!(store.stats().unwrap().plane.path, Route::Host);
    let save = store.allocate(&keys(0..2), &blocks(0, 2)).unwrap();
    for order in [Order::AfterStream(stream), Order::InStream(stream)] {
        let error = store.start(&save, Layer(0), order).unwrap_err();
        assert!(matches!(error, StoreError::NoStreams), "{error}");
    }
    let ticket = store.start(&save, Layer(0), Order::Unordered).unwrap();
    let error = store.join(&ticket, stream).unwrap_err();
    assert!(matches!(error, StoreError::NoStreams), "{error}");
    store.wait(ticket).unwrap();
}

/// Records the admin commands that every controller has executed when memory is freed.
struct Freed {
    emus: Vec<Arc<Emu>>,
    admin_commands: Arc<Mutex<Vec<u64>>>,
    _memory: Arc<dyn Any + Send + Sync>,
}

impl Drop for Freed {
    fn drop(&mut self) {
        *self.admin_commands.lock().unwrap() = admin_commands(&self.emus);
    }
}

fn admin_commands(emus: &[Arc<Emu>]) -> Vec<u64> {
    emus.iter().map(|emu| emu.counters().admin_commands).collect()
}

/// Otherwise a command in flight would write to memory that has been reused.
#[test]
fn queues_are_deleted_before_memory_is_freed() {
    for is_closed in [true, false] {
        let plan = Plan::default();
        let parts = Parts::new(&plan);
        let (host, device, len, memory) = parts.gpu.alloc_pinned(6 * 64 * 4096).into_parts();
        let (emus, admin) = (parts.emus.clone(), Arc::new(Mutex::new(Vec::new())));
        let freed = Freed { emus: emus.clone(), admin_commands: admin.clone(), _memory: memory };
        // SAFETY: it is the same memory, whose owner is inside the new one.
        let memory = unsafe { ExternalMemory::new(host, device, len, Arc::new(freed)) };
        let memory = parts.domain.import(memory).unwrap();
        let pool = KvPool::contiguous(memory, &plan.shape, 64).unwrap();
        let base = pool.device(BlockId(0), objstore::Row(0)).unwrap();
        let rig = parts.store(&plan, pool, base, inline).unwrap();
        let before = admin_commands(&emus);
        let Rig { store, .. } = rig;
        if is_closed {
            store.close().unwrap().pool.unregister().unwrap();
        } else {
            drop(store);
        }
        // Two queues per device, each with a submission and a completion queue.
        let found = admin.lock().unwrap().clone();
        let done: Vec<u64> = found.iter().zip(&before).map(|(at, before)| at - before).collect();
        assert!(done.len() == 2 && done.iter().all(|count| *count >= 4), "{is_closed}: {done:?}");
    }
}

/// The engine's memory is freed only after it is unregistered.
#[test]
fn a_pool_is_unregistered_only_when_nothing_uses_it() {
    for path in [Route::Direct, Route::Staged, Route::Host] {
        let plan = Plan::default();
        let parts = Parts::new(&plan);
        let (pool, base) = if path == Route::Host {
            let memory = parts.domain.import(parts.gpu.alloc_pinned(6 * 64 * 4096)).unwrap();
            let pool = KvPool::contiguous(memory, &plan.shape, 64).unwrap();
            let base = pool.device(BlockId(0), objstore::Row(0)).unwrap();
            (pool, base)
        } else {
            parts.pool(&plan, path)
        };
        let own = pool.clone();
        let mut rig = parts.store(&plan, pool, base, inline).unwrap();
        let keys = keys(0..4);
        rig.put(&keys, 0);
        let compute = rig.gpu.stream(1);
        let load = rig.load(&keys, 20);
        let ticket = rig.store.start(&load, Layer(0), compute).unwrap();
        rig.store.wait(ticket).unwrap();
        let refused = own.unregister().unwrap_err();
        assert!(refused.others >= 1 && refused.to_string().contains("close the store"));
        let own = *refused.pool;
        let Rig { store, gpu, .. } = rig;
        let living = gpu.living();
        let closed = store.close().unwrap();
        assert!(gpu.is_idle(), "{path}: a stream still looks at a word of the store");
        assert_eq!(closed.controllers.len(), 2);
        let closed = closed.pool.unregister().unwrap_err();
        assert_eq!(closed.others, 1, "{path}: who holds it but the test?");
        drop(own);
        assert_eq!(gpu.living(), living, "{path}: freed while it was registered");
        closed.pool.unregister().unwrap();
        let freed = if path == Route::Staged { 2 } else { 1 };
        assert_eq!(gpu.living(), living - freed, "{path}");
    }
}

#[test]
fn closing_waits_for_streams_that_look_at_the_stores_words() {
    for path in [Route::Direct, Route::Staged] {
        for opens in [true, false] {
            let mut plan = Plan::default();
            plan.options.stop_timeout = Nanos::from_millis(200);
            let mut rig = Rig::new(&plan, path);
            let keys = keys(0..4);
            rig.put(&keys, 0);
            let load = rig.load(&keys, 20);
            let ticket = rig.store.start(&load, Layer(0), Order::Unordered).unwrap();
            let compute = rig.gpu.stream(1);
            if opens {
                // The stream gets there while the store is being closed.
                rig.gpu.enqueue(compute, |_| {});
            } else {
                rig.gpu.gate(compute, 1);
            }
            rig.store.join(&ticket, compute).unwrap();
            rig.store.wait(ticket).unwrap();
            let Rig { store, gpu, .. } = rig;
            match store.close() {
                Ok(_) => assert!(opens && gpu.is_idle(), "{path}"),
                Err(StoreError::Failed { cause }) => {
                    assert!(!opens && cause.contains("stream"), "{path}: {cause}");
                }
                Err(error) => panic!("{path}: {error}"),
            }
            // The event that it waits for still exists.
            gpu.open(1);
            for _ in 0..20 {
                gpu.step();
            }
            assert!(gpu.is_idle(), "{path}");
        }
    }
}

/// A stream accepted the wait, but not the mark behind it.
#[test]
fn a_wait_of_which_nobody_knows_the_end_keeps_its_word() {
    let mut plan = Plan::default();
    plan.options.stop_timeout = Nanos::from_millis(200);
    let mut rig = Rig::new(&plan, Route::Direct);
    let keys = keys(0..4);
    rig.put(&keys, 0);
    let load = rig.load(&keys, 20);
    let ticket = rig.store.start(&load, Layer(0), Order::Unordered).unwrap();
    let compute = rig.gpu.stream(1);
    rig.gpu.gate(compute, 1);
    rig.gpu.break_it(Defect::RefusesAfter(1));
    let error = rig.store.join(&ticket, compute).unwrap_err();
    assert!(matches!(error, StoreError::Stream { .. }), "{error}");
    rig.gpu.break_it(Defect::None);
    rig.store.wait(ticket).unwrap();
    let error = rig.store.close().unwrap_err();
    assert!(matches!(error, StoreError::Failed { .. }), "{error}");
    rig.gpu.open(1);
    (0..20).for_each(|_| rig.gpu.step());
    assert!(rig.gpu.is_idle());
}
