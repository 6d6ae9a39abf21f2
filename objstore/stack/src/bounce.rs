//! Bounce buffers for engine memory that the devices cannot describe.
//!
//! A drive whose SGLs or PRPs have dword granularity cannot reach an object at an odd address. Such
//! a pool is not registered; a smaller pool of bounce buffers is. A request takes some of its
//! blocks, and the CPU copies each layer before it is stored, or after it was retrieved.

#![allow(unsafe_code, reason = "copies between an engine's memory and that of the devices")]

use std::{
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
};

use nvme_spec::nvm::Direction;
use objstore::{BlockId, KvPool, KvShape, Layer, Row};

use crate::{
    error::StackError,
    pool::{EngineMemory, PoolLayout},
};

/// Maximum bytes of bounce buffers; but at least one block.
const BYTES_MAX: u64 = 64 << 20;

/// Returns the number of bounce buffers for a pool of `blocks` blocks.
pub(crate) fn blocks(shape: &KvShape, blocks: u32) -> u32 {
    let room = (BYTES_MAX / shape.block_bytes()).max(1);
    u32::try_from(room).unwrap_or(u32::MAX).min(blocks)
}

/// The engine's memory, and its bounce buffers.
#[derive(Debug)]
pub(crate) struct Bounce {
    memory: EngineMemory,
    layout: PoolLayout,
    /// The bounce buffers, registered with the devices.
    pool: KvPool,
    shape: KvShape,
    free: Mutex<Vec<BlockId>>,
}

impl Bounce {
    pub(crate) fn new(
        memory: EngineMemory,
        layout: PoolLayout,
        pool: KvPool,
        shape: KvShape,
    ) -> Arc<Self> {
        let free = Mutex::new((0..pool.blocks()).map(BlockId).collect());
        Arc::new(Self { memory, layout, pool, shape, free })
    }

    /// Takes a bounce buffer for each of the engine's `blocks`.
    ///
    /// # Errors
    /// Returns [`StackError::Bounce`] if too few are free.
    pub(crate) fn take(self: &Arc<Self>, blocks: &[BlockId]) -> Result<Bounced, StackError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(left) = free.len().checked_sub(blocks.len()) else {
            let (free, all) = (free.len(), self.pool.blocks() as usize);
            return Err(StackError::Bounce { wanted: blocks.len(), free, all });
        };
        let buffers = free.split_off(left);
        Ok(Bounced { bounce: self.clone(), blocks: blocks.to_vec(), buffers })
    }

    /// Returns the address of an engine's object; `None` if the block does not exist.
    fn engine(&self, block: BlockId, row: Row) -> Option<NonNull<u8>> {
        let layout = &self.layout;
        let row = layout.rows.get(row.0 as usize).filter(|_| block.0 < layout.blocks)?;
        let offset = row + u64::from(block.0) * layout.block_stride;
        let end = offset.checked_add(u64::from(self.shape.object_bytes))?;
        // SAFETY: inside the memory that the contract of `EngineMemory::new` covers.
        (end <= self.memory.bytes() as u64)
            .then(|| unsafe { self.memory.base().add(offset as usize) })
    }

    fn buffer(&self, block: BlockId, row: Row) -> Option<NonNull<u8>> {
        let base = self.pool.memory().host()?;
        let offset = self.pool.offset(block, row)?;
        // SAFETY: the pool was registered: its objects are inside its memory.
        Some(unsafe { base.add(offset as usize) })
    }
}

/// The bounce buffers of a request, returned on drop. Drop it only when nothing is in flight.
#[derive(Debug)]
pub(crate) struct Bounced {
    bounce: Arc<Bounce>,
    /// The engine's blocks.
    blocks: Vec<BlockId>,
    buffers: Vec<BlockId>,
}

impl Bounced {
    /// Returns the blocks that the devices read and write instead of the engine's.
    pub(crate) fn buffers(&self) -> &[BlockId] {
        &self.buffers
    }

    /// Copies a layer between the engine's memory and the buffers.
    pub(crate) fn copy(&self, layer: Layer, direction: Direction) {
        let Self { bounce, blocks, buffers } = self;
        let bytes = bounce.shape.object_bytes as usize;
        for row in bounce.shape.layer_rows(layer).map(Row) {
            for (block, buffer) in blocks.iter().zip(buffers) {
                let objects = bounce.engine(*block, row).zip(bounce.buffer(*buffer, row));
                let Some((engine, buffer)) = objects else { continue };
                let (from, to) = match direction {
                    Direction::Write => (engine, buffer),
                    Direction::Read => (buffer, engine),
                };
                // SAFETY: both have that many bytes (above), and are two allocations. The engine
                // does not use the blocks of a request, and no device uses the buffers now.
                unsafe { to.copy_from_nonoverlapping(from, bytes) };
            }
        }
    }
}

impl Drop for Bounced {
    fn drop(&mut self) {
        let mut free = self.bounce.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.append(&mut self.buffers);
    }
}
