//! The block of each file: entries, the table of their keys, checksums, namespaces, and the order
//! of eviction. All that a journal restores; references and writes in progress are above it.

mod entry;
mod recovery;
mod snapshot;
mod table;
mod tenants;
mod usage;

pub use self::{
    entry::{Entry, State},
    snapshot::SnapshotCursor,
    tenants::{Tenant, Tenants},
    usage::{CatalogCounts, StoredFile, Usage},
};

use self::{snapshot::Ages, table::KeyTable};
use super::{CatalogConfig, CatalogError, KeyState};
use crate::{
    ids::{FileId, NamespaceId},
    key::BlockKey,
    policy::{Candidate, Policy},
    record::UseKind,
};

/// Keys looked up together so that their cache misses overlap: about what a core has in flight.
const BATCH: usize = 16;

/// Progress of the scan for files of cleared namespaces.
#[derive(Debug, Default)]
struct Sweep {
    next: u32,
    /// Entries left until every one has been scanned.
    left: u32,
}

/// The block of each file.
#[derive(Debug)]
pub struct Index {
    entries: Vec<Entry>,
    table: KeyTable,
    /// `words_per_file` checksums of each file, in one array: a file's are never moved or freed
    /// alone, and untouched pages cost nothing.
    checksums: Vec<u32>,
    words_per_file: usize,
    pub tenants: Tenants,
    policy: Box<dyn Policy>,
    ages: Ages,
    sweep: Sweep,
    /// Keys for [`Catalog::take_dropped`](super::Catalog::take_dropped), collected since its first
    /// call.
    pub dropped: Option<Vec<(NamespaceId, BlockKey)>>,
}

impl Index {
    /// Makes an index of free files.
    pub fn new(config: &CatalogConfig) -> Self {
        let words_per_file = config.words_per_file as usize;
        Self {
            entries: vec![Entry::FREE; config.files as usize],
            table: KeyTable::new(config.files, config.seed),
            checksums: vec![0; config.files as usize * words_per_file],
            words_per_file,
            tenants: Tenants { max: config.namespaces_max.max(1), ..Tenants::default() },
            policy: config.policy.policy(config.files),
            ages: Ages::default(),
            sweep: Sweep::default(),
            dropped: None,
        }
    }

    pub fn files(&self) -> u32 {
        self.entries.len() as u32
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub fn entry(&self, file: FileId) -> &Entry {
        &self.entries[file.at()]
    }

    /// Returns the files of `keys`, in order, `None` for a key without one.
    pub fn find_all<'a>(
        &'a self,
        space: u32,
        keys: &'a [BlockKey],
    ) -> impl Iterator<Item = Option<FileId>> + 'a {
        keys.chunks(BATCH)
            .flat_map(move |batch| self.find_batch(space, batch).into_iter().take(batch.len()))
    }

    /// Returns the file of a key.
    pub fn find(&self, space: u32, key: &BlockKey) -> Option<FileId> {
        self.find_batch(space, std::slice::from_ref(key))[0]
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

    /// Returns true when lookups find `file`; false for a file outside the index.
    pub fn is_stored(&self, file: FileId) -> bool {
        let Some(entry) = self.entries.get(file.at()) else { return false };
        entry.state == State::Stored && self.tenants.is_current(entry.space)
    }

    /// Returns true when `file` has a key that lookups do not find yet.
    pub fn is_writing(&self, file: FileId) -> bool {
        self.entries.get(file.at()).is_some_and(|entry| entry.state == State::Writing)
    }

    /// Returns the leading `keys` that are stored, by their files.
    pub fn stored_prefix<'a>(
        &'a self,
        namespace: NamespaceId,
        keys: &'a [BlockKey],
    ) -> Result<impl Iterator<Item = FileId> + 'a, CatalogError> {
        let space = self.tenants.get(namespace)?.space;
        let found = self.find_all(space, keys);
        Ok(found.map_while(|file| file.filter(|file| self.is_stored(*file))))
    }

    pub fn are_stored(
        &self,
        namespace: NamespaceId,
        keys: &[BlockKey],
    ) -> Result<Vec<bool>, CatalogError> {
        let space = self.tenants.get(namespace)?.space;
        let found = self.find_all(space, keys);
        Ok(found.map(|file| file.is_some_and(|file| self.is_stored(file))).collect())
    }

    /// Returns what is known of a key.
    pub fn state_of(
        &self,
        namespace: NamespaceId,
        key: &BlockKey,
    ) -> Result<KeyState, CatalogError> {
        let space = self.tenants.get(namespace)?.space;
        let stored = |space| self.find(space, key).is_some_and(|file| self.is_stored(file));
        Ok(match self.find(space, key) {
            Some(file) if self.is_writing(file) => KeyState::Writing,
            Some(file) if self.is_stored(file) => KeyState::Stored,
            _ if self.policy.remembers(self.table.hash(space, key)) => KeyState::Evicted,
            _ if self.tenants.all.iter().any(|tenant| stored(tenant.space)) => KeyState::Elsewhere,
            _ => KeyState::Unknown,
        })
    }

    /// Returns the files of those `keys` that are stored.
    pub fn stored_files(
        &self,
        namespace: NamespaceId,
        keys: &[BlockKey],
    ) -> Result<Vec<FileId>, CatalogError> {
        let space = self.tenants.get(namespace)?.space;
        Ok(self.find_all(space, keys).flatten().filter(|file| self.is_stored(*file)).collect())
    }

    /// Returns the namespace of the file's key.
    pub fn namespace_of(&self, file: FileId) -> NamespaceId {
        self.tenants.id(self.slot_of(file))
    }

    fn slot_of(&self, file: FileId) -> u32 {
        self.tenants.spaces[self.entry(file).space as usize].slot
    }

    pub fn checksums(&self, file: FileId) -> &[u32] {
        &self.checksums[file.at() * self.words_per_file..][..self.words_per_file]
    }

    pub fn checksums_mut(&mut self, file: FileId) -> &mut [u32] {
        &mut self.checksums[file.at() * self.words_per_file..][..self.words_per_file]
    }

    /// Changes an entry. Every change goes through here, so that the counts stay correct.
    fn change(&mut self, file: FileId, change: impl FnOnce(&mut Entry)) {
        let entry = &mut self.entries[file.at()];
        let before = *entry;
        change(entry);
        self.tenants.spaces[before.space as usize].count(&before, false);
        self.tenants.spaces[entry.space as usize].count(entry, true);
    }

    pub fn refer(&mut self, file: FileId) {
        self.change(file, |entry| entry.refs += 1);
    }

    /// Takes a reference back. Returns true when it was the last one of a doomed file.
    pub fn unrefer(&mut self, file: FileId) -> bool {
        self.change(file, |entry| entry.refs -= 1);
        self.entry(file).refs == 0 && self.entry(file).state == State::Doomed
    }

    /// Gives a key to a free file.
    pub fn insert(&mut self, file: FileId, space: u32, key: BlockKey, state: State) {
        self.table.insert(self.table.hash(space, &key), file);
        self.change(file, |entry| *entry = Entry { key, space, state, ..Entry::FREE });
    }

    /// Makes a written file visible to lookups.
    pub fn store(&mut self, namespace: NamespaceId, file: FileId) {
        self.change(file, |entry| entry.state = State::Stored);
        self.hand_to_policy(namespace, file);
    }

    pub fn use_file(&mut self, namespace: NamespaceId, file: FileId, how: UseKind) {
        let slot = self.tenants.slot(namespace);
        match how {
            UseKind::Touched => self.policy.touch(slot, file, self.hash_of(file)),
            UseKind::Refreshed => self.policy.refresh(slot, file),
            UseKind::Known => self.policy.know(slot, file, self.hash_of(file)),
        }
    }

    /// Makes a stored file evictable, in the order that the policy decides.
    fn hand_to_policy(&mut self, namespace: NamespaceId, file: FileId) {
        self.policy.insert(self.tenants.slot(namespace), file, self.hash_of(file));
        self.ages.inserted += 1;
    }

    /// Returns how many leading `keys` are worth storing: the first `room` that have no file, and
    /// those that are worth as much as `victim`. Remembers the others.
    pub fn admit(&mut self, space: u32, keys: &[BlockKey], room: u32, victim: Candidate) -> usize {
        let hash = |key: &BlockKey| self.table.hash(space, key);
        let is_worth_it = |key: &&BlockKey| self.policy.rate(hash(key)) >= victim.rate;
        let room = room as usize;
        let admitted = room + keys.iter().skip(room).take_while(is_worth_it).count();
        for key in keys.iter().skip(admitted).rev() {
            let hash = self.table.hash(space, key);
            self.policy.refuse(hash);
            self.ages.inserted += 1;
        }
        admitted.min(keys.len())
    }

    /// Returns the hash of a file's key.
    fn hash_of(&self, file: FileId) -> u64 {
        let entry = self.entry(file);
        self.table.hash(entry.space, &entry.key)
    }

    /// Adds a namespace. It replaces the one in its slot, whose blocks all become misses.
    pub fn register(&mut self, id: NamespaceId, digest: [u8; 32], label: String) {
        match self.tenants.all.get(self.tenants.slot(id) as usize) {
            Some(before) => self.forget(*before.id),
            None => self.policy.add_namespace(),
        }
        self.tenants.add(id, digest, label);
    }

    /// Sets the epoch: all blocks of the namespace belong to an earlier one.
    pub fn set_epoch(&mut self, namespace: NamespaceId, epoch: u64) {
        self.forget(namespace);
        self.tenants.get_mut(namespace).epoch = epoch;
    }

    /// Makes all blocks of a namespace misses.
    pub fn forget(&mut self, namespace: NamespaceId) {
        if self.tenants.clear(namespace) {
            self.policy.clear(self.tenants.slot(namespace));
            self.sweep.left = self.files();
        }
    }

    /// Returns the namespace's next victim.
    pub fn candidate(&mut self, namespace: NamespaceId) -> Option<Candidate> {
        let tenant = self.tenants.get(namespace).ok()?;
        if self.tenants.spaces[tenant.space as usize].evictable() == 0 {
            return None;
        }
        let may_go = |file: FileId| self.entries[file.at()].refs == 0;
        self.policy.candidate(self.tenants.slot(namespace), tenant.weight, &may_go)
    }

    /// Takes the key from a victim of the policy.
    pub fn evict(&mut self, namespace: NamespaceId, file: FileId) {
        self.policy.evict(self.tenants.slot(namespace), file, self.hash_of(file));
        self.doom(file);
    }

    /// Takes the key from a stored file.
    pub fn drop_file(&mut self, file: FileId) {
        self.policy.remove(self.slot_of(file), file);
        self.doom(file);
    }

    /// Takes the key from a file that the policy does not have.
    pub fn doom(&mut self, file: FileId) {
        self.table.remove(self.hash_of(file), file);
        let (namespace, was_found) = (self.namespace_of(file), self.is_stored(file));
        if let Some(dropped) = self.dropped.as_mut().filter(|_| was_found) {
            dropped.push((namespace, self.entries[file.at()].key));
        }
        self.change(file, |entry| entry.state = State::Doomed);
    }

    /// Resets a file's entry to that of a free file.
    pub fn reset(&mut self, file: FileId) {
        let space = self.entry(file).space;
        self.change(file, |entry| entry.state = State::Free);
        self.tenants.spare_if_empty(space);
    }

    /// Returns true if no entry can be one of a cleared namespace.
    pub fn is_swept(&self) -> bool {
        self.sweep.left == 0
    }

    /// Scans up to `entries` entries for a file of a cleared namespace, and takes its key.
    pub fn sweep(&mut self, entries: &mut u32) -> Option<FileId> {
        while *entries > 0 && self.sweep.left > 0 {
            let file = FileId(self.sweep.next);
            self.sweep.next = (self.sweep.next + 1) % self.files();
            self.sweep.left -= 1;
            *entries -= 1;
            let entry = self.entry(file);
            if entry.state == State::Stored && !self.tenants.is_current(entry.space) {
                self.doom(file);
                return Some(file);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
