//! Handles of callers. A store is of this process, or of a server to which it is connected.

use std::{mem::ManuallyDrop, sync::Arc};

use ripieno_stack::{KvPrefix, KvRequest, KvStore, Own};

use crate::{config::Owner, status::Failure};

/// A handle of a store in one namespace. Any number of threads may use it, and a store may have any
/// number of handles.
#[derive(Debug)]
pub struct Store(Own<Opened>);

/// Blocks found by a lookup. They are not evicted until the prefix is released.
#[derive(Debug)]
pub struct Prefix(Own<Box<dyn KvPrefix>>);

/// A retrieval or storing of blocks.
#[derive(Debug)]
pub struct Request(Own<Box<dyn KvRequest>>);

/// Target of a caller's pointer. Only the process uses it that made it.
pub(crate) trait Handle: From<Own<Self::Of>> + Into<Own<Self::Of>> {
    /// Type of the value.
    type Of;
    /// Returns the value.
    fn own(&self) -> &Own<Self::Of>;
}

macro_rules! handle {
    ($handle:ident, $of:ty) => {
        impl Handle for $handle {
            type Of = $of;
            fn own(&self) -> &Own<$of> {
                &self.0
            }
        }
        impl From<Own<$of>> for $handle {
            fn from(own: Own<$of>) -> Self {
                Self(own)
            }
        }
        impl From<$handle> for Own<$of> {
            fn from(handle: $handle) -> Self {
                handle.0
            }
        }
    };
}

handle!(Store, Opened);
handle!(Prefix, Box<dyn KvPrefix>);
handle!(Request, Box<dyn KvRequest>);

/// A store, in one namespace.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) store: Box<dyn KvStore>,
    /// Shared by the handles of a store. At a server, the engine's memory.
    pub(crate) memory: Arc<Option<Owner>>,
}

impl Opened {
    /// Returns a store of this process.
    pub(crate) fn own(&self) -> Result<&objstore::Store, Failure> {
        Ok(self.store.own()?)
    }

    /// Releases a handle. The last one closes the store.
    pub(crate) fn close(self) -> Result<(), Failure> {
        let Self { store, memory } = self;
        let Some(memory) = Arc::into_inner(memory) else { return Ok(()) };
        // It stays the server's if that does not say that it has ended.
        let memory = ManuallyDrop::new(memory);
        store.close()?;
        drop(ManuallyDrop::into_inner(memory));
        Ok(())
    }
}
