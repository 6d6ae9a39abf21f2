//! A filled store over software controllers.

use std::sync::Arc;

use anyhow::{Result, ensure};
use nvme_driver::{DmaSlice, platform::buffer::Buffer};
use nvme_emu::{Emu, EmuConfig};
use objstore::{
    BlockId, BlockKey, Format, KeyChain, KvShape, Prefix, Route, Store, StoreConfig, StoreOptions,
};
use rand::{SeedableRng as _, rngs::StdRng, seq::SliceRandom as _};
use ripieno_stack::{
    Builder, CudaChoice, Devices, Executor, Gpu, OpenSteps, PoolMemory, StackConfig, StackError,
};
use ripieno_testkit::{memory_drives, pattern};

const PATTERN_BYTES: usize = 1 << 20;

/// Fields are dropped in this order: users before what they use.
pub struct Stack {
    /// The store.
    pub store: Store,
    /// Keys of all blocks, which are stored.
    pub keys: Vec<BlockKey>,
    stack: ripieno_stack::Stack,
}

/// The GPU that runs the I/O kernel, and the route to its memory.
pub struct OnGpu {
    pub gpu: Arc<Gpu>,
    pub choice: CudaChoice,
    pub route: Route,
}

/// Fills a pool in host memory in.
struct Fill;

impl OpenSteps for Fill {
    fn ready(&mut self, config: &mut StoreConfig) -> Result<(), StackError> {
        fill_with_pattern(DmaSlice::whole(config.pool.memory().clone())?)
    }
}

impl Stack {
    /// Creates a store of `blocks` blocks on one controller with memory media, filled from an
    /// equally large KV pool.
    pub fn in_memory(options: &StoreOptions, format: &Format, blocks: u32) -> Result<Self> {
        Self::over(media(&format.shape, blocks, 1), options, format, blocks, None, None)
    }

    /// Same as [`Stack::in_memory`], on these devices, by an executor other than theirs, and on a
    /// GPU.
    pub fn over(
        devices: impl Into<Devices>,
        options: &StoreOptions,
        format: &Format,
        blocks: u32,
        executor: Option<Executor>,
        on_gpu: Option<&OnGpu>,
    ) -> Result<Self> {
        let config = StackConfig {
            executor: executor.or(on_gpu.map(|on| Executor::Cuda(on.choice))),
            route: Some(on_gpu.map_or(Route::Host, |on| on.route)),
            queues: Some(options.queues),
            ..StackConfig::default()
        };
        let builder = Builder::new(config, format.shape)
            .on(devices)
            .pool(PoolMemory::Own { blocks })
            .format(format.clone())
            .options(options.clone())
            .gpu(on_gpu.map(|on| on.gpu.clone()));
        let stack = match on_gpu {
            Some(_) => builder.open()?,
            None => builder.open_with(&mut Fill)?,
        };
        let mut chain = KeyChain::new(b"bench");
        let keys = (0..blocks).map(|block| chain.next(&[block])).collect();
        let stack = Self { store: stack.store().clone(), keys, stack };
        let blocks: Vec<BlockId> = (0..blocks).map(BlockId).collect();
        stack.fill(&blocks)?;
        Ok(stack)
    }

    /// Returns the first controller.
    pub fn emu(&self) -> &Arc<Emu> {
        &self.stack.emus()[0]
    }

    /// Returns the layers of a block.
    pub fn layers(&self) -> u32 {
        self.store.shape().layers
    }

    /// Stores all blocks, none of which may be stored yet. Returns the bytes of all layers.
    pub fn fill(&self, blocks: &[BlockId]) -> Result<u64> {
        let save = self.store.allocate(&self.keys, blocks)?;
        ensure!(save.written() == blocks.len(), "the store is too small");
        let bytes = self.store.move_all(&save)?;
        self.store.commit(save)?;
        Ok(bytes)
    }

    /// Returns the prefix of all blocks.
    pub fn prefix(&self) -> Result<Prefix> {
        let prefix = self.store.lookup(&self.keys)?;
        ensure!(prefix.len() == self.keys.len(), "only {} blocks were found", prefix.len());
        Ok(prefix)
    }

    /// Retrieves all layers of all blocks once, into these blocks. Returns the bytes read.
    pub fn retrieve(&self, blocks: &[BlockId]) -> Result<u64> {
        let load = self.store.retrieve(&self.prefix()?, blocks)?;
        Ok(self.store.move_all(&load)?)
    }

    /// Closes the store and shuts the drives down.
    pub fn close(self) -> Result<()> {
        Ok(self.stack.close()?)
    }
}

/// Returns the blocks in an order without neighbours.
pub fn scattered(blocks: u32) -> Vec<BlockId> {
    let mut order: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    order.shuffle(&mut StdRng::seed_from_u64(1));
    order
}

/// Returns drives with memory media for these blocks.
pub fn media(shape: &KvShape, blocks: u32, devices: u32) -> Vec<EmuConfig> {
    let lba = if shape.object_bytes.is_multiple_of(4096) { 4096 } else { 512 };
    let bytes = shape.block_bytes() * u64::from(blocks) / u64::from(devices);
    // Room for whole groups of the layout.
    memory_drives(devices as usize, (bytes * 2).max(64 << 20), lba)
}

/// Fills in bytes other than zeroes, which media and drives may treat specially.
fn fill_with_pattern(memory: DmaSlice) -> Result<(), StackError> {
    let bytes = memory.len();
    let mut contents = Buffer::new(memory).expect("the KV pool is host memory");
    for (at, seed) in (0..bytes).step_by(PATTERN_BYTES).zip(0..) {
        contents.write(at, &pattern(PATTERN_BYTES.min(bytes - at), seed))?;
    }
    Ok(())
}
