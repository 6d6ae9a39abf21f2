//! All that a store holds, whoever's it is: for tools that look after the whole of it. An engine
//! stays in its own namespaces.

use kv_catalog::{FileId, NamespaceId, StoredFile};

use super::Store;
use crate::error::StoreError;

impl Store {
    /// The numbers and labels of all namespaces.
    #[must_use]
    pub fn namespaces(&self) -> Vec<(NamespaceId, String)> {
        let keys = self.inner.keys();
        keys.catalog.namespaces().map(|(id, label, _)| (id, label.to_owned())).collect()
    }

    /// A handle that works in a namespace that was registered before.
    ///
    /// # Errors
    /// [`StoreError::Catalog`] when there is none of this number.
    pub fn within_number(&self, namespace: NamespaceId) -> Result<Self, StoreError> {
        self.inner.keys().catalog.usage(namespace)?;
        Ok(Self { inner: self.inner.clone(), namespace })
    }

    /// Up to `max` files with number `first` or higher that lookups find now, in the order of their
    /// numbers, which is that of their places on the devices.
    #[must_use]
    pub fn stored_from(&self, first: FileId, max: usize) -> Vec<StoredFile> {
        self.inner.keys().catalog.stored_from(first).take(max).collect()
    }
}
