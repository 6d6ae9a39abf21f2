//! The stack as it runs in production: controllers, I/O kernel and caller on their own threads, in
//! real time. A layer costs the caller's thread the same for any number of blocks.

use crate::gpu;

use std::sync::Arc;

use allocation_counter::measure;
use gpu::{Copies, Gpu, GpuClock};
use nvme_driver::{ControllerOptions, DmaSpace};
use nvme_emu::{EmuDomain, EmuRunner};
use objstore::{
    BlockId, BlockKey, Format, KvPool, KvShape, Layer, Namespace, Order, PoolLayout, Route, Row,
    Store, StoreConfig, StoreDevice, StoreGpu, StoreOptions,
};
use ripieno_testkit::{Drives, format, host_executor, keys, memory_drives, object};

const BLOCKS: u32 = 1024;
const SHAPE: KvShape = KvShape { layers: 4, segments: 2, object_bytes: 4096, block_tokens: 16 };

/// Returns a store in real time, the threads of its controllers, and the address space.
fn stack() -> (Store, EmuRunner, Arc<EmuDomain>, KvPool) {
    let gpu = Gpu::new(1);
    stack_on(&gpu, Route::Host)
}

/// Returns a store whose pool uses this path.
fn stack_on(gpu: &Arc<Gpu>, path: Route) -> (Store, EmuRunner, Arc<EmuDomain>, KvPool) {
    let domain = EmuDomain::with_copies("test", Arc::new(Copies(gpu.clone())));
    let drives = Drives::threaded(domain.clone(), memory_drives(2, 128 << 20, 4096));
    let controllers = drives.attach(&ControllerOptions::default());
    let devices = controllers.into_iter().map(StoreDevice::new).collect();
    // Only the thread that uses the store advances streams.
    let clock = Arc::new(GpuClock(drives.clock.clone(), gpu.clone()));
    let bytes = BLOCKS as usize * SHAPE.block_bytes() as usize;
    let layout = PoolLayout::contiguous(&SHAPE, BLOCKS);
    let pool = match path {
        Route::Staged => {
            let staging = KvPool::staging_bytes(&SHAPE, BLOCKS, 4) as usize;
            let staging = domain.import(gpu.alloc_pinned(staging)).unwrap();
            KvPool::staged(gpu.alloc(bytes).0, staging, &SHAPE, layout)
        }
        Route::Direct => {
            let memory = domain.import(gpu.alloc(bytes).0).unwrap();
            KvPool::on_gpu(memory, &SHAPE, layout)
        }
        _ => KvPool::contiguous(domain.alloc(bytes).unwrap(), &SHAPE, BLOCKS),
    };
    let pool = pool.unwrap();
    let config = StoreConfig {
        devices,
        clock,
        executor: host_executor(drives.clock),
        shape: SHAPE,
        pool: pool.clone(),
        gpu: Some(StoreGpu { streams: gpu.clone(), copies: Arc::new(Copies(gpu.clone())) }),
        options: StoreOptions::default(),
        namespace: Namespace::default(),
    };
    // This GPU has no kernel that could read objects.
    let checksums = path == Route::Host;
    let store = Store::create(config, &Format { checksums, ..format(SHAPE) });
    (store.unwrap(), drives.runner.unwrap(), domain, pool)
}

fn store_all(store: &Store, pool: &KvPool, domain: &EmuDomain, keys: &[BlockKey]) {
    let blocks: Vec<BlockId> = (0..keys.len() as u32).map(BlockId).collect();
    for (key, block) in keys.iter().zip(&blocks) {
        for row in (0..SHAPE.rows()).map(Row) {
            let iova = pool.iova(*block, row).unwrap();
            domain.access().write(iova, &object(*key, 0, row, SHAPE.object_bytes)).unwrap();
        }
    }
    let save = store.allocate(keys, &blocks).unwrap();
    let tickets: Vec<_> = (0..SHAPE.layers)
        .map(|layer| store.start(&save, Layer(layer), Order::Unordered).unwrap())
        .collect();
    for ticket in tickets {
        store.wait(ticket).unwrap();
    }
    assert_eq!(store.commit(save).unwrap().accepted, keys.len());
}

#[test]
fn a_round_trip_with_threads() {
    let (store, runner, domain, pool) = stack();
    let keys = keys(0..200);
    store_all(&store, &pool, &domain, &keys);
    let prefix = store.lookup(&keys).unwrap();
    assert_eq!(prefix.len(), 200);
    // In reverse order, so that every block moves to a different place.
    let blocks: Vec<BlockId> = (500..700).rev().map(BlockId).collect();
    let load = store.retrieve(&prefix, &blocks).unwrap();
    // Handles may be dropped by other threads, at any time.
    std::thread::spawn(move || drop(prefix)).join().unwrap();
    for layer in (0..SHAPE.layers).map(Layer) {
        let ticket = store.start(&load, layer, Order::Unordered).unwrap();
        assert_eq!(store.wait(ticket).unwrap().objects, 400);
        let mut bytes = vec![0; SHAPE.object_bytes as usize];
        for (key, block) in keys.iter().zip(&blocks) {
            for row in SHAPE.layer_rows(layer).map(Row) {
                let iova = pool.iova(*block, row).unwrap();
                domain.access().read(iova, &mut bytes).unwrap();
                assert!(bytes == object(*key, 0, row, SHAPE.object_bytes), "{key}, row {row}");
            }
        }
    }
    drop(load);
    assert_eq!(store.stats().unwrap().files.active, 0);
    assert_eq!(store.close().unwrap().controllers.len(), 2);
    drop(runner);
}

#[test]
fn a_layer_allocates_nothing_for_any_number_of_blocks() {
    let (store, runner, domain, pool) = stack();
    let keys = keys(0..1000);
    store_all(&store, &pool, &domain, &keys);
    for count in [1, 30, 1000] {
        let blocks: Vec<BlockId> = (0..count as u32).map(BlockId).collect();
        let prefix = store.lookup(&keys[..count]).unwrap();
        let load = store.retrieve(&prefix, &blocks).unwrap();
        let allocated = measure(|| {
            for layer in (0..SHAPE.layers).map(Layer) {
                let ticket = store.start(&load, layer, Order::Unordered).unwrap();
                store.wait(ticket).unwrap();
            }
        });
        assert_eq!(allocated.count_total, 0, "with {count} blocks");
    }
    // In this order: without its controllers the store would wait for them to time out.
    store.close().unwrap();
    drop(runner);
}

/// The same with streams: a staged layer costs the same number of stream operations for any number
/// of blocks.
#[test]
fn a_layer_in_order_with_streams_allocates_nothing() {
    for path in [Route::Direct, Route::Staged] {
        let gpu = Gpu::new(1);
        let (store, runner, _domain, _pool) = stack_on(&gpu, path);
        let keys = keys(0..1000);
        let blocks: Vec<BlockId> = (0..1000).map(BlockId).collect();
        let compute = gpu.stream(1);
        // In the first pass the store sees the stream for the first time.
        for pass in 0..2 {
            let save = store.allocate(&keys[pass * 500..][..500], &blocks[..500]).unwrap();
            let allocated = measure(|| {
                for layer in (0..SHAPE.layers).map(Layer) {
                    let ticket = store.start(&save, layer, compute).unwrap();
                    store.wait(ticket).unwrap();
                }
            });
            assert!(pass == 0 || allocated.count_total == 0, "{path}: storing");
            store.commit(save).unwrap();
        }
        let mut enqueued = Vec::new();
        for count in [1, 30, 1000] {
            let prefix = store.lookup(&keys[..count]).unwrap();
            let load = store.retrieve(&prefix, &blocks[..count]).unwrap();
            let ops = gpu.enqueued();
            let allocated = measure(|| {
                for layer in (0..SHAPE.layers).map(Layer) {
                    let odd = layer.0 % 2 == 1;
                    let order = if odd { compute.into() } else { Order::AfterStream(compute) };
                    let ticket = store.start(&load, layer, order).unwrap();
                    store.join(&ticket, compute).unwrap();
                    store.wait(ticket).unwrap();
                }
            });
            assert_eq!(allocated.count_total, 0, "{path} with {count} blocks");
            enqueued.push(gpu.enqueued() - ops);
        }
        assert!(enqueued.iter().all(|ops| *ops == enqueued[0]), "{path}: {enqueued:?}");
        store.close().unwrap();
        drop(runner);
    }
}

/// One store, four threads: each stores and retrieves its own blocks, and looks up the others'.
#[test]
fn threads_share_a_store() {
    let (store, runner, domain, pool) = stack();
    let work = |thread: u32| {
        let (store, pool, domain) = (store.clone(), pool.clone(), domain.clone());
        move || {
            let mut commits = 0;
            for round in 0..20 {
                let first = thread * 1000 + round * 8;
                let keys = keys(first..first + 8);
                let blocks: Vec<BlockId> = (thread * 16..).take(8).map(BlockId).collect();
                for (key, block) in keys.iter().zip(&blocks) {
                    for row in (0..SHAPE.rows()).map(Row) {
                        let iova = pool.iova(*block, row).unwrap();
                        let object = object(*key, 0, row, SHAPE.object_bytes);
                        domain.access().write(iova, &object).unwrap();
                    }
                }
                let save = store.allocate(&keys, &blocks).unwrap();
                for layer in (0..SHAPE.layers).map(Layer) {
                    let ticket = store.start(&save, layer, Order::Unordered).unwrap();
                    store.wait(ticket).unwrap();
                }
                commits += store.commit(save).unwrap().written;
                let prefix = store.lookup(&keys).unwrap();
                assert_eq!(prefix.len(), 8);
                let blocks: Vec<BlockId> = (thread * 16 + 8..).take(8).map(BlockId).collect();
                let load = store.retrieve(&prefix, &blocks).unwrap();
                for layer in (0..SHAPE.layers).map(Layer) {
                    let ticket = store.start(&load, layer, Order::Unordered).unwrap();
                    store.wait(ticket).unwrap();
                }
                let mut bytes = vec![0; SHAPE.object_bytes as usize];
                for (key, block) in keys.iter().zip(&blocks) {
                    for row in (0..SHAPE.rows()).map(Row) {
                        domain.access().read(pool.iova(*block, row).unwrap(), &mut bytes).unwrap();
                        assert!(bytes == object(*key, 0, row, SHAPE.object_bytes), "{key}");
                    }
                }
            }
            commits
        }
    };
    let threads: Vec<_> = (0..4).map(|thread| std::thread::spawn(work(thread))).collect();
    let written: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert_eq!(written, 4 * 20 * 8);
    let stats = store.stats().unwrap();
    assert_eq!((stats.files.stored, stats.files.active, stats.files.writing), (640, 0, 0));
    store.close().unwrap();
    drop(runner);
}
