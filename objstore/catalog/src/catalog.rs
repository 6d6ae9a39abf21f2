//! Keys, files, references, pins, eviction and namespaces of one store, for all of its ranks.

mod budget;
mod deallocation;
mod drop;
mod entry;
mod error;
mod handle;
mod log;
mod recovery;
mod sharing;
mod snapshot;
mod table;
mod tenants;
mod usage;
mod write;

pub use budget::WriteBudget;
pub use error::CatalogError;
pub use log::Group;
pub use snapshot::SnapshotCursor;
pub use usage::{CatalogCounts, StoredFile, Usage};
pub use write::{Position, Reported, Write, WriteId};

use self::{
    budget::Bucket,
    drop::{Gone, Sweep},
    entry::{Entry, Space, State},
    handle::Handles,
    log::Log,
    snapshot::Ages,
    table::KeyTable,
    tenants::Tenants,
    write::Writing,
};
use crate::{
    file_pool::FilePool,
    ids::{FileId, Lsn, NamespaceId},
    key::BlockKey,
    policy::{Policy, PolicyKind},
    record::{Record, UseKind},
};

/// Keys looked up together so that their cache misses overlap: about what a core has in flight.
const BATCH: usize = 16;

/// Parameters of a catalog.
#[derive(Debug, Clone)]
pub struct CatalogConfig {
    /// Files of the store.
    pub files: u32,
    /// Ranks that have to report before a write is committed; at least one.
    pub ranks: u32,
    /// Checksums of a file, over all ranks: `ranks * rows`, or 0 when none are kept.
    pub words_per_file: u32,
    /// Namespaces that may be registered.
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
pub enum Found {
    /// Committed in this file.
    Stored(FileId),
    /// Being written to this file.
    Writing(FileId),
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
    entries: Vec<Entry>,
    table: KeyTable,
    /// `words_per_file` checksums of each file, in one array: a file's are never moved or freed
    /// alone, and untouched pages cost nothing.
    checksums: Vec<u32>,
    pool: FilePool,
    policy: Box<dyn Policy>,
    ages: Ages,
    bucket: Option<Bucket>,
    tenants: Tenants,
    sweep: Sweep,
    references: Handles<Held>,
    writes: Handles<Writing>,
    log: Log,
    /// True while records are applied and the free files are not known yet.
    recovering: bool,
    /// First files of the groups that [`Catalog::unused_groups`] handed out.
    deallocating: Vec<FileId>,
    gone: Gone,
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
            entries: vec![Entry::FREE; files as usize],
            table: KeyTable::new(files, config.seed),
            checksums: vec![0; files as usize * words_per_file as usize],
            pool: FilePool::new(files),
            policy: config.policy.policy(files),
            ages: Ages::default(),
            bucket: config.write_budget.map(Bucket::new),
            tenants: Tenants::default(),
            sweep: Sweep::default(),
            references: Handles::new(),
            writes: Handles::new(),
            log: Log::new(config.journal),
            recovering: false,
            deallocating: Vec::new(),
            gone: Gone::default(),
            config,
        }
    }

    /// Returns the number of leading `keys` that are stored. Changes nothing: it is not a use.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] if the namespace is unknown.
    pub fn lookup(&self, namespace: NamespaceId, keys: &[BlockKey]) -> Result<usize, CatalogError> {
        let space = self.tenants.get(namespace)?.space;
        let mut hits = 0;
        for batch in keys.chunks(BATCH) {
            let found = self.find_batch(space, batch);
            let stored = |file: &Option<FileId>| file.is_some_and(|file| self.is_stored(file));
            let run = found[..batch.len()].iter().take_while(|file| stored(file)).count();
            hits += run;
            if run < batch.len() {
                break;
            }
        }
        Ok(hits)
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
        let space = self.tenants.get(namespace)?.space;
        let mut files = Vec::with_capacity(keys.len());
        'keys: for batch in keys.chunks(BATCH) {
            let found = self.find_batch(space, batch);
            for file in &found[..batch.len()] {
                match *file {
                    Some(file) if self.is_stored(file) => files.push(file),
                    _ => break 'keys,
                }
            }
        }
        for file in files.iter().rev() {
            self.refer(*file);
            if !self.entry(*file).pinned {
                self.use_file(namespace, *file, UseKind::Touched);
                self.log.used(*file, UseKind::Touched);
            }
        }
        let tenant = &mut self.tenants.all[namespace.0 as usize];
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
        let found = self.lookup(namespace, keys)?;
        let files = self.stored_files(namespace, &keys[..found])?;
        Ok(self.hold(&files))
    }

    /// Makes a second reference on some files of an existing one, by position: for a transfer that
    /// may outlive the original reference.
    ///
    /// # Errors
    /// Returns [`CatalogError::Reference`] if `id` is unknown, [`CatalogError::Positions`] if the
    /// range ends beyond it, or [`CatalogError::Dropped`] if a file has lost its key meanwhile.
    pub fn share(
        &mut self,
        id: ReferenceId,
        positions: std::ops::Range<usize>,
    ) -> Result<Reference, CatalogError> {
        let held = self.references.get(id.0).ok_or(CatalogError::Reference { id })?;
        let Some(files) = held.files.get(positions.clone()) else {
            let there_are = held.files.len();
            return Err(CatalogError::Positions { end: positions.end, there_are });
        };
        if let Some(at) = files.iter().position(|file| !self.is_stored(*file)) {
            let (position, file) = (positions.start + at, files[at]);
            return Err(CatalogError::Dropped { position, file });
        }
        let files = files.to_vec();
        Ok(self.hold(&files))
    }

    /// References those of `files` that lookups find. Does not count as a use: eviction order stays
    /// as it is.
    pub fn hold(&mut self, files: &[FileId]) -> Reference {
        let files: Vec<FileId> =
            files.iter().copied().filter(|file| self.is_stored(*file)).collect();
        files.iter().for_each(|file| self.refer(*file));
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
    ) -> Result<Option<Found>, CatalogError> {
        let space = self.tenants.get(namespace)?.space;
        let [found, ..] = self.find_batch(space, std::slice::from_ref(key));
        Ok(found.map(|file| match self.entry(file).state {
            State::Writing => Found::Writing(file),
            _ => Found::Stored(file),
        }))
    }

    /// Returns true when `file` holds a committed block that lookups can find.
    /// Returns `false` for a file outside the catalog: a store has one more, for its self-test.
    #[must_use]
    pub fn is_stored(&self, file: FileId) -> bool {
        let Some(entry) = self.entries.get(file.at()) else { return false };
        entry.state == State::Stored && self.tenants.is_current(entry.space)
    }

    /// Returns the checksums of a file's objects, all rows of rank 0 first; empty when none are
    /// kept. They are valid only while the file is referenced.
    #[must_use]
    pub fn checksums(&self, file: FileId) -> &[u32] {
        let words = self.config.words_per_file as usize;
        &self.checksums[file.at() * words..][..words]
    }

    /// Protects the stored ones of `keys` from eviction. Returns their number.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] if the namespace is unknown.
    pub fn pin(&mut self, namespace: NamespaceId, keys: &[BlockKey]) -> Result<u32, CatalogError> {
        self.set_pins(namespace, keys, true)
    }

    /// Undoes [`Catalog::pin`]. Returns the number of `keys` that are stored.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] if the namespace is unknown.
    pub fn unpin(
        &mut self,
        namespace: NamespaceId,
        keys: &[BlockKey],
    ) -> Result<u32, CatalogError> {
        self.set_pins(namespace, keys, false)
    }

    fn set_pins(
        &mut self,
        namespace: NamespaceId,
        keys: &[BlockKey],
        pinned: bool,
    ) -> Result<u32, CatalogError> {
        let files = self.stored_files(namespace, keys)?;
        for file in files.iter().rev() {
            self.set_pin(*file, pinned);
        }
        Ok(files.len() as u32)
    }

    fn set_pin(&mut self, file: FileId, pinned: bool) {
        let Entry { space, pinned: before, .. } = *self.entry(file);
        if before == pinned {
            return;
        }
        let namespace = self.tenants.spaces[space as usize].namespace;
        match pinned {
            true => self.policy.remove(namespace, file),
            false => self.hand_to_policy(NamespaceId(namespace), file),
        }
        self.change(file, |entry| entry.pinned = pinned);
        self.log.push(&Record::Pin { file, pinned });
    }

    /// Sets the time for the write budget, from any monotonic clock. Nothing else depends on time.
    pub fn advance(&mut self, now_ns: u64) {
        if let Some(bucket) = &mut self.bucket {
            bucket.advance(now_ns);
        }
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

    /// Returns the position of the last record made: once it is durable, so is every change made so
    /// far.
    #[must_use]
    pub fn last_lsn(&self) -> Lsn {
        self.log.last()
    }

    /// Marks all records up to `lsn` as durable: files that waited for them become free.
    pub fn durable(&mut self, lsn: Lsn) {
        self.log.durable(lsn);
        while let Some(file) = self.log.leave_limbo() {
            self.pool.free(file);
        }
    }

    /// Returns the files of those `keys` that are stored.
    fn stored_files(
        &self,
        namespace: NamespaceId,
        keys: &[BlockKey],
    ) -> Result<Vec<FileId>, CatalogError> {
        let space = self.tenants.get(namespace)?.space;
        let mut files = Vec::with_capacity(keys.len());
        for batch in keys.chunks(BATCH) {
            let found = self.find_batch(space, batch);
            files.extend(found.into_iter().flatten().filter(|file| self.is_stored(*file)));
        }
        Ok(files)
    }

    /// Looks up at most [`BATCH`] keys. Hashing all of them first lets their cache misses overlap.
    fn find_batch(&self, space: u32, keys: &[BlockKey]) -> [Option<FileId>; BATCH] {
        let mut hashes = [0; BATCH];
        for (hash, key) in hashes.iter_mut().zip(keys) {
            *hash = self.table.hash(space, key);
        }
        let mut found = [None; BATCH];
        for ((found, hash), key) in found.iter_mut().zip(hashes).zip(keys) {
            *found = self.table.find(hash, |file| {
                let entry = self.entry(file);
                entry.key == *key && entry.space == space
            });
        }
        found
    }

    fn entry(&self, file: FileId) -> &Entry {
        &self.entries[file.at()]
    }

    /// Changes an entry. Every change goes through here, so that the counts stay correct.
    fn change(&mut self, file: FileId, change: impl FnOnce(&mut Entry)) {
        let entry = &mut self.entries[file.at()];
        let before = *entry;
        change(entry);
        self.tenants.spaces[before.space as usize].count(&before, false);
        self.tenants.spaces[entry.space as usize].count(entry, true);
    }

    fn refer(&mut self, file: FileId) {
        self.change(file, |entry| entry.refs += 1);
    }

    fn use_file(&mut self, namespace: NamespaceId, file: FileId, how: UseKind) {
        match how {
            UseKind::Touched => self.policy.touch(namespace.0, file),
            UseKind::Refreshed => self.policy.refresh(namespace.0, file),
            UseKind::Known => self.policy.know(namespace.0, file),
        }
    }

    /// Makes a stored file evictable, in the order that the policy decides.
    fn hand_to_policy(&mut self, namespace: NamespaceId, file: FileId) {
        self.policy.insert(namespace.0, file, self.hash_of(file));
        self.ages.inserted += 1;
    }

    /// Returns the hash of a file's key.
    fn hash_of(&self, file: FileId) -> u64 {
        let entry = self.entry(file);
        self.table.hash(entry.space, &entry.key)
    }

    fn let_go(&mut self, file: FileId) {
        self.change(file, |entry| entry.refs -= 1);
        if self.entry(file).refs == 0 && self.entry(file).state == State::Doomed {
            self.set_free(file);
        }
    }
}

#[cfg(test)]
mod tests;
