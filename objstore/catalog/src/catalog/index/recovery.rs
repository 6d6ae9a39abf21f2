//! Recovery of the catalog from journal records.

use super::{Index, State};
use crate::{
    catalog::CatalogError,
    ids::{FileId, NamespaceId},
    key::BlockKey,
    record::{Record, Words},
};

/// Returns the digest of a namespace of which a damaged journal has only the number.
fn nameless(id: NamespaceId) -> [u8; 32] {
    let mut digest = [0; 32];
    digest[..4].copy_from_slice(&id.0.to_le_bytes());
    digest
}

impl Index {
    /// Applies one record of the journal ([`Catalog::apply`](crate::Catalog::apply)).
    pub fn apply(&mut self, record: &Record<'_>) -> Result<(), CatalogError> {
        let damaged =
            |problem: &str| CatalogError::Damaged(format!("{} {problem}", describe(record)));
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
                    if self.is_stored(file) {
                        self.use_file(self.namespace_of(file), file, how);
                    }
                }
                Ok(())
            }
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

    /// Applies one record of a damaged journal ([`Catalog::salvage`](crate::Catalog::salvage)).
    pub fn salvage(&mut self, record: &Record<'_>) -> Result<(), CatalogError> {
        match *record {
            Record::Commit { file, namespace, key, checksums }
                if self.check_commit(file, namespace, checksums).is_ok() =>
            {
                let space = self.tenants.get_mut(namespace).space;
                let found = self.find(space, &key);
                if let Some(other) = found.filter(|found| *found != file) {
                    self.unstore(other);
                }
                if found != Some(file) && self.is_stored(file) {
                    self.unstore(file);
                }
            }
            Record::Namespace { id, epoch, digest, .. } => {
                let known = self.tenants.by_digest.get(&digest).copied();
                if known == Some(id) && self.tenants.get_mut(id).epoch < epoch {
                    self.set_epoch(id, epoch);
                }
                // It was replaced and came back: a nameless one fills the slot that it had.
                if let Some(known) = known.filter(|known| *known < id) {
                    self.register(known, nameless(known), String::new());
                }
                // Those of the slots before it come later, or are lost.
                let slots = self.tenants.all.len() as u32..self.tenants.slot(id);
                for before in slots.map(NamespaceId) {
                    self.register(before, nameless(before), String::new());
                }
                if known.is_none() {
                    self.tenants.rename(id, &nameless(id), digest);
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
        let end = first.0.checked_add(count).filter(|end| *end <= self.files());
        let end = end.ok_or("names files that the store does not have")?;
        Ok((first.0..end).map(FileId))
    }

    fn apply_namespace(&mut self, record: &Record<'_>) -> Result<(), &'static str> {
        let Record::Namespace { id, digest, epoch, quota_files, weight, label, owner } = *record
        else {
            unreachable!("the caller looked");
        };
        if weight == 0 {
            return Err("has a weight of zero");
        }
        let slot = self.tenants.slot(id) as usize;
        let before = self.tenants.all.get(slot).map(|tenant| *tenant.id);
        match (self.tenants.by_digest.get(&digest), before) {
            (Some(known), _) if *known != id => return Err("has the digest of another namespace"),
            (None, Some(before)) if id == before => return Err("has another digest than before"),
            (None, Some(before)) if id < before => return Err("has the number of an earlier one"),
            (None, None) if slot > self.tenants.all.len() => return Err("skips a number"),
            (None, _) => self.register(id, digest, label.to_owned()),
            (Some(_), _) => {}
        }
        let tenant = self.tenants.get_mut(id);
        if epoch < tenant.epoch {
            return Err("goes back to an earlier epoch");
        }
        (tenant.epoch, tenant.quota, tenant.weight) = (epoch, quota_files, weight);
        tenant.owner = owner;
        label.clone_into(&mut tenant.label);
        Ok(())
    }

    fn check_commit(
        &self,
        file: FileId,
        namespace: NamespaceId,
        checksums: Words<'_>,
    ) -> Result<(), &'static str> {
        if file.0 >= self.files() {
            return Err("names a file that the store does not have");
        }
        if self.tenants.get(namespace).is_err() {
            return Err("is of an unknown namespace");
        }
        if checksums.len() != self.words_per_file {
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
        damaged: impl FnOnce(&str) -> CatalogError,
    ) -> Result<(), CatalogError> {
        let space = self.tenants.get_mut(namespace).space;
        let found = self.find(space, &key);
        if let Some(first) = found.filter(|found| *found != file) {
            return Err(CatalogError::Damaged(format!(
                "files {first} and {file} hold the same key {key}"
            )));
        }
        let before = *self.entry(file);
        if found.is_none() && before.state == State::Stored {
            if self.tenants.is_current(before.space) {
                return Err(damaged("is for a file that holds another key"));
            }
            self.doom(file);
            self.reset(file);
        }
        for (kept, word) in self.checksums_mut(file).iter_mut().zip(checksums.iter()) {
            *kept = word;
        }
        if found.is_none() {
            self.insert(file, space, key, State::Stored);
            self.hand_to_policy(namespace, file);
        } else {
            self.policy.refresh(self.tenants.slot(namespace), file);
        }
        Ok(())
    }

    fn unstore(&mut self, file: FileId) {
        self.evict(self.namespace_of(file), file);
        self.reset(file);
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
        Record::Clear { namespace } => format!("a clearing of namespace {namespace}"),
        Record::Epoch { namespace, epoch } => {
            format!("the change of namespace {namespace} to epoch {epoch}")
        }
    }
}
