//! The engine's KV pool: one tensor for each layer and segment, in memory that devices reach.
//!
//! [`PoolAccess`] hides where that memory is and whether the CPU or the GPU fills and compares it.

mod access;
mod cpu;
mod gpu;

use objstore::{BlockId, BlockKey};
use rand::seq::SliceRandom as _;
use rand::{SeedableRng, rngs::StdRng};

use crate::contents;
use crate::model::Shape;

pub(crate) use access::{Check, Item, PARTS_MAX, Part, PoolAccess};
pub(crate) use cpu::CpuAccess;
pub(crate) use gpu::GpuAccess;

/// Layers of one request in flight at the same time: as in an engine, the next layers move while
/// the current one is computed.
pub(crate) const LAYERS_AHEAD: usize = 8;

/// Blocks of KV cache memory, handed out in shuffled order, as after a long time of serving.
#[derive(Debug)]
pub(crate) struct Pool {
    access: Box<dyn PoolAccess>,
    shape: Shape,
    /// All blocks, in allocation order.
    order: Vec<BlockId>,
    next: usize,
}

impl Pool {
    /// Returns a pool that `access` reaches, with its blocks in shuffled order.
    pub(crate) fn new(access: Box<dyn PoolAccess>, shape: Shape, blocks: u32, seed: u64) -> Self {
        let mut order: Vec<BlockId> = (0..blocks).map(BlockId).collect();
        order.shuffle(&mut StdRng::seed_from_u64(seed));
        Self { access, shape, order, next: 0 }
    }

    /// Returns the number of blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.order.len()
    }

    /// Returns the next `count` blocks. Their previous users must be done with them.
    pub(crate) fn take(&mut self, count: usize) -> Vec<BlockId> {
        assert!(count <= self.order.len(), "{count} blocks of a pool of {}", self.order.len());
        let (before, after) = self.order.split_at(self.next);
        let blocks = after.iter().chain(before).take(count).copied().collect();
        self.next = (self.next + count) % self.order.len();
        blocks
    }

    /// Returns the access to the bytes.
    pub(crate) fn access(&mut self) -> &mut dyn PoolAccess {
        &mut *self.access
    }

    /// Returns a part of an object: that of the block `key`, in the pool's `block`.
    pub(crate) fn item(
        &self,
        block: BlockId,
        key: BlockKey,
        (layer, segment): (u32, u32),
        (offset, len): Part,
    ) -> Item {
        let (blocks, object) = (self.order.len() as u64, self.shape.object_bytes as usize);
        assert!(u64::from(block.0) < blocks, "block {block} of a pool of {blocks}");
        assert!(layer < self.shape.layers && segment < self.shape.segments);
        assert!(offset + len <= object, "bytes {offset}+{len} of an object of {object}");
        let row = u64::from(layer * self.shape.segments + segment);
        let at = (row * blocks + u64::from(block.0)) * object as u64 + offset as u64;
        let contents = contents::of(key.seed(), layer, segment);
        Item { at, contents, offset: offset as u32, len: len as u32 }
    }
}

#[cfg(test)]
mod tests;
