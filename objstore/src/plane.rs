//! The plane: moves files between devices and registered memory. It knows no key.
//!
//! A plane is what each worker process of an engine has: its devices, their queues and rings, and
//! the KV pool. What to move comes from a catalog, which may be in another process; what passes
//! between them is plain data ([`Move`], [`JobDone`]). A job is begun and finished by its number;
//! nothing is given back by dropping a handle.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
};

use gio_uring::{Affine, Counters, Event, IocbId, PoolHandle, Uring, Wait};
use kv_catalog::{DeviceIndex, FileId, Geometry, KvShape, Layer, PlantedBug, Region, planted};
use nvme_driver::{Clock, Controller, DmaMemory, Nanos, ResetCount};
use nvme_spec::ids::{Nsid, QueueId};

use crate::{
    config::{ExecutorFactory, StoreOptions},
    error::{Failure, StoreError},
    registration::KvPool,
    stats::{DramStats, Path},
};

mod checksums;
mod close;
mod complete;
mod events;
mod job;
mod late;
mod layer;
mod memory;
mod open;
mod recover;
mod report;
mod request;
mod route;
mod self_test;
mod staging;
mod streams;

pub use close::ClosedPlane;
pub(crate) use complete::Polled;
pub use events::StoreEvent;
use job::{Job, LayerState, PlaneId};
pub use job::{JobDone, JobFailure, JobId, LayerDone, Move, Ticket};
use late::Late;
use memory::HostMemory;
pub(crate) use memory::{AGAIN, Copied};
pub use open::{PlaneConfig, PlaneDevice};
pub use report::Report;
pub use route::kernel_read;
pub use self_test::KvView;
use staging::Staging;
use streams::Streams;

/// A controller that a plane and a journal share. Whoever locks it may do I/O on its host queue
/// and control it; nothing on the data path does.
#[derive(Debug, Clone)]
pub struct SharedController {
    controller: Arc<Mutex<Controller>>,
    resets: ResetCount,
}

impl SharedController {
    /// Shares `controller`.
    #[must_use]
    pub fn new(controller: Controller) -> Self {
        let resets = controller.resets().clone();
        Self { controller: Arc::new(Mutex::new(controller)), resets }
    }

    /// Locks it. A thread that panicked while it had it leaves no half-done state: the driver's
    /// calls are complete in themselves.
    pub fn lock(&self) -> MutexGuard<'_, Controller> {
        self.controller.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks it, unless somebody else has it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Controller>> {
        match self.controller.try_lock() {
            Ok(controller) => Some(controller),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// How often it was reset, without waiting for who has it.
    pub(crate) fn resets(&self) -> u64 {
        self.resets.get()
    }

    /// The controller, when nothing else shares it any more.
    pub(crate) fn into_inner(self) -> Option<Controller> {
        let mutex = Arc::try_unwrap(self.controller).ok()?;
        Some(mutex.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A device and what the plane has of it.
#[derive(Debug)]
struct Device {
    controller: SharedController,
    nsid: Nsid,
    /// Where the files' objects are.
    region: Region,
    /// The queue pairs that are granted to the I/O kernel.
    queues: Vec<QueueId>,
    /// It reports that its media takes no writes any more.
    read_only: bool,
    /// Its owner wants it back.
    requested: bool,
    /// Its queues alone are not enough: it is reset before anything else is done.
    must_reset: bool,
}

/// A layer operation in flight: in the ring, or on a stream behind it.
#[derive(Debug)]
struct Op {
    /// `None`: only a stream copies.
    iocb: Option<IocbId>,
    job: JobId,
    layer: Layer,
    /// What became of it in the ring. The IOCB may be used by another operation then.
    outcome: Option<Result<LayerDone, Failure>>,
    /// With streams: reached when it ended in the ring.
    end: Option<Wait>,
    /// Staged: its buffer.
    buffer: Option<usize>,
    /// Reached when its objects were moved by a stream: those that were staged and retrieved are in
    /// the pool, and what memory of this process has to do with it was copied.
    moved: Option<Wait>,
    /// What a stream waits for that moves them. Kept for it.
    first: Option<Wait>,
}

/// Where the ring moves objects to and from.
#[derive(Debug)]
enum Target {
    /// The engine's memory.
    Pool(PoolHandle),
    /// Staging memory, for a pool that no device reaches.
    Staged(Staging),
}

/// What the store counts itself.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    stored_bytes: u64,
    retrieved_bytes: u64,
    recoveries: u64,
}

/// Memory reused from call to call.
#[derive(Debug, Default)]
struct Scratch {
    map: Vec<Affine>,
    /// By block: the job that last used it as a destination.
    used: Vec<u64>,
}

/// Devices, rings and registered memory: moves files by number.
///
/// One thread uses it at a time; [`crate::Store`] shares it between threads.
#[derive(Debug)]
pub struct Plane {
    /// `None` only after the plane failed: then it was leaked, with everything its kernel uses.
    ring: Option<Uring>,
    target: Target,
    /// The events of streams; `None` without a GPU.
    streams: Option<Streams>,
    devices: Vec<Device>,
    clock: Arc<dyn Clock>,
    executor: Factory,
    options: StoreOptions,
    /// Checksums are made and compared.
    checksums: bool,
    /// Writes have force unit access.
    fua: bool,
    /// Placement handles that every device has; 0 without.
    placements: u32,
    /// A volatile cache has to be flushed before written data counts as stored.
    must_flush: bool,
    shape: KvShape,
    geometry: Geometry,
    files: u32,
    pool: KvPool,
    /// Blocks beside the devices.
    memory: Option<HostMemory>,
    /// Where padding comes from and goes to. Never read; kept because the devices use it.
    pads: Option<Arc<dyn DmaMemory>>,
    jobs: HashMap<JobId, Job>,
    jobs_ever: u64,
    ops: Vec<Op>,
    /// Jobs that were abandoned and have not ended.
    abandoned: usize,
    /// Abandoned jobs that have ended since they were last asked for.
    ended: Vec<JobId>,
    /// Files whose read failed since they were last asked for.
    lost: Vec<FileId>,
    /// What devices reported and the engine has not asked for.
    events: VecDeque<StoreEvent>,
    /// When the devices are polled next.
    next_poll: Nanos,
    late: Late,
    id: PlaneId,
    tally: Tally,
    scratch: Scratch,
    /// Why controllers have to be recovered before anything else is done.
    fault: Option<String>,
    /// Why nothing is stored any more: a flush failed.
    read_only: Option<String>,
    /// Why the plane does nothing any more.
    failed: Option<String>,
}

/// Counts since a plane was opened.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct PlaneStats {
    /// The route of the data.
    pub path: Path,
    /// Bytes written to the devices, without padding.
    pub stored_bytes: u64,
    /// Bytes read from the devices, without padding.
    pub retrieved_bytes: u64,
    /// What was retrieved without them.
    pub dram: DramStats,
    /// Times the controllers were recovered from a timeout or a fault.
    pub recoveries: u64,
    /// What the I/O kernel counts.
    pub ring: Counters,
}

/// A boxed closure that can be printed.
struct Factory(ExecutorFactory);

impl std::fmt::Debug for Factory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ExecutorFactory")
    }
}

impl Plane {
    /// The shape of the KV blocks.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Where files live on the devices.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The engine's memory.
    #[must_use]
    pub fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// An event that layers can wait for ([`crate::Order::AfterEvent`]) and that the engine's
    /// stream signals. Good until the plane is closed, or had to replace its executor.
    ///
    /// # Errors
    /// [`StoreError::Ring`] without memory, [`StoreError::Failed`].
    pub fn event(&mut self) -> Result<Event, StoreError> {
        Ok(self.ring()?.event()?)
    }

    /// Abandoned jobs that have ended since the last call: no device touches their files any more.
    pub fn take_ended(&mut self) -> Vec<JobId> {
        std::mem::take(&mut self.ended)
    }

    /// Files whose bytes could not be read since the last call, each once: they are misses from
    /// now on.
    pub fn take_lost(&mut self) -> Vec<FileId> {
        let mut lost = std::mem::take(&mut self.lost);
        lost.sort_unstable();
        lost.dedup();
        lost
    }

    /// A count that grows when controllers are recovered from a timeout or a fault, and whenever
    /// one of them is reset, by whomever: its volatile cache may have forgotten what was stored
    /// and not flushed. For comparing with [`JobDone::recoveries`].
    #[must_use]
    pub fn recoveries(&self) -> u64 {
        let resets = self.devices.iter().map(|device| device.controller.resets());
        self.tally.recoveries + resets.sum::<u64>()
    }

    /// Counts.
    ///
    /// # Errors
    /// [`StoreError::Failed`].
    pub fn stats(&mut self) -> Result<PlaneStats, StoreError> {
        let ring = self.ring()?.counters().total;
        let Tally { stored_bytes, retrieved_bytes, recoveries } = self.tally;
        Ok(PlaneStats {
            path: self.pool.path(),
            stored_bytes,
            retrieved_bytes,
            dram: self.memory.as_ref().map(HostMemory::stats).unwrap_or_default(),
            recoveries,
            ring,
        })
    }

    /// Makes everything that was written permanent, where a device has a volatile write cache.
    ///
    /// # Errors
    /// [`StoreError::JournalFailed`]: a device did not flush its cache, now or before. What was
    /// written since the last flush that succeeded may be lost, and nobody can tell what a later
    /// one would cover: no device is asked again, and nothing is stored any more until the plane
    /// is opened anew. What is stored can be retrieved.
    pub fn flush(&mut self) -> Result<(), StoreError> {
        self.check_flushed()?;
        if !self.must_flush {
            return Ok(());
        }
        for (device, index) in self.devices.iter().zip(0..) {
            if index > 0 && planted(PlantedBug::RankFlushesFirst) {
                continue;
            }
            if let Err(source) = device.controller.lock().flush(device.nsid) {
                let error = StoreError::Driver { device: DeviceIndex(index), source };
                tracing::error!(%error, "the plane takes no writes any more");
                self.read_only = Some(error.to_string());
                break;
            }
        }
        self.check_flushed()
    }

    /// Refuses to store once a flush has failed.
    fn check_flushed(&self) -> Result<(), StoreError> {
        match &self.read_only {
            Some(cause) => Err(StoreError::JournalFailed { cause: cause.clone() }),
            None => Ok(()),
        }
    }

    /// Takes note of what happened since the last call: events of devices now and then, and
    /// completions.
    ///
    /// # Errors
    /// [`StoreError::Failed`], or why recovering from an earlier operation's fault failed.
    pub fn sync(&mut self) -> Result<(), StoreError> {
        self.check()?;
        self.attend()?;
        self.reap().map(|_| ())
    }

    /// Refuses to go on with a failed plane.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        match &self.failed {
            Some(cause) => Err(StoreError::Failed { cause: cause.clone() }),
            None => Ok(()),
        }
    }

    /// The ring and the events of streams.
    fn streams(&mut self) -> Result<(&mut Uring, &mut Streams), StoreError> {
        self.check()?;
        match (&mut self.ring, &mut self.streams) {
            (Some(ring), Some(streams)) => Ok((ring, streams)),
            _ => Err(StoreError::NoStreams),
        }
    }

    fn ring(&mut self) -> Result<&mut Uring, StoreError> {
        match (&mut self.ring, &self.failed) {
            (Some(ring), None) => Ok(ring),
            (_, cause) => Err(StoreError::Failed { cause: cause.clone().unwrap_or_default() }),
        }
    }

    fn ticket(&self, job: JobId, layer: Layer, ends: [Option<Wait>; 2]) -> Ticket {
        Ticket { job, layer, plane: self.id.clone(), ends }
    }
}
