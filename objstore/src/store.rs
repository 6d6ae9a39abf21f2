//! The store: a catalog, a plane and a journal in one process.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use gio_uring::Event;
use kv_catalog::{
    BlockKey, Catalog, DeviceIndex, Geometry, KvShape, Namespace, NamespaceId, Superblock, Usage,
};
use nvme_driver::{Clock, Nanos};

use crate::{
    error::StoreError,
    plane::{JobId, KvView, Plane, StoreEvent},
    stats::StoreStats,
};

mod ahead;
mod behind;
mod block_device;
mod commit;
mod deallocation;
mod everything;
mod handles;
mod layer;
mod open;
mod paced;
mod ranks;
mod request;
mod salvage;
mod writer;

use behind::Published;
use commit::{Commits, Ready};
use deallocation::Drive;
use handles::Held;
pub use handles::{Committed, Prefix, Transfer, Writing};
pub use open::{Closed, Medium};
pub use paced::{PacedEnd, PacedStore};
pub use ranks::{DurableCatalog, RankConfig, RankId};
pub use salvage::Salvage;

/// A GPU-centric object store for KV cache. See the crate's documentation for how it works.
///
/// A cheap handle: clones are the same store, and any number of threads may use them. Lookups
/// take one short lock and never wait for I/O. Each handle works in one namespace
/// ([`Store::within`]): it neither finds nor changes what belongs to another one.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
    namespace: NamespaceId,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let namespace = self.namespace;
        f.debug_struct("Store").field("namespace", &namespace).finish_non_exhaustive()
    }
}

/// What the handles share. Locks are taken in this order: drives, commits, ready, published, plane,
/// keys.
struct Inner {
    superblock: Superblock,
    geometry: Geometry,
    clock: Arc<dyn Clock>,
    wait_timeout: Nanos,
    /// That are told what holds nothing.
    drives: Mutex<Vec<Drive>>,
    /// Writings that wait to be committed.
    ready: Mutex<Vec<Ready>>,
    commits: Mutex<Commits>,
    /// Writings that lookups find and that are to become permanent.
    published: Mutex<Vec<Published>>,
    /// `None` once it was closed.
    plane: Mutex<Option<Plane>>,
    keys: Mutex<Keys>,
}

/// What lookups need. Never locked during I/O.
#[derive(Debug)]
struct Keys {
    catalog: Catalog,
    /// What to give back when a job has ended.
    held: HashMap<JobId, Held>,
    tally: Tally,
    /// Storing had to wait until evicted files were free.
    is_crowded: bool,
    /// Why nothing can be stored any more.
    read_only: Option<String>,
    /// Why the store does nothing any more.
    failed: Option<String>,
}

/// What the store counts itself.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    lookups: u64,
    blocks_looked_up: u64,
    blocks_hit: u64,
    files_lost: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a thread that panicked left is either whole or about a handle of its own.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn keys(&self) -> MutexGuard<'_, Keys> {
        lock(&self.keys)
    }

    /// Does something with the plane, then takes note of what it says of jobs and files.
    fn with_plane<T>(
        &self,
        act: impl FnOnce(&mut Plane) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut guard = lock(&self.plane);
        let plane = guard.as_mut().ok_or_else(closed)?;
        let result = act(plane);
        let (ended, lost) = (plane.take_ended(), plane.take_lost());
        let failed = plane.check().err();
        if !ended.is_empty() || !lost.is_empty() || failed.is_some() {
            let mut keys = self.keys();
            for file in lost {
                keys.tally.files_lost += u64::from(keys.catalog.is_stored(file));
                keys.catalog.lost(file);
            }
            ended.into_iter().for_each(|job| keys.end(job));
            if let (Some(error), None) = (failed, &keys.failed) {
                keys.failed = Some(match error {
                    StoreError::Failed { cause } => cause,
                    error => error.to_string(),
                });
            }
        }
        result
    }

    /// Gives up on a job.
    fn abandon(&self, job: JobId) {
        // A closed store has nothing left to give back.
        let _ = self.with_plane(|plane| {
            plane.abandon(job);
            Ok(())
        });
    }
}

impl Keys {
    /// A job has ended.
    fn end(&mut self, job: JobId) {
        if let Some(held) = self.held.remove(&job) {
            self.give_back(held);
        }
    }

    fn give_back(&mut self, held: Held) {
        let given_back = match held {
            Held::Read(reference) => self.catalog.release(reference),
            Held::Write(write) => self.catalog.abort(write),
        };
        debug_assert!(given_back.is_ok(), "{given_back:?}");
    }

    /// Refuses to change anything once a device did not take the journal, or did not flush.
    fn check_writable(&self) -> Result<(), StoreError> {
        match &self.read_only {
            Some(cause) => Err(StoreError::JournalFailed { cause: cause.clone() }),
            None => Ok(()),
        }
    }

    fn check(&self) -> Result<(), StoreError> {
        match &self.failed {
            Some(cause) => Err(StoreError::Failed { cause: cause.clone() }),
            None => Ok(()),
        }
    }
}

fn closed() -> StoreError {
    StoreError::Failed { cause: "it was closed".to_owned() }
}

impl Store {
    /// The shape of the KV blocks.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.inner.superblock.layout.shape
    }

    /// What the first device says of the store.
    #[must_use]
    pub fn superblock(&self) -> &Superblock {
        &self.inner.superblock
    }

    /// Where files live on the devices.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.inner.geometry
    }

    /// A handle that works in `namespace`, which is registered if it is new.
    ///
    /// # Errors
    /// [`StoreError::Catalog`], [`StoreError::Failed`]; [`StoreError::JournalFailed`] for a new one
    /// when the store takes no writes any more.
    pub fn within(&self, namespace: &Namespace) -> Result<Self, StoreError> {
        let registered = self.change(|catalog| Ok(catalog.namespace(namespace)?));
        let namespace = registered.or_else(|error| {
            // A store that takes no writes can be read.
            let digest = namespace.digest();
            self.look(|catalog| {
                let found = catalog.namespaces().find(|(_, _, other)| *other == digest);
                found.map(|(id, ..)| id).ok_or(error)
            })
        })?;
        Ok(Self { inner: self.inner.clone(), namespace })
    }

    /// The namespace this handle works in.
    #[must_use]
    pub fn namespace(&self) -> NamespaceId {
        self.namespace
    }

    /// How many leading `keys` are stored now. Takes no reference and has no effect: the next call
    /// may evict them.
    #[must_use]
    pub fn peek(&self, keys: &[BlockKey]) -> usize {
        // A handle's namespace exists.
        self.inner.keys().catalog.lookup(self.namespace, keys).unwrap_or(0)
    }

    /// Whether `key` is stored now, as [`Store::peek`].
    #[must_use]
    pub fn contains(&self, key: BlockKey) -> bool {
        self.peek(&[key]) == 1
    }

    /// The longest run of leading `keys` that is stored. Those blocks are not evicted until the
    /// result is dropped.
    ///
    /// # Errors
    /// [`StoreError::Failed`], [`StoreError::Catalog`] for a namespace that does not exist.
    pub fn lookup(&self, keys: &[BlockKey]) -> Result<Prefix, StoreError> {
        let mut state = self.inner.keys();
        state.check()?;
        let reference = state.catalog.acquire(self.namespace, keys)?;
        state.tally.lookups += 1;
        state.tally.blocks_looked_up += keys.len() as u64;
        state.tally.blocks_hit += reference.files.len() as u64;
        Ok(Prefix { store: self.inner.clone(), reference })
    }

    /// Pins the stored ones of `keys`: they are not evicted until they are unpinned, also after
    /// the store was closed and opened again. Says how many were found.
    ///
    /// This, like every change of the store but a commit, is permanent when the next
    /// [`Store::sync_journal`] has returned. A crash before that may undo it.
    ///
    /// # Errors
    /// As for [`Store::lookup`]; [`StoreError::JournalFailed`] when the store takes no writes any
    /// more: nothing was changed.
    pub fn pin(&self, keys: &[BlockKey]) -> Result<u32, StoreError> {
        self.change(|catalog| Ok(catalog.pin(self.namespace, keys)?))
    }

    /// Undoes [`Store::pin`].
    ///
    /// # Errors
    /// As for [`Store::pin`].
    pub fn unpin(&self, keys: &[BlockKey]) -> Result<u32, StoreError> {
        self.change(|catalog| Ok(catalog.unpin(self.namespace, keys)?))
    }

    /// Drops `keys`, used and pinned ones too, and returns how many were stored. Their files are
    /// reused once no prefix, transfer or writing refers to them.
    ///
    /// # Errors
    /// As for [`Store::pin`].
    pub fn remove(&self, keys: &[BlockKey]) -> Result<u32, StoreError> {
        self.change(|catalog| Ok(catalog.remove(self.namespace, keys)?))
    }

    /// Drops everything of the namespace, used and pinned blocks too.
    ///
    /// # Errors
    /// As for [`Store::pin`].
    pub fn clear(&self) -> Result<(), StoreError> {
        self.change(|catalog| Ok(catalog.clear(self.namespace)?))
    }

    /// Starts a new epoch of the namespace: as [`Store::clear`], and what was being stored for the
    /// old epoch will not be found either. Returns the new epoch.
    ///
    /// The new epoch is permanent when the next [`Store::sync_journal`] has returned. Call that
    /// before anything is computed with new weights: after a crash in between, blocks of the old
    /// ones may be found again.
    ///
    /// # Errors
    /// As for [`Store::pin`].
    pub fn bump_epoch(&self) -> Result<u64, StoreError> {
        self.change(|catalog| Ok(catalog.bump_epoch(self.namespace)?))
    }

    /// Limits the namespace to so many files; `None`: no limit.
    ///
    /// # Errors
    /// As for [`Store::pin`].
    pub fn set_quota(&self, files: Option<u32>) -> Result<(), StoreError> {
        self.change(|catalog| Ok(catalog.set_quota(self.namespace, files)?))
    }

    /// Says how much longer than those of other namespaces its blocks are kept unused: `weight`
    /// times as long as with 1, which is the default.
    ///
    /// # Errors
    /// As for [`Store::pin`]; [`StoreError::Catalog`] for a weight of 0.
    pub fn set_weight(&self, weight: u32) -> Result<(), StoreError> {
        self.change(|catalog| Ok(catalog.set_weight(self.namespace, weight)?))
    }

    /// What the namespace holds.
    ///
    /// # Errors
    /// As for [`Store::lookup`].
    pub fn usage(&self) -> Result<Usage, StoreError> {
        Ok(self.inner.keys().catalog.usage(self.namespace)?)
    }

    /// Evicts up to `files` files of the namespace, and says how many it found.
    ///
    /// # Errors
    /// As for [`Store::pin`].
    pub fn evict(&self, files: u32) -> Result<u32, StoreError> {
        self.change(|catalog| Ok(catalog.evict(Some(self.namespace), files)?))
    }

    /// Does something that is to become permanent.
    fn change<T>(
        &self,
        act: impl FnOnce(&mut Catalog) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut keys = self.inner.keys();
        keys.check()?;
        keys.check_writable()?;
        act(&mut keys.catalog)
    }

    /// Does something that need not become permanent.
    fn look<T>(
        &self,
        act: impl FnOnce(&mut Catalog) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut keys = self.inner.keys();
        keys.check()?;
        act(&mut keys.catalog)
    }

    /// An event that layers can wait for ([`crate::Order::AfterEvent`]) and that the engine's
    /// stream signals. Good until the store is closed, or had to replace its executor.
    ///
    /// # Errors
    /// [`StoreError::Ring`] without memory, [`StoreError::Failed`].
    pub fn event(&self) -> Result<Event, StoreError> {
        self.inner.with_plane(Plane::event)
    }

    /// As [`Plane::poll_events`].
    ///
    /// # Errors
    /// As there.
    pub fn poll_events(&self) -> Result<Vec<StoreEvent>, StoreError> {
        self.inner.tend();
        self.inner.with_plane(Plane::poll_events)
    }

    /// The devices whose owner wants them back (an unbind, a hot removal): close the store soon.
    #[must_use]
    pub fn requested_devices(&self) -> Vec<DeviceIndex> {
        lock(&self.inner.plane)
            .as_ref()
            .map(|plane| plane.requested_devices().collect())
            .unwrap_or_default()
    }

    /// Sends a pattern through every layer and segment to the devices and back, in a file that is
    /// there for that alone. `view` is how the engine sees its blocks; `None`: at the addresses
    /// that were registered. Opening does the latter ([`crate::StoreOptions::self_test`]). The
    /// pool's first and last block may not be used meanwhile; they are put back as they were.
    ///
    /// # Errors
    /// As for [`Plane::self_test`].
    pub fn self_test(&self, view: Option<&mut dyn KvView>) -> Result<(), StoreError> {
        self.inner.with_plane(|plane| plane.self_test(view))
    }

    /// Counts, and what the store holds now.
    ///
    /// # Errors
    /// As for [`Store::lookup`].
    pub fn stats(&self) -> Result<StoreStats, StoreError> {
        let plane = self.inner.with_plane(|plane| {
            plane.sync()?;
            plane.stats()
        })?;
        let journal_bytes = self.inner.journal_bytes();
        let (deallocated_bytes, deallocations_failed) = {
            let drives = lock(&self.inner.drives);
            let bytes = drives.iter().map(|drive| drive.bytes).sum();
            (bytes, drives.iter().map(|drive| drive.failed).sum())
        };
        let keys = self.inner.keys();
        keys.check()?;
        let counts = keys.catalog.counts();
        let Tally { lookups, blocks_looked_up, blocks_hit, files_lost } = keys.tally;
        Ok(StoreStats {
            path: plane.path,
            files: counts.files,
            files_free: counts.free + counts.limbo,
            free_runs: counts.free_runs,
            files_stored: counts.stored,
            files_writing: counts.writing,
            files_referenced: counts.active,
            file_bytes: self.inner.geometry.file_bytes(),
            lookups,
            blocks_looked_up,
            blocks_hit,
            evictions: counts.evicted,
            files_lost,
            stored_bytes: plane.stored_bytes,
            retrieved_bytes: plane.retrieved_bytes,
            dram: plane.dram,
            journal_bytes,
            deallocated_bytes,
            deallocations_failed,
            recoveries: plane.recoveries,
            commands: plane.ring.commands,
            sq_doorbells: plane.ring.sq_doorbells,
            cq_doorbells: plane.ring.cq_doorbells,
        })
    }
}
