//! What is where, in files.

use super::{Catalog, CatalogError};
use crate::{
    ids::{FileId, NamespaceId},
    key::BlockKey,
};

/// A block that lookups find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredFile {
    /// Where it is.
    pub file: FileId,
    /// Whose it is.
    pub namespace: NamespaceId,
    /// What it is.
    pub key: BlockKey,
}

/// What one namespace has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Files that lookups find.
    pub stored: u32,
    /// Of these, in use: never evicted.
    pub active: u32,
    /// Of these, pinned: never evicted.
    pub pinned: u32,
    /// Of these, neither in use nor pinned.
    pub evictable: u32,
    /// Of those that are not pinned, used again since they were stored: kept longer.
    pub recent: u32,
    /// Of those that are not pinned, the others.
    pub idle: u32,
    /// Being written.
    pub writing: u32,
    /// Dropped, but still in use.
    pub doomed: u32,
    /// Most files it may have in all of these.
    pub quota_files: Option<u32>,
    /// Its share when space is short.
    pub weight: u32,
    /// Dropped all at once this often by a change of the model, adapter or salt.
    pub epoch: u64,
    /// Blocks asked for since the catalog was made.
    pub asked: u64,
    /// Blocks found.
    pub hits: u64,
    /// Files written and committed.
    pub committed: u64,
    /// Files evicted.
    pub evicted: u64,
    /// Files refused because the write budget was used up.
    pub refused: u64,
}

/// What the whole catalog has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CatalogCounts {
    /// Files in all.
    pub files: u32,
    /// Free.
    pub free: u32,
    /// Runs that the free files form.
    pub free_runs: u32,
    /// Dropped, and waiting for the journal.
    pub limbo: u32,
    /// That lookups find.
    pub stored: u32,
    /// Of these, published and not committed.
    pub published: u32,
    /// Stored and in use.
    pub active: u32,
    /// Stored and pinned.
    pub pinned: u32,
    /// Stored, and neither in use nor pinned.
    pub evictable: u32,
    /// Being written.
    pub writing: u32,
    /// Evicted since the catalog was made.
    pub evicted: u64,
    /// Without a key, and not free yet: in use, of a namespace that was cleared just now, or being
    /// deallocated.
    pub dropped: u32,
}

impl Catalog {
    /// What a namespace has.
    ///
    /// # Errors
    /// [`CatalogError::Namespace`].
    pub fn usage(&self, namespace: NamespaceId) -> Result<Usage, CatalogError> {
        let tenant = self.tenant(namespace)?;
        let space = &self.spaces[tenant.space as usize];
        let tiers = self.policy.tiers(namespace.0);
        Ok(Usage {
            stored: space.stored,
            active: space.active,
            pinned: space.pinned,
            evictable: space.evictable,
            recent: tiers.recent,
            idle: tiers.idle,
            writing: space.writing,
            doomed: self.held(namespace) - space.stored - space.writing,
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

    /// The files with number `first` or higher that lookups find, in the order of their numbers.
    pub fn stored_from(&self, first: FileId) -> impl Iterator<Item = StoredFile> + '_ {
        let rest = self.entries.get(first.at()..).unwrap_or_default();
        (first.0..).map(FileId).zip(rest).filter(|(file, _)| self.is_stored(*file)).map(
            |(file, entry)| {
                let namespace = NamespaceId(self.spaces[entry.space as usize].namespace);
                StoredFile { file, namespace, key: entry.key }
            },
        )
    }

    /// What all namespaces have together.
    #[must_use]
    pub fn counts(&self) -> CatalogCounts {
        let mut counts = CatalogCounts {
            files: self.config.files,
            free: self.pool.free_files(),
            free_runs: self.pool.runs() as u32,
            limbo: self.log.limbo(),
            ..CatalogCounts::default()
        };
        for tenant in &self.namespaces {
            let space = &self.spaces[tenant.space as usize];
            counts.stored += space.stored;
            counts.published += space.published;
            counts.active += space.active;
            counts.pinned += space.pinned;
            counts.evictable += space.evictable;
            counts.writing += space.writing;
            counts.evicted += tenant.evicted;
        }
        let seen = counts.free + counts.limbo + counts.stored + counts.writing;
        counts.dropped = counts.files - seen;
        counts
    }
}
