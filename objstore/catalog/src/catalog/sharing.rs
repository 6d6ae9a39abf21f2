//! Namespaces: identity, quota and weight.

use std::sync::Arc;

use super::{Catalog, CatalogError};
use crate::{ids::NamespaceId, namespace::Namespace, record::LABEL_BYTES_MAX};

impl Catalog {
    /// Returns the namespace of this descriptor. A new one is registered without a quota, weight 1.
    /// If there is no room, it replaces the least recently registered one that has no block stored
    /// or being written, is not kept ([`Catalog::keep`]), and has no pins, no quota, and weight 1.
    /// The number of that one is unknown from then on.
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
        let (tenants, max) = (&self.index.tenants, self.config.namespaces_max);
        let slots = tenants.all.len() as u32;
        let slot = if slots < max { Some(slots) } else { self.unused_slot() };
        let (id, label) = (slot.and_then(|slot| tenants.next_id(slot)), descriptor.label.clone());
        let Some(id) = id else { return Err(CatalogError::Namespaces { label, max }) };
        self.index.register(id, digest, label);
        self.log_namespace(id);
        Ok(id)
    }

    /// Returns the slot of the least recently registered namespace that is not used in any way.
    fn unused_slot(&self) -> Option<u32> {
        let tenants = &self.index.tenants;
        let unused = tenants.all.iter().filter(|tenant| {
            let is_plain = tenant.quota.is_none() && tenant.weight == 1;
            is_plain
                && Arc::strong_count(&tenant.id) == 1
                && tenants.held(*tenant.id) == 0
                && !self.pins.are_in(*tenant.id)
        });
        unused.map(|tenant| *tenant.id).min().map(|id| tenants.slot(id))
    }

    /// Returns the number of a namespace, which stays its own as long as a clone of it exists.
    ///
    /// # Errors
    /// Returns [`CatalogError::Namespace`] if the namespace is unknown.
    pub fn keep(&self, namespace: NamespaceId) -> Result<Arc<NamespaceId>, CatalogError> {
        Ok(self.index.tenants.get(namespace)?.id.clone())
    }

    /// Returns ids, labels and digests of all namespaces.
    pub fn namespaces(&self) -> impl Iterator<Item = (NamespaceId, &str, [u8; 32])> {
        let all = self.index.tenants.all.iter();
        all.map(|tenant| (*tenant.id, tenant.label.as_str(), tenant.digest))
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
        self.log.push(&self.index.tenants.get_mut(id).record());
    }
}
