//! Namespaces: identity, quota and weight.

use std::sync::Arc;

use super::{Catalog, CatalogError, index::Tenant};
use crate::{ids::NamespaceId, namespace::Namespace, record::LABEL_BYTES_MAX};

/// A user of a server, to whom namespaces count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceOwner {
    /// The user's number.
    pub user: u32,
    /// Namespaces that he may have at a time.
    pub namespaces_max: u32,
}

impl Catalog {
    /// Returns the namespace of this descriptor. A new one is registered without a quota, weight 1.
    /// If there is no room, it replaces the least recently registered one that has no block stored
    /// or being written, is not kept ([`Catalog::keep`]), and has no pins, no quota, and weight 1.
    /// The number of that one is unknown from then on.
    ///
    /// # Errors
    /// Returns [`CatalogError::Refused`] or [`CatalogError::Recovering`].
    pub fn namespace(&mut self, descriptor: &Namespace) -> Result<NamespaceId, CatalogError> {
        self.namespace_of(descriptor, None)
    }

    /// Same as [`Catalog::namespace`], for a user, to whom the files of a namespace count that he
    /// names first. If he has as many as he may, or there is no room, a new one replaces the least
    /// recently registered of his own that is not kept, has no block being written, no pins, no
    /// quota, and weight 1: an empty one, or else its blocks are dropped.
    ///
    /// # Errors
    /// Same as [`Catalog::namespace`], and [`CatalogError::OwnNamespaces`].
    pub fn namespace_of(
        &mut self,
        descriptor: &Namespace,
        owner: Option<NamespaceOwner>,
    ) -> Result<NamespaceId, CatalogError> {
        self.check_recovered()?;
        if descriptor.label.len() > LABEL_BYTES_MAX {
            let bytes = descriptor.label.len();
            return Err(CatalogError::Refused(format!(
                "a namespace's label has {bytes} bytes; give at most {LABEL_BYTES_MAX}"
            )));
        }
        let digest = descriptor.digest();
        let user = owner.map(|owner| owner.user);
        if let Some(id) = self.index.tenants.by_digest.get(&digest).copied() {
            if let (Some(_), None) = (user, self.index.tenants.get_mut(id).owner) {
                self.index.tenants.get_mut(id).owner = user;
                self.log_namespace(id);
            }
            return Ok(id);
        }
        let (label, max) = (descriptor.label.clone(), self.config.namespaces_max);
        let Some(id) = self.free_slot(owner).and_then(|slot| self.index.tenants.next_id(slot))
        else {
            return Err(match owner {
                Some(NamespaceOwner { user, namespaces_max })
                    if self.owned(user) >= namespaces_max =>
                {
                    CatalogError::OwnNamespaces { label, user, max: namespaces_max }
                }
                _ => CatalogError::Refused(format!(
                    "namespace {label:?} is new, and each of the {max} that the store was \
                     formatted for has blocks, users, pins, a quota or a weight; clear one and \
                     end its use, or format the store for more"
                )),
            });
        };
        self.index.register(id, digest, label);
        self.index.tenants.get_mut(id).owner = user;
        self.log_namespace(id);
        Ok(id)
    }

    /// Returns the number of namespaces whose files count to a user.
    fn owned(&self, user: u32) -> u32 {
        self.index.tenants.all.iter().filter(|tenant| tenant.owner == Some(user)).count() as u32
    }

    /// Returns a slot for a new namespace.
    fn free_slot(&self, owner: Option<NamespaceOwner>) -> Option<u32> {
        let tenants = &self.index.tenants;
        let is_empty = |tenant: &Tenant| tenants.held(*tenant.id) == 0;
        let Some(NamespaceOwner { user, namespaces_max }) = owner else {
            return self.slot_beyond().or_else(|| self.unused_slot(is_empty));
        };
        let is_own = |tenant: &Tenant| {
            let writing = tenants.spaces[tenant.space as usize].writing;
            tenant.owner == Some(user) && writing == 0
        };
        let other = match self.owned(user) < namespaces_max {
            true => self.slot_beyond().or_else(|| self.unused_slot(is_empty)),
            false => None,
        };
        let own_empty = || self.unused_slot(|tenant| is_own(tenant) && is_empty(tenant));
        other.or_else(own_empty).or_else(|| self.unused_slot(is_own))
    }

    /// Returns the slot behind the last one, if there may be another one.
    fn slot_beyond(&self) -> Option<u32> {
        let slots = self.index.tenants.all.len() as u32;
        (slots < self.config.namespaces_max).then_some(slots)
    }

    /// Returns the slot of the least recently registered namespace that `may_go`, and that nobody
    /// uses or has given a property.
    fn unused_slot(&self, may_go: impl Fn(&Tenant) -> bool) -> Option<u32> {
        let tenants = &self.index.tenants;
        let unused = tenants.all.iter().filter(|tenant| {
            let is_plain = tenant.quota.is_none() && tenant.weight == 1;
            is_plain
                && Arc::strong_count(&tenant.id) == 1
                && may_go(tenant)
                && !self.pins.are_in(*tenant.id)
        });
        unused.map(|tenant| *tenant.id).min().map(|id| tenants.slot(id))
    }

    /// Limits the files of all namespaces of a user together, as [`Catalog::set_quota`] limits
    /// those of one. It ends with the process.
    ///
    /// # Errors
    /// Returns [`CatalogError::Recovering`].
    pub fn limit_owner(&mut self, user: u32, files: Option<u32>) -> Result<(), CatalogError> {
        self.check_recovered()?;
        match files {
            None => _ = self.owner_limits.remove(&user),
            Some(files) => {
                self.owner_limits.insert(user, files);
                let own = self.slots_of(user);
                let excess = self.held_in(&own).saturating_sub(files);
                self.evict_in(own, excess);
            }
        }
        Ok(())
    }

    /// Returns the slots of a user's namespaces.
    fn slots_of(&self, user: u32) -> Vec<u32> {
        let all = (0..).zip(&self.index.tenants.all);
        all.filter(|(_, tenant)| tenant.owner == Some(user)).map(|(slot, _)| slot).collect()
    }

    /// Returns the files of the namespaces in some slots.
    pub(super) fn held_in(&self, slots: &[u32]) -> u32 {
        let tenants = &self.index.tenants;
        slots.iter().map(|slot| tenants.held(tenants.id(*slot))).sum()
    }

    /// Returns the limits that a namespace's files count against: the slots that each is about, and
    /// the files that these may have.
    pub(super) fn limits_of(&self, namespace: NamespaceId) -> Vec<(Vec<u32>, u32)> {
        let tenants = &self.index.tenants;
        let tenant = tenants.get(namespace).expect("the caller checked it");
        let own = tenant.quota.map(|files| (vec![tenants.slot(namespace)], files));
        let user = tenant.owner.and_then(|user| Some((user, *self.owner_limits.get(&user)?)));
        own.into_iter().chain(user.map(|(user, files)| (self.slots_of(user), files))).collect()
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
    /// Returns [`CatalogError::Namespace`], [`CatalogError::Refused`] for a weight of 0, which
    /// would never receive space, or [`CatalogError::Recovering`].
    pub fn set_weight(&mut self, namespace: NamespaceId, weight: u32) -> Result<(), CatalogError> {
        self.check_recovered()?;
        self.index.tenants.get(namespace)?;
        if weight == 0 {
            let why = "a namespace's weight is zero; give at least 1".to_owned();
            return Err(CatalogError::Refused(why));
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
