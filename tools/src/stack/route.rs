//! The ways of the data between drives and KV pool: each is built, and not taken before it is
//! proven.

use std::fmt;
use std::sync::Arc;

use anyhow::Context as _;
use objstore::KvPool;
use serde::Serialize;

use crate::config::Route;
use crate::gpu::Gpu;
use crate::model::Shape;
use crate::pool::{CpuHand, GpuHand, Hand, LAYERS_AHEAD, PARTS_MAX, Pool};
use crate::problem::{Problem, Unfit, one_line, unfit};
use crate::size::Size;

use super::fleet::{Build, Fleet};

/// A route that was tried and not taken. Field names are those of the JSON object.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct NotTaken {
    pub(crate) route: &'static str,
    pub(crate) why: String,
    /// What would open it.
    pub(crate) fix: String,
}

impl fmt::Display for NotTaken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)?;
        if self.fix.is_empty() { Ok(()) } else { write!(f, "; {}", self.fix) }
    }
}

impl NotTaken {
    /// # Errors
    /// `error` itself, if it is about more than this route.
    pub(super) fn because(route: Route, error: anyhow::Error) -> anyhow::Result<Self> {
        let unfit = error.downcast_ref::<Unfit>().cloned();
        let Some(unfit) = unfit else { return Err(error) };
        // What was being done is said around the reason.
        let why = one_line(&error);
        Ok(Self { route: route.name(), why, fix: unfit.fix })
    }
}

/// None of the routes that were wanted works.
#[derive(Debug)]
pub(crate) struct NoRoute(pub(crate) Vec<NotTaken>);

impl NoRoute {
    /// As a mistake in the command line, which asked for them.
    pub(crate) fn problem(&self) -> Problem {
        let Self(tried) = self;
        let asked = match &tried[..] {
            [NotTaken { route, .. }] => format!("--require {route}: the route does not work"),
            _ => "--executor cuda: no route of the data works".to_owned(),
        };
        let fix = tried.iter().map(|not| &not.fix).find(|fix| !fix.is_empty());
        let fix = fix.map_or("ripieno doctor shows what does", |fix| fix);
        Problem::new(format!("{asked}: {self}"), fix)
    }
}

impl fmt::Display for NoRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why: Vec<String> =
            self.0.iter().map(|NotTaken { route, why, .. }| format!("{route}: {why}")).collect();
        f.write_str(&why.join("; "))
    }
}

impl std::error::Error for NoRoute {}

/// A pool, and who makes and checks what is in it.
pub(super) struct Prepared {
    pub(super) registered: KvPool,
    pub(super) hand: Box<dyn Hand>,
    /// Where it is.
    pub(super) place: String,
}

/// Makes the KV pool as `route` wants it.
///
/// # Errors
/// [`Unfit`] when the route cannot be taken here.
pub(super) fn prepare(
    route: Route,
    plan: Build<'_>,
    fleet: &mut Fleet,
) -> anyhow::Result<Prepared> {
    let layout = Layout::new(plan)?;
    match (route, plan.gpu) {
        (Route::Host, _) => layout.host(plan, fleet),
        (Route::Staged, Some(gpu)) => layout.staged(gpu, fleet),
        (Route::Direct, Some(gpu)) => layout.direct(gpu, fleet),
        (Route::Staged | Route::Direct, None) => Err(unfit("no GPU takes part", "")),
    }
}

/// Layers of a request that are in flight at a time: each needs a staging buffer of its own.
pub(super) fn layers_ahead(shape: &Shape) -> u32 {
    shape.layers.min(LAYERS_AHEAD as u32)
}

/// Where everything is in the pool, wherever that is.
struct Layout {
    shape: Shape,
    blocks: u32,
    bytes: usize,
    rows: Vec<u64>,
}

impl Layout {
    fn new(plan: Build<'_>) -> anyhow::Result<Self> {
        let (shape, blocks) = (plan.args.shape, plan.sizing.pool_blocks);
        let bytes = usize::try_from(Pool::bytes(&shape, blocks))
            .context("the KV pool does not fit the address space")?;
        Ok(Self { shape, blocks, bytes, rows: Pool::rows(&shape, blocks) })
    }

    /// Bytes from one block's object to the next one's.
    fn stride(&self) -> u64 {
        u64::from(self.shape.object_bytes)
    }

    /// Parts of objects that a batch has at the most, and another one that is in flight with it.
    fn items(&self) -> usize {
        self.blocks as usize * self.shape.segments as usize * PARTS_MAX * 2
    }

    /// In host memory, which a GPU that takes part reaches, too.
    fn host(self, plan: Build<'_>, fleet: &mut Fleet) -> anyhow::Result<Prepared> {
        plan.sizing.check_pool(plan.args)?;
        let memory = fleet.pool_memory(self.bytes)?;
        let mut place = plan.args.flags.memory.to_string();
        if let Some(gpu) = plan.gpu {
            fleet.registrations.push(gpu.register(memory.memory())?);
            place = "host memory, mapped into the GPU".into();
        }
        let first = memory.offset() as u64;
        let rows = self.rows.iter().map(|at| first + at).collect();
        let (shape, whole) = (self.shape.kv(), memory.memory().clone());
        let registered = KvPool::new(whole, &shape, rows, self.stride(), self.blocks)
            .context("registering the KV pool")?;
        Ok(Prepared { registered, hand: Box::new(CpuHand::new(memory)?), place })
    }

    /// In the GPU's memory, by way of pinned memory of the host.
    fn staged(self, gpu: &Arc<Gpu>, fleet: &mut Fleet) -> anyhow::Result<Prepared> {
        let shape = self.shape.kv();
        let bytes = KvPool::staging_bytes(&shape, self.blocks, layers_ahead(&self.shape));
        let bytes = usize::try_from(bytes).context("staging memory beyond the address space")?;
        let staging = gpu.staging(&*fleet.space, bytes.max(fleet.scratch_bytes()))?;
        fleet.prove(&staging)?;
        let (pool, base, owner) = gpu.memory(self.bytes)?;
        let hand = GpuHand::new(gpu, base, self.bytes as u64, owner, self.items())?;
        let stride = self.stride();
        let registered = KvPool::staged(pool, staging, &shape, self.rows, stride, self.blocks)
            .context("registering the KV pool")?;
        let staging = Size(bytes as u64);
        let place = format!("GPU memory, staged through {staging} of pinned host memory");
        Ok(Prepared { registered, hand: Box::new(hand), place })
    }

    /// In the GPU's memory, which the devices reach.
    fn direct(self, gpu: &Arc<Gpu>, fleet: &mut Fleet) -> anyhow::Result<Prepared> {
        let (memory, place) = if fleet.emulation.is_some() {
            let (memory, ..) = gpu.memory(self.bytes)?;
            let imported = fleet.space.import(memory).context("mapping GPU memory")?;
            (imported, "GPU memory, reached by its copy engine".to_owned())
        } else {
            let bytes = self.bytes.max(fleet.scratch_bytes());
            let (memory, kind) = gpu.mapped(&*fleet.space, bytes)?;
            fleet.prove(&memory)?;
            (memory, format!("GPU memory, mapped by GDRCopy ({kind})"))
        };
        let base = memory.device().context("GPU memory has no address on the GPU")?;
        let owner = Arc::new(memory.clone());
        let hand = GpuHand::new(gpu, base, self.bytes as u64, owner, self.items())?;
        let (shape, stride) = (self.shape.kv(), self.stride());
        let registered = KvPool::on_gpu(memory, &shape, self.rows, stride, self.blocks)
            .context("registering the KV pool")?;
        Ok(Prepared { registered, hand: Box::new(hand), place })
    }
}
