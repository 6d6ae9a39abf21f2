//! The plane: moves files between devices and registered memory. It knows no keys.
//!
//! Each worker process of an engine has a plane: its devices, their queues and rings, and the KV
//! pool. A catalog, which may be in another process, decides which files to move; the two exchange
//! plain data ([`Move`], [`JobDone`]). Jobs are begun and ended by number; dropping a handle
//! releases nothing.

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

/// A controller that a plane and a journal share. The holder of the lock may do I/O on its host
/// queue and control it; nothing on the data path takes the lock.
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

    /// Locks the controller. A thread that panicked while holding the lock leaves no half-done
    /// state: the driver's calls are complete in themselves.
    pub fn lock(&self) -> MutexGuard<'_, Controller> {
        self.controller.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the controller, unless another thread holds the lock.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, Controller>> {
        match self.controller.try_lock() {
            Ok(controller) => Some(controller),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns the number of resets, without waiting for the lock.
    pub(crate) fn resets(&self) -> u64 {
        self.resets.get()
    }

    /// Returns the controller if nothing else shares it any more.
    pub(crate) fn into_inner(self) -> Option<Controller> {
        let mutex = Arc::try_unwrap(self.controller).ok()?;
        Some(mutex.into_inner().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A device and the plane's resources on it.
#[derive(Debug)]
struct Device {
    controller: SharedController,
    nsid: Nsid,
    /// Region of the files' objects.
    region: Region,
    /// The queue pairs that are granted to the I/O kernel.
    queues: Vec<QueueId>,
    /// Set when the media has become read-only.
    read_only: bool,
    /// Set when the device's owner wants it back.
    requested: bool,
    /// Set when new queues alone are not enough: it is reset before anything else is done.
    must_reset: bool,
}

/// A layer operation in flight: in the ring, or on a stream behind it.
#[derive(Debug)]
struct Op {
    /// `None` if only a stream copies.
    iocb: Option<IocbId>,
    job: JobId,
    layer: Layer,
    /// Its result in the ring. The IOCB may be used by another operation then.
    outcome: Option<Result<LayerDone, Failure>>,
    /// With streams: reached when it ended in the ring.
    end: Option<Wait>,
    /// The staging buffer, on the staged path.
    buffer: Option<usize>,
    /// Reached when a stream has moved its objects: staged objects of a retrieve are in the pool,
    /// and copies to and from the DRAM cache are done.
    moved: Option<Wait>,
    /// The event that a stream waits for before it moves them. Kept alive for the stream.
    first: Option<Wait>,
}

/// Memory that the ring moves objects to and from.
#[derive(Debug)]
enum Target {
    /// The engine's memory.
    Pool(PoolHandle),
    /// Staging memory, for a pool that no device reaches.
    Staged(Staging),
}

/// Counts that the plane keeps itself.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    stored_bytes: u64,
    retrieved_bytes: u64,
    recoveries: u64,
}

/// Memory reused between calls.
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
    /// Set if checksums are computed and compared.
    checksums: bool,
    /// Set if writes have force unit access.
    fua: bool,
    /// Placement handles that every device has; 0 without placement.
    placements: u32,
    /// Set if a volatile cache must be flushed before written data counts as stored.
    must_flush: bool,
    shape: KvShape,
    geometry: Geometry,
    files: u32,
    pool: KvPool,
    /// The DRAM cache.
    memory: Option<HostMemory>,
    /// Source and target of padding. Never read; kept because the devices use it.
    pads: Option<Arc<dyn DmaMemory>>,
    jobs: HashMap<JobId, Job>,
    jobs_ever: u64,
    ops: Vec<Op>,
    /// Jobs that were abandoned and have not ended.
    abandoned: usize,
    /// Abandoned jobs that have ended, until they are taken.
    ended: Vec<JobId>,
    /// Files whose read failed, until they are taken.
    lost: Vec<FileId>,
    /// Events of devices that the engine has not taken.
    events: VecDeque<StoreEvent>,
    /// Time of the next poll of the devices.
    next_poll: Nanos,
    late: Late,
    id: PlaneId,
    tally: Tally,
    scratch: Scratch,
    /// Set when controllers must be recovered before anything else is done, with the cause.
    fault: Option<String>,
    /// Set when a failed flush ended all writes, with the cause.
    read_only: Option<String>,
    /// Set when the plane refuses every call, with the cause.
    failed: Option<String>,
}

/// Counts since a plane was opened.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct PlaneStats {
    /// The data path.
    pub path: Path,
    /// Bytes written to the devices, without padding.
    pub stored_bytes: u64,
    /// Bytes read from the devices, without padding.
    pub retrieved_bytes: u64,
    /// Counts of the DRAM cache.
    pub dram: DramStats,
    /// Recoveries of the controllers from a timeout or a fault.
    pub recoveries: u64,
    /// Counts of the I/O kernel.
    pub ring: Counters,
}

/// A boxed closure that implements `Debug`.
struct Factory(ExecutorFactory);

impl std::fmt::Debug for Factory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ExecutorFactory")
    }
}

impl Plane {
    /// Returns the shape of the KV blocks.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Returns the placement of files on the devices.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Returns the engine's memory.
    #[must_use]
    pub fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// Returns an event that layers can wait for ([`crate::Order::AfterEvent`]) and that the
    /// engine's stream signals. Valid until the plane is closed or has to replace its executor.
    ///
    /// # Errors
    /// Returns [`StoreError::Ring`] if memory runs out, or [`StoreError::Failed`].
    pub fn event(&mut self) -> Result<Event, StoreError> {
        Ok(self.ring()?.event()?)
    }

    /// Returns abandoned jobs that have ended: no device accesses their files any more.
    pub fn take_ended(&mut self) -> Vec<JobId> {
        std::mem::take(&mut self.ended)
    }

    /// Returns files that could not be read since the last call, each once: they are misses from
    /// now on.
    pub fn take_lost(&mut self) -> Vec<FileId> {
        let mut lost = std::mem::take(&mut self.lost);
        lost.sort_unstable();
        lost.dedup();
        lost
    }

    /// Returns a count that grows when controllers are recovered from a timeout or a fault, and
    /// whenever one of them is reset, by any owner: its volatile cache may have lost data that was
    /// stored and not flushed. For comparing with [`JobDone::recoveries`].
    #[must_use]
    pub fn recoveries(&self) -> u64 {
        let resets = self.devices.iter().map(|device| device.controller.resets());
        self.tally.recoveries + resets.sum::<u64>()
    }

    /// Returns the counts.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
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

    /// Makes all written data permanent: flushes the devices if one has a volatile write cache.
    ///
    /// # Errors
    /// Returns [`StoreError::JournalFailed`] if a device did not flush its cache, now or before.
    /// Data written since the last successful flush may be lost, and it is unknown what a later
    /// flush would cover: no device is flushed again, and nothing is stored any more until the
    /// plane is reopened. Stored blocks can be retrieved.
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

    /// Processes everything since the last call: events of devices, at their poll interval, and
    /// completions.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`], or the error of a recovery from an earlier fault.
    pub fn sync(&mut self) -> Result<(), StoreError> {
        self.check()?;
        self.attend()?;
        self.reap().map(|_| ())
    }

    /// Refuses calls on a failed plane.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        match &self.failed {
            Some(cause) => Err(StoreError::Failed { cause: cause.clone() }),
            None => Ok(()),
        }
    }

    /// Returns the ring and the events of streams.
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
