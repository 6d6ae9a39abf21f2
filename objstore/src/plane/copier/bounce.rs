//! Bounce buffers for engine memory that the devices cannot describe.
//!
//! A drive whose SGLs or PRPs have dword granularity cannot reach an object at an odd address. Such
//! memory is not registered; a smaller pool of bounce buffers is ([`KvPool::bounced`]). A job takes
//! some of its blocks, and the CPU copies each layer before it is stored, or after it was read.

#![allow(unsafe_code, reason = "copies between an engine's memory and that of the devices")]

use std::ptr::NonNull;

use kv_catalog::{BlockId, KvShape, Layer, Row};
use nvme_spec::nvm::Direction;

use super::copies::Pairs;
use crate::{error::StoreError, ids::Move, registration::KvPool};

/// The bounce buffers of a pool.
#[derive(Debug)]
pub(super) struct Bounce {
    pool: KvPool,
    free: Vec<BlockId>,
}

impl Bounce {
    /// Returns `None` if the pool is the engine's memory itself.
    pub(super) fn new(pool: &KvPool) -> Option<Self> {
        let free = (0..pool.blocks()).map(BlockId).collect();
        pool.is_bounced().then(|| Self { pool: pool.clone(), free })
    }

    /// Takes a bounce buffer for each of the engine's blocks, and names it in the move instead.
    pub(super) fn take(&mut self, moves: &mut [Move]) -> Result<Pairs, StoreError> {
        let (wanted, free) = (moves.len(), self.free.len());
        let Some(left) = free.checked_sub(wanted) else {
            let all = self.pool.blocks() as usize;
            return Err(StoreError::Bounce { wanted, free, all });
        };
        let blocks: Vec<_> = moves.iter().copied().zip(self.free.split_off(left)).collect();
        moves.iter_mut().zip(&blocks).for_each(|(entry, (_, buffer))| entry.block = *buffer);
        Ok(Pairs { blocks, ..Pairs::default() })
    }

    /// Takes the buffers of an ended job back.
    pub(super) fn give_back(&mut self, through: &Pairs) {
        self.free.extend(through.blocks.iter().map(|(_, buffer)| *buffer));
    }

    /// Copies a layer between the engine's memory and a job's buffers.
    pub(super) fn copy(
        &self,
        through: &Pairs,
        direction: Direction,
        shape: &KvShape,
        layer: Layer,
    ) {
        let Some(engine) = self.pool.engine() else { return };
        for row in shape.layer_rows(layer).map(Row) {
            for (entry, buffer) in &through.blocks {
                let objects = engine.object(entry.block, row).zip(self.buffer(*buffer, row));
                let Some((engine, buffer)) = objects else { continue };
                let (from, to) = match direction {
                    Direction::Write => (engine, buffer),
                    Direction::Read => (buffer, engine),
                };
                let bytes = shape.object_bytes as usize;
                // SAFETY: both have that many bytes, and are two allocations. The engine does not
                // use the blocks of a request, and no device uses the buffers now.
                unsafe { to.copy_from_nonoverlapping(from, bytes) };
            }
        }
    }

    fn buffer(&self, block: BlockId, row: Row) -> Option<NonNull<u8>> {
        let offset = self.pool.offset(block, row)?;
        // SAFETY: the pool was registered: its objects are inside its memory.
        Some(unsafe { self.pool.memory().host()?.add(offset as usize) })
    }
}
