//! Removal of blocks: eviction, removal, loss, clearing of a whole namespace, and groups of files
//! that hold no data, for drives that receive deallocate (TRIM) hints.

use std::{cmp::Ordering, collections::BinaryHeap, ops::Range};

use super::{Catalog, CatalogError};
use crate::{
    ids::{FileId, NamespaceId},
    key::BlockKey,
    policy::Candidate,
    record::Record,
};

/// Entries that one call scans for files of cleared namespaces: some hundred microseconds.
const SWEEP_ENTRIES: u32 = 1 << 16;

/// A namespace's next victim. The greatest is evicted first.
pub(super) struct Next {
    pub(super) candidate: Candidate,
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
    /// least valuable of all. Returns the number evicted. They are free once the records made so
    /// far are durable.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] or [`CatalogError::Recovering`].
    pub fn evict(
        &mut self,
        namespace: Option<NamespaceId>,
        files: u32,
    ) -> Result<u32, CatalogError> {
        self.check_recovered()?;
        let mut swept = 0;
        match namespace {
            Some(namespace) => _ = self.index.tenants.get(namespace)?,
            None => swept = self.sweep(files),
        }
        Ok(swept + self.evict_from(namespace, files - swept))
    }

    /// Returns the number of files to evict now, so that the next writes find free ones without
    /// waiting for the journal.
    #[must_use]
    pub fn wants_space(&self) -> u32 {
        if !self.config.journal {
            return 0;
        }
        self.files_ahead().saturating_sub(self.pool.free_files() + self.log.limbo())
    }

    /// Returns the number of files to keep free ahead.
    fn files_ahead(&self) -> u32 {
        (self.config.files / 64).min(self.config.files_ahead)
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
        let mut files = self.index.stored_files(namespace, keys)?;
        files.sort_unstable();
        files.dedup();
        self.drop_files(&files);
        Ok(files.len() as u32)
    }

    /// Drops a file that could not be read or whose data is corrupt: its key is a miss from now on.
    /// One that is being written is left out of the commit. Does nothing to others.
    pub fn lost(&mut self, file: FileId) {
        if self.is_stored(file) {
            self.drop_files(&[file]);
        } else if self.index.is_writing(file) {
            self.unfit.insert(file);
        }
    }

    /// Returns the keys evicted, removed or lost since the last call, without those of cleared
    /// namespaces. They are collected from the first call on.
    pub fn take_dropped(&mut self) -> Vec<(NamespaceId, BlockKey)> {
        self.index.dropped.replace(Vec::new()).unwrap_or_default()
    }

    /// Returns the files that became empty and unreferenced since the last call. They are collected
    /// from the first call on. A returned file may already have been allocated again.
    pub fn take_freed(&mut self) -> Vec<FileId> {
        self.freed.replace(Vec::new()).unwrap_or_default()
    }

    /// Drops all blocks of a namespace, including pinned ones and those being written, in one step.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] or [`CatalogError::Recovering`].
    pub fn clear(&mut self, namespace: NamespaceId) -> Result<(), CatalogError> {
        self.check_recovered()?;
        self.index.tenants.get(namespace)?;
        self.index.forget(namespace);
        self.with_pins(|pins, catalog| pins.end_in(catalog, namespace));
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
        let epoch = self.index.tenants.get(namespace)?.epoch + 1;
        self.index.set_epoch(namespace, epoch);
        self.with_pins(|pins, catalog| pins.end_in(catalog, namespace));
        self.log.push(&Record::Epoch { namespace, epoch });
        Ok(epoch)
    }

    /// Same as [`Catalog::clear`], if nothing in the namespace is in use, pinned or being written.
    /// Returns the number of files that are, and has changed nothing unless that is 0.
    ///
    /// # Errors
    /// Same as [`Catalog::clear`].
    pub fn clear_unused(&mut self, namespace: NamespaceId) -> Result<u32, CatalogError> {
        let usage = self.index.usage(namespace)?;
        let used = usage.stored - usage.evictable + usage.writing + usage.doomed;
        if used == 0 {
            self.clear(namespace)?;
        }
        Ok(used)
    }

    /// Evicts the least valuable files of a namespace, or of all. Returns their number.
    pub(super) fn evict_from(&mut self, namespace: Option<NamespaceId>, files: u32) -> u32 {
        let all = 0..self.index.tenants.all.len() as u32;
        let slots = namespace.map(|id| self.index.tenants.slot(id)).map_or(all, |at| at..at + 1);
        self.evict_in(slots, files)
    }

    /// Same, of the namespaces in some slots.
    pub(super) fn evict_in(&mut self, slots: impl IntoIterator<Item = u32>, files: u32) -> u32 {
        if files == 0 {
            return 0;
        }
        let mut victims = Vec::new();
        let slots = slots.into_iter();
        let mut next: BinaryHeap<Next> =
            slots.filter_map(|slot| self.next_victim(self.index.tenants.id(slot))).collect();
        while victims.len() < files as usize
            && let Some(Next { candidate, namespace }) = next.pop()
        {
            self.index.evict(namespace, candidate.file);
            self.index.tenants.get_mut(namespace).evicted += 1;
            self.index.tenants.evicted += 1;
            victims.push(candidate.file);
            next.extend(self.next_victim(namespace));
        }
        self.log_dropped(&mut victims);
        victims.len() as u32
    }

    pub(super) fn next_victim(&mut self, namespace: NamespaceId) -> Option<Next> {
        let candidate = self.index.candidate(namespace)?;
        Some(Next { candidate, namespace })
    }

    /// Returns the next victim of the namespaces in some slots.
    pub(super) fn least_valuable(&mut self, slots: impl IntoIterator<Item = u32>) -> Option<Next> {
        let slots = slots.into_iter();
        slots.filter_map(|slot| self.next_victim(self.index.tenants.id(slot))).max()
    }

    /// Returns the number of files, up to `wanted`, that can be written without an eviction, now or
    /// ahead of the next writes.
    pub(super) fn spare_files(&mut self, wanted: u32) -> u32 {
        let ahead = if self.config.journal { self.files_ahead() } else { 0 };
        let spare =
            |it: &Self| (it.pool.free_files() + it.log.limbo()).saturating_sub(ahead).min(wanted);
        let missing = wanted - spare(self);
        if missing > 0 {
            self.sweep(missing);
        }
        spare(self)
    }

    /// Logs the eviction of files that lost their keys, and frees those that are not in use.
    fn log_dropped(&mut self, files: &mut [FileId]) {
        files.sort_unstable();
        for run in files.chunk_by(|a, b| a.0 + 1 == b.0) {
            self.log.push(&Record::Evict { first: run[0], count: run.len() as u32 });
        }
        for file in files.iter() {
            if self.index.entry(*file).refs == 0 {
                self.set_free(*file);
            }
        }
    }

    fn drop_files(&mut self, files: &[FileId]) {
        files.iter().for_each(|file| self.index.drop_file(*file));
        self.log_dropped(&mut files.to_vec());
    }

    /// Sends a doomed, unreferenced file to limbo, or frees it if no record is outstanding.
    pub(super) fn set_free(&mut self, file: FileId) {
        self.index.reset(file);
        if let Some(freed) = &mut self.freed {
            freed.push(file);
        }
        // During recovery the free files are computed after the last record.
        if !self.recovering && self.log.retire(file) {
            self.pool.free(file);
        }
    }

    /// Scans for files of cleared namespaces, until `wanted` of them are free or in limbo. Returns
    /// their number.
    fn sweep(&mut self, wanted: u32) -> u32 {
        let (mut found, mut entries) = (0, SWEEP_ENTRIES);
        while found < wanted
            && let Some(file) = self.index.sweep(&mut entries)
        {
            if self.index.entry(file).refs == 0 {
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
            self.sweep(missing(self));
        }
        if missing(self) > 0 {
            self.evict_from(None, missing(self));
        }
    }

    /// Makes the files of cleared namespaces free, once the records made so far are durable. Does
    /// a part of it in a call, and returns true if it is done.
    pub fn sweep_all(&mut self) -> bool {
        self.sweep(u32::MAX);
        self.index.is_swept()
    }

    /// Takes the free files with number `first` or higher, up to the next one that is not free, and
    /// at most `most`. They are not allocated before [`Catalog::put_back`].
    pub fn take_free(&mut self, first: FileId, most: u32) -> Option<Range<u32>> {
        self.pool.take_from(first, most)
    }

    /// Makes files free again that [`Catalog::take_free`] has taken.
    pub fn put_back(&mut self, files: Range<u32>) {
        files.for_each(|file| self.pool.free(FileId(file)));
    }

    /// Starts to track groups of `files` files that are free as a whole
    /// ([`Geometry::group`](crate::Geometry::group)). Call it after recovery.
    ///
    /// # Panics
    /// Panics if `files` is 0.
    pub fn watch_groups(&mut self, files: u32) {
        self.pool.watch_groups(files);
    }

    /// Returns up to `most` groups, by their first files, that hold nothing and should stay empty
    /// for a while: all of their files are free, durably so in the journal, and the number of files
    /// kept free ahead remains without them. Their files are not allocated before
    /// [`Catalog::deallocated`]. A group is returned again only after it was written.
    pub fn unused_groups(&mut self, most: usize) -> Vec<FileId> {
        self.sweep(u32::MAX);
        let ahead = self.files_ahead();
        let groups = std::iter::from_fn(|| self.pool.take_group(ahead));
        let groups: Vec<FileId> = groups.take(most).collect();
        self.deallocating.extend(&groups);
        groups
    }

    /// Returns the files of these groups to the pool, whether their drives deallocated them or not.
    /// Ignores groups that were not handed out.
    pub fn deallocated(&mut self, groups: &[FileId]) {
        for first in groups {
            let Some(at) = self.deallocating.iter().position(|group| group == first) else {
                continue;
            };
            self.deallocating.swap_remove(at);
            let files = self.pool.group_files();
            (first.0..first.0 + files).for_each(|file| self.pool.free(FileId(file)));
        }
    }
}
