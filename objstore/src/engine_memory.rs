//! Memory of an engine that is copied through bounce buffers, because no device describes it.

#![allow(unsafe_code, reason = "addresses in memory that an engine owns")]

use std::{any::Any, fmt, ptr::NonNull, sync::Arc};

use kv_catalog::{BlockId, Row};

use crate::pool_layout::PoolLayout;

/// An engine's memory, and its layout, of which every object is inside the memory.
pub(crate) struct EngineMemory {
    pub(crate) base: NonNull<u8>,
    pub(crate) layout: PoolLayout,
    pub(crate) _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: a plain address; the owner is Send + Sync.
unsafe impl Send for EngineMemory {}
// SAFETY: as above; the memory is accessed only by raw copies, which the plane serializes.
unsafe impl Sync for EngineMemory {}

impl fmt::Debug for EngineMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineMemory").field("base", &self.base).finish_non_exhaustive()
    }
}

impl EngineMemory {
    /// Returns the address of an object; `None` if the block or row does not exist.
    pub(crate) fn object(&self, block: BlockId, row: Row) -> Option<NonNull<u8>> {
        let offset = self.layout.offset(block, row)?;
        // SAFETY: inside the memory (`KvPool::bounced` checked it), which the contract of
        // `ExternalMemory::new` covers.
        Some(unsafe { self.base.add(offset as usize) })
    }
}
