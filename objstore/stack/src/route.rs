//! Routes of the data between devices and KV pool: each is built, and taken only if proven.

use std::sync::Arc;

use nvme_driver::{Controller, DescriptorMode};
use objstore::{KvPool, KvShape, PoolLayout, Route};

use crate::{
    controllers::Controllers,
    error::StackError,
    executor::Executor,
    gpu::Gpu,
    pool::{self, EngineMemory, GpuMemory, PoolMemory, whole_pages},
    size::Size,
};

/// Maximum bytes of staging memory for an engine's pool; but at least a block per buffer.
const STAGING_MAX: u64 = 1 << 30;

/// Maximum bytes of bounce buffers; but at least one block.
const BOUNCE_MAX: u64 = 64 << 20;

/// Returns the routes to try for this pool, the best first; only `require`, if given.
///
/// # Errors
/// Returns [`StackError::Config`] if there is none.
pub fn routes(
    executor: Executor,
    pool: &PoolMemory,
    require: Option<Route>,
) -> Result<&'static [Route], StackError> {
    let wrong = |field, problem| Err(StackError::Config { field, problem });
    let all: &[Route] = match (pool, executor) {
        (PoolMemory::Gpu { memory, .. }, Executor::Cuda(choice)) => {
            let (pool, gpu) = (memory.ordinal(), choice.ordinal);
            if pool != gpu {
                return wrong(
                    "executor",
                    format!("the pool is on GPU {pool} and the I/O kernel on GPU {gpu}"),
                );
            }
            &[Route::Direct, Route::Staged]
        }
        (PoolMemory::Gpu { .. }, Executor::File) => &[Route::Staged],
        (PoolMemory::Gpu { .. }, Executor::Host | Executor::Inline) => {
            return wrong(
                "executor",
                "the pool is in a GPU's memory; take cuda, on that GPU, or for a store in files \
                 file"
                    .to_owned(),
            );
        }
        (PoolMemory::Own { .. }, Executor::Cuda(_)) => &Route::ALL,
        _ => &[Route::Host],
    };
    let Some(route) = require else { return Ok(all) };
    match all.iter().position(|found| *found == route) {
        Some(at) => Ok(&all[at..=at]),
        None => {
            let names: Vec<&str> = all.iter().map(|route| route.name()).collect();
            let names = names.join(" and ");
            wrong("route", format!("{route} was asked for; to this pool there is {names}"))
        }
    }
}

/// A registered KV pool, and its location as a text.
pub(crate) type Placed = (KvPool, String);

/// Parameters of a pool.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolPlan<'a> {
    pub(crate) pool: &'a PoolMemory,
    pub(crate) shape: &'a KvShape,
    /// Number of staging buffers, if the pool is staged.
    pub(crate) staging_buffers: u32,
    pub(crate) gpu: Option<&'a Arc<Gpu>>,
}

impl PoolPlan<'_> {
    /// Registers the KV pool for `route`, and names its location. Leaves the controllers unchanged
    /// if it fails.
    ///
    /// # Errors
    /// Returns [`StackError::Unfit`] if the route does not work here; also [`StackError::Memory`],
    /// [`StackError::Pool`], [`StackError::Cuda`] or [`StackError::Drive`].
    pub(crate) fn register(
        &self,
        route: Route,
        attached: &mut Controllers,
    ) -> Result<Placed, StackError> {
        match (route, self.gpu) {
            (Route::Host, _) => self.host(attached),
            (Route::Staged, Some(gpu)) => self.staged(attached, gpu),
            (Route::Direct, Some(gpu)) => self.direct(attached, gpu),
            (Route::Staged | Route::Direct, None) => {
                Err(StackError::unfit("no GPU takes part", ""))
            }
        }
    }

    /// Registers a pool in host memory, mapped for a GPU if one is used.
    fn host(&self, on: &mut Controllers) -> Result<Placed, StackError> {
        let (pool, place) = match self.pool {
            PoolMemory::Own { blocks } => {
                let (layout, bytes) = self.own(*blocks);
                let (memory, place) = on.pool_memory(bytes)?;
                let layout = layout.after(memory.offset());
                let pool = KvPool::new(memory.memory().clone(), self.shape, layout)?;
                (pool, place)
            }
            PoolMemory::Engine { memory, layout } => self.of_engine(memory, layout, on)?,
            PoolMemory::Gpu { .. } => {
                return Err(StackError::unfit("the pool is in a GPU's memory", ""));
            }
        };
        let Some(gpu) = self.gpu else { return Ok((pool, place)) };
        on.register(gpu, pool.memory())?;
        Ok((pool, "host memory, mapped into the GPU".to_owned()))
    }

    /// Registers a pool in the GPU's memory, staged through pinned host memory.
    fn staged(&self, attached: &mut Controllers, gpu: &Arc<Gpu>) -> Result<Placed, StackError> {
        let (layout, slots) = match self.pool {
            PoolMemory::Own { blocks } => (self.own(*blocks).0, *blocks),
            PoolMemory::Gpu { layout, .. } => (layout.clone(), self.staging_blocks(layout.blocks)),
            PoolMemory::Engine { .. } => {
                return Err(StackError::unfit("the pool is in host memory", ""));
            }
        };
        let bytes = KvPool::staging_bytes(self.shape, slots, self.staging_buffers);
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let staging = gpu.staging(&*attached.space, bytes.max(attached.scratch_bytes()))?;
        attached.prove(&staging)?;
        let memory = match self.pool {
            PoolMemory::Gpu { memory, .. } => memory.external(),
            _ => gpu.memory(self.own(layout.blocks).1)?,
        };
        let pool = KvPool::staged(memory, staging, self.shape, layout)?;
        let staging = Size(bytes as u64);
        let place = format!("GPU memory, staged through {staging} of pinned host memory");
        Ok((pool, place))
    }

    /// Registers a pool in the GPU's memory, which the devices reach directly.
    fn direct(&self, attached: &mut Controllers, gpu: &Arc<Gpu>) -> Result<Placed, StackError> {
        let (layout, memory) = match self.pool {
            PoolMemory::Own { blocks } => {
                let (layout, bytes) = self.own(*blocks);
                (layout, gpu.memory(bytes.max(attached.scratch_bytes()))?)
            }
            PoolMemory::Gpu { memory, layout } => {
                pool::check(layout, self.shape, memory.bytes())?;
                self.check_objects(memory, layout, attached)?;
                (layout.clone(), memory.external())
            }
            PoolMemory::Engine { .. } => {
                return Err(StackError::unfit("the pool is in host memory", ""));
            }
        };
        let (memory, head, place) = if attached.is_emulated() {
            let (pages, head) = whole_pages(memory);
            let place = "GPU memory, reached by its copy engine".to_owned();
            (attached.space.import(pages)?, head, place)
        } else {
            attached.check_order()?;
            let (memory, head, kind) = gpu.map(&*attached.space, memory)?;
            (memory, head, format!("GPU memory, mapped by GDRCopy ({kind})"))
        };
        if let PoolMemory::Own { .. } = self.pool {
            // An engine's memory is not overwritten: the store tests it, and restores it.
            attached.prove(&memory)?;
        }
        let pool = KvPool::on_gpu(memory, self.shape, layout.after(head))?;
        Ok((pool, place))
    }

    /// Returns the layout and size of memory allocated for the pool.
    fn own(&self, blocks: u32) -> (PoolLayout, usize) {
        let bytes = self.shape.block_bytes().saturating_mul(u64::from(blocks));
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        (PoolLayout::contiguous(self.shape, blocks), bytes)
    }

    /// Returns the blocks that fit into a staging buffer.
    fn staging_blocks(&self, blocks: u32) -> u32 {
        let each = KvPool::staging_bytes(self.shape, 1, self.staging_buffers).max(1);
        u32::try_from((STAGING_MAX / each).max(1)).unwrap_or(u32::MAX).min(blocks)
    }

    /// Registers an engine's memory of this process, or bounce buffers in its place.
    fn of_engine(
        &self,
        memory: &EngineMemory,
        layout: &PoolLayout,
        attached: &Controllers,
    ) -> Result<Placed, StackError> {
        let Self { shape, .. } = self;
        let pool = pool::register(memory, layout.clone(), &*attached.space, shape)?;
        let base = memory.base().as_ptr().addr() as u64;
        let (unit, lba_bytes) = limits(attached);
        let place = "host".to_owned();
        // The store's proof of access uses an LBA at each end of the pool, and must not touch
        // memory beside it.
        if span(layout, shape) >= 2 * lba_bytes && layout.is_aligned(base, unit) {
            return Ok((pool, place));
        }
        drop(pool);
        let room = (BOUNCE_MAX / shape.block_bytes()).max(1);
        let blocks = u32::try_from(room).unwrap_or(u32::MAX).min(layout.blocks);
        tracing::info!(blocks, unit, "the KV pool is not aligned: bounce buffers are used");
        let (ours, bytes) = self.own(blocks);
        let ours = KvPool::new(attached.space.alloc(bytes)?, shape, ours)?;
        let pool = ours.bounced(memory.external(), shape, layout.clone())?;
        Ok((pool, place))
    }

    /// Refuses objects in a GPU's memory that devices cannot describe: a kernel can copy them.
    fn check_objects(
        &self,
        memory: &GpuMemory,
        layout: &PoolLayout,
        attached: &Controllers,
    ) -> Result<(), StackError> {
        let (unit, lba_bytes) = limits(attached);
        if !layout.is_aligned(memory.base().0, unit) {
            let why = format!("objects of the pool do not begin at multiples of {unit} bytes");
            return Err(StackError::unfit(why, "align the KV cache"));
        }
        if span(layout, self.shape) < 2 * lba_bytes {
            let why = format!("the pool has not even two LBAs, of {lba_bytes} bytes");
            return Err(StackError::unfit(why, "use more blocks"));
        }
        Ok(())
    }
}

/// Returns the bytes from the first object of a layout to the end of the last one.
fn span(layout: &PoolLayout, shape: &KvShape) -> u64 {
    let used = layout.used(shape.object_bytes);
    used.end - used.start
}

/// Returns the alignment of addresses for all devices, and the largest LBA size in bytes.
pub(crate) fn limits(attached: &Controllers) -> (u64, u64) {
    let (mut unit, mut lba_bytes) = (1, 512);
    for device in &attached.devices {
        let controller = device.controller.lock();
        unit = unit.max(granularity(&controller));
        let spaces = controller.namespaces().iter();
        lba_bytes = spaces.fold(lba_bytes, |most, space| most.max(1 << space.lba_shift));
    }
    (unit, lba_bytes)
}

/// Returns the alignment of addresses and lengths for a controller.
fn granularity(controller: &Controller) -> u64 {
    match controller.info().descriptor_mode {
        DescriptorMode::Sgl { granularity, .. } => granularity.into(),
        // PRP entries have dword granularity.
        DescriptorMode::Prp { .. } => 4,
    }
}
