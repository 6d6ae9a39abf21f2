//! A store over one software controller with memory media.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use gio_kernels::{HostExecutor, HostOptions};
use gio_uring::{ExecutorError, IoExecutor};
use nvme_driver::{Clock, Controller, ControllerOptions, DmaSpace, MonotonicClock};
use nvme_emu::{Emu, EmuConfig, EmuDomain, EmuRunner, MemoryMedia};
use objstore::{
    BlockId, BlockKey, KeyChain, KvPool, KvShape, Layer, Store, StoreConfig, StoreOptions,
};

/// Fields are dropped in this order: who uses before who is used.
pub struct Stack {
    /// The store.
    pub store: Store,
    /// Keys of `blocks` blocks, all of them stored.
    pub keys: Vec<BlockKey>,
    shape: KvShape,
    _runner: EmuRunner,
}

impl Stack {
    /// A store of `blocks` blocks of `shape`, filled from an equally large KV pool.
    pub fn filled(shape: KvShape, blocks: u32) -> Result<Self> {
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
        let domain = EmuDomain::new("bench");
        let bytes = shape.block_bytes() * u64::from(blocks);
        let lba = if shape.object_bytes.is_multiple_of(4096) { 4096 } else { 512 };
        // Room for whole groups of the layout.
        let media = MemoryMedia::new((bytes * 2).max(64 << 20))?;
        let emu = Emu::new(domain.clone(), EmuConfig::new("emu0").namespace(media, lba))?;
        let runner = EmuRunner::spawn(vec![emu.clone()], clock.clone())?;
        let controller =
            Controller::attach(emu.bus(), clock.clone(), ControllerOptions::default())?;
        let memory = domain.alloc(usize::try_from(bytes)?)?;
        let pool = KvPool::contiguous(memory, &shape, blocks)?;
        let for_executor = clock.clone();
        let store = Store::open(StoreConfig {
            devices: vec![controller.into()],
            clock,
            executor: Box::new(move || -> Result<Box<dyn IoExecutor>, ExecutorError> {
                Ok(Box::new(HostExecutor::new(HostOptions::default(), for_executor.clone())))
            }),
            shape,
            pool,
            gpu: None,
            options: StoreOptions::default(),
        })
        .context("opening the store")?;
        let mut chain = KeyChain::new(b"bench");
        let keys = (0..blocks).map(|block| chain.next(&[block])).collect();
        let mut stack = Self { store, keys, shape, _runner: runner };
        stack.fill(blocks)?;
        Ok(stack)
    }

    fn fill(&mut self, blocks: u32) -> Result<()> {
        let ids: Vec<BlockId> = (0..blocks).map(BlockId).collect();
        let writing = self.store.allocate(&self.keys, &ids)?;
        anyhow::ensure!(writing.written() == blocks as usize, "the store is too small");
        for layer in 0..self.shape.layers {
            let ticket = self.store.store_layer(&writing, Layer(layer))?;
            self.store.wait(ticket)?;
        }
        self.store.commit(writing)?;
        Ok(())
    }
}
