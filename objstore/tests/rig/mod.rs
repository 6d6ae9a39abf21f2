//! A store whose pool is on a GPU, over software controllers, in virtual time and on one thread.
#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;

use gio_kernels::InlineExecutor;
use gio_uring::{IoExecutor, RawStream};
use nvme_driver::{Clock, ControllerOptions, DevicePtr, DmaSpace, Nanos};
use nvme_emu::{Emu, EmuDomain, FaultRule, SimClock};
use objstore::{
    BlockId, BlockKey, ExecutorFactory, Format, KvPool, KvShape, Layer, LoadRequest, Namespace,
    Order, PoolLayout, Route, Row, Store, StoreConfig, StoreDevice, StoreError, StoreGpu, Ticket,
};
use ripieno_testkit::{Drives, memory_drives, object, set_faults};

use crate::{
    gpu::{Copies, Gpu, GpuClock, Memory},
    stack::{Plan, blocks},
};

/// The clock of the whole rig.
pub type Ticks = Arc<GpuClock<SimClock>>;

/// A store and everything around it.
pub struct Rig {
    pub store: Store,
    pub gpu: Arc<Gpu>,
    pub domain: Arc<EmuDomain>,
    pub emus: Vec<Arc<Emu>>,
    pub clock: Ticks,
    pub shape: KvShape,
    pub blocks: u32,
    /// GPU address of the pool.
    pub base: DevicePtr,
}

/// All of a rig except the store.
pub struct Parts {
    pub gpu: Arc<Gpu>,
    pub domain: Arc<EmuDomain>,
    pub emus: Vec<Arc<Emu>>,
    pub clock: Ticks,
    pub devices: Vec<StoreDevice>,
}

impl Parts {
    pub fn new(plan: &Plan) -> Self {
        let gpu = Gpu::new(plan.seed);
        let sim = SimClock::new(plan.seed);
        let clock = Arc::new(GpuClock(sim.clone(), gpu.clone()));
        let domain = EmuDomain::with_copies("test", Arc::new(Copies(gpu.clone())));
        let mut configs = memory_drives(plan.devices, plan.device_bytes, plan.lba_bytes);
        configs.iter_mut().for_each(plan.drive);
        let mut drives = Drives::simulated(domain.clone(), configs, &sim);
        drives.clock = clock.clone();
        let controllers = drives.attach(&ControllerOptions::default());
        let devices = controllers.into_iter().map(StoreDevice::new).collect();
        let emus = drives.emus;
        Self { gpu, domain, emus, clock, devices }
    }

    /// Returns a pool that uses this path, and its GPU address.
    pub fn pool(&self, plan: &Plan, path: Route) -> (KvPool, DevicePtr) {
        let shape = &plan.shape;
        let bytes = shape.block_bytes() * u64::from(plan.blocks);
        let (memory, base) = self.gpu.alloc(bytes as usize);
        let layout = PoolLayout::contiguous(shape, plan.blocks);
        let pool = if path == Route::Staged {
            let buffers = plan.options.staging_buffers;
            let staging = KvPool::staging_bytes(shape, SLOTS, buffers) as usize;
            let staging = self.domain.import(self.gpu.alloc_pinned(staging)).unwrap();
            KvPool::staged(memory, staging, shape, layout)
        } else {
            let memory = self.domain.import(memory).unwrap();
            KvPool::on_gpu(memory, shape, layout)
        };
        (pool.unwrap(), base)
    }

    pub fn store(
        self,
        plan: &Plan,
        pool: KvPool,
        base: DevicePtr,
        executor: impl Fn(u32, Ticks) -> Box<dyn IoExecutor> + Send + 'static,
    ) -> Result<Rig, StoreError> {
        let Self { gpu, domain, emus, clock, devices } = self;
        let (mut made, ticks) = (0, clock.clone());
        let executor: ExecutorFactory = Box::new(move || {
            made += 1;
            Ok(executor(made - 1, ticks.clone()))
        });
        let config = StoreConfig {
            devices,
            clock: clock.clone(),
            executor,
            shape: plan.shape,
            pool,
            gpu: Some(StoreGpu { streams: gpu.clone(), copies: Arc::new(Copies(gpu.clone())) }),
            options: plan.options.clone(),
            namespace: Namespace::default(),
        };
        // This GPU's I/O kernel cannot read objects: only its streams can.
        let format = Format { shape: plan.shape, checksums: false, ..plan.format.clone() };
        let store = Store::create(config, &format)?;
        let (shape, blocks) = (plan.shape, plan.blocks);
        Ok(Rig { store, gpu, domain, emus, clock, shape, blocks, base })
    }
}

/// Blocks that fit into a staging buffer.
pub const SLOTS: u32 = 16;

pub fn inline(_: u32, clock: Ticks) -> Box<dyn IoExecutor> {
    Box::new(InlineExecutor::new(clock))
}

/// Placement of objects in GPU memory.
#[derive(Debug, Clone, Copy)]
pub struct Places {
    pub shape: KvShape,
    pub blocks: u32,
    pub base: DevicePtr,
}

impl Places {
    pub fn at(&self, block: BlockId, row: Row) -> DevicePtr {
        let object = u64::from(row.0) * u64::from(self.blocks) + u64::from(block.0);
        DevicePtr(self.base.0 + object * u64::from(self.shape.object_bytes))
    }

    fn object(&self, key: BlockKey, row: Row) -> Vec<u8> {
        object(key, 0, row, self.shape.object_bytes)
    }

    /// Computes the KV of `key` in `layer` into `block`.
    pub fn fill(&self, memory: &Memory, block: BlockId, key: BlockKey, layer: Layer) {
        for row in self.shape.layer_rows(layer).map(Row) {
            memory.write(self.at(block, row), &self.object(key, row));
        }
    }

    pub fn wipe(&self, memory: &Memory, block: BlockId, layer: Layer) {
        for row in self.shape.layer_rows(layer).map(Row) {
            memory.write(self.at(block, row), &vec![0xEE; self.shape.object_bytes as usize]);
        }
    }

    /// Returns true if `block` holds the KV of `key` in the rows of `layer`, every byte of it.
    pub fn holds(&self, memory: &Memory, block: BlockId, key: BlockKey, layer: Layer) -> bool {
        self.shape.layer_rows(layer).map(Row).all(|row| {
            let bytes = memory.read(self.at(block, row), self.shape.object_bytes as usize);
            bytes == self.object(key, row)
        })
    }
}

impl Rig {
    pub fn new(plan: &Plan, path: Route) -> Self {
        Self::with_executor(plan, path, inline)
    }

    pub fn with_executor(
        plan: &Plan,
        path: Route,
        executor: impl Fn(u32, Ticks) -> Box<dyn IoExecutor> + Send + 'static,
    ) -> Self {
        let parts = Parts::new(plan);
        let (pool, base) = parts.pool(plan, path);
        let rig = parts.store(plan, pool, base, executor).unwrap();
        assert!(rig.gpu.is_idle(), "the proof left something in a stream");
        rig
    }

    pub fn places(&self) -> Places {
        Places { shape: self.shape, blocks: self.blocks, base: self.base }
    }

    pub fn layers(&self) -> impl Iterator<Item = Layer> + use<> {
        (0..self.shape.layers).map(Layer)
    }

    pub fn fill(&self, first: u32, keys: &[BlockKey]) {
        for (key, block) in keys.iter().zip(blocks(first, keys.len())) {
            self.layers().for_each(|l| self.places().fill(&self.gpu.memory, block, *key, l));
        }
    }

    pub fn wipe(&self, first: u32, count: usize) {
        for block in blocks(first, count) {
            self.layers().for_each(|l| self.places().wipe(&self.gpu.memory, block, l));
        }
    }

    pub fn holds(&self, first: u32, keys: &[BlockKey], layer: Layer) -> bool {
        let places = self.places();
        let memory = &self.gpu.memory;
        keys.iter().zip(blocks(first, keys.len())).all(|(k, b)| places.holds(memory, b, *k, layer))
    }

    /// Stores `keys` from blocks `first` on, waiting on the host.
    pub fn put(&mut self, keys: &[BlockKey], first: u32) -> usize {
        self.fill(first, keys);
        let save = self.store.allocate(keys, &blocks(first, keys.len())).unwrap();
        for layer in self.layers() {
            let ticket = self.store.start(&save, layer, Order::Unordered).unwrap();
            self.store.wait(ticket).unwrap();
        }
        self.store.commit(save).unwrap().accepted
    }

    /// Begins a transfer of `keys` into wiped blocks from `first` on; all are stored.
    pub fn load(&mut self, keys: &[BlockKey], first: u32) -> LoadRequest {
        let prefix = self.store.lookup(keys).unwrap();
        assert_eq!(prefix.len(), keys.len());
        self.wipe(first, keys.len());
        self.store.retrieve(&prefix, &blocks(first, keys.len())).unwrap()
    }

    /// Looks up `keys`, reads the hits, checks every byte and returns how many there were.
    pub fn get(&mut self, keys: &[BlockKey], first: u32) -> usize {
        let prefix = self.store.lookup(keys).unwrap();
        self.wipe(first, prefix.len());
        let load = self.store.retrieve(&prefix, &blocks(first, prefix.len())).unwrap();
        for layer in self.layers() {
            let ticket = self.store.start(&load, layer, Order::Unordered).unwrap();
            self.store.wait(ticket).unwrap();
            assert!(self.holds(first, &keys[..prefix.len()], layer), "layer {layer}");
        }
        prefix.len()
    }

    /// Has the stream check if `block`s hold `keys` in `layer` once it gets here.
    pub fn look(
        &self,
        stream: RawStream,
        first: u32,
        keys: &[BlockKey],
        layer: Layer,
    ) -> std::sync::mpsc::Receiver<bool> {
        let (tell, seen) = std::sync::mpsc::channel();
        let (places, keys) = (self.places(), keys.to_vec());
        self.gpu.enqueue(stream, move |memory| {
            let all = keys.iter().zip(blocks(first, keys.len()));
            let holds = all.into_iter().all(|(key, b)| places.holds(memory, b, *key, layer));
            let _ = tell.send(holds);
        });
        seen
    }

    /// Runs the I/O kernel, the controllers and the streams for some turns, without waiting.
    pub fn run(&mut self, turns: u32) {
        for _ in 0..turns {
            // The inline kernel runs only when its ring is polled.
            let _ = self.store.stats();
            self.clock.pause(0, Nanos::MAX);
        }
    }

    /// Runs turns until the streams are empty, without waiting. Returns false if they never are.
    pub fn settle(&mut self) -> bool {
        for idle in 0..3000 {
            if self.gpu.is_idle() {
                return true;
            }
            let _ = self.store.stats();
            self.clock.pause(idle, Nanos::MAX);
        }
        false
    }

    pub fn faults(&self, rule: Option<FaultRule>) {
        set_faults(&self.emus, rule);
    }
}

/// Waits for tickets; returns the first error.
pub fn wait_all(store: &mut Store, tickets: Vec<Ticket>) -> Result<(), StoreError> {
    tickets.into_iter().try_for_each(|ticket| store.wait(ticket).map(|_| ()))
}
