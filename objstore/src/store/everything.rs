//! All that a store holds, whoever's it is: for tools that look after the whole of it. An engine
//! stays in its own namespaces.

use kv_catalog::{FileId, NamespaceId, StoredFile};

use super::{Prefix, Store};
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
