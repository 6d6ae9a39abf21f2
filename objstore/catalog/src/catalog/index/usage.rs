//! Counts of files by state.

use serde::{Deserialize, Serialize};

use super::Index;
use crate::{
    catalog::CatalogError,
    file_pool::FilePool,
    ids::{FileId, NamespaceId},
    key::BlockKey,
};

/// A block that lookups find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredFile {
    /// The file.
    pub file: FileId,
    /// The namespace.
    pub namespace: NamespaceId,
    /// The key.
    pub key: BlockKey,
}

/// File counts of one namespace. As JSON they are a part of the server's protocol, without
/// `recent`, `idle`, `doomed` and `weight`, which are 0 for its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Usage {
    /// Files that lookups find.
    pub stored: u32,
    /// Stored and in use, or pinned: never evicted.
    pub active: u32,
    /// Stored, neither in use nor pinned.
    pub evictable: u32,
    /// Used again since they were stored: kept longer.
    #[serde(skip)]
    pub recent: u32,
    /// Not used again.
    #[serde(skip)]
    pub idle: u32,
    /// Files being written.
    pub writing: u32,
    /// Files dropped but still in use.
    #[serde(skip)]
    pub doomed: u32,
    /// Limit on the sum of these.
    pub quota_files: Option<u32>,
    /// Relative share when space is short.
    #[serde(skip)]
    pub weight: u32,
    /// Number of times a change of the model, adapter or salt dropped everything.
    pub epoch: u64,
    /// Blocks looked up since the catalog was made.
    pub asked: u64,
    /// Blocks found.
    pub hits: u64,
    /// Files written and committed.
    pub committed: u64,
    /// Files evicted.
    pub evicted: u64,
    /// Files refused: worth less than what would be evicted for them, or beyond the write budget.
    pub refused: u64,
}

/// File counts of the whole catalog. As JSON they are a part of the server's protocol, without
/// `free_runs` and `dropped`, which are 0 for its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CatalogCounts {
    /// Files in total.
    pub files: u32,
    /// Free files.
    pub free: u32,
    /// Runs of consecutive free files.
    #[serde(skip)]
    pub free_runs: u32,
    /// Dropped files that wait for the journal.
    pub limbo: u32,
    /// Files that lookups find.
    pub stored: u32,
    /// Stored and in use, or pinned.
    pub active: u32,
    /// Stored, and neither in use nor pinned.
    pub evictable: u32,
    /// Files being written.
    pub writing: u32,
    /// Files evicted since the catalog was made.
    pub evicted: u64,
    /// Files without a key that are not free yet: in use, of a namespace just cleared, or being
    /// deallocated.
    #[serde(skip)]
    pub dropped: u32,
}

impl Index {
    pub fn usage(&self, namespace: NamespaceId) -> Result<Usage, CatalogError> {
        let tenant = self.tenants.get(namespace)?;
        let space = &self.tenants.spaces[tenant.space as usize];
        let tiers = self.policy.tiers(self.tenants.slot(namespace));
        Ok(Usage {
            stored: space.stored,
            active: space.active,
            evictable: space.evictable(),
            recent: tiers.recent,
            idle: tiers.idle,
            writing: space.writing,
            doomed: self.tenants.held(namespace) - space.stored - space.writing,
            quota_files: tenant.quota,
            weight: tenant.weight,
            epoch: tenant.epoch,
            asked: tenant.asked,
            hits: tenant.hits,
            committed: tenant.committed,
            evicted: tenant.evicted,
            refused: tenant.refused,
        })
    }

    pub fn stored_from(&self, first: FileId) -> impl Iterator<Item = StoredFile> {
        let rest = self.entries.get(first.at()..).unwrap_or_default();
        (first.0..).map(FileId).zip(rest).filter(|(file, _)| self.is_stored(*file)).map(
            |(file, entry)| {
                let namespace = self.namespace_of(file);
                StoredFile { file, namespace, key: entry.key }
            },
        )
    }

    /// Returns the counts of all namespaces together, in a store with `limbo` files in limbo.
    pub fn counts(&self, pool: &FilePool, limbo: u32) -> CatalogCounts {
        let mut counts = CatalogCounts {
            files: self.files(),
            free: pool.free_files(),
            free_runs: pool.runs() as u32,
            limbo,
            evicted: self.tenants.evicted,
            ..CatalogCounts::default()
        };
        for tenant in &self.tenants.all {
            let space = &self.tenants.spaces[tenant.space as usize];
            counts.stored += space.stored;
            counts.active += space.active;
            counts.evictable += space.evictable();
            counts.writing += space.writing;
        }
        let seen = counts.free + counts.limbo + counts.stored + counts.writing;
        counts.dropped = counts.files - seen;
        counts
    }
}
