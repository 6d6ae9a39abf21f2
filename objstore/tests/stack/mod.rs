//! The whole stack below a store, in virtual time and on one thread: software controllers, driver,
//! ring, and the I/O kernel inline. The order of events follows from the seed.
#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;

use gio_kernels::InlineExecutor;
use gio_uring::IoExecutor;
use nvme_driver::{ControllerOptions, Nanos};
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, FaultAction, FaultRule, FaultWhen, MemoryMedia, NamespaceConfig,
    SimClock, SimMedia, SimOptions,
};
use objstore::{
    BlockId, BlockKey, ExecutorFactory, Format, KvShape, Layer, Namespace, Order, PolicyKind,
    Prefix, Store, StoreConfig, StoreDevice, StoreError, StoreOptions, StoreRequest,
};
use ripieno_testkit::{Drives, KvMemory, format, memory_drives, set_faults};
#[allow(unused_imports, reason = "each test file uses its part")]
pub use ripieno_testkit::{blocks, keys};

/// Configuration of a stack.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    pub devices: usize,
    pub device_bytes: u64,
    pub lba_bytes: u32,
    pub shape: KvShape,
    pub blocks: u32,
    pub options: StoreOptions,
    /// Format of the store, except for its shape.
    pub format: Format,
    /// Power loss drops writes until they are flushed, unless they had FUA.
    pub volatile_cache: bool,
    /// Changes the configuration of the controllers, which are good modern drives by default.
    pub drive: fn(&mut EmuConfig),
}

impl Default for Plan {
    fn default() -> Self {
        let shape = KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 };
        Self {
            seed: 1,
            devices: 2,
            device_bytes: 64 << 20,
            lba_bytes: 4096,
            shape,
            format: format(shape),
            blocks: 64,
            volatile_cache: false,
            drive: |_| {},
            options: StoreOptions {
                queues: 2,
                depth: 64,
                iocbs: 16,
                command_timeout: Nanos::from_millis(100),
                // The tests assume this order of eviction.
                policy: PolicyKind::Lru,
                virtual_time: true,
                ..StoreOptions::default()
            },
        }
    }
}

/// Creates the controllers of a plan.
pub fn drives(plan: &Plan, clock: &Arc<SimClock>) -> Drives {
    let mut configs = memory_drives(plan.devices, plan.device_bytes, plan.lba_bytes);
    for config in &mut configs {
        if plan.volatile_cache {
            let media = MemoryMedia::new(plan.device_bytes).unwrap();
            let options = SimOptions { seed: plan.seed, ..SimOptions::default() };
            let media = SimMedia::new(media, options);
            config.namespaces = vec![NamespaceConfig::new(media, plan.lba_bytes)];
        }
        (plan.drive)(config);
    }
    Drives::simulated(EmuDomain::new("test"), configs, clock)
}

/// A store and everything under it.
pub struct Stack {
    pub store: Store,
    pub shape: KvShape,
    pub kv: KvMemory,
    pub domain: Arc<EmuDomain>,
    pub emus: Vec<Arc<Emu>>,
    pub clock: Arc<SimClock>,
}

impl Stack {
    pub fn new(plan: &Plan) -> Self {
        Self::open(plan).unwrap()
    }

    pub fn open(plan: &Plan) -> Result<Self, StoreError> {
        let clock = SimClock::new(plan.seed);
        let inline = clock.clone();
        Self::with_executor(plan, clock, move |_| Box::new(InlineExecutor::new(inline.clone())))
    }

    /// Creates a stack; `executor` makes the n-th executor, counted from 0.
    pub fn with_executor(
        plan: &Plan,
        clock: Arc<SimClock>,
        executor: impl Fn(u32) -> Box<dyn IoExecutor> + Send + 'static,
    ) -> Result<Self, StoreError> {
        Self::over(plan, clock.clone(), drives(plan, &clock), executor)
    }

    pub fn over(
        plan: &Plan,
        clock: Arc<SimClock>,
        drives: Drives,
        executor: impl Fn(u32) -> Box<dyn IoExecutor> + Send + 'static,
    ) -> Result<Self, StoreError> {
        let controllers = drives.attach(&ControllerOptions::default());
        let Drives { domain, emus, .. } = drives;
        let kv = KvMemory::new(&*domain, plan.shape, plan.blocks);
        let mut made = 0;
        let executor: ExecutorFactory = Box::new(move || {
            made += 1;
            Ok(executor(made - 1))
        });
        let config = StoreConfig {
            devices: controllers.into_iter().map(StoreDevice::new).collect(),
            clock: clock.clone(),
            executor,
            shape: plan.shape,
            pool: kv.pool.clone(),
            gpu: None,
            options: plan.options.clone(),
            namespace: Namespace::default(),
        };
        let store = Store::create(config, &Format { shape: plan.shape, ..plan.format.clone() })?;
        Ok(Self { store, shape: plan.shape, kv, domain, emus, clock })
    }

    /// Computes the KV of `key` into `block`.
    pub fn fill(&mut self, block: BlockId, key: BlockKey) {
        self.kv.fill(block, key, 0);
    }

    /// Makes `block` hold no data of any key.
    pub fn wipe(&mut self, block: BlockId) {
        self.kv.wipe(block);
    }

    pub fn holds(&self, block: BlockId, key: BlockKey) -> bool {
        (0..self.shape.layers).all(|layer| self.kv.holds(block, Layer(layer), key, 0))
    }

    /// Fills blocks and allocates files, but stores nothing yet.
    pub fn begin(&mut self, keys: &[BlockKey], first: u32) -> StoreRequest {
        let blocks = blocks(first, keys.len());
        for (key, block) in keys.iter().zip(&blocks) {
            self.fill(*block, *key);
        }
        self.store.allocate(keys, &blocks).unwrap()
    }

    /// Stores every layer of a store request, waiting for each.
    pub fn write_all(&mut self, save: &StoreRequest) -> Result<(), StoreError> {
        for layer in (0..self.shape.layers).map(Layer) {
            let ticket = self.store.start(save, layer, Order::Unordered)?;
            self.store.wait(ticket)?;
        }
        Ok(())
    }

    /// Stores `keys` from blocks `first` on, and returns how many were accepted.
    pub fn put(&mut self, keys: &[BlockKey], first: u32) -> usize {
        let save = self.begin(keys, first);
        self.write_all(&save).unwrap();
        self.store.commit(save).unwrap().accepted
    }

    /// Reads a prefix into wiped blocks from `first` on, layer by layer.
    pub fn read(&mut self, prefix: &Prefix, first: u32) -> Result<(), StoreError> {
        let blocks = blocks(first, prefix.len());
        blocks.iter().for_each(|block| self.wipe(*block));
        let load = self.store.retrieve(prefix, &blocks)?;
        let mut tickets = Vec::new();
        for layer in (0..self.shape.layers).map(Layer) {
            tickets.push(self.store.start(&load, layer, Order::Unordered)?);
        }
        let mut result = Ok(());
        for ticket in tickets {
            result = result.and(self.store.wait(ticket).map(|_| ()));
        }
        result
    }

    /// Looks up `keys`, reads the hits, checks every byte and returns how many there were.
    pub fn get(&mut self, keys: &[BlockKey], first: u32) -> usize {
        let prefix = self.store.lookup(keys).unwrap();
        self.read(&prefix, first).unwrap();
        for (key, block) in keys.iter().zip(blocks(first, prefix.len())) {
            assert!(self.holds(block, *key), "{block}: not the bytes of {key}");
        }
        prefix.len()
    }

    /// Injects a fault rule into every device; `None` removes it.
    pub fn faults(&self, rule: Option<FaultRule>) {
        set_faults(&self.emus, rule);
    }

    /// Returns the first LBA of the files' objects on each device.
    pub fn data_lba(&self) -> u64 {
        self.store.superblock().data_region().unwrap().first.0
    }

    pub fn refused_dma(&self) -> u64 {
        self.domain.refused()
    }
}

pub const WRITE: u8 = 1;
pub const READ: u8 = 2;
/// Unrecovered Read Error.
pub const READ_ERROR: FaultAction = FaultAction::Status { code: 0x281, dnr: true };
/// Write Fault.
pub const WRITE_FAULT: FaultAction = FaultAction::Status { code: 0x280, dnr: true };

pub fn on(opcode: u8, then: FaultAction) -> FaultRule {
    FaultRule::new(
        FaultWhen { opcode: Some(opcode), admin: Some(false), ..FaultWhen::default() },
        then,
    )
}
