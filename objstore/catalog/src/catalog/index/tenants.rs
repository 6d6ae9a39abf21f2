//! The registered namespaces, and the spaces of their keys.

use std::{collections::HashMap, sync::Arc};

use super::entry::Space;
use crate::{catalog::CatalogError, ids::NamespaceId, record::Record};

/// A registered namespace.
#[derive(Debug)]
pub struct Tenant {
    /// Its number. Clones are those of `Catalog::keep`.
    pub id: Arc<NamespaceId>,
    pub digest: [u8; 32],
    pub label: String,
    pub epoch: u64,
    /// The space number that is part of its keys, until it is cleared.
    pub space: u32,
    /// Earlier spaces that still have files.
    pub former: Vec<u32>,
    pub quota: Option<u32>,
    pub weight: u32,
    /// The user to whom its files count.
    pub owner: Option<u32>,
    pub asked: u64,
    pub hits: u64,
    pub committed: u64,
    pub evicted: u64,
    pub refused: u64,
}

impl Tenant {
    /// Returns the journal record of the namespace.
    pub fn record(&self) -> Record<'_> {
        Record::Namespace {
            id: *self.id,
            digest: self.digest,
            epoch: self.epoch,
            quota_files: self.quota,
            weight: self.weight,
            label: &self.label,
            owner: self.owner,
        }
    }
}

/// All namespaces, by slot: the remainder of their number.
#[derive(Debug, Default)]
pub struct Tenants {
    /// The number of slots.
    pub max: u32,
    pub all: Vec<Tenant>,
    pub by_digest: HashMap<[u8; 32], NamespaceId>,
    pub spaces: Vec<Space>,
    /// Files evicted, also from namespaces that were replaced.
    pub evicted: u64,
    /// Numbers of spaces that have no entries left, for reuse.
    pub spare: Vec<u32>,
}

impl Tenants {
    pub fn get(&self, namespace: NamespaceId) -> Result<&Tenant, CatalogError> {
        let there = self.all.get(self.slot(namespace) as usize);
        there.filter(|it| *it.id == namespace).ok_or(CatalogError::Namespace { namespace })
    }

    /// Same as [`Tenants::get`] for a namespace that is known.
    pub fn get_mut(&mut self, namespace: NamespaceId) -> &mut Tenant {
        let there = namespace.0 % self.max;
        self.all.get_mut(there as usize).filter(|it| *it.id == namespace).expect("it is known")
    }

    pub fn slot(&self, namespace: NamespaceId) -> u32 {
        namespace.0 % self.max
    }

    /// Returns the number of the namespace in a slot.
    pub fn id(&self, slot: u32) -> NamespaceId {
        *self.all[slot as usize].id
    }

    /// Returns a number for a new namespace in a slot, above all others: no number ever has two
    /// meanings. `None` if numbers have run out.
    pub fn next_id(&self, slot: u32) -> Option<NamespaceId> {
        let next = self.all.iter().map(|tenant| u64::from(tenant.id.0) + 1).max().unwrap_or(0);
        let (slot, max) = (u64::from(slot), u64::from(self.max));
        u32::try_from(next + (slot + max - next % max) % max).ok().map(NamespaceId)
    }

    /// Adds a namespace without a quota, with weight 1, in place of one in its slot.
    pub fn add(&mut self, id: NamespaceId, digest: [u8; 32], label: String) {
        let slot = self.slot(id);
        let mut tenant = Tenant {
            id: Arc::new(id),
            digest,
            label,
            epoch: 0,
            space: 0,
            former: Vec::new(),
            quota: None,
            weight: 1,
            owner: None,
            asked: 0,
            hits: 0,
            committed: 0,
            evicted: 0,
            refused: 0,
        };
        if let Some(before) = self.all.get_mut(slot as usize) {
            self.by_digest.remove(&before.digest);
            (tenant.space, tenant.former) = (before.space, std::mem::take(&mut before.former));
            *before = tenant;
        } else {
            tenant.space = self.new_space(slot);
            self.all.push(tenant);
        }
        self.by_digest.insert(digest, id);
    }

    /// Gives the namespace its digest, if it has `before` instead.
    pub fn rename(&mut self, id: NamespaceId, before: &[u8; 32], digest: [u8; 32]) {
        if self.by_digest.get(before) == Some(&id) {
            self.by_digest.remove(before);
            self.by_digest.insert(digest, id);
            self.get_mut(id).digest = digest;
        }
    }

    fn new_space(&mut self, slot: u32) -> u32 {
        let space = Space { slot, ..Space::default() };
        if let Some(at) = self.spare.pop() {
            self.spaces[at as usize] = space;
            return at;
        }
        self.spaces.push(space);
        self.spaces.len() as u32 - 1
    }

    /// Gives the namespace a new space for its keys. Returns false if the old one has no files.
    pub fn clear(&mut self, namespace: NamespaceId) -> bool {
        let before = self.get_mut(namespace).space;
        if self.spaces[before as usize].is_empty() {
            return false;
        }
        let space = self.new_space(self.slot(namespace));
        let tenant = self.get_mut(namespace);
        tenant.space = space;
        tenant.former.push(before);
        true
    }

    /// Returns true if the space is that of its namespace's keys: it was not cleared since.
    pub fn is_current(&self, space: u32) -> bool {
        self.all[self.spaces[space as usize].slot as usize].space == space
    }

    /// Makes the number of a former space available once it has no files any more.
    pub fn spare_if_empty(&mut self, space: u32) {
        if self.spaces[space as usize].is_empty() && !self.is_current(space) {
            let slot = self.spaces[space as usize].slot;
            self.all[slot as usize].former.retain(|former| *former != space);
            self.spare.push(space);
        }
    }

    /// Returns the number of files that count towards the namespace's quota.
    pub fn held(&self, namespace: NamespaceId) -> u32 {
        let tenant = &self.all[self.slot(namespace) as usize];
        let space = &self.spaces[tenant.space as usize];
        let former = tenant.former.iter().map(|at| self.spaces[*at as usize].in_use());
        space.stored + space.writing + space.doomed + former.sum::<u32>()
    }
}
