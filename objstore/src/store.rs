//! The store: a catalog, a plane and a journal in one process.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
};

use kv_catalog::{
    BlockKey, Catalog, CatalogCounts, DurableCatalog, FileId, Geometry, JournalError, KvShape,
    Namespace, NamespaceId, NamespaceOwner, NewPin, PinAnswer, PinLimits, PinList, StoredFile,
    Superblock, Usage, WriteId, lock,
};
use nvme_driver::Clock;

use crate::{
    error::StoreError,
    ids::{JobId, PoolId},
    plane::{JobDone, Mover, Plane},
    stats::{Lookups, StoreStats},
};

mod block_device;
mod clusters;
mod commit;
mod deallocation;
mod erase;
mod handles;
mod layer;
mod open;
pub(crate) mod owner;
mod ranks;
mod request;
mod reservation;
mod salvage;

pub use clusters::{ClusterCopies, StoredClusters};
use deallocation::Drive;
pub use erase::Erased;
use handles::Held;
pub use handles::{Committed, LoadRequest, Prefix, StoreRequest, Transfer};
pub use open::{Closed, Medium};
pub use ranks::{RankId, open_catalog};
pub use reservation::Reservation;
pub use salvage::Salvage;

/// A GPU-centric object store for KV cache. See the crate's documentation for its use.
///
/// A cheap handle: clones refer to the same store, and any number of threads may use them. Lookups
/// take one short lock and never wait for I/O. Each handle works in one namespace
/// ([`Store::within`]): it neither finds nor changes data of another one.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
    /// Kept as long as the handle exists.
    namespace: Arc<NamespaceId>,
    /// The pool of its requests' blocks.
    pool: PoolId,
    /// False if its reads pass the DRAM cache by.
    is_cached: bool,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

/// State shared by the handles. Lock order: drives, plane, jobs, catalog.
struct Inner {
    catalog: DurableCatalog,
    geometry: Geometry,
    clock: Arc<dyn Clock>,
    /// Drives that receive deallocate (TRIM) hints.
    drives: Mutex<Vec<Drive>>,
    plane: Plane,
    /// Ended jobs whose commits wait.
    queued: Mutex<Vec<(JobDone, WriteId)>>,
    /// Results of commits that another thread did. Locked during a commit, before all others.
    committed: Mutex<HashMap<JobId, Result<(), StoreError>>>,
    jobs: Mutex<Jobs>,
}

/// State of requests. Never locked during I/O.
#[derive(Debug, Default)]
struct Jobs {
    /// References and files to release when a job ends.
    held: HashMap<JobId, Held>,
    lookups: Lookups,
    /// Set when the store refuses every call, with the cause.
    failed: Option<String>,
}

impl Inner {
    /// Applies what the plane reports about jobs and files. The plane is locked.
    fn apply_reports(&self, plane: &mut Mover) {
        let (ended, lost) = (plane.take_ended(), plane.take_lost());
        let failed = plane.check().err();
        if ended.is_empty() && lost.is_empty() && failed.is_none() {
            return;
        }
        let mut jobs = lock(&self.jobs);
        self.catalog.with(|catalog| {
            for file in lost {
                jobs.lookups.files_lost += u64::from(catalog.is_stored(file));
                catalog.lost(file);
            }
        });
        for held in ended.iter().filter_map(|job| jobs.held.remove(job)) {
            self.give_back(held);
        }
        if let (Some(error), None) = (failed, &jobs.failed) {
            jobs.failed = Some(match error {
                StoreError::Failed { cause } => cause,
                error => error.to_string(),
            });
        }
    }

    fn give_back(&self, held: Held) {
        let given_back = self.catalog.with(|catalog| match &held {
            Held::Read(reference) => catalog.release(*reference),
            Held::Write(write) => catalog.abort(*write),
            // Its drop ends the write if it is the last one.
            Held::Part(..) => Ok(()),
        });
        assert!(given_back.is_ok(), "{given_back:?}");
    }
}

impl Jobs {
    fn check(&self) -> Result<(), StoreError> {
        match &self.failed {
            Some(cause) => Err(StoreError::Failed { cause: cause.clone() }),
            None => Ok(()),
        }
    }
}

impl Store {
    /// Returns the shape of the KV blocks.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.superblock().layout.shape
    }

    /// Returns the plane, for pacing ([`Plane::pace`]) and all else that is not in terms of keys.
    #[must_use]
    pub fn plane(&self) -> &Plane {
        &self.inner.plane
    }

    /// Returns the superblock of the first device.
    #[must_use]
    pub fn superblock(&self) -> &Superblock {
        self.inner.catalog.superblock()
    }

    /// Returns the placement of files on the devices.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.inner.geometry
    }

    /// Returns a handle that works in `namespace`, which is registered if it is new.
    ///
    /// # Errors
    /// Returns [`StoreError::Catalog`], [`StoreError::Failed`], or, for a new namespace in a store
    /// that takes no writes any more, [`StoreError::JournalFailed`].
    pub fn within(&self, namespace: &Namespace) -> Result<Self, StoreError> {
        self.within_of(namespace, None)
    }

    /// Same as [`Store::within`], for a user of a server, as [`Catalog::namespace_of`] does it.
    ///
    /// # Errors
    /// Same as [`Store::within`].
    pub fn within_of(
        &self,
        namespace: &Namespace,
        owner: Option<NamespaceOwner>,
    ) -> Result<Self, StoreError> {
        let registered = self.change(|catalog| {
            let id = catalog.namespace_of(namespace, owner)?;
            Ok(catalog.keep(id)?)
        });
        let namespace = registered.or_else(|error| {
            // A store that takes no writes can still be read.
            let digest = namespace.digest();
            self.look(|catalog| {
                let found = catalog.namespaces().find(|(_, _, other)| *other == digest);
                Ok(catalog.keep(found.map(|(id, ..)| id).ok_or(error)?)?)
            })
        })?;
        Ok(Self { namespace, ..self.clone() })
    }

    /// Returns a handle that works in a registered namespace, by its number: for tools that
    /// maintain the whole store.
    ///
    /// # Errors
    /// Returns [`StoreError::Catalog`] if there is none with this number.
    pub fn in_namespace(&self, namespace: NamespaceId) -> Result<Self, StoreError> {
        let namespace = self.inner.catalog.with(|catalog| catalog.keep(namespace))?;
        Ok(Self { namespace, ..self.clone() })
    }

    /// Returns a handle whose requests name blocks of another pool of the plane
    /// ([`Plane::add_pool`]).
    #[must_use]
    pub fn with_pool(&self, pool: PoolId) -> Self {
        Self { pool, ..self.clone() }
    }

    /// Returns a handle whose reads neither use the DRAM cache
    /// ([`crate::StoreOptions::dram`]) nor fill it: for a check of the devices.
    #[must_use]
    pub fn without_dram(&self) -> Self {
        Self { is_cached: false, ..self.clone() }
    }

    /// Returns the namespace of this handle.
    #[must_use]
    pub fn namespace(&self) -> NamespaceId {
        *self.namespace
    }

    /// Returns how many leading `keys` are stored now. Takes no reference and has no side effects:
    /// the next call may evict them.
    #[must_use]
    pub fn peek(&self, keys: &[BlockKey]) -> usize {
        // A handle's namespace exists.
        self.inner.catalog.with(|catalog| catalog.lookup(*self.namespace, keys)).unwrap_or(0)
    }

    /// Returns the longest stored run of leading `keys`. Its blocks are not evicted until the
    /// result is dropped.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`], or [`StoreError::Catalog`] for an unknown namespace.
    pub fn lookup(&self, keys: &[BlockKey]) -> Result<Prefix, StoreError> {
        let mut jobs = lock(&self.inner.jobs);
        jobs.check()?;
        let reference =
            self.inner.catalog.with(|catalog| catalog.acquire(*self.namespace, keys))?;
        jobs.lookups.calls += 1;
        jobs.lookups.blocks += keys.len() as u64;
        jobs.lookups.hits += reference.files.len() as u64;
        Ok(Prefix { store: self.inner.clone(), reference })
    }

    /// Returns an error if the store takes no writes any more.
    ///
    /// # Errors
    /// Same as [`Plane::check_writable`].
    pub fn check_writable(&self) -> Result<(), StoreError> {
        self.inner.plane.check_writable()
    }

    /// Same as [`Catalog::pin_for`].
    ///
    /// # Errors
    /// Same as [`Store::lookup`].
    pub fn pin_for(&self, new: &NewPin<'_>, limits: &PinLimits) -> Result<PinAnswer, StoreError> {
        lock(&self.inner.jobs).check()?;
        Ok(self.inner.catalog.pin_for(new, limits)?)
    }

    /// Same as [`Catalog::end_pins`].
    pub fn end_pins(&self, number: Option<u64>, owner: Option<u64>) -> Option<u64> {
        self.inner.catalog.with(|catalog| catalog.end_pins(number, owner))
    }

    /// Same as [`Catalog::pins_of`].
    pub fn pins_of(&self, is_owner: impl Fn(u64) -> bool) -> (usize, u64) {
        self.inner.catalog.with(|catalog| catalog.pins_of(is_owner))
    }

    /// Returns the state of the pins of all namespaces.
    #[must_use]
    pub fn pins(&self, limits: &PinLimits) -> PinList {
        self.inner.catalog.with(|catalog| catalog.pins(limits))
    }

    /// Removes `keys`, including used and pinned ones, and returns how many were stored. Their
    /// files are reused once no prefix, load request or store request refers to them.
    ///
    /// This, like every change of the store except a commit, is permanent when the next
    /// [`Store::sync_journal`] has returned. A crash before that may undo it.
    ///
    /// # Errors
    /// Same as [`Store::lookup`], and [`StoreError::JournalFailed`] if the store takes no writes
    /// any more: nothing was changed.
    pub fn remove(&self, keys: &[BlockKey]) -> Result<u32, StoreError> {
        self.change(|catalog| Ok(catalog.remove(*self.namespace, keys)?))
    }

    /// Returns the keys of the namespace that were evicted, removed or lost since the last call, by
    /// any handle; not those of cleared namespaces. They are collected from the first call on. Keys
    /// of other namespaces are discarded.
    #[must_use]
    pub fn take_dropped(&self) -> Vec<BlockKey> {
        let dropped = self.inner.catalog.with(Catalog::take_dropped).into_iter();
        dropped.filter(|(of, _)| *of == *self.namespace).map(|(_, key)| key).collect()
    }

    /// Removes all blocks of the namespace, including used and pinned ones.
    ///
    /// # Errors
    /// Same as [`Store::remove`].
    pub fn clear(&self) -> Result<(), StoreError> {
        self.change(|catalog| Ok(catalog.clear(*self.namespace)?))
    }

    /// Removes all blocks of the namespace like [`Store::clear`], unless some are in use, pinned or
    /// being stored: then nothing is changed. Returns the number of these.
    ///
    /// # Errors
    /// Same as [`Store::remove`].
    pub fn clear_unused(&self) -> Result<u32, StoreError> {
        self.change(|catalog| Ok(catalog.clear_unused(*self.namespace)?))
    }

    /// Erases free files of all namespaces, up to `bytes_max` bytes of them, in the order of their
    /// numbers from `first`. They read as zeroes when this returns, also after a loss of power; a
    /// drive may deallocate them instead of writing zeroes. The first call ([`FileId`] 0) of a
    /// series also frees the files of cleared namespaces.
    ///
    /// # Errors
    /// Returns [`StoreError::Driver`] if a device fails, [`StoreError::Forgotten`] if a controller
    /// was reset meanwhile, and the errors of [`Store::check_writable`].
    pub fn erase(&self, first: FileId, bytes_max: u64) -> Result<Erased, StoreError> {
        self.inner.erase(first, bytes_max)
    }

    /// Starts a new epoch of the namespace: clears it like [`Store::clear`], and blocks that were
    /// being stored in the old epoch will not be found either. Returns the new epoch.
    ///
    /// The new epoch is permanent when the next [`Store::sync_journal`] has returned. Call that
    /// before computing anything with new weights: after a crash before it returns, blocks of the
    /// old ones may be found again.
    ///
    /// # Errors
    /// Same as [`Store::remove`].
    pub fn bump_epoch(&self) -> Result<u64, StoreError> {
        self.change(|catalog| Ok(catalog.bump_epoch(*self.namespace)?))
    }

    /// Limits the namespace to this many files; `None`: no limit.
    ///
    /// # Errors
    /// Same as [`Store::remove`].
    pub fn set_quota(&self, files: Option<u32>) -> Result<(), StoreError> {
        self.change(|catalog| Ok(catalog.set_quota(*self.namespace, files)?))
    }

    /// Limits the files of all namespaces of a user together, as [`Catalog::limit_owner`] does it.
    ///
    /// # Errors
    /// Same as [`Store::remove`].
    pub fn limit_owner(&self, user: u32, files: Option<u32>) -> Result<(), StoreError> {
        self.change(|catalog| Ok(catalog.limit_owner(user, files)?))
    }

    /// Sets the eviction weight of the namespace: its unused blocks are kept `weight` times as long
    /// as with 1, which is the default.
    ///
    /// # Errors
    /// Same as [`Store::remove`], and [`StoreError::Catalog`] for a weight of 0.
    pub fn set_weight(&self, weight: u32) -> Result<(), StoreError> {
        self.change(|catalog| Ok(catalog.set_weight(*self.namespace, weight)?))
    }

    /// Returns the usage of the namespace.
    ///
    /// # Errors
    /// Same as [`Store::lookup`].
    pub fn usage(&self) -> Result<Usage, StoreError> {
        Ok(self.inner.catalog.with(|catalog| catalog.usage(*self.namespace))?)
    }

    /// Evicts up to `files` files of the namespace, and returns how many it evicted.
    ///
    /// # Errors
    /// Same as [`Store::remove`].
    pub fn evict(&self, files: u32) -> Result<u32, StoreError> {
        self.change(|catalog| Ok(catalog.evict(Some(*self.namespace), files)?))
    }

    /// Changes the catalog; the change is to become permanent.
    fn change<T>(
        &self,
        act: impl FnOnce(&mut Catalog) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        lock(&self.inner.jobs).check()?;
        self.inner.catalog.change(act)
    }

    /// Calls `act` on the catalog, without changes that must become permanent.
    fn look<T>(
        &self,
        act: impl FnOnce(&mut Catalog) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        lock(&self.inner.jobs).check()?;
        self.inner.catalog.with(act)
    }

    /// Returns counts, and the current contents of the store.
    ///
    /// # Errors
    /// Same as [`Store::lookup`].
    pub fn stats(&self) -> Result<StoreStats, StoreError> {
        self.inner.plane.sync()?;
        self.stats_now()
    }

    /// Same as [`Store::stats`]. Reads counters, and does no other work: for watching a store in
    /// use.
    ///
    /// # Errors
    /// Same as [`Store::lookup`].
    pub fn stats_now(&self) -> Result<StoreStats, StoreError> {
        let (deallocated_bytes, deallocations_failed) = {
            let drives = lock(&self.inner.drives);
            let bytes = drives.iter().map(|drive| drive.bytes).sum();
            (bytes, drives.iter().map(|drive| drive.failed).sum())
        };
        Ok(StoreStats {
            plane: self.inner.plane.stats()?,
            files: self.counts()?,
            file_bytes: self.inner.geometry.file_bytes(),
            lookups: lock(&self.inner.jobs).lookups,
            journal_bytes: self.inner.catalog.written_bytes(),
            deallocated_bytes,
            deallocations_failed,
        })
    }

    /// Returns the counts of the files of all namespaces.
    ///
    /// # Errors
    /// Same as [`Store::lookup`].
    pub fn counts(&self) -> Result<CatalogCounts, StoreError> {
        self.look(|catalog| Ok(catalog.counts()))
    }

    /// Returns, for each of `keys`, if it is stored now. Same guarantees as [`Store::peek`].
    ///
    /// # Errors
    /// Same as [`Store::lookup`].
    pub fn are_stored(&self, keys: &[BlockKey]) -> Result<Vec<bool>, StoreError> {
        self.look(|catalog| Ok(catalog.are_stored(*self.namespace, keys)?))
    }

    /// Returns the numbers and labels of all namespaces: for tools that maintain the whole store.
    /// An engine stays in its own.
    #[must_use]
    pub fn namespaces(&self) -> Vec<(NamespaceId, String)> {
        self.inner.catalog.with(|catalog| {
            catalog.namespaces().map(|(id, label, _)| (id, label.to_owned())).collect()
        })
    }

    /// Returns up to `max` stored files of all namespaces with number `first` or higher, in the
    /// order of their numbers, which is the order of their positions on the devices.
    #[must_use]
    pub fn stored_from(&self, first: FileId, max: usize) -> Vec<StoredFile> {
        self.inner.catalog.with(|catalog| catalog.stored_from(first).take(max).collect())
    }

    /// Returns those of `files`, of any namespace, that are stored, as a prefix to be retrieved. It
    /// does not count as a use or a lookup: eviction order is unchanged.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn hold(&self, files: &[FileId]) -> Result<Prefix, StoreError> {
        let reference = self.look(|catalog| Ok(catalog.hold(files)))?;
        Ok(Prefix { store: self.inner.clone(), reference })
    }

    /// Reads the journal again, and repairs it if it is damaged and `repair` is set, as
    /// [`DurableCatalog::verify`] does. Commits wait meanwhile.
    ///
    /// # Errors
    /// Returns [`StoreError::JournalFailed`] if the repair fails, or [`StoreError::Failed`].
    pub fn verify_journal(&self, repair: bool) -> Result<Option<JournalError>, StoreError> {
        lock(&self.inner.jobs).check()?;
        Ok(self.inner.catalog.verify(repair)?)
    }
}
