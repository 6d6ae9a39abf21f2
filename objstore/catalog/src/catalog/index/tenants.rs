//! The registered namespaces, and the spaces of their keys.

use std::collections::HashMap;

use super::entry::Space;
use crate::{catalog::CatalogError, ids::NamespaceId, record::Record};

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

impl Tenant {
    /// Returns the journal record of the namespace.
    pub fn record(&self, id: NamespaceId) -> Record<'_> {
        Record::Namespace {
            id,
            digest: self.digest,
            epoch: self.epoch,
            quota_files: self.quota,
            weight: self.weight,
            label: &self.label,
        }
    }
}

/// All namespaces, by number.
#[derive(Debug, Default)]
pub struct Tenants {
    pub all: Vec<Tenant>,
    pub by_digest: HashMap<[u8; 32], NamespaceId>,
    pub spaces: Vec<Space>,
    /// Numbers of spaces that have no entries left, for reuse.
    spare: Vec<u32>,
}

impl Tenants {
    pub fn get(&self, namespace: NamespaceId) -> Result<&Tenant, CatalogError> {
        self.all.get(namespace.0 as usize).ok_or(CatalogError::Namespace { namespace })
    }

    /// Same as [`Tenants::get`] for a namespace that is known.
    pub fn get_mut(&mut self, namespace: NamespaceId) -> &mut Tenant {
        &mut self.all[namespace.0 as usize]
    }

    /// Adds a namespace without a quota, with weight 1.
    pub fn add(&mut self, digest: [u8; 32], label: String) -> NamespaceId {
        let id = NamespaceId(self.all.len() as u32);
        let space = self.new_space(id);
        self.all.push(Tenant {
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
        id
    }

    fn new_space(&mut self, id: NamespaceId) -> u32 {
        let space = Space { namespace: id.0, ..Space::default() };
        if let Some(at) = self.spare.pop() {
            self.spaces[at as usize] = space;
            return at;
        }
        self.spaces.push(space);
        self.spaces.len() as u32 - 1
    }

    /// Gives the namespace a new space for its keys. Returns false if the old one has no files.
    pub fn clear(&mut self, namespace: NamespaceId) -> bool {
        let before = self.all[namespace.0 as usize].space;
        if self.spaces[before as usize].is_empty() {
            return false;
        }
        let space = self.new_space(namespace);
        let tenant = self.get_mut(namespace);
        tenant.space = space;
        tenant.former.push(before);
        true
    }

    /// Returns true if the space is that of its namespace's keys: it was not cleared since.
    pub fn is_current(&self, space: u32) -> bool {
        self.all[self.spaces[space as usize].namespace as usize].space == space
    }

    /// Makes the number of a former space available once it has no files any more.
    pub fn spare_if_empty(&mut self, space: u32) {
        if self.spaces[space as usize].is_empty() && !self.is_current(space) {
            let namespace = self.spaces[space as usize].namespace;
            self.all[namespace as usize].former.retain(|former| *former != space);
            self.spare.push(space);
        }
    }

    /// Returns the number of files that count towards the namespace's quota.
    pub fn held(&self, namespace: NamespaceId) -> u32 {
        let tenant = &self.all[namespace.0 as usize];
        let space = &self.spaces[tenant.space as usize];
        let former = tenant.former.iter().map(|at| self.spaces[*at as usize].in_use());
        space.stored + space.writing + space.doomed + former.sum::<u32>()
    }
}
