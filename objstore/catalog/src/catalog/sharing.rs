//! Namespaces: identity, quota and weight.

use super::{Catalog, CatalogError};
use crate::{ids::NamespaceId, namespace::Namespace, record::LABEL_BYTES_MAX};

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
        if let Some(id) = self.index.tenants.by_digest.get(&digest) {
            return Ok(*id);
        }
        let max = self.config.namespaces_max;
        if self.index.tenants.all.len() >= max as usize {
            return Err(CatalogError::Namespaces { max });
        }
        let id = self.index.register(digest, descriptor.label.clone());
        self.log_namespace(id);
        Ok(id)
    }

    /// Returns ids, labels and digests of all namespaces.
    pub fn namespaces(&self) -> impl Iterator<Item = (NamespaceId, &str, [u8; 32])> {
        let numbered = (0..).map(NamespaceId).zip(&self.index.tenants.all);
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
        self.index.tenants.get(namespace)?;
        self.index.tenants.get_mut(namespace).quota = files;
        self.log_namespace(namespace);
        if let Some(files) = files {
            let excess = self.index.tenants.held(namespace).saturating_sub(files);
            self.evict_from(Some(namespace), excess);
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
        self.index.tenants.get(namespace)?;
        if weight == 0 {
            return Err(CatalogError::Weight);
        }
        self.index.tenants.get_mut(namespace).weight = weight;
        self.log_namespace(namespace);
        Ok(())
    }

    pub(super) fn check_recovered(&self) -> Result<(), CatalogError> {
        if self.recovering { Err(CatalogError::Recovering) } else { Ok(()) }
    }

    fn log_namespace(&mut self, id: NamespaceId) {
        self.log.push(&self.index.tenants.get_mut(id).record(id));
    }
}
