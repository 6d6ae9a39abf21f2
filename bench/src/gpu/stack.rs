//! A store whose I/O kernel runs on the GPU, over software controllers with memory media.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use gio_kernels::cuda::{
    CudaCopies, CudaOptions, CudaStreams, DoorbellKind, LaunchMode, Registration,
};
use gio_uring::{ExecutorError, IoExecutor, StreamOps};
use nvme_driver::{
    Bus, Clock, Controller, ControllerOptions, CopyEngine, DmaMemory, DmaSlice, DmaSpace,
    MonotonicClock, QueueMemory,
};
use nvme_emu::{Emu, EmuConfig, EmuDomain, EmuRunner, MemoryMedia};
use objstore::{
    BlockId, BlockKey, KeyChain, KvPool, KvShape, Layer, Namespace, Store, StoreConfig,
    StoreDevice, StoreGpu, StoreOptions,
};

use super::device::Gpu;

/// Entries per queue.
const DEPTH: u32 = 256;
/// Bytes per command for descriptors.
const DESCRIPTOR_BYTES: usize = 4096;

/// Data path between drives and pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// The pool is in host memory.
    Host,
    /// The pool is in the GPU's memory, and a kernel of the store moves objects there.
    Staged,
    /// The pool is in the GPU's memory, and the software controllers write there by copies.
    Direct,
}

impl Route {
    /// Returns its name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Staged => "staged",
            Self::Direct => "direct",
        }
    }
}

/// Configuration of a stack.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub route: Route,
    pub mode: LaunchMode,
    /// Dedicated SMs of the I/O kernel; `None` shares all of them.
    pub sms: Option<u32>,
    pub devices: u32,
    pub queues_per_device: u16,
    pub shape: KvShape,
    pub blocks: u32,
    /// Layers in flight at once, if they need staging memory.
    pub buffers: u32,
}

/// Fields are dropped in this order: users before what they use.
pub struct Stack {
    /// The store.
    pub store: Store,
    /// Keys of all blocks, which are stored.
    pub keys: Vec<BlockKey>,
    plan: Plan,
    _registrations: Vec<Arc<Registration>>,
    _runner: EmuRunner,
}

impl Stack {
    /// Creates a store of `plan.blocks` blocks, filled from an equally large KV pool.
    pub fn filled(gpu: &Arc<Gpu>, plan: Plan) -> Result<Self> {
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
        let domain = EmuDomain::with_copies("bench", Arc::new(CudaCopies::new(&gpu.device)?));
        let mut registrations = Vec::new();
        let emus =
            (0..plan.devices).map(|at| drive(&domain, plan, at)).collect::<Result<Vec<_>>>()?;
        let runner = EmuRunner::spawn(emus.clone(), clock.clone())?;
        let mut devices = Vec::new();
        for emu in &emus {
            let bus: Arc<dyn Bus> = emu.bus();
            registrations.push(gpu.device.register_doorbells(&bus, DoorbellKind::Memory)?);
            let options = ControllerOptions {
                io_queues: plan.queues_per_device,
                ..ControllerOptions::default()
            };
            let controller = Controller::attach(bus, clock.clone(), options)?;
            let queues = (0..plan.queues_per_device).map(|_| queue(gpu, &domain));
            let queue_memory = queues.collect::<Result<Vec<_>>>()?;
            devices.push(StoreDevice { queue_memory, ..StoreDevice::new(controller) });
        }
        let pool = pool(gpu, &domain, plan)?;
        let streams: Arc<dyn StreamOps> = Arc::new(CudaStreams::new(&gpu.device)?);
        let copies: Arc<dyn CopyEngine> = Arc::new(CudaCopies::new(&gpu.device)?);
        let (maker, for_executor) = (gpu.clone(), clock.clone());
        let cuda = CudaOptions { mode: plan.mode, sms: plan.sms, ..CudaOptions::default() };
        let config = StoreConfig {
            devices,
            clock,
            executor: Box::new(move || -> Result<Box<dyn IoExecutor>, ExecutorError> {
                Ok(Box::new(maker.executor(cuda, for_executor.clone())?))
            }),
            shape: plan.shape,
            pool,
            gpu: Some(StoreGpu { streams, copies }),
            options: StoreOptions {
                queues_per_device: plan.queues_per_device,
                queue_depth: DEPTH,
                staging_buffers: plan.buffers,
                iocbs: plan.shape.layers.next_power_of_two().max(256),
                ..StoreOptions::default()
            },
            namespace: Namespace::default(),
        };
        let format = ripieno_testkit::format(plan.shape);
        let store = Store::create(config, &format).context("opening the store")?;
        let mut chain = KeyChain::new(b"bench");
        let keys = (0..plan.blocks).map(|block| chain.next(&[block])).collect();
        let mut stack = Self { store, keys, plan, _registrations: registrations, _runner: runner };
        stack.fill()?;
        Ok(stack)
    }

    fn fill(&mut self) -> Result<()> {
        let ids: Vec<BlockId> = (0..self.plan.blocks).map(BlockId).collect();
        let save = self.store.allocate(&self.keys, &ids)?;
        ensure!(save.written() == ids.len(), "the store is too small");
        for layer in 0..self.plan.shape.layers {
            let ticket = self.store.store_layer(&save, Layer(layer))?;
            self.store.wait(ticket)?;
        }
        self.store.commit(save)?;
        Ok(())
    }

    /// Retrieves all layers of all blocks once, into these blocks. Returns the bytes read.
    pub fn retrieve(&mut self, blocks: &[BlockId]) -> Result<u64> {
        let prefix = self.store.lookup(&self.keys)?;
        ensure!(prefix.len() == blocks.len(), "only {} blocks were found", prefix.len());
        let load = self.store.retrieve(&prefix, blocks)?;
        let burst = self.burst();
        let layers: Vec<u32> = (0..self.plan.shape.layers).collect();
        let mut bytes = 0;
        for some in layers.chunks(burst) {
            let mut tickets = Vec::with_capacity(burst);
            for &layer in some {
                tickets.push(self.store.retrieve_layer(&load, Layer(layer))?);
            }
            for ticket in tickets {
                bytes += self.store.wait(ticket)?.bytes;
            }
        }
        Ok(bytes)
    }

    /// Returns the layers of a block.
    pub fn layers(&self) -> u32 {
        self.plan.shape.layers
    }

    /// Returns the number of layers in flight at once.
    pub fn burst(&self) -> usize {
        match self.plan.route {
            Route::Staged => self.plan.buffers as usize,
            Route::Host | Route::Direct => self.plan.shape.layers as usize,
        }
    }

    /// Closes the store and shuts the drives down.
    pub fn close(self) -> Result<()> {
        let Self { store, _registrations, _runner, .. } = self;
        for mut controller in store.close()?.controllers {
            controller.shutdown()?;
        }
        Ok(())
    }
}

/// Creates a drive with room for its part of the files.
fn drive(domain: &Arc<EmuDomain>, plan: Plan, at: u32) -> Result<Arc<Emu>> {
    let lba = if plan.shape.object_bytes.is_multiple_of(4096) { 4096 } else { 512 };
    let bytes = plan.shape.block_bytes() * u64::from(plan.blocks) / u64::from(plan.devices);
    // Room for whole groups of the layout.
    let media = MemoryMedia::new((bytes * 2).max(64 << 20))?;
    Ok(Emu::new(domain.clone(), EmuConfig::new(format!("emu{at}")).namespace(media, lba))?)
}

/// Allocates a queue in pinned memory, which host, GPU and controller reach.
fn queue(gpu: &Gpu, domain: &Arc<EmuDomain>) -> Result<QueueMemory> {
    let depth = DEPTH as usize;
    let [sq, cq, descriptors] = [depth * 64, depth * 16, depth * DESCRIPTOR_BYTES];
    let memory = gpu.device.pinned(sq + cq + descriptors)?.into_external();
    let memory = domain.import(memory)?;
    let part = |at, len| DmaSlice::new(memory.clone(), at, len);
    Ok(QueueMemory {
        sq: part(0, sq)?,
        cq: part(sq, cq)?,
        descriptors: part(sq + cq, descriptors)?,
    })
}

fn pool(gpu: &Gpu, domain: &Arc<EmuDomain>, plan: Plan) -> Result<KvPool> {
    let Plan { shape, blocks, .. } = plan;
    let bytes = usize::try_from(shape.block_bytes() * u64::from(blocks))?;
    let stride = u64::from(shape.object_bytes);
    let tensor = stride * u64::from(blocks);
    let rows = (0..u64::from(shape.rows())).map(|row| row * tensor).collect();
    Ok(match plan.route {
        // Pinned: the I/O kernel reads objects to compute their checksums.
        Route::Host => {
            let memory = domain.import(gpu.device.pinned(bytes)?.into_external())?;
            KvPool::new(memory, &shape, rows, stride, blocks)?
        }
        Route::Direct => {
            let memory = domain.import(gpu.device.allocate(bytes)?.into_external())?;
            KvPool::on_gpu(memory, &shape, rows, stride, blocks)?
        }
        Route::Staged => {
            let staging = KvPool::staging_bytes(&shape, blocks, plan.buffers);
            let staging = gpu.device.pinned(usize::try_from(staging)?)?.into_external();
            let staging: Arc<dyn DmaMemory> = domain.import(staging)?;
            let memory = gpu.device.allocate(bytes)?.into_external();
            KvPool::staged(memory, staging, &shape, rows, stride, blocks)?
        }
    })
}
