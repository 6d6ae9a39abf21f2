//! Pools of other owners beside the store's own: they share its blocks, and are removed at any
//! time.

use std::sync::Arc;

use nvme_driver::{
    Clock, ControllerOptions, DmaMemory, DmaSlice, DmaSpace as _, Nanos, platform::buffer::Buffer,
};
use nvme_emu::{EmuConfig, EmuDomain, FaultAction, FaultRule, FaultWhen, SglSupport};
use objstore::{
    BlockId, BlockKey, Format, KvPool, KvShape, Layer, Namespace, Order, Store, StoreConfig,
    StoreDevice, StoreError, StoreOptions,
};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};
use ripieno_testkit::{
    Drives, KvMemory, blocks, format, host_executor, keys, memory_drives, set_faults,
};

const SHAPE: KvShape = KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 };
const BLOCKS: u32 = 8;
/// Opcode of a write.
const WRITE: u8 = 1;

/// Fields are dropped in this order: the store before its controllers.
struct Rig {
    store: Store,
    drives: Drives,
}

impl Rig {
    fn new(options: StoreOptions) -> Self {
        Self::on(memory_drives(2, 32 << 20, 4096), SHAPE, options)
    }

    fn on(drives: Vec<EmuConfig>, shape: KvShape, options: StoreOptions) -> Self {
        Self::formatted(drives, &format(shape), shape, options)
    }

    fn formatted(
        drives: Vec<EmuConfig>,
        format: &Format,
        shape: KvShape,
        options: StoreOptions,
    ) -> Self {
        let drives = Drives::threaded(EmuDomain::new("pools"), drives);
        let own = KvMemory::new(&*drives.domain, shape, 2);
        let attached = drives.attach(&ControllerOptions::default());
        let devices: Vec<StoreDevice> = attached.into_iter().map(StoreDevice::new).collect();
        Store::format(&devices, format).unwrap();
        let clock: Arc<dyn Clock> = drives.clock.clone();
        let store = Store::open(StoreConfig {
            devices,
            clock: clock.clone(),
            executor: host_executor(clock),
            shape,
            namespace: Namespace::default(),
            pool: own.pool.clone(),
            gpu: None,
            options,
        });
        Self { store: store.unwrap(), drives }
    }

    fn memory(&self) -> KvMemory {
        KvMemory::new(&*self.drives.domain, SHAPE, BLOCKS)
    }
}

/// An engine with a pool of its own.
struct Engine {
    store: Store,
    memory: KvMemory,
}

impl Engine {
    fn new(rig: &Rig, shape: KvShape) -> Self {
        let memory = KvMemory::new(&*rig.drives.domain, shape, BLOCKS);
        let pool = rig.store.plane().add_pool(memory.pool.clone()).unwrap();
        Self { store: rig.store.with_pool(pool), memory }
    }

    fn save(&mut self, key: BlockKey, version: u64, block: BlockId) {
        self.memory.fill(block, key, version);
        save(&self.store, &[key], &[block]);
    }

    /// Loads blocks, and returns true if all of them have the bytes of their versions.
    fn loads(&mut self, wanted: &[(BlockKey, u64)]) -> bool {
        let (keys, blocks): (Vec<BlockKey>, _) =
            (wanted.iter().map(|(key, _)| *key).collect(), blocks(0, wanted.len()));
        blocks.iter().for_each(|block| self.memory.wipe(*block));
        load(&self.store, &keys, &blocks);
        let mut all = wanted.iter().zip(&blocks);
        all.all(|((key, version), block)| {
            (0..SHAPE.layers).all(|at| self.memory.holds(*block, Layer(at), *key, *version))
        })
    }
}

fn save(store: &Store, keys: &[BlockKey], blocks: &[BlockId]) {
    let save = store.allocate(keys, blocks).unwrap();
    for layer in (0..SHAPE.layers).map(Layer) {
        store.start(&save, layer, Order::Unordered).unwrap();
    }
    assert_eq!(store.commit(save).unwrap().written, keys.len());
}

fn load(store: &Store, keys: &[BlockKey], blocks: &[BlockId]) {
    let prefix = store.lookup(keys).unwrap();
    let load = store.retrieve(&prefix, blocks).unwrap();
    for layer in (0..SHAPE.layers).map(Layer) {
        let ticket = store.start(&load, layer, Order::Unordered).unwrap();
        store.wait(ticket).unwrap();
    }
}

#[test]
fn what_one_pool_stores_another_one_finds() {
    let rig = Rig::new(StoreOptions::default());
    let (mut one, other) = (rig.memory(), rig.memory());
    let first = rig.store.plane().add_pool(one.pool.clone()).unwrap();
    let second = rig.store.plane().add_pool(other.pool.clone()).unwrap();
    assert_ne!(first, second);
    let (keys, from, to) = (keys(0..4), blocks(0, 4), blocks(4, 4));
    for (key, block) in keys.iter().zip(&from) {
        one.fill(*block, *key, 0);
    }
    save(&rig.store.with_pool(first), &keys, &from);
    load(&rig.store.with_pool(second), &keys, &to);
    for layer in (0..SHAPE.layers).map(Layer) {
        let mut pairs = keys.iter().zip(&to);
        assert!(pairs.all(|(key, block)| other.holds(*block, layer, *key, 0)));
    }
    rig.store.plane().remove_pool(first).unwrap();
    rig.store.plane().remove_pool(second).unwrap();
    rig.store.close().unwrap();
}

#[test]
fn layers_take_turns_in_pools_that_have_room_for_one() {
    for dram in [0, 1 << 20] {
        let rig = Rig::new(StoreOptions { dram, ..StoreOptions::default() });
        let plane = rig.store.plane().clone();
        let mut all = rig.memory();
        let bytes = KvPool::staging_bytes(&SHAPE, BLOCKS, 1) as usize;
        let rooms = [(); 2].map(|()| rig.drives.domain.alloc(bytes).unwrap());
        let pool = |memory: &Arc<dyn DmaMemory>, blocks| {
            plane.add_pool(KvPool::of_layers(memory.clone(), 0, &SHAPE, blocks).unwrap()).unwrap()
        };
        let [first, second] = [0, 1].map(|at: usize| pool(&rooms[at], BLOCKS));
        let small = pool(&rooms[0], BLOCKS - 1);
        let (keys, at) = (keys(0..4), blocks(1, 4));
        keys.iter().zip(&at).for_each(|(key, block)| all.fill(*block, *key, 0));
        // Copies a layer's objects between a room and the memory of all layers.
        let row_bytes = bytes / SHAPE.segments as usize;
        let object = SHAPE.object_bytes as usize;
        let copy = |all: &mut KvMemory, room: usize, layer: Layer, is_write: bool| {
            let mut staged = buffer(&rooms[room]);
            let mut own = buffer(all.pool.memory());
            for (block, row) in
                at.iter().flat_map(|at| SHAPE.layer_rows(layer).map(|row| (*at, row)))
            {
                let there = (row % SHAPE.segments) as usize * row_bytes + block.0 as usize * object;
                let here = all.pool.offset(block, objstore::Row(row)).unwrap() as usize;
                let mut bytes = vec![0; object];
                if is_write {
                    own.read(here, &mut bytes).unwrap();
                    staged.write(there, &bytes).unwrap();
                } else {
                    staged.read(there, &mut bytes).unwrap();
                    own.write(here, &bytes).unwrap();
                }
            }
        };
        let store = rig.store.with_pool(first);
        let aim = |layer: Layer| [(0, first), (1, second)][layer.0 as usize % 2];
        let save = store.allocate(&keys, &at).unwrap();
        let ticket = save.ticket(Layer(0));
        let refused = plane.start_at(ticket, small).unwrap_err();
        assert!(refused.to_string().contains("7 blocks"), "{refused}");
        for layer in (0..SHAPE.layers).map(Layer) {
            let (room, pool) = aim(layer);
            copy(&mut all, room, layer, true);
            plane.start_at(save.ticket(layer), pool).unwrap();
            store.wait(save.ticket(layer)).unwrap();
        }
        assert_eq!(store.commit(save).unwrap().written, keys.len());
        at.iter().for_each(|block| all.wipe(*block));
        // Leftovers in a room must not be taken for what was loaded.
        rooms.iter().for_each(|room| buffer(room).write(0, &vec![0xEE; bytes]).unwrap());
        let prefix = store.lookup(&keys).unwrap();
        let load = store.retrieve(&prefix, &at).unwrap();
        for layer in (0..SHAPE.layers).map(Layer) {
            let (room, pool) = aim(layer);
            plane.start_at(load.ticket(layer), pool).unwrap();
            store.wait(load.ticket(layer)).unwrap();
            copy(&mut all, room, layer, false);
            let mut pairs = keys.iter().zip(&at);
            assert!(pairs.all(|(key, block)| all.holds(*block, layer, *key, 0)));
        }
        drop((load, prefix));
        for pool in [first, second, small] {
            plane.remove_pool(pool).unwrap();
        }
        rig.store.close().unwrap();
    }
}

fn buffer(memory: &Arc<dyn DmaMemory>) -> Buffer {
    Buffer::new(DmaSlice::whole(memory.clone()).unwrap()).unwrap()
}

#[test]
fn a_pool_is_removed_under_its_requests() {
    let rig = Rig::new(StoreOptions::default());
    let free = rig.store.stats().unwrap().files_free();
    for _ in 0..20 {
        let mut memory = rig.memory();
        let pool = rig.store.plane().add_pool(memory.pool.clone()).unwrap();
        let store = rig.store.with_pool(pool);
        let (keys, from) = (keys(0..8), blocks(0, 8));
        keys.iter().zip(&from).for_each(|(key, block)| memory.fill(*block, *key, 0));
        let request = store.allocate(&keys, &from).unwrap();
        store.start(&request, Layer(0), Order::Unordered).unwrap();
        store.start(&request, Layer(2), Order::Unordered).unwrap();
        let removed = rig.store.plane().remove_pool(pool).unwrap();
        let KvMemory { pool: kept, .. } = memory;
        drop((removed, kept));
        // Nothing of it is left: neither the request, nor its files.
        let late = store.start(&request, Layer(1), Order::Unordered).unwrap_err();
        assert!(matches!(late, StoreError::Ended { .. }), "{late}");
        let late = store.allocate(&keys, &from).unwrap_err();
        assert!(late.to_string().contains("it was removed or never added"), "{late}");
        assert!(store.commit(request).is_err());
        assert_eq!(rig.store.stats().unwrap().files_free(), free);
        assert_eq!(rig.store.peek(&keys), 0);
    }
    rig.store.close().unwrap();
}

#[test]
fn a_block_beyond_its_pool_is_refused() {
    let rig = Rig::new(StoreOptions::default());
    let memory = rig.memory();
    let pool = rig.store.plane().add_pool(memory.pool.clone()).unwrap();
    let store = rig.store.with_pool(pool);
    let error = store.allocate(&keys(0..1), &[BlockId(BLOCKS)]).unwrap_err();
    assert!(
        error.to_string().starts_with(&format!("block {BLOCKS} was given, but {BLOCKS} blocks")),
        "{error}"
    );
    // The store's own pool is smaller.
    let error = rig.store.allocate(&keys(0..1), &[BlockId(2)]).unwrap_err();
    assert!(error.to_string().starts_with("block 2 was given, but 2 blocks"), "{error}");
    // Also for a key that needs no block, as it is stored.
    save(&store, &keys(0..1), &[BlockId(0)]);
    let error = store.allocate(&keys(0..1), &[BlockId(BLOCKS)]).unwrap_err();
    assert!(
        error.to_string().starts_with(&format!("block {BLOCKS} was given, but {BLOCKS} blocks")),
        "{error}"
    );
}

#[test]
fn a_pool_that_cannot_be_beside_the_first_is_refused() {
    let rig = Rig::new(StoreOptions::default());
    let other = KvShape { segments: 1, ..SHAPE };
    let memory = rig.drives.domain.alloc(1 << 20).unwrap();
    let pool = KvPool::contiguous(memory, &other, BLOCKS).unwrap();
    let error = rig.store.plane().add_pool(pool).unwrap_err().to_string();
    assert!(error.contains("another shape"), "{error}");
}

#[test]
fn blocks_in_dram_are_there_for_all_pools() {
    let rig = Rig::new(StoreOptions { dram: 1 << 20, ..StoreOptions::default() });
    let (mut one, other) = (rig.memory(), rig.memory());
    let first = rig.store.plane().add_pool(one.pool.clone()).unwrap();
    let second = rig.store.plane().add_pool(other.pool.clone()).unwrap();
    let (keys, from) = (keys(0..4), blocks(0, 4));
    keys.iter().zip(&from).for_each(|(key, block)| one.fill(*block, *key, 0));
    save(&rig.store.with_pool(first), &keys, &from);
    // The cache has its own copies.
    let KvMemory { pool, .. } = one;
    drop((rig.store.plane().remove_pool(first).unwrap(), pool));
    let to = blocks(4, 4);
    load(&rig.store.with_pool(second), &keys, &to);
    let is_right = |layer| {
        let mut pairs = keys.iter().zip(&to);
        pairs.all(|(key, block)| other.holds(*block, layer, *key, 0))
    };
    assert!((0..SHAPE.layers).map(Layer).all(is_right));
    let stats = rig.store.stats().unwrap();
    assert_eq!((stats.plane.dram.hits, stats.plane.retrieved_bytes), (4, 0), "{stats:?}");
    rig.store.close().unwrap();
}

/// Only checksums show that an engine has changed a block while it was copied to the cache.
#[test]
fn without_checksums_the_cache_takes_no_blocks_of_engines() {
    let format = Format { checksums: false, ..format(SHAPE) };
    let options = StoreOptions { dram: 1 << 20, ..StoreOptions::default() };
    let rig = Rig::formatted(memory_drives(2, 32 << 20, 4096), &format, SHAPE, options);
    let mut engine = Engine::new(&rig, SHAPE);
    let key = keys(0..1)[0];
    engine.save(key, 0, BlockId(0));
    assert!(engine.loads(&[(key, 0)]) && engine.loads(&[(key, 0)]));
    let stats = rig.store.stats().unwrap();
    assert_eq!((stats.plane.dram.hits, stats.plane.dram.blocks), (0, 0), "{stats:?}");
    rig.store.close().unwrap();
}

/// Two engines store, load, replace and read ahead at random, with a cache for a few blocks, and
/// every byte is compared.
fn engines_over(drives: Vec<EmuConfig>, object_bytes: u32, seed: u64) {
    let shape = KvShape { object_bytes, ..SHAPE };
    let dram = 6 * shape.block_bytes();
    let rig = Rig::on(drives, shape, StoreOptions { dram, ..StoreOptions::default() });
    let mut engines = [Engine::new(&rig, shape), Engine::new(&rig, shape)];
    let mut rng = SmallRng::seed_from_u64(seed);
    let keys = keys(0..16);
    let mut versions: Vec<Option<u64>> = vec![None; keys.len()];
    for step in 0..300 {
        let (first, count) = (rng.random_range(0..keys.len()), rng.random_range(1..=4));
        let run = first..keys.len().min(first + count);
        let engine = &mut engines[rng.random_range(0..2)];
        match rng.random_range(0..4) {
            0 => {
                engine.store.remove(&keys[first..=first]).unwrap();
                versions[first] = Some(step);
                engine.save(keys[first], step, BlockId(rng.random_range(0..BLOCKS)));
            }
            1 => {
                engine.store.prefetch(&keys[run], Nanos::from_millis(1)).unwrap();
            }
            _ => {
                let stored = run.map_while(|at| Some((keys[at], versions[at]?)));
                let wanted: Vec<_> = stored.collect();
                assert!(engine.loads(&wanted), "seed {seed}, step {step}: {wanted:?}");
            }
        }
    }
    let dram = rig.store.stats().unwrap().plane.dram;
    let counts = [dram.hits, dram.misses, dram.evictions, dram.prefetched_bytes];
    assert!(counts.iter().all(|count| *count > 0), "seed {seed}: {dram:?}");
    drop(engines);
    rig.store.close().unwrap();
}

#[test]
fn the_cache_has_the_bytes_of_devices_of_all_kinds() {
    let drives = |count, lba_bytes, change: fn(&mut EmuConfig)| {
        let mut drives = memory_drives(count, 32 << 20, lba_bytes);
        drives.iter_mut().for_each(change);
        drives
    };
    let prps: fn(&mut EmuConfig) = |drive| drive.sgl = SglSupport::None;
    let small: fn(&mut EmuConfig) = |drive| drive.mdts_bytes = Some(8192);
    engines_over(drives(1, 512, |_| ()), 512, 1);
    engines_over(drives(3, 512, |_| ()), 4096 + 512, 2);
    engines_over(drives(2, 512, |drive| drive.sgl = SglSupport::Dword), 1536, 3);
    engines_over(drives(2, 4096, prps), 4096, 4);
    engines_over(drives(1, 512, prps), 16384, 5);
    engines_over(drives(5, 4096, small), 20480, 6);
    engines_over(drives(4, 4096, |drive| drive.vwc = false), 65536, 7);
}

#[test]
fn a_pool_is_removed_while_a_device_does_not_answer() {
    // A busy machine must not make good commands late: in real time, that takes seconds.
    let rig = Rig::new(StoreOptions {
        command_timeout: Nanos::from_millis(3_000),
        wait_timeout: Nanos::from_millis(6_000),
        ..StoreOptions::default()
    });
    let (mut one, mut other) = (rig.memory(), rig.memory());
    let first = rig.store.plane().add_pool(one.pool.clone()).unwrap();
    let second = rig.store.plane().add_pool(other.pool.clone()).unwrap();
    let (keys, from) = (keys(0..4), blocks(0, 4));
    keys.iter().zip(&from).for_each(|(key, block)| one.fill(*block, *key, 0));
    keys.iter().zip(&from).for_each(|(key, block)| other.fill(*block, *key, 0));
    // One write is lost by the device: its pool stays until the controllers were recovered.
    let when = FaultWhen { opcode: Some(WRITE), admin: Some(false), ..FaultWhen::default() };
    set_faults(&rig.drives.emus, Some(FaultRule::new(when, FaultAction::Drop).limit(1)));
    let store = rig.store.with_pool(first);
    let request = store.allocate(&keys, &from).unwrap();
    store.start(&request, Layer(0), Order::Unordered).unwrap();
    rig.store.plane().remove_pool(first).unwrap();
    assert_eq!(rig.store.plane().stats().unwrap().recoveries, 1);
    drop(request);
    // The other pool works on.
    set_faults(&rig.drives.emus, None);
    let store = rig.store.with_pool(second);
    save(&store, &keys, &from);
    load(&store, &keys, &blocks(4, 4));
    assert!(keys.iter().zip(blocks(4, 4)).all(|(key, at)| other.holds(at, Layer(0), *key, 0)));
    rig.store.close().unwrap();
}
