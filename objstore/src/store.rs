//! The store: what an engine calls.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    sync::mpsc::Receiver,
};

use gio_uring::{Affine, Event, IocbId, PoolHandle, Uring, Wait};
use nvme_driver::{Clock, Controller, DmaMemory, Nanos};
use nvme_spec::ids::{Nsid, QueueId};

use kv_catalog::{BlockKey, FileId, FilePool, Found, Geometry, Index, KvShape, Layer, Region};

use crate::{
    config::{ExecutorFactory, StoreOptions},
    error::{Failure, StoreError},
    registration::KvPool,
    stats::{Path, StoreStats},
    transfer::{LayerDone, Message, Prefix, ReleaseSender, Request, RequestId},
};

mod close;
mod complete;
mod events;
mod layer;
mod open;
mod recover;
mod request;
mod route;
mod staging;
mod streams;

pub use close::Closed;
pub use events::StoreEvent;
use staging::Staging;
use streams::Streams;

/// A device and what the store has of it.
#[derive(Debug)]
struct Device {
    controller: Controller,
    nsid: Nsid,
    region: Region,
    /// The queue pairs that are granted to the I/O kernel.
    queues: Vec<QueueId>,
    /// It reports that its media takes no writes any more.
    read_only: bool,
    /// Its owner wants it back.
    requested: bool,
}

/// A layer operation in flight: in the ring, or on a stream behind it.
#[derive(Debug)]
struct Op {
    iocb: IocbId,
    request: RequestId,
    layer: Layer,
    /// What became of it in the ring. The IOCB may be used by another operation then.
    outcome: Option<Result<LayerDone, Failure>>,
    /// With streams: reached when it ended in the ring.
    end: Option<Wait>,
    /// Staged: its buffer.
    buffer: Option<usize>,
    /// Staged and retrieved: reached when its objects are in the pool.
    moved: Option<Wait>,
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
    lookups: u64,
    blocks_looked_up: u64,
    blocks_hit: u64,
    evictions: u64,
    files_lost: u64,
    stored_bytes: u64,
    retrieved_bytes: u64,
    recoveries: u64,
}

/// Memory reused from call to call.
#[derive(Debug, Default)]
struct Scratch {
    freed: Vec<FileId>,
    map: Vec<Affine>,
    /// By block: the request that last used it as a destination.
    used: Vec<u64>,
}

/// A GPU-centric object store for KV cache. See the crate's documentation for how it works.
///
/// One thread owns it. Handles it gives out may be dropped on any thread.
#[derive(Debug)]
pub struct Store {
    /// `None` only after the store failed: then it was leaked, with everything its kernel uses.
    ring: Option<Uring>,
    target: Target,
    /// The events of streams; `None` without a GPU.
    streams: Option<Streams>,
    devices: Vec<Device>,
    clock: Arc<dyn Clock>,
    executor: Factory,
    options: StoreOptions,
    fua: bool,
    shape: KvShape,
    geometry: Geometry,
    path: Path,
    pool: KvPool,
    /// Where padding comes from and goes to. Never read; kept because the devices use it.
    pads: Option<Arc<dyn DmaMemory>>,
    index: Index,
    files: FilePool,
    requests: HashMap<RequestId, Request>,
    requests_ever: u64,
    ops: Vec<Op>,
    /// Requests without a handle whose last operation has ended.
    ended: Vec<RequestId>,
    /// What devices reported and the engine has not asked for.
    events: VecDeque<StoreEvent>,
    /// When the devices are polled next.
    next_poll: Nanos,
    releases: ReleaseSender,
    messages: Receiver<Message>,
    tally: Tally,
    scratch: Scratch,
    /// Why controllers have to be recovered before anything else is done.
    fault: Option<String>,
    /// Why the store does nothing any more.
    failed: Option<String>,
}

/// A boxed closure that can be printed.
struct Factory(ExecutorFactory);

impl std::fmt::Debug for Factory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ExecutorFactory")
    }
}

impl Store {
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

    /// Whether `key` is stored now. Takes no reference: the next call may evict it.
    #[must_use]
    pub fn contains(&self, key: BlockKey) -> bool {
        matches!(self.index.find(key), Some(Found::Stored(_)))
    }

    /// The longest run of leading `keys` that is stored. Those blocks are not evicted until the
    /// result is dropped: hold it to pin them.
    ///
    /// # Errors
    /// [`StoreError::Failed`], or why recovering from an earlier operation's fault failed.
    pub fn lookup(&mut self, keys: &[BlockKey]) -> Result<Prefix, StoreError> {
        self.sync()?;
        let mut files = Vec::new();
        let hits = self.index.lookup(keys, &mut files);
        self.tally.lookups += 1;
        self.tally.blocks_looked_up += keys.len() as u64;
        self.tally.blocks_hit += hits as u64;
        Ok(Prefix { files, releases: self.releases.clone() })
    }

    /// Drops `keys` from the index, used ones too, and returns how many were stored. Their files
    /// are reused once no prefix, transfer or writing refers to them.
    ///
    /// # Errors
    /// As for [`Store::lookup`].
    pub fn remove(&mut self, keys: &[BlockKey]) -> Result<usize, StoreError> {
        self.sync()?;
        let mut removed = 0;
        for key in keys {
            if let Some(Found::Stored(file)) = self.index.find(*key) {
                self.index.invalidate(file, &mut self.scratch.freed);
                removed += 1;
            }
        }
        self.free();
        Ok(removed)
    }

    /// Evicts up to `files` files, those unused for longest first, and says how many it found.
    ///
    /// # Errors
    /// As for [`Store::lookup`].
    pub fn evict(&mut self, files: u32) -> Result<u32, StoreError> {
        self.sync()?;
        Ok(self.make_room(files))
    }

    /// An event that layers can wait for ([`crate::Order::AfterEvent`]) and that the
    /// engine's stream signals. Good until the store is closed, or had to replace its executor.
    ///
    /// # Errors
    /// [`StoreError::Ring`] without memory, [`StoreError::Failed`].
    pub fn event(&mut self) -> Result<Event, StoreError> {
        Ok(self.ring()?.event()?)
    }

    /// Counts, and what the store holds now.
    ///
    /// # Errors
    /// As for [`Store::lookup`].
    pub fn stats(&mut self) -> Result<StoreStats, StoreError> {
        self.sync()?;
        let counts = self.index.counts();
        let ring = self.ring()?.counters().total;
        let tally = self.tally;
        Ok(StoreStats {
            path: self.path,
            files: self.files.files(),
            files_free: self.files.free_files(),
            free_runs: self.files.runs() as u32,
            files_stored: counts.stored,
            files_writing: counts.writing,
            files_referenced: counts.referenced,
            file_bytes: self.geometry.file_bytes(),
            lookups: tally.lookups,
            blocks_looked_up: tally.blocks_looked_up,
            blocks_hit: tally.blocks_hit,
            evictions: tally.evictions,
            files_lost: tally.files_lost,
            stored_bytes: tally.stored_bytes,
            retrieved_bytes: tally.retrieved_bytes,
            recoveries: tally.recoveries,
            commands: ring.commands,
            sq_doorbells: ring.sq_doorbells,
            cq_doorbells: ring.cq_doorbells,
        })
    }

    /// Refuses to go on with a failed store.
    fn check(&self) -> Result<(), StoreError> {
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

    /// Takes note of what happened since the last call: events of devices now and then,
    /// completions, then dropped handles.
    fn sync(&mut self) -> Result<(), StoreError> {
        self.check()?;
        if self.clock.now() >= self.next_poll {
            self.poll_devices()?;
        }
        self.reap()?;
        while let Ok(message) = self.messages.try_recv() {
            match message {
                Message::Release(files) => {
                    self.index.release(&files, &mut self.scratch.freed);
                    self.free();
                }
                Message::End(id) => self.end(id),
            }
        }
        Ok(())
    }

    /// Gives the files that the index let go back to the pool.
    fn free(&mut self) {
        for file in self.scratch.freed.drain(..) {
            self.files.free(file);
        }
    }

    /// Evicts up to `files` files.
    fn make_room(&mut self, files: u32) -> u32 {
        let mut evicted = 0;
        while evicted < files
            && let Some(file) = self.index.evict()
        {
            self.files.free(file);
            evicted += 1;
        }
        self.tally.evictions += u64::from(evicted);
        evicted
    }
}
