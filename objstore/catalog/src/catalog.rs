//! Keys, files, references, pins, eviction and namespaces of one store, for all of its ranks.

use std::collections::{HashMap, HashSet};

mod budget;
mod drop;
mod error;
mod handle;
mod index;
mod log;
mod pins;
mod sharing;
mod write;

pub use budget::WriteBudget;
pub use error::CatalogError;
pub use index::{CatalogCounts, SnapshotCursor, StoredFile, Usage};
pub use log::Group;
pub use pins::{NewPin, Outcome, PINS_MAX, PinAnswer, PinLimits, PinList, PinStatus};
pub use sharing::NamespaceOwner;
pub use write::{Position, Reported, Write, WriteId};

use self::{
    budget::Bucket,
    handle::Handles,
    index::{Index, State},
    log::Log,
    pins::Pins,
    write::OpenWrite,
};
use crate::{
    file_pool::FilePool,
    ids::{FileId, Lsn, NamespaceId},
    key::BlockKey,
    policy::PolicyKind,
    record::{Record, UseKind},
};

/// Parameters of a catalog.
#[derive(Debug, Clone)]
pub struct CatalogConfig {
    /// Files of the store.
    pub files: u32,
    /// Bytes of a file on the devices, over all ranks: for limits in bytes.
    pub file_bytes: u64,
    /// Ranks that have to report before a write is committed; at least one.
    pub ranks: u32,
    /// Checksums of a file, over all ranks: `ranks * rows`, or 0 when none are kept.
    pub words_per_file: u32,
    /// Namespaces that may be registered at a time. The journal has been written with this number.
    pub namespaces_max: u32,
    /// True to make journal records. Without a journal, files are free as soon as they are dropped.
    pub journal: bool,
    /// Files that [`Catalog::wants_space`] keeps free ahead, but at most one in 64.
    pub files_ahead: u32,
    /// Makes it unpredictable which keys collide in the hash table.
    pub seed: u64,
    /// Eviction policy.
    pub policy: PolicyKind,
    /// Limit on the writing rate; `None` is unlimited.
    pub write_budget: Option<WriteBudget>,
}

/// Id of a reference that holds files while they are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReferenceId(pub u64);

/// Files that are neither evicted nor reused until the reference is released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// Id to pass to [`Catalog::release`].
    pub id: ReferenceId,
    /// The files, one for each key of the prefix.
    pub files: Vec<FileId>,
}

/// The file and state of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hit {
    /// Committed in this file.
    Stored(FileId),
    /// Being written to this file.
    Writing(FileId),
}

/// State of a key, as far as the catalog knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyState {
    /// Its block is stored.
    Stored,
    /// Its block is being written.
    Writing,
    /// Its block was evicted, or refused. Only the newest of them are remembered, and by a hash.
    Evicted,
    /// Another namespace has the key.
    Elsewhere,
    /// Nothing: it was never stored, or that is forgotten.
    Unknown,
}

#[derive(Debug)]
struct Held {
    files: Vec<FileId>,
}

/// Keys, files, references, pins, eviction and namespaces of one store, for all of its ranks.
///
/// The catalog does no I/O and never blocks. Each decision also becomes a journal record
/// ([`Catalog::pending`]); an action that must not happen before its record is durable waits for
/// [`Catalog::durable`]. Time and random seed are arguments.
///
/// ```text
///   lookup(keys) -> length                       begin(keys) -> Write { files }
///   acquire(keys) -> Reference { files }           every rank writes and flushes its part
///     every rank reads its part                  written(write, rank) -> Reported
///   release(reference)                           commit(write) -> Lsn    after the last rank
/// ```
///
/// # Life of a file
/// free -> writing ([`Catalog::begin`]) -> stored ([`Catalog::commit`]) -> limbo (evicted or
/// dropped, until its record is durable) -> free. A file that is dropped while in use is doomed
/// first: no lookup finds it, and it goes to limbo with its last reference.
#[derive(Debug)]
pub struct Catalog {
    config: CatalogConfig,
    index: Index,
    pool: FilePool,
    bucket: Option<Bucket>,
    references: Handles<Held>,
    writes: Handles<OpenWrite>,
    pins: Pins,
    /// Files that the namespaces of a user may have together.
    owner_limits: HashMap<u32, u32>,
    log: Log,
    /// True while records are applied and the free files are not known yet.
    recovering: bool,
    /// First files of the groups that [`Catalog::unused_groups`] handed out.
    deallocating: Vec<FileId>,
    /// Files for [`Catalog::take_freed`], collected since its first call.
    freed: Option<Vec<FileId>>,
    /// Files being written whose blocks are not to be committed.
    unfit: HashSet<FileId>,
}

impl Catalog {
    /// Makes an empty catalog.
    ///
    /// # Panics
    /// Panics if `ranks` is 0, if `words_per_file` is no multiple of `ranks`, or if `files` is
    /// `u32::MAX`.
    #[must_use]
    pub fn new(config: CatalogConfig) -> Self {
        let CatalogConfig { files, ranks, words_per_file, .. } = config;
        assert!(ranks > 0, "a store has one rank at least");
        assert!(words_per_file.is_multiple_of(ranks), "every rank has the same rows");
        assert_ne!(files, u32::MAX, "one number is needed for \"none\"");
        Self {
            index: Index::new(&config),
            pool: FilePool::new(files),
            bucket: config.write_budget.map(|budget| Bucket::new(budget, config.file_bytes)),
            references: Handles::new(),
            writes: Handles::new(),
            pins: Pins::default(),
            owner_limits: HashMap::new(),
            log: Log::new(config.journal),
            recovering: false,
            deallocating: Vec::new(),
            freed: None,
            unfit: HashSet::new(),
            config,
        }
    }

    /// Returns the number of leading `keys` that are stored. Changes nothing: it is not a use.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] if the namespace is unknown.
    pub fn lookup(&self, namespace: NamespaceId, keys: &[BlockKey]) -> Result<usize, CatalogError> {
        Ok(self.index.stored_prefix(namespace, keys)?.count())
    }

    /// Returns, for each of `keys`, whether it is stored. Changes nothing: it is not a use.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] if the namespace is unknown.
    pub fn are_stored(
        &self,
        namespace: NamespaceId,
        keys: &[BlockKey],
    ) -> Result<Vec<bool>, CatalogError> {
        self.index.are_stored(namespace, keys)
    }

    /// Returns what is known of a key, for a report: slower than a lookup, as it asks all
    /// namespaces. Changes nothing: it is not a use.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] if the namespace is unknown.
    pub fn state_of(
        &self,
        namespace: NamespaceId,
        key: &BlockKey,
    ) -> Result<KeyState, CatalogError> {
        self.index.state_of(namespace, key)
    }

    /// Returns the longest stored prefix of `keys`, with a reference on each of its files until
    /// [`Catalog::release`]. Counts as a use. An empty prefix has an id, too.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] if the namespace is unknown.
    pub fn acquire(
        &mut self,
        namespace: NamespaceId,
        keys: &[BlockKey],
    ) -> Result<Reference, CatalogError> {
        let files: Vec<FileId> = self.index.stored_prefix(namespace, keys)?.collect();
        for file in files.iter().rev() {
            self.index.refer(*file);
            self.use_file(namespace, *file, UseKind::Touched);
        }
        let tenant = self.index.tenants.get_mut(namespace);
        tenant.asked += keys.len() as u64;
        tenant.hits += files.len() as u64;
        let held = Held { files: files.clone() };
        Ok(Reference { id: ReferenceId(self.references.insert(held)), files })
    }

    /// Same as [`Catalog::acquire`], but does not count as a use: eviction order stays as it is.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] if the namespace is unknown.
    pub fn hold_prefix(
        &mut self,
        namespace: NamespaceId,
        keys: &[BlockKey],
    ) -> Result<Reference, CatalogError> {
        let files: Vec<FileId> = self.index.stored_prefix(namespace, keys)?.collect();
        Ok(self.hold(&files))
    }

    /// Makes a second reference on some files of an existing one, by position: for a transfer that
    /// may outlive the original reference.
    ///
    /// # Errors
    /// Returns [`CatalogError::Reference`] if `id` is unknown, [`CatalogError::Refused`] if
    /// one is beyond its end, or [`CatalogError::Dropped`] if a file has lost its key meanwhile.
    pub fn share(
        &mut self,
        id: ReferenceId,
        positions: &[usize],
    ) -> Result<Reference, CatalogError> {
        let held = self.references.get(id.0).ok_or(CatalogError::Reference { id })?;
        let there_are = held.files.len();
        let mut files = Vec::with_capacity(positions.len());
        for position in positions {
            files.push(*held.files.get(*position).ok_or_else(|| {
                let end = position.saturating_add(1);
                CatalogError::Refused(format!(
                    "positions up to {end} were asked for, but the reference has {there_are} files"
                ))
            })?);
        }
        if let Some(at) = files.iter().position(|file| !self.is_stored(*file)) {
            let (position, file) = (positions[at], files[at]);
            return Err(CatalogError::Dropped { position, file });
        }
        Ok(self.hold(&files))
    }

    /// References those of `files` that lookups find. Does not count as a use: eviction order stays
    /// as it is.
    pub fn hold(&mut self, files: &[FileId]) -> Reference {
        let files: Vec<FileId> =
            files.iter().copied().filter(|file| self.is_stored(*file)).collect();
        files.iter().for_each(|file| self.index.refer(*file));
        let held = Held { files: files.clone() };
        Reference { id: ReferenceId(self.references.insert(held)), files }
    }

    /// Releases a reference.
    ///
    /// # Errors
    /// Returns [`CatalogError::Reference`] if it is unknown or was released before.
    pub fn release(&mut self, id: ReferenceId) -> Result<(), CatalogError> {
        let held = self.references.remove(id.0).ok_or(CatalogError::Reference { id })?;
        for file in held.files.iter().rev() {
            self.let_go(*file);
        }
        Ok(())
    }

    /// Returns the file of a key, if it has one.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] if the namespace is unknown.
    pub fn find(
        &self,
        namespace: NamespaceId,
        key: &BlockKey,
    ) -> Result<Option<Hit>, CatalogError> {
        let space = self.index.tenants.get(namespace)?.space;
        Ok(self.index.find(space, key).map(|file| match self.index.entry(file).state {
            State::Writing => Hit::Writing(file),
            _ => Hit::Stored(file),
        }))
    }

    /// Returns true when `file` holds a committed block that lookups can find.
    /// Returns `false` for a file outside the catalog: a store has one more, for its self-test.
    #[must_use]
    pub fn is_stored(&self, file: FileId) -> bool {
        self.index.is_stored(file)
    }

    /// Returns the checksums of a file's objects, all rows of rank 0 first; empty when none are
    /// kept. They are valid only while the file is referenced.
    #[must_use]
    pub fn checksums(&self, file: FileId) -> &[u32] {
        self.index.checksums(file)
    }

    /// Pins the leading ones of some keys that are stored and within the limits, for a time from
    /// the last [`Catalog::advance`] on. With [`NewPin::wait`], it also reserves the room of those
    /// that are not stored yet. Clearing a namespace ends its pins.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] if a namespace is unknown.
    pub fn pin_for(
        &mut self,
        new: &NewPin<'_>,
        limits: &PinLimits,
    ) -> Result<PinAnswer, CatalogError> {
        self.with_pins(|pins, catalog| pins.add(catalog, new, limits))
    }

    /// Ends a pin of [`Catalog::pin_for`], or all (`None`): of an owner, or of any one. Returns the
    /// number of blocks that they held; `None` if there is no such pin, or not any more.
    pub fn end_pins(&mut self, number: Option<u64>, owner: Option<u64>) -> Option<u64> {
        self.with_pins(|pins, catalog| pins.end(catalog, number, owner))
    }

    /// Returns the state of all pins.
    #[must_use]
    pub fn pins(&self, limits: &PinLimits) -> PinList {
        self.pins.list(&self.config, limits)
    }

    /// Returns the number and the bytes of the pins of some owners.
    #[must_use]
    pub fn pins_of(&self, is_owner: impl Fn(u64) -> bool) -> (usize, u64) {
        self.pins.of(is_owner)
    }

    /// Calls `act` with the pins, which use only references.
    fn with_pins<T>(&mut self, act: impl FnOnce(&mut Pins, &mut Self) -> T) -> T {
        let mut pins = std::mem::take(&mut self.pins);
        let done = act(&mut pins, self);
        self.pins = pins;
        done
    }

    /// Sets the time, from any monotonic clock: for the write budget, and for pins.
    pub fn advance(&mut self, now_ns: u64) {
        if let Some(bucket) = &mut self.bucket {
            bucket.advance(now_ns);
        }
        self.with_pins(|pins, catalog| pins.expire(catalog, now_ns));
    }

    /// Returns true if anything depends on the time now.
    #[must_use]
    pub fn needs_time(&self) -> bool {
        self.bucket.is_some() || !self.pins.is_empty()
    }

    /// Returns the records to be written next, as one group of at most `max_bytes` (or one record).
    /// Each record is handed out once: if it cannot be written, the store must become read-only.
    pub fn pending(&mut self, max_bytes: usize) -> Option<Group> {
        self.log.pending(max_bytes)
    }

    /// Limits the records that wait for [`Catalog::pending`] to `bytes_max` bytes. On overflow they
    /// are dropped, and a snapshot must be written instead ([`Group::needs_snapshot`]).
    pub fn limit_pending(&mut self, bytes_max: usize) {
        self.log.limit(bytes_max);
    }

    /// Marks all records up to `lsn` as durable: files that waited for them become free.
    pub fn durable(&mut self, lsn: Lsn) {
        self.log.durable(lsn);
        while let Some(file) = self.log.leave_limbo() {
            self.pool.free(file);
        }
    }

    /// Returns the counts of a namespace.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] if the namespace is unknown.
    pub fn usage(&self, namespace: NamespaceId) -> Result<Usage, CatalogError> {
        self.index.usage(namespace)
    }

    /// Returns the files numbered `first` or higher that lookups find, in order.
    pub fn stored_from(&self, first: FileId) -> impl Iterator<Item = StoredFile> {
        self.index.stored_from(first)
    }

    /// Returns the counts of all namespaces together.
    #[must_use]
    pub fn counts(&self) -> CatalogCounts {
        self.index.counts(&self.pool, self.log.limbo())
    }

    /// Appends the next piece of the whole state to `out`, as records of about `max_bytes`, and
    /// returns the cursor to continue from; `None` at the end. A piece may be shorter, or empty.
    /// The first one has all namespaces. The oldest files come first, so that recovery restores
    /// roughly the eviction order.
    ///
    /// It reflects all records made so far. In the journal's new half it must therefore follow them
    /// and precede all later ones: take the pending records first, without a change in between.
    /// One snapshot at a time: starting a new one ends the one before.
    ///
    /// # Panics
    /// Panics if records are pending.
    pub fn snapshot(
        &mut self,
        cursor: SnapshotCursor,
        max_bytes: usize,
        out: &mut Vec<u8>,
    ) -> Option<SnapshotCursor> {
        assert!(self.log.is_empty(), "records come before a snapshot that has their effect");
        self.index.snapshot(cursor, max_bytes, out)
    }

    /// Applies one record of the journal. Only for a catalog that is otherwise unused;
    /// [`Catalog::recovered`] ends recovery.
    ///
    /// A snapshot is written while changes go on, so a record may name a file before the snapshot
    /// does: evictions of empty files are ignored, and a commit may occur twice.
    ///
    /// # Errors
    /// Returns [`CatalogError::Damaged`] if it contradicts earlier ones.
    pub fn apply(&mut self, record: &Record<'_>) -> Result<(), CatalogError> {
        self.recovering = true;
        self.index.apply(record)
    }

    /// Applies one record of a damaged journal: like [`Catalog::apply`], but if records contradict
    /// each other, because others between them are missing, the later one wins.
    ///
    /// # Errors
    /// Returns [`CatalogError::Damaged`], and changes nothing, if the record is not of this store,
    /// or of a namespace whose record is missing.
    pub fn salvage(&mut self, record: &Record<'_>) -> Result<(), CatalogError> {
        self.recovering = true;
        self.index.salvage(record)
    }

    /// Ends recovery: files without a block become free, and the catalog can be used.
    pub fn recovered(&mut self) {
        let mut entries = self.config.files;
        while let Some(file) = self.index.sweep(&mut entries) {
            self.index.reset(file);
        }
        let used = self.index.entries().iter().map(|entry| entry.state != State::Free);
        self.pool = FilePool::from_used(used);
        self.recovering = false;
    }

    /// Counts a use of `file`, for the policy and for the journal.
    fn use_file(&mut self, namespace: NamespaceId, file: FileId, how: UseKind) {
        self.index.use_file(namespace, file, how);
        self.log.used(file, how);
    }

    fn let_go(&mut self, file: FileId) {
        if self.index.unrefer(file) {
            self.set_free(file);
        }
    }
}

#[cfg(test)]
mod tests;
