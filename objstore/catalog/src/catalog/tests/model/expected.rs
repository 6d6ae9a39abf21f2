//! The expected state of the catalog and of the medium.

use std::collections::{BTreeMap, BTreeSet};

use super::NAMESPACES;
use crate::ids::NamespaceId;

/// Content of a file: salt of the namespace and its number, epoch, key, and number of the write.
pub type Content = ((u32, u32), u64, u32, u64);

#[derive(Debug, Clone, Copy)]
pub struct Block {
    pub file: u32,
    pub stored: bool,
    pub content: Content,
}

#[derive(Debug, Default)]
pub struct Model {
    pub keys: BTreeMap<(u32, u32), Block>,
    pub refs: BTreeMap<u32, u32>,
    /// The number and the salt of the namespace in each slot.
    pub ids: [u32; NAMESPACES as usize],
    pub salts: [u32; NAMESPACES as usize],
    pub epochs: [u64; NAMESPACES as usize],
    pub quotas: [Option<u32>; NAMESPACES as usize],
    pub weights: [u32; NAMESPACES as usize],
    /// Files of writes that have not ended.
    pub writing: BTreeSet<u32>,
    /// Those of them that are not to be committed.
    pub unfit: BTreeSet<u32>,
    /// Files without a key that are still in use, with the namespace.
    pub doomed: BTreeMap<u32, u32>,
    /// Dropped files, and the record that must be durable before their reuse.
    pub dropped: BTreeMap<u32, u64>,
    pub medium: BTreeMap<u32, Content>,
    pub writes_ever: u64,
    pub durable: u64,
    /// (record, (namespace, key), content): commits, in order.
    pub commits: Vec<(u64, (u32, u32), Content)>,
}

impl Model {
    pub fn id(&self, namespace: u32) -> NamespaceId {
        NamespaceId(self.ids[namespace as usize])
    }

    pub fn in_use(&self, file: u32) -> bool {
        self.refs.contains_key(&file) || self.writing.contains(&file)
    }

    pub fn evictable(&self, block: &Block) -> bool {
        block.stored && !self.in_use(block.file)
    }

    pub fn release(&mut self, file: u32) {
        let refs = self.refs.get_mut(&file).unwrap();
        *refs -= 1;
        if *refs == 0 {
            self.refs.remove(&file);
            self.settle(file);
        }
    }

    /// An unreferenced file need not be kept.
    pub fn settle(&mut self, file: u32) {
        if !self.in_use(file) {
            self.doomed.remove(&file);
        }
    }

    /// Drops a key, which record `lsn` records.
    pub fn drop_key(&mut self, key: (u32, u32), lsn: u64) {
        let block = self.keys.remove(&key).unwrap();
        if block.stored {
            self.dropped.insert(block.file, lsn);
        }
        if self.in_use(block.file) {
            self.doomed.insert(block.file, key.0);
        }
    }

    pub fn held(&self, namespace: u32) -> u32 {
        let keys = self.keys.keys().filter(|key| key.0 == namespace).count();
        let doomed = self.doomed.values().filter(|owner| **owner == namespace).count();
        (keys + doomed) as u32
    }
}
