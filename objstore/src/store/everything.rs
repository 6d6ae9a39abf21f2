//! All that a store holds, whoever's it is: for tools that look after the whole of it. An engine
//! stays in its own namespaces.

use kv_catalog::{FileId, JournalError, NamespaceId, StoredFile};

use super::{Prefix, Store, lock};
use crate::error::StoreError;

impl Store {
    /// The numbers and labels of all namespaces.
    #[must_use]
    pub fn namespaces(&self) -> Vec<(NamespaceId, String)> {
        let keys = self.inner.keys();
        keys.catalog.namespaces().map(|(id, label, _)| (id, label.to_owned())).collect()
    }

    /// Up to `max` files with number `first` or higher that lookups find now, in the order of their
    /// numbers, which is that of their places on the devices.
    #[must_use]
    pub fn stored_from(&self, first: FileId, max: usize) -> Vec<StoredFile> {
        self.inner.keys().catalog.stored_from(first).take(max).collect()
    }

    /// Reads the journal again: the device may have changed bytes of it since it was opened, which
    /// the next opening would end at. Returns what is wrong with it; `None` if nothing is. With
    /// `repair`, all that the store holds is written into the other half of the journal then, so
    /// that it opens again. Commits wait meanwhile.
    ///
    /// # Errors
    /// [`StoreError::JournalFailed`] when that cannot be written, [`StoreError::Failed`].
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

    /// Those of `files` that lookups find, as a prefix to be retrieved. No use of them: they are
    /// evicted as if nobody had asked for them, and no lookup is counted.
    ///
    /// # Errors
    /// [`StoreError::Failed`].
    pub fn hold(&self, files: &[FileId]) -> Result<Prefix, StoreError> {
        let mut keys = self.inner.keys();
        keys.check()?;
        let reference = keys.catalog.hold(files);
        Ok(Prefix { store: self.inner.clone(), reference })
    }
}
