//! The whole stack below a store, in virtual time and on one thread: software controllers, driver,
//! ring, and the I/O kernel inline. What happens follows from the seed.
#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;

use gio_kernels::InlineExecutor;
use gio_uring::IoExecutor;
use nvme_driver::{Bus, Clock, Controller, ControllerOptions, DmaSpace, Iova, Nanos};
use nvme_emu::{
    Emu, EmuConfig, EmuDomain, FaultAction, FaultPlan, FaultRule, FaultWhen, MemoryMedia, SimClock,
    SimMedia, SimOptions,
};
use objstore::{
    BlockId, BlockKey, ExecutorFactory, KvPool, KvShape, Layer, Prefix, Row, Store, StoreConfig,
    StoreDevice, StoreError, StoreOptions, Writing,
};

/// What a stack is made of.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    pub devices: usize,
    pub device_bytes: u64,
    pub lba_bytes: u32,
    pub shape: KvShape,
    pub blocks: u32,
    pub options: StoreOptions,
    /// Writes are lost with the power until they are flushed, or had FUA.
    pub volatile_cache: bool,
    /// Makes the controllers different from good modern drives.
    pub drive: fn(&mut EmuConfig),
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            seed: 1,
            devices: 2,
            device_bytes: 16 << 20,
            lba_bytes: 4096,
            shape: KvShape { layers: 3, segments: 2, object_bytes: 4096, block_tokens: 16 },
            blocks: 64,
            volatile_cache: false,
            drive: |_| {},
            options: StoreOptions {
                queues_per_device: 2,
                queue_depth: 64,
                iocbs: 16,
                command_timeout: Nanos::from_millis(100),
                virtual_time: true,
                ..StoreOptions::default()
            },
        }
    }
}

/// A store and everything under it.
pub struct Stack {
    pub store: Store,
    pub shape: KvShape,
    pub pool: KvPool,
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

    /// `executor` makes the n-th executor, counted from 0.
    pub fn with_executor(
        plan: &Plan,
        clock: Arc<SimClock>,
        executor: impl Fn(u32) -> Box<dyn IoExecutor> + Send + 'static,
    ) -> Result<Self, StoreError> {
        let domain = EmuDomain::new("test");
        let mut emus = Vec::new();
        let mut devices = Vec::new();
        for at in 0..plan.devices {
            let media = MemoryMedia::new(plan.device_bytes).unwrap();
            let config = EmuConfig::new(format!("emu{at}"));
            let mut config = if plan.volatile_cache {
                let options = SimOptions { seed: plan.seed, ..SimOptions::default() };
                config.namespace(SimMedia::new(media, options), plan.lba_bytes)
            } else {
                config.namespace(media, plan.lba_bytes)
            };
            (plan.drive)(&mut config);
            let emu = Emu::new(domain.clone(), config).unwrap();
            clock.drive(emu.clone());
            let bus: Arc<dyn Bus> = emu.bus();
            let ticks: Arc<dyn Clock> = clock.clone();
            let controller = Controller::attach(bus, ticks, ControllerOptions::default()).unwrap();
            devices.push(StoreDevice::from(controller));
            emus.push(emu);
        }
        let bytes = plan.shape.block_bytes() * u64::from(plan.blocks);
        let memory = domain.alloc(bytes as usize).unwrap();
        let pool = KvPool::contiguous(memory, &plan.shape, plan.blocks).unwrap();
        let mut made = 0;
        let executor: ExecutorFactory = Box::new(move || {
            made += 1;
            Ok(executor(made - 1))
        });
        let store = Store::open(StoreConfig {
            devices,
            clock: clock.clone(),
            executor,
            shape: plan.shape,
            pool: pool.clone(),
            gpu: None,
            options: plan.options.clone(),
        })?;
        Ok(Self { store, shape: plan.shape, pool, domain, emus, clock })
    }

    /// The bytes that the object of `key` in `row` has.
    pub fn pattern(&self, key: BlockKey, row: Row) -> Vec<u8> {
        let mut word = (key.0 as u64 ^ (key.0 >> 64) as u64) ^ (u64::from(row.0) << 48);
        let words = (self.shape.object_bytes as usize).div_ceil(8);
        let mut bytes = Vec::with_capacity(words * 8);
        for _ in 0..words {
            word = (word ^ (word >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9).wrapping_add(1);
            bytes.extend(word.to_le_bytes());
        }
        bytes.truncate(self.shape.object_bytes as usize);
        bytes
    }

    fn iova(&self, block: BlockId, row: Row) -> Iova {
        self.pool.iova(block, row).unwrap()
    }

    /// Computes the KV of `key` into `block`.
    pub fn fill(&self, block: BlockId, key: BlockKey) {
        for row in (0..self.shape.rows()).map(Row) {
            let bytes = self.pattern(key, row);
            self.domain.access().write(self.iova(block, row), &bytes).unwrap();
        }
    }

    /// Makes `block` hold nothing of any key.
    pub fn wipe(&self, block: BlockId) {
        for row in (0..self.shape.rows()).map(Row) {
            let len = self.shape.object_bytes as usize;
            self.domain.access().fill(self.iova(block, row), 0xEE, len).unwrap();
        }
    }

    /// Whether `block` holds the KV of `key` in the rows of `layer`, every byte of it.
    pub fn holds_layer(&self, block: BlockId, key: BlockKey, layer: Layer) -> bool {
        let mut bytes = vec![0; self.shape.object_bytes as usize];
        self.shape.layer_rows(layer).map(Row).all(|row| {
            self.domain.access().read(self.iova(block, row), &mut bytes).unwrap();
            bytes == self.pattern(key, row)
        })
    }

    pub fn holds(&self, block: BlockId, key: BlockKey) -> bool {
        (0..self.shape.layers).all(|layer| self.holds_layer(block, key, Layer(layer)))
    }

    /// Computes and allocates, but stores nothing yet.
    pub fn begin(&mut self, keys: &[BlockKey], first: u32) -> Writing {
        let blocks = blocks(first, keys.len());
        for (key, block) in keys.iter().zip(&blocks) {
            self.fill(*block, *key);
        }
        self.store.allocate(keys, &blocks).unwrap()
    }

    /// Stores every layer of a writing, waiting for each.
    pub fn write_all(&mut self, writing: &Writing) -> Result<(), StoreError> {
        for layer in (0..self.shape.layers).map(Layer) {
            let ticket = self.store.store_layer(writing, layer)?;
            self.store.wait(ticket)?;
        }
        Ok(())
    }

    /// Stores `keys` from blocks `first` on, and returns how many were accepted.
    pub fn put(&mut self, keys: &[BlockKey], first: u32) -> usize {
        let writing = self.begin(keys, first);
        self.write_all(&writing).unwrap();
        self.store.commit(writing).unwrap().accepted
    }

    /// Reads a prefix into wiped blocks from `first` on, layer by layer.
    pub fn read(&mut self, prefix: &Prefix, first: u32) -> Result<(), StoreError> {
        let blocks = blocks(first, prefix.len());
        blocks.iter().for_each(|block| self.wipe(*block));
        let transfer = self.store.retrieve(prefix, &blocks)?;
        let mut tickets = Vec::new();
        for layer in (0..self.shape.layers).map(Layer) {
            tickets.push(self.store.retrieve_layer(&transfer, layer)?);
        }
        let mut result = Ok(());
        for ticket in tickets {
            result = result.and(self.store.wait(ticket).map(|_| ()));
        }
        result
    }

    /// Looks up `keys`, reads what is found, checks every byte and returns how many there were.
    pub fn get(&mut self, keys: &[BlockKey], first: u32) -> usize {
        let prefix = self.store.lookup(keys).unwrap();
        self.read(&prefix, first).unwrap();
        for (key, block) in keys.iter().zip(blocks(first, prefix.len())) {
            assert!(self.holds(block, *key), "{block}: not the bytes of {key}");
        }
        prefix.len()
    }

    /// Makes one rule wrong with every device.
    pub fn faults(&self, rule: Option<FaultRule>) {
        let rules: Vec<FaultRule> = rule.into_iter().collect();
        for emu in &self.emus {
            emu.set_faults(FaultPlan { seed: 1, rules: rules.clone(), ..FaultPlan::default() });
        }
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

pub fn keys(range: std::ops::Range<u128>) -> Vec<BlockKey> {
    range
        .map(|n| BlockKey((n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835)))
        .collect()
}

pub fn blocks(first: u32, count: usize) -> Vec<BlockId> {
    (first..first + count as u32).map(BlockId).collect()
}
