//! Removal of blocks: eviction, removal, loss, and clearing of a whole namespace.

use std::{cmp::Ordering, collections::BinaryHeap};

use super::{Catalog, CatalogError, Entry, State};
use crate::{
    ids::{FileId, NamespaceId},
    key::BlockKey,
    planted::{PlantedBug, planted},
    policy::Candidate,
    record::Record,
};

/// Entries that one call scans for files of cleared namespaces: some hundred microseconds.
pub(super) const SWEEP_ENTRIES: u32 = 1 << 16;

/// Progress of the scan for files of cleared namespaces.
#[derive(Debug, Default)]
pub struct Sweep {
    next: u32,
    /// Entries left until every one has been scanned.
    left: u32,
}

/// Files and keys that callers collect.
#[derive(Debug, Default)]
pub struct Gone {
    /// Files for [`Catalog::take_freed`], collected since its first call.
    freed: Option<Vec<FileId>>,
    /// Keys for [`Catalog::take_dropped`], collected since its first call.
    dropped: Option<Vec<(NamespaceId, BlockKey)>>,
}

/// A namespace's next victim. The greatest is evicted first.
struct Next {
    candidate: Candidate,
    namespace: NamespaceId,
}

impl Ord for Next {
    fn cmp(&self, other: &Self) -> Ordering {
        let order = other.candidate.order(&self.candidate);
        order.then(other.namespace.cmp(&self.namespace))
    }
}

impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Next {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Next {}

impl Catalog {
    /// Evicts up to `files` files: of `namespace`, or else files of cleared namespaces and then the
    /// least valuable of all. Returns the number evicted. They are free once the journal is durable
    /// up to [`Catalog::last_lsn`].
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] or [`CatalogError::Recovering`].
    pub fn evict(
        &mut self,
        namespace: Option<NamespaceId>,
        files: u32,
    ) -> Result<u32, CatalogError> {
        self.check_recovered()?;
        match namespace {
            Some(namespace) => {
                self.tenants.get(namespace)?;
                Ok(self.evict_from(namespace, files))
            }
            None => {
                let swept = self.sweep(files, SWEEP_ENTRIES);
                Ok(swept + self.evict_any(files - swept))
            }
        }
    }

    /// Returns the number of files to evict now, so that the next writes find free ones without
    /// waiting for the journal.
    #[must_use]
    pub fn wants_space(&self) -> u32 {
        if !self.config.journal {
            return 0;
        }
        let ahead = (self.config.files / 64).min(self.config.files_ahead);
        ahead.saturating_sub(self.pool.free_files() + self.log.limbo())
    }

    /// Drops the stored ones of `keys`, pinned or not. Returns their number.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] or [`CatalogError::Recovering`].
    pub fn remove(
        &mut self,
        namespace: NamespaceId,
        keys: &[BlockKey],
    ) -> Result<u32, CatalogError> {
        self.check_recovered()?;
        let mut files = self.stored_files(namespace, keys)?;
        files.sort_unstable();
        files.dedup();
        self.drop_files(&files);
        Ok(files.len() as u32)
    }

    /// Drops a file that could not be read or whose data is corrupt: its key is a miss from now on.
    /// Does nothing to a file that lookups do not find.
    pub fn lost(&mut self, file: FileId) {
        if self.is_stored(file) {
            self.drop_files(&[file]);
        }
    }

    /// Returns the keys evicted, removed or lost since the last call, without those of cleared
    /// namespaces. They are collected from the first call on.
    pub fn take_dropped(&mut self) -> Vec<(NamespaceId, BlockKey)> {
        self.gone.dropped.replace(Vec::new()).unwrap_or_default()
    }

    /// Returns the files that became empty and unreferenced since the last call. They are collected
    /// from the first call on. A returned file may already have been allocated again.
    pub fn take_freed(&mut self) -> Vec<FileId> {
        self.gone.freed.replace(Vec::new()).unwrap_or_default()
    }

    /// Drops all blocks of a namespace, including pinned ones and those being written, in one step.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] or [`CatalogError::Recovering`].
    pub fn clear(&mut self, namespace: NamespaceId) -> Result<(), CatalogError> {
        self.check_recovered()?;
        self.tenants.get(namespace)?;
        self.forget(namespace);
        self.log.push(&Record::Clear { namespace });
        Ok(())
    }

    /// Clears a namespace for good: blocks computed before (with other weights, say) never match
    /// again. Returns the new epoch.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] or [`CatalogError::Recovering`].
    pub fn bump_epoch(&mut self, namespace: NamespaceId) -> Result<u64, CatalogError> {
        self.check_recovered()?;
        let epoch = self.tenants.get(namespace)?.epoch + 1;
        self.set_epoch(namespace, epoch);
        self.log.push(&Record::Epoch { namespace, epoch });
        Ok(epoch)
    }

    /// Sets the epoch: all blocks of the namespace belong to an earlier one.
    pub(super) fn set_epoch(&mut self, namespace: NamespaceId, epoch: u64) {
        if !planted(PlantedBug::EpochIgnored) {
            self.forget(namespace);
        }
        self.tenants.all[namespace.0 as usize].epoch = epoch;
    }

    /// Makes all blocks of a namespace misses.
    pub(super) fn forget(&mut self, namespace: NamespaceId) {
        let before = self.tenants.all[namespace.0 as usize].space;
        if self.tenants.spaces[before as usize].is_empty() {
            return;
        }
        let space = self.tenants.new_space(namespace);
        let tenant = &mut self.tenants.all[namespace.0 as usize];
        tenant.space = space;
        tenant.former.push(before);
        self.policy.clear(namespace.0);
        self.sweep.left = self.config.files;
    }

    /// Evicts the least valuable files of all namespaces.
    pub(super) fn evict_any(&mut self, files: u32) -> u32 {
        let mut victims = Vec::new();
        let namespaces = (0..self.tenants.all.len() as u32).map(NamespaceId);
        let mut next: BinaryHeap<Next> =
            namespaces.filter_map(|namespace| self.next_victim(namespace)).collect();
        while victims.len() < files as usize
            && let Some(Next { candidate, namespace }) = next.pop()
        {
            self.take_victim(namespace, candidate.file);
            victims.push(candidate.file);
            next.extend(self.next_victim(namespace));
        }
        self.log_dropped(&mut victims);
        victims.len() as u32
    }

    pub(super) fn evict_from(&mut self, namespace: NamespaceId, files: u32) -> u32 {
        let mut victims = Vec::new();
        while victims.len() < files as usize
            && let Some(Next { candidate, .. }) = self.next_victim(namespace)
        {
            self.take_victim(namespace, candidate.file);
            victims.push(candidate.file);
        }
        self.log_dropped(&mut victims);
        victims.len() as u32
    }

    fn next_victim(&mut self, namespace: NamespaceId) -> Option<Next> {
        let tenant = &self.tenants.all[namespace.0 as usize];
        if self.tenants.spaces[tenant.space as usize].evictable == 0 {
            return None;
        }
        let may_go = |file: FileId| self.entries[file.at()].refs == 0;
        let candidate = self.policy.candidate(namespace.0, tenant.weight, &may_go)?;
        Some(Next { candidate, namespace })
    }

    fn take_victim(&mut self, namespace: NamespaceId, file: FileId) {
        self.policy.evict(namespace.0, file, self.hash_of(file));
        self.tenants.all[namespace.0 as usize].evicted += 1;
        self.doom(file);
    }

    /// Takes the key from a file.
    pub(super) fn doom(&mut self, file: FileId) {
        self.table.remove(self.hash_of(file), file);
        let Entry { key, space, .. } = *self.entry(file);
        let was_found = self.is_stored(file);
        if let Some(dropped) = self.gone.dropped.as_mut().filter(|_| was_found) {
            dropped.push((NamespaceId(self.tenants.spaces[space as usize].namespace), key));
        }
        self.change(file, |entry| entry.state = State::Doomed);
    }

    /// Logs the eviction of files that lost their keys, and frees those that are not in use.
    fn log_dropped(&mut self, files: &mut [FileId]) {
        files.sort_unstable();
        for run in files.chunk_by(|a, b| a.0 + 1 == b.0) {
            self.log.push(&Record::Evict { first: run[0], count: run.len() as u32 });
        }
        for file in files.iter() {
            if self.entry(*file).refs == 0 {
                self.set_free(*file);
            }
        }
    }

    fn drop_files(&mut self, files: &[FileId]) {
        for file in files {
            let entry = *self.entry(*file);
            if !entry.pinned {
                self.policy.remove(self.tenants.spaces[entry.space as usize].namespace, *file);
            }
            self.doom(*file);
        }
        self.log_dropped(&mut files.to_vec());
    }

    /// Sends a doomed, unreferenced file to limbo, or frees it if no record is outstanding.
    pub(super) fn set_free(&mut self, file: FileId) {
        self.reset(file);
        if let Some(freed) = &mut self.gone.freed {
            freed.push(file);
        }
        // During recovery the free files are computed after the last record.
        if !self.recovering && self.log.retire(file) {
            self.pool.free(file);
        }
    }

    /// Resets a file's entry to that of a free file.
    pub(super) fn reset(&mut self, file: FileId) {
        let space = self.entry(file).space;
        self.change(file, |entry| {
            (entry.state, entry.pinned) = (State::Free, false);
        });
        self.tenants.spare_if_empty(space);
    }

    /// Scans for files of cleared namespaces, until `wanted` of them are free or in limbo. Returns
    /// their number.
    pub(super) fn sweep(&mut self, wanted: u32, entries: u32) -> u32 {
        let mut found = 0;
        for _ in 0..entries.min(self.sweep.left) {
            if found >= wanted {
                break;
            }
            let file = FileId(self.sweep.next);
            self.sweep.left -= 1;
            self.sweep.next = (self.sweep.next + 1) % self.config.files;
            let entry = *self.entry(file);
            if entry.state != State::Stored || self.tenants.is_current(entry.space) {
                continue;
            }
            self.doom(file);
            if entry.refs == 0 {
                self.set_free(file);
                found += 1;
            }
        }
        found
    }

    /// Makes `files` files free, now or once the journal is durable: takes those of cleared
    /// namespaces first.
    pub(super) fn make_room(&mut self, files: u32) {
        let missing =
            |catalog: &Self| files.saturating_sub(catalog.pool.free_files() + catalog.log.limbo());
        if missing(self) > 0 {
            self.sweep(missing(self), SWEEP_ENTRIES);
        }
        if missing(self) > 0 {
            self.evict_any(missing(self));
        }
    }
}
