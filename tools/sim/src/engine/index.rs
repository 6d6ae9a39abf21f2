//! Index of a tier's blocks: a catalog of the store, without I/O.

use std::collections::HashMap;

use kv_catalog::{
    BlockKey, Catalog, CatalogConfig, Namespace, NamespaceId, PolicyKind, ReferenceId, WriteId,
};

#[derive(Debug)]
pub(super) struct Index {
    catalog: Catalog,
    space: NamespaceId,
    /// `None` if nobody asks for changes.
    watched: Option<Watched>,
}

/// Writes whose blocks are reported.
#[derive(Debug, Default)]
struct Watched {
    /// Keys of the writes in progress.
    writing: HashMap<WriteId, Vec<BlockKey>>,
    stored: Vec<BlockKey>,
}

const REGISTERED: &str = "the only namespace is registered";

/// Returns a catalog of one rank without journal and checksums, and its only namespace.
pub fn plain_catalog(files: u32, file_bytes: u64, policy: PolicyKind) -> (Catalog, NamespaceId) {
    let mut catalog = Catalog::new(CatalogConfig {
        files,
        file_bytes,
        ranks: 1,
        words_per_file: 0,
        namespaces_max: 1,
        journal: false,
        files_ahead: 0,
        seed: 1,
        policy,
        write_budget: None,
    });
    let space = catalog.namespace(&Namespace::default()).expect("the first of one");
    (catalog, space)
}

impl Index {
    pub(super) fn new(bytes: u64, block_bytes: u64, policy: PolicyKind) -> Self {
        let files = u32::try_from(bytes / block_bytes).unwrap_or(u32::MAX - 1);
        let (catalog, space) = plain_catalog(files, block_bytes, policy);
        Self { catalog, space, watched: None }
    }

    /// Returns the blocks that were stored or dropped since the last call, and whether they are
    /// present. They are collected from the first call on.
    pub(super) fn changes(&mut self) -> Vec<(BlockKey, bool)> {
        let stored = std::mem::take(&mut self.watched.get_or_insert_default().stored);
        let dropped = self.catalog.take_dropped().into_iter().map(|(_, key)| key);
        let changed: Vec<BlockKey> = stored.into_iter().chain(dropped).collect();
        changed.into_iter().map(|key| (key, self.find(&[key]) > 0)).collect()
    }

    /// Returns the number of leading blocks present.
    pub(super) fn find(&self, keys: &[BlockKey]) -> usize {
        self.catalog.lookup(self.space, keys).expect(REGISTERED)
    }

    /// Uses present blocks, and pins them until they are released.
    pub(super) fn hold(&mut self, keys: &[BlockKey]) -> ReferenceId {
        self.catalog.acquire(self.space, keys).expect(REGISTERED).id
    }

    pub(super) fn release(&mut self, held: ReferenceId) {
        self.catalog.release(held).expect("it is held");
    }

    /// Reserves room for blocks. Returns the number with room, and how many of those are new.
    pub(super) fn begin(&mut self, keys: &[BlockKey]) -> (WriteId, usize, usize) {
        let write = self.catalog.begin(self.space, keys).expect(REGISTERED);
        if let Some(watched) = &mut self.watched {
            let own = keys.iter().zip(&write.positions).filter(|(_, position)| position.own);
            watched.writing.insert(write.id, own.map(|(key, _)| *key).collect());
        }
        (write.id, write.positions.len(), write.own().count())
    }

    pub(super) fn abort(&mut self, write: WriteId) {
        self.catalog.abort(write).expect("it is a write");
        if let Some(watched) = &mut self.watched {
            watched.writing.remove(&write);
        }
    }

    /// Commits a complete write.
    pub(super) fn commit(&mut self, write: WriteId) {
        self.catalog.written(write, 0, &[]).expect("it is a write");
        self.catalog.commit(write).expect("all of it was written");
        if let Some(watched) = &mut self.watched {
            watched.stored.extend(watched.writing.remove(&write).unwrap_or_default());
        }
    }

    pub(super) fn remove(&mut self, keys: &[BlockKey]) {
        self.catalog.remove(self.space, keys).expect(REGISTERED);
    }
}
