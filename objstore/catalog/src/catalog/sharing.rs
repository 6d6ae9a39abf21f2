//! Namespaces: identity, quota and weight.

use super::{Catalog, CatalogError, Space};
use crate::{
    ids::NamespaceId,
    namespace::Namespace,
    record::{LABEL_BYTES_MAX, Record},
};

/// A registered namespace.
#[derive(Debug, Clone)]
pub struct Tenant {
    pub digest: [u8; 32],
    pub label: String,
    pub epoch: u64,
    /// The space number that is part of its keys, until it is cleared.
    pub space: u32,
    /// Earlier spaces that still have files.
    pub former: Vec<u32>,
    pub quota: Option<u32>,
    pub weight: u32,
    pub asked: u64,
    pub hits: u64,
    pub committed: u64,
    pub evicted: u64,
    pub refused: u64,
}

impl Catalog {
    /// Returns the namespace of this descriptor. A new one is registered without a quota, weight 1.
    ///
    /// # Errors
    /// Returns [`CatalogError::Label`], [`CatalogError::Namespaces`] or
    /// [`CatalogError::Recovering`].
    pub fn namespace(&mut self, descriptor: &Namespace) -> Result<NamespaceId, CatalogError> {
        self.check_recovered()?;
        if descriptor.label.len() > LABEL_BYTES_MAX {
            let bytes = descriptor.label.len();
            return Err(CatalogError::Label { bytes, max: LABEL_BYTES_MAX });
        }
        let digest = descriptor.digest();
        if let Some(id) = self.by_digest.get(&digest) {
            return Ok(*id);
        }
        let max = self.config.namespaces_max;
        if self.namespaces.len() >= max as usize {
            return Err(CatalogError::Namespaces { max });
        }
        let id = self.register(digest, descriptor.label.clone());
        self.log_namespace(id);
        Ok(id)
    }

    /// Returns ids, labels and digests of all namespaces.
    pub fn namespaces(&self) -> impl Iterator<Item = (NamespaceId, &str, [u8; 32])> {
        let numbered = (0..).map(NamespaceId).zip(&self.namespaces);
        numbered.map(|(id, tenant)| (id, tenant.label.as_str(), tenant.digest))
    }

    /// Limits the number of files that the namespace may hold, including doomed ones and those
    /// being written. The excess is evicted now, except files in use or pinned, and no new files
    /// are accepted until it is gone.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] or [`CatalogError::Recovering`].
    pub fn set_quota(
        &mut self,
        namespace: NamespaceId,
        files: Option<u32>,
    ) -> Result<(), CatalogError> {
        self.check_recovered()?;
        self.tenant(namespace)?;
        self.namespaces[namespace.0 as usize].quota = files;
        self.log_namespace(namespace);
        if let Some(files) = files {
            self.evict_from(namespace, self.held(namespace).saturating_sub(files));
        }
        Ok(())
    }

    /// Sets the eviction weight: how much longer its unused files are kept than other namespaces'.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`], [`CatalogError::Weight`] or
    /// [`CatalogError::Recovering`].
    pub fn set_weight(&mut self, namespace: NamespaceId, weight: u32) -> Result<(), CatalogError> {
        self.check_recovered()?;
        self.tenant(namespace)?;
        if weight == 0 {
            return Err(CatalogError::Weight);
        }
        self.namespaces[namespace.0 as usize].weight = weight;
        self.log_namespace(namespace);
        Ok(())
    }

    pub(super) fn tenant(&self, namespace: NamespaceId) -> Result<&Tenant, CatalogError> {
        self.namespaces.get(namespace.0 as usize).ok_or(CatalogError::Namespace { namespace })
    }

    pub(super) fn check_recovered(&self) -> Result<(), CatalogError> {
        if self.recovering { Err(CatalogError::Recovering) } else { Ok(()) }
    }

    pub(super) fn register(&mut self, digest: [u8; 32], label: String) -> NamespaceId {
        let id = NamespaceId(self.namespaces.len() as u32);
        let space = self.new_space(id);
        self.namespaces.push(Tenant {
            digest,
            label,
            epoch: 0,
            space,
            former: Vec::new(),
            quota: None,
            weight: 1,
            asked: 0,
            hits: 0,
            committed: 0,
            evicted: 0,
            refused: 0,
        });
        self.by_digest.insert(digest, id);
        self.policy.add_namespace();
        id
    }

    pub(super) fn log_namespace(&mut self, id: NamespaceId) {
        let record = record(id, &self.namespaces[id.0 as usize]);
        self.log.push(&record);
    }

    pub(super) fn new_space(&mut self, id: NamespaceId) -> u32 {
        let space = Space { namespace: id.0, ..Space::default() };
        if let Some(at) = self.spare_spaces.pop() {
            self.spaces[at as usize] = space;
            return at;
        }
        self.spaces.push(space);
        self.spaces.len() as u32 - 1
    }

    /// Returns the number of files that count towards the namespace's quota.
    pub(super) fn held(&self, namespace: NamespaceId) -> u32 {
        let tenant = &self.namespaces[namespace.0 as usize];
        let space = &self.spaces[tenant.space as usize];
        let former = tenant.former.iter().map(|at| self.spaces[*at as usize].in_use());
        space.stored + space.writing + space.doomed + former.sum::<u32>()
    }
}

/// Returns the journal record of a namespace.
pub fn record(id: NamespaceId, tenant: &Tenant) -> Record<'_> {
    Record::Namespace {
        id,
        digest: tenant.digest,
        epoch: tenant.epoch,
        quota_files: tenant.quota,
        weight: tenant.weight,
        label: &tenant.label,
    }
}
