//! Pools of other owners beside the store's own: they share its blocks, and are removed at any
//! time.

use std::sync::Arc;

use nvme_driver::{Clock, ControllerOptions, DmaSpace as _, Nanos};
use nvme_emu::{EmuDomain, FaultAction, FaultRule, FaultWhen};
use objstore::{
    BlockId, BlockKey, KvPool, KvShape, Layer, Namespace, Store, StoreConfig, StoreDevice,
    StoreError, StoreOptions,
};
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
        let drives = Drives::threaded(EmuDomain::new("pools"), memory_drives(2, 32 << 20, 4096));
        let own = KvMemory::new(&*drives.domain, SHAPE, 2);
        let attached = drives.attach(&ControllerOptions::default());
        let devices: Vec<StoreDevice> = attached.into_iter().map(StoreDevice::new).collect();
        Store::format(&devices, &format(SHAPE)).unwrap();
        let clock: Arc<dyn Clock> = drives.clock.clone();
        let store = Store::open(StoreConfig {
            devices,
            clock: clock.clone(),
            executor: host_executor(clock),
            shape: SHAPE,
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

fn save(store: &Store, keys: &[BlockKey], blocks: &[BlockId]) {
    let save = store.allocate(keys, blocks).unwrap();
    for layer in (0..SHAPE.layers).map(Layer) {
        store.store_layer(&save, layer).unwrap();
    }
    assert_eq!(store.commit(save).unwrap().written, keys.len());
}

fn load(store: &Store, keys: &[BlockKey], blocks: &[BlockId]) {
    let prefix = store.lookup(keys).unwrap();
    let load = store.retrieve(&prefix, blocks).unwrap();
    for layer in (0..SHAPE.layers).map(Layer) {
        let ticket = store.retrieve_layer(&load, layer).unwrap();
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
fn a_pool_is_removed_under_its_requests() {
    let rig = Rig::new(StoreOptions::default());
    let free = rig.store.stats().unwrap().files_free;
    for _ in 0..20 {
        let mut memory = rig.memory();
        let pool = rig.store.plane().add_pool(memory.pool.clone()).unwrap();
        let store = rig.store.with_pool(pool);
        let (keys, from) = (keys(0..8), blocks(0, 8));
        keys.iter().zip(&from).for_each(|(key, block)| memory.fill(*block, *key, 0));
        let request = store.allocate(&keys, &from).unwrap();
        store.store_layer(&request, Layer(0)).unwrap();
        store.store_layer(&request, Layer(2)).unwrap();
        let removed = rig.store.plane().remove_pool(pool).unwrap();
        let KvMemory { pool: kept, .. } = memory;
        drop((removed, kept));
        // Nothing of it is left: neither the request, nor its files.
        let late = store.store_layer(&request, Layer(1)).unwrap_err();
        assert!(matches!(late, StoreError::Ended { .. }), "{late}");
        let late = store.allocate(&keys, &from).unwrap_err();
        assert!(matches!(late, StoreError::NoSuchPool { .. }), "{late}");
        assert!(store.commit(request).is_err());
        assert_eq!(rig.store.stats().unwrap().files_free, free);
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
    assert!(matches!(error, StoreError::NoSuchBlock { blocks: BLOCKS, .. }), "{error}");
    // The store's own pool is smaller.
    let error = rig.store.allocate(&keys(0..1), &[BlockId(2)]).unwrap_err();
    assert!(matches!(error, StoreError::NoSuchBlock { blocks: 2, .. }), "{error}");
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
    let rig = Rig::new(StoreOptions { dram_bytes: 1 << 20, ..StoreOptions::default() });
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
    assert_eq!((stats.dram.hits, stats.retrieved_bytes), (4, 0), "{stats:?}");
    rig.store.close().unwrap();
}

#[test]
fn a_pool_is_removed_while_a_device_does_not_answer() {
    let rig = Rig::new(StoreOptions {
        command_timeout: Nanos::from_millis(300),
        wait_timeout: Nanos::from_millis(600),
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
    store.store_layer(&request, Layer(0)).unwrap();
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
