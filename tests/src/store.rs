//! A store over any controllers, on one thread, and blocks whose right contents are known.

use std::sync::Arc;

use anyhow::Context;
use gio_kernels::InlineExecutor;
use nvme_driver::{Bus, Clock, Controller, ControllerOptions, DmaSlice, platform::buffer::Buffer};
use objstore::{
    BlockId, BlockKey, ExecutorFactory, KvPool, KvShape, Layer, Row, Store, StoreConfig,
    StoreDevice, StoreOptions,
};

/// What a [`Rig`] is made with.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The KV blocks.
    pub shape: KvShape,
    /// How many of them the engine has.
    pub blocks: u32,
    /// How the driver is set.
    pub driver: ControllerOptions,
    /// How the store is set. Its time is always the clock's.
    pub store: StoreOptions,
}

/// A store and the engine's memory.
#[derive(Debug)]
pub struct Rig {
    /// The store.
    pub store: Store,
    /// What a block is made of.
    pub shape: KvShape,
    pool: KvPool,
    memory: Buffer,
}

impl Rig {
    /// Opens a store over the controllers of `buses`, which share one address space.
    pub fn open(
        buses: &[Arc<dyn Bus>],
        clock: Arc<dyn Clock>,
        plan: &Plan,
    ) -> anyhow::Result<Self> {
        let mut devices = Vec::new();
        for bus in buses {
            let controller = Controller::attach(bus.clone(), clock.clone(), plan.driver.clone())?;
            devices.push(StoreDevice::from(controller));
        }
        let bytes = plan.shape.block_bytes() * u64::from(plan.blocks);
        let memory = buses.first().context("no controllers")?.dma().alloc(bytes as usize)?;
        let pool = KvPool::contiguous(memory.clone(), &plan.shape, plan.blocks)?;
        let memory = Buffer::new(DmaSlice::whole(memory)?).context("unreachable memory")?;
        let ticks = clock.clone();
        let executor: ExecutorFactory =
            Box::new(move || Ok(Box::new(InlineExecutor::new(ticks.clone()))));
        let store = Store::open(StoreConfig {
            devices,
            clock,
            executor,
            shape: plan.shape,
            pool: pool.clone(),
            gpu: None,
            options: StoreOptions { virtual_time: true, ..plan.store.clone() },
        })?;
        Ok(Self { store, shape: plan.shape, pool, memory })
    }

    /// The bytes of version `version` of `key` in `row`.
    fn contents(&self, key: BlockKey, version: u64, row: Row) -> Vec<u8> {
        let salt = (key.0 as u64) ^ (key.0 >> 64) as u64 ^ version << 40 ^ u64::from(row.0) << 20;
        crate::pattern(self.shape.object_bytes as usize, salt)
    }

    fn offset(&self, block: BlockId, row: Row) -> usize {
        self.pool.offset(block, row).expect("a block and row that exist") as usize
    }

    /// Computes version `version` of `key` into `block`.
    pub fn fill(&mut self, block: BlockId, key: BlockKey, version: u64) {
        for row in (0..self.shape.rows()).map(Row) {
            let (offset, bytes) = (self.offset(block, row), self.contents(key, version, row));
            self.memory.write(offset, &bytes).expect("inside the pool");
        }
    }

    /// Makes `block` hold nothing of any key.
    pub fn wipe(&mut self, block: BlockId) {
        let nothing = vec![0xee; self.shape.object_bytes as usize];
        for row in (0..self.shape.rows()).map(Row) {
            let offset = self.offset(block, row);
            self.memory.write(offset, &nothing).expect("inside the pool");
        }
    }

    /// Whether `block` holds version `version` of `key` in `layer`, every byte of it.
    #[must_use]
    pub fn holds(&self, block: BlockId, layer: Layer, key: BlockKey, version: u64) -> bool {
        let mut bytes = vec![0; self.shape.object_bytes as usize];
        self.shape.layer_rows(layer).map(Row).all(|row| {
            self.memory.read(self.offset(block, row), &mut bytes).expect("inside the pool");
            bytes == self.contents(key, version, row)
        })
    }
}

/// Some keys, all different.
#[must_use]
pub fn keys(count: u32) -> Vec<BlockKey> {
    let key = |n: u32| BlockKey(u128::from(n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060));
    (0..count).map(key).collect()
}
