//! Memory of an engine that is copied through bounce buffers, because no device describes it.

#![allow(unsafe_code, reason = "addresses in memory that an engine owns")]

use std::{any::Any, fmt, ptr::NonNull, sync::Arc};

use kv_catalog::{BlockId, KvShape, Row};
use nvme_driver::{DmaError, ExternalMemory};

use crate::error::RegistrationError;

/// An engine's memory and its layout.
pub(crate) struct EngineMemory {
    base: NonNull<u8>,
    rows: Vec<u64>,
    block_stride: u64,
    blocks: u32,
    _owner: Arc<dyn Any + Send + Sync>,
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
    pub(crate) fn new(
        memory: ExternalMemory,
        shape: &KvShape,
        rows: Vec<u64>,
        block_stride: u64,
        blocks: u32,
    ) -> Result<Self, RegistrationError> {
        let (base, _, total, owner) = memory.into_parts();
        let base = base.ok_or(RegistrationError::NoHostAddress { what: "the pool" })?;
        let object = u64::from(shape.object_bytes);
        for (row, first) in rows.iter().enumerate() {
            let gap = u64::from(blocks.saturating_sub(1)).saturating_mul(block_stride);
            if first.saturating_add(gap).saturating_add(object) > total as u64 {
                let offset = usize::try_from(*first).unwrap_or(usize::MAX);
                let length = usize::try_from(gap.saturating_add(object)).unwrap_or(usize::MAX);
                let source = DmaError::OutOfRange { offset, len: length, total };
                return Err(RegistrationError::Row { row, offset, length, source });
            }
        }
        Ok(Self { base, rows, block_stride, blocks, _owner: owner })
    }

    pub(crate) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Returns the address of an object; `None` if the block or row does not exist.
    pub(crate) fn object(&self, block: BlockId, row: Row) -> Option<NonNull<u8>> {
        let row = self.rows.get(row.0 as usize).filter(|_| block.0 < self.blocks)?;
        let offset = row + u64::from(block.0) * self.block_stride;
        // SAFETY: inside the memory (`new`), which the contract of `ExternalMemory::new` covers.
        Some(unsafe { self.base.add(offset as usize) })
    }
}
