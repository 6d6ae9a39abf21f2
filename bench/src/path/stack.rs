//! A store over software controllers.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use nvme_driver::{ControllerOptions, DmaSlice, DmaSpace, platform::buffer::Buffer};
use nvme_emu::{Emu, EmuConfig, EmuDomain, EmuRunner};
use objstore::{
    BlockId, BlockKey, Format, KeyChain, KvPool, KvShape, Layer, Namespace, Store, StoreConfig,
    StoreDevice, StoreOptions,
};
use ripieno_testkit::{Drives, host_executor, memory_drives, pattern};

const PATTERN_BYTES: usize = 1 << 20;

/// Fields are dropped in this order: users before what they use.
pub struct Stack {
    /// The store.
    pub store: Store,
    /// Keys of all blocks, which are stored.
    pub keys: Vec<BlockKey>,
    /// The first controller.
    pub emu: Arc<Emu>,
    shape: KvShape,
    _runner: Option<EmuRunner>,
}

impl Stack {
    /// Creates a store of `blocks` blocks of `shape` on one controller with memory media, filled
    /// from an equally large KV pool.
    pub fn filled(shape: KvShape, blocks: u32) -> Result<Self> {
        Self::in_memory(StoreOptions::default(), &ripieno_testkit::format(shape), blocks)
    }

    /// Same as [`Stack::filled`], with these options and this format.
    pub fn in_memory(options: StoreOptions, format: &Format, blocks: u32) -> Result<Self> {
        let shape = format.shape;
        let bytes = shape.block_bytes() * u64::from(blocks);
        let lba = if shape.object_bytes.is_multiple_of(4096) { 4096 } else { 512 };
        // Room for whole groups of the layout.
        let configs = memory_drives(1, (bytes * 2).max(64 << 20), lba);
        Self::over(configs, options, format, blocks)
    }

    /// Same as [`Stack::in_memory`], on these controllers.
    pub fn over(
        configs: Vec<EmuConfig>,
        options: StoreOptions,
        format: &Format,
        blocks: u32,
    ) -> Result<Self> {
        let shape = format.shape;
        let bytes = shape.block_bytes() * u64::from(blocks);
        let drives = Drives::threaded(EmuDomain::new("bench"), configs);
        let emu = drives.emus[0].clone();
        let controllers = drives.attach(&ControllerOptions::default());
        let memory = drives.domain.alloc(usize::try_from(bytes)?)?;
        // Not zeroes, which media and drives may treat specially.
        let mut contents =
            Buffer::new(DmaSlice::whole(memory.clone())?).context("the KV pool is host memory")?;
        for (at, seed) in (0..bytes as usize).step_by(PATTERN_BYTES).zip(0..) {
            let len = PATTERN_BYTES.min(bytes as usize - at);
            contents.write(at, &pattern(len, seed))?;
        }
        let config = StoreConfig {
            devices: controllers.into_iter().map(StoreDevice::new).collect(),
            clock: drives.clock.clone(),
            executor: host_executor(drives.clock),
            shape,
            pool: KvPool::contiguous(memory, &shape, blocks)?,
            gpu: None,
            options,
            namespace: Namespace::default(),
        };
        let store = Store::create(config, format).context("opening the store")?;
        let mut chain = KeyChain::new(b"bench");
        let keys = (0..blocks).map(|block| chain.next(&[block])).collect();
        let mut stack = Self { store, keys, emu, shape, _runner: drives.runner };
        stack.fill()?;
        Ok(stack)
    }

    /// Stores all blocks, none of which may be stored yet. Returns the bytes of all layers.
    pub fn fill(&mut self) -> Result<u64> {
        let ids: Vec<BlockId> = (0..self.keys.len() as u32).map(BlockId).collect();
        let save = self.store.allocate(&self.keys, &ids)?;
        anyhow::ensure!(save.written() == ids.len(), "the store is too small");
        let layers = (0..self.shape.layers).map(|at| self.store.store_layer(&save, Layer(at)));
        let tickets: Vec<_> = layers.collect::<Result<_, _>>()?;
        let mut bytes = 0;
        for ticket in tickets {
            bytes += self.store.wait(ticket)?.bytes;
        }
        self.store.commit(save)?;
        Ok(bytes)
    }
}
