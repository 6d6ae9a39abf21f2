//! The ways of the data between drives and KV pool: each is built, and not taken before it is
//! proven.

use std::fmt;

use anyhow::Context as _;
use objstore::KvPool;
use serde::Serialize;

use crate::cli::Route;
use crate::problem::one_line;
use crate::replay::{CpuHand, Hand, Pool, kv_shape};

use super::Plan;
use super::fleet::Fleet;

/// Why a route is not taken.
#[derive(Debug, Clone)]
pub(crate) struct Unfit {
    /// What was found.
    pub(crate) why: String,
    /// What would open the route.
    pub(crate) mend: String,
}

/// An error that closes a route and nothing else.
fn unfit(why: impl Into<String>, mend: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Unfit { why: why.into(), mend: mend.into() })
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl std::error::Error for Unfit {}

/// A route that was tried and not taken. Field names are those of the JSON object.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct NotTaken {
    pub(crate) route: &'static str,
    pub(crate) why: String,
    /// What would open it.
    pub(crate) mend: String,
}

impl fmt::Display for NotTaken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)?;
        if self.mend.is_empty() { Ok(()) } else { write!(f, "; {}", self.mend) }
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
        Ok(Self { route: route.name(), why, mend: unfit.mend })
    }
}

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
pub(super) fn prepare(route: Route, plan: Plan<'_>, fleet: &mut Fleet) -> anyhow::Result<Prepared> {
    match route {
        Route::Host => host(plan, fleet),
        Route::Staged | Route::Direct => Err(unfit("it is not built in yet", "")),
    }
}

/// In host memory, which a GPU that takes part reaches, too.
fn host(plan: Plan<'_>, fleet: &mut Fleet) -> anyhow::Result<Prepared> {
    let Plan { args, room, gpu, .. } = plan;
    let bytes = usize::try_from(Pool::bytes(&args.shape, room.pool_blocks))
        .context("the KV pool does not fit the address space")?;
    let memory = fleet.pool_memory(bytes)?;
    let mut place = args.memory.to_string();
    if let Some(gpu) = gpu {
        fleet.registrations.push(gpu.register(memory.memory())?);
        place = "host memory, mapped into the GPU".into();
    }
    let first = memory.offset() as u64;
    let rows = Pool::rows(&args.shape, room.pool_blocks).iter().map(|at| first + at).collect();
    let (shape, stride) = (kv_shape(&args.shape), u64::from(args.shape.object_bytes));
    let whole = memory.memory().clone();
    let registered = KvPool::new(whole, &shape, rows, stride, room.pool_blocks)
        .context("registering the KV pool")?;
    Ok(Prepared { registered, hand: Box::new(CpuHand::new(memory)?), place })
}
