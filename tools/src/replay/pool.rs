//! The engine's KV pool: one tensor for each layer and segment, in memory that devices reach.
//!
//! Where that memory is, and so who makes and compares the bytes in it, is behind [`Hand`].

mod cpu;
mod gpu;

use std::fmt;

use gio_kernels::pattern::{Difference, Pattern};
use objstore::{BlockId, BlockKey, Order, Store, StoreError, Ticket};
use rand::seq::SliceRandom as _;
use rand::{SeedableRng, rngs::StdRng};

use crate::contents;
use crate::model::Shape;

pub(crate) use cpu::CpuHand;
pub(crate) use gpu::GpuHand;

/// A part of an object: offset and length in bytes.
pub(crate) type Part = (usize, usize);

/// A part of an object, and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Item {
    /// Its first byte in the pool.
    pub(crate) at: u64,
    /// What the object holds.
    pub(crate) contents: Pattern,
    /// Bytes from the object's beginning.
    pub(crate) offset: u32,
    /// Length in bytes.
    pub(crate) len: u32,
}

/// Called now and then during long work.
pub(crate) type Look<'a> = &'a mut dyn FnMut();

/// Makes, overwrites and compares bytes of the pool: a batch at a time, in the order it was asked.
///
/// No transfer may be using an item's block, but for [`Hand::check`].
pub(crate) trait Hand: fmt::Debug + Send {
    /// Makes the contents of objects, as a layer of the engine's model would.
    fn make(&mut self, items: &[Item], look: Look<'_>) -> anyhow::Result<()>;

    /// Overwrites parts with bytes that are wrong for every block.
    fn poison(&mut self, items: &[Item], look: Look<'_>) -> anyhow::Result<()>;

    /// Where in that order a transfer takes its place.
    fn order(&self) -> Order<'static>;

    /// What is asked for from now on comes after the transfer.
    fn join(&mut self, store: &mut Store, ticket: &Ticket) -> Result<(), StoreError>;

    /// Announces that parts are going to be compared.
    fn check(&mut self, items: Vec<Item>) -> anyhow::Result<Box<dyn Check>>;
}

/// A comparison that was announced.
pub(crate) trait Check {
    /// Which items differ, ascending, and where. To be asked when their transfer is done.
    fn differences(self: Box<Self>, look: Look<'_>) -> anyhow::Result<Vec<(usize, Difference)>>;
}

/// Blocks of KV cache memory, handed out in shuffled order, as after a long time of serving.
#[derive(Debug)]
pub(crate) struct Pool {
    hand: Box<dyn Hand>,
    shape: Shape,
    /// All blocks, in the order they are handed out.
    order: Vec<BlockId>,
    next: usize,
}

impl Pool {
    /// Bytes of a pool of `blocks` blocks.
    pub(crate) fn bytes(shape: &Shape, blocks: u32) -> u64 {
        shape.block_bytes() * u64::from(blocks)
    }

    /// Where in the pool the tensor of each row begins: they lie one after another.
    pub(crate) fn rows(shape: &Shape, blocks: u32) -> Vec<u64> {
        let tensor = u64::from(shape.object_bytes) * u64::from(blocks);
        (0..u64::from(shape.rows())).map(|row| row * tensor).collect()
    }

    /// A pool whose bytes `hand` reaches, with its blocks in shuffled order.
    pub(crate) fn new(hand: Box<dyn Hand>, shape: Shape, blocks: u32, seed: u64) -> Self {
        let mut order: Vec<BlockId> = (0..blocks).map(BlockId).collect();
        order.shuffle(&mut StdRng::seed_from_u64(seed));
        Self { hand, shape, order, next: 0 }
    }

    /// Number of blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.order.len()
    }

    /// The next `count` blocks. Whoever had them before has to be done with them.
    pub(crate) fn take(&mut self, count: usize) -> Vec<BlockId> {
        assert!(count <= self.order.len(), "{count} blocks of a pool of {}", self.order.len());
        let (before, after) = self.order.split_at(self.next);
        let blocks = after.iter().chain(before).take(count).copied().collect();
        self.next = (self.next + count) % self.order.len();
        blocks
    }

    /// Who reaches the bytes.
    pub(crate) fn hand(&mut self) -> &mut dyn Hand {
        &mut *self.hand
    }

    /// A part of the object that `block` has in this layer and segment, for the block `key`.
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
        let contents = contents::of(key.0, layer, segment);
        Item { at, contents, offset: offset as u32, len: len as u32 }
    }
}

#[cfg(test)]
mod tests;
