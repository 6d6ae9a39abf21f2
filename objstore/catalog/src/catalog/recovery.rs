//! Recovery of the catalog from journal records.

use super::{Catalog, CatalogError, Entry, State};
use crate::{
    file_pool::FilePool,
    ids::{FileId, NamespaceId},
    key::BlockKey,
    planted::{PlantedBug, planted},
    record::{Record, Words},
};

impl Catalog {
    /// Applies one record of the journal. Only for a catalog that is otherwise unused;
    /// [`Catalog::recovered`] ends recovery.
    ///
    /// A snapshot is written while changes go on, so a record may name a file before the snapshot
    /// does: evictions and pins of empty files are ignored, and a commit may occur twice.
    ///
    /// # Errors
    /// Returns [`CatalogError::Damaged`] or [`CatalogError::TwoFiles`] if it contradicts earlier
    /// ones.
    pub fn apply(&mut self, record: &Record<'_>) -> Result<(), CatalogError> {
        self.recovering = true;
        let damaged = |problem| CatalogError::Damaged { record: describe(record), problem };
        match *record {
            Record::Namespace { .. } => self.apply_namespace(record).map_err(damaged),
            Record::Commit { file, namespace, key, checksums } => {
                self.check_commit(file, namespace, checksums).map_err(damaged)?;
                self.apply_commit(file, namespace, key, checksums, damaged)
            }
            Record::Evict { first, count } => {
                for file in self.range(first, count).map_err(damaged)? {
                    if self.is_stored(file) {
                        self.unstore(file);
                    }
                }
                Ok(())
            }
            Record::Use { first, count, how } => {
                for file in self.range(first, count).map_err(damaged)?.rev() {
                    let entry = *self.entry(file);
                    if self.is_stored(file) && !entry.pinned {
                        let namespace = self.tenants.spaces[entry.space as usize].namespace;
                        self.use_file(NamespaceId(namespace), file, how);
                    }
                }
                Ok(())
            }
            Record::Pin { file, pinned } => {
                if file.0 >= self.config.files {
                    return Err(damaged("names a file that the store does not have"));
                }
                if self.is_stored(file) {
                    self.apply_pin(file, pinned);
                }
                Ok(())
            }
            Record::Clear { .. } if planted(PlantedBug::ClearNotReplayed) => Ok(()),
            Record::Clear { namespace } => {
                self.tenants.get(namespace).map_err(|_| damaged("is of an unknown namespace"))?;
                self.forget(namespace);
                Ok(())
            }
            Record::Epoch { namespace, epoch } => {
                let tenant = self
                    .tenants
                    .get(namespace)
                    .map_err(|_| damaged("is of an unknown namespace"))?;
                if epoch < tenant.epoch {
                    return Err(damaged("goes back to an earlier epoch"));
                }
                self.set_epoch(namespace, epoch);
                Ok(())
            }
        }
    }

    /// Applies one record of a damaged journal: like [`Catalog::apply`], but if records contradict
    /// each other, because others between them are missing, the later one wins.
    ///
    /// # Errors
    /// Returns [`CatalogError::Damaged`], and changes nothing, if the record is not of this store,
    /// or of a namespace whose record is missing.
    pub fn salvage(&mut self, record: &Record<'_>) -> Result<(), CatalogError> {
        self.recovering = true;
        match *record {
            Record::Commit { file, namespace, key, checksums }
                if self.check_commit(file, namespace, checksums).is_ok() =>
            {
                let space = self.tenants.all[namespace.0 as usize].space;
                let [found, ..] = self.find_batch(space, std::slice::from_ref(&key));
                if let Some(other) = found.filter(|found| *found != file) {
                    self.unstore(other);
                }
                if found != Some(file) && self.is_stored(file) {
                    self.unstore(file);
                }
            }
            Record::Namespace { id, epoch, digest, .. } => {
                let known = self.tenants.by_digest.get(&digest) == Some(&id);
                if known && self.tenants.all[id.0 as usize].epoch < epoch {
                    self.set_epoch(id, epoch);
                }
            }
            _ => {}
        }
        self.apply(record)
    }

    /// Returns the files that a record names, from `first` on.
    fn range(
        &self,
        first: FileId,
        count: u32,
    ) -> Result<impl DoubleEndedIterator<Item = FileId> + use<>, &'static str> {
        let end = first.0.checked_add(count).filter(|end| *end <= self.config.files);
        let end = end.ok_or("names files that the store does not have")?;
        Ok((first.0..end).map(FileId))
    }

    fn apply_namespace(&mut self, record: &Record<'_>) -> Result<(), &'static str> {
        let Record::Namespace { id, digest, epoch, quota_files, weight, label } = *record else {
            unreachable!("the caller looked");
        };
        if weight == 0 {
            return Err("has a weight of zero");
        }
        match (self.tenants.by_digest.get(&digest), self.tenants.all.len() as u32) {
            (Some(known), _) if *known != id => return Err("has the digest of another namespace"),
            (None, there_are) if id.0 < there_are => return Err("has another digest than before"),
            (None, there_are) if id.0 > there_are => return Err("skips a number"),
            (None, _) => _ = self.register(digest, label.to_owned()),
            (Some(_), _) => {}
        }
        if epoch < self.tenants.all[id.0 as usize].epoch {
            return Err("goes back to an earlier epoch");
        }
        let tenant = &mut self.tenants.all[id.0 as usize];
        (tenant.epoch, tenant.quota, tenant.weight) = (epoch, quota_files, weight);
        label.clone_into(&mut tenant.label);
        Ok(())
    }

    fn check_commit(
        &self,
        file: FileId,
        namespace: NamespaceId,
        checksums: Words<'_>,
    ) -> Result<(), &'static str> {
        if file.0 >= self.config.files {
            return Err("names a file that the store does not have");
        }
        if self.tenants.get(namespace).is_err() {
            return Err("is of an unknown namespace");
        }
        if checksums.len() != self.config.words_per_file as usize {
            return Err("has another number of checksums than this store keeps");
        }
        Ok(())
    }

    fn apply_commit(
        &mut self,
        file: FileId,
        namespace: NamespaceId,
        key: BlockKey,
        checksums: Words<'_>,
        damaged: impl FnOnce(&'static str) -> CatalogError,
    ) -> Result<(), CatalogError> {
        let space = self.tenants.all[namespace.0 as usize].space;
        let found = self.find_batch(space, std::slice::from_ref(&key))[0];
        if let Some(first) = found.filter(|found| *found != file) {
            return Err(CatalogError::TwoFiles { key, first, second: file });
        }
        let before = *self.entry(file);
        if found.is_none() && before.state == State::Stored {
            if self.tenants.is_current(before.space) {
                return Err(damaged("is for a file that holds another key"));
            }
            self.doom(file);
            self.reset(file);
        }
        let first = file.at() * self.config.words_per_file as usize;
        for (at, word) in checksums.iter().enumerate() {
            self.checksums[first + at] = word;
        }
        if found.is_none() {
            self.table.insert(self.table.hash(space, &key), file);
            let new = Entry { key, space, state: State::Stored, ..Entry::FREE };
            self.change(file, |entry| *entry = new);
            self.hand_to_policy(namespace, file);
        } else if !before.pinned {
            self.policy.refresh(namespace.0, file);
        }
        Ok(())
    }

    fn unstore(&mut self, file: FileId) {
        let entry = *self.entry(file);
        if !entry.pinned {
            let namespace = self.tenants.spaces[entry.space as usize].namespace;
            self.policy.evict(namespace, file, self.hash_of(file));
        }
        self.doom(file);
        self.reset(file);
    }

    fn apply_pin(&mut self, file: FileId, pinned: bool) {
        let entry = *self.entry(file);
        let namespace = self.tenants.spaces[entry.space as usize].namespace;
        match (entry.pinned, pinned) {
            (false, true) => self.policy.remove(namespace, file),
            (true, false) => self.hand_to_policy(NamespaceId(namespace), file),
            _ => {}
        }
        self.change(file, |entry| entry.pinned = pinned);
    }

    /// Ends recovery: files without a block become free, and the catalog can be used.
    pub fn recovered(&mut self) {
        // No file is free yet: otherwise the files that the sweep finds would be freed twice.
        self.pool = FilePool::from_used(self.entries.iter().map(|_| true));
        self.sweep(u32::MAX, u32::MAX);
        let used = self.entries.iter().map(|entry| entry.state != State::Free);
        self.pool = FilePool::from_used(used);
        self.recovering = false;
    }
}

/// Describes a record for an error message.
fn describe(record: &Record<'_>) -> String {
    match *record {
        Record::Namespace { id, .. } => format!("the record of namespace {id}"),
        Record::Commit { file, namespace, .. } => {
            format!("a commit of file {file} in namespace {namespace}")
        }
        Record::Evict { first, count } => format!("an eviction of {count} files from {first} on"),
        Record::Use { first, count, .. } => format!("a use of {count} files from {first} on"),
        Record::Pin { file, .. } => format!("a pin of file {file}"),
        Record::Clear { namespace } => format!("a clearing of namespace {namespace}"),
        Record::Epoch { namespace, epoch } => {
            format!("the change of namespace {namespace} to epoch {epoch}")
        }
    }
}
