//! Access to all namespaces of a store, for tools that maintain the whole of it. An engine stays in
//! its own namespaces.

use kv_catalog::{FileId, JournalError, NamespaceId, StoredFile};

use super::{Prefix, Store, lock};
use crate::error::StoreError;

impl Store {
    /// Returns the numbers and labels of all namespaces.
    #[must_use]
    pub fn namespaces(&self) -> Vec<(NamespaceId, String)> {
        let keys = self.inner.keys();
        keys.catalog.namespaces().map(|(id, label, _)| (id, label.to_owned())).collect()
    }

    /// Returns up to `max` stored files with number `first` or higher, in the order of their
    /// numbers, which is the order of their positions on the devices.
    #[must_use]
    pub fn stored_from(&self, first: FileId, max: usize) -> Vec<StoredFile> {
        self.inner.keys().catalog.stored_from(first).take(max).collect()
    }

    /// Reads the journal again to find bytes that the device has changed since it was opened, at
    /// which the next opening would stop. Returns the damage; `None` if there is none. If there is
    /// and `repair` is set, the whole state is written into the other half of the journal, so that
    /// it opens again. Commits wait meanwhile.
    ///
    /// # Errors
    /// Returns [`StoreError::JournalFailed`] if the repair fails, or [`StoreError::Failed`].
    pub fn verify_journal(&self, repair: bool) -> Result<Option<JournalError>, StoreError> {
        self.inner.keys().check()?;
        let mut commits = lock(&self.inner.commits);
        let Err(damage) = commits.journal.verify() else { return Ok(None) };
        tracing::error!(%damage, repair, "the journal is damaged");
        if repair {
            self.inner.keys().check_writable()?;
            let renewed = commits.journal.renew(|act| act(&mut self.inner.keys().catalog));
            renewed.map_err(|error| {
                let cause = self.inner.read_only(error.to_string());
                StoreError::JournalFailed { cause }
            })?;
        }
        Ok(Some(damage))
    }

    /// Returns those of `files` that are stored, as a prefix to be retrieved. It does not count as
    /// a use or a lookup: eviction order is unchanged.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`].
    pub fn hold(&self, files: &[FileId]) -> Result<Prefix, StoreError> {
        let mut keys = self.inner.keys();
        keys.check()?;
        let reference = keys.catalog.hold(files);
        Ok(Prefix { store: self.inner.clone(), reference })
    }
}
