//! The engine's KV pool: one tensor for each layer and segment, in memory that devices reach.

#![allow(
    unsafe_code,
    reason = "the pool is memory that devices write, reached by address and not by reference"
)]

use std::ptr::NonNull;

use anyhow::Context as _;
use nvme_driver::DmaSlice;
use objstore::{BlockId, BlockKey, KvPool, RegistrationError};
use rand::seq::SliceRandom as _;
use rand::{SeedableRng, rngs::StdRng};

use crate::contents::{self, Contents, Difference};
use crate::model::Shape;
use crate::replay::room::kv_shape;

/// Blocks of KV cache memory, handed out in shuffled order, as after a long time of serving.
#[derive(Debug)]
pub(crate) struct Pool {
    memory: DmaSlice,
    base: NonNull<u8>,
    shape: Shape,
    /// All blocks, in the order they are handed out.
    order: Vec<BlockId>,
    next: usize,
}

/// A part of an object: offset and length in bytes.
pub(crate) type Part = (usize, usize);

impl Pool {
    /// Bytes of a pool of `blocks` blocks.
    pub(crate) fn bytes(shape: &Shape, blocks: u32) -> u64 {
        shape.block_bytes() * u64::from(blocks)
    }

    /// Makes a pool in `memory` of at least [`Pool::bytes`] and shuffles its blocks.
    ///
    /// # Errors
    /// When the CPU does not reach the memory.
    pub(crate) fn new(
        memory: DmaSlice,
        shape: Shape,
        blocks: u32,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let base = memory.host().context("the KV pool is not reachable for the CPU")?;
        let bytes = Self::bytes(&shape, blocks);
        assert!(memory.len() as u64 >= bytes, "{} bytes needed, {} given", bytes, memory.len());
        let mut order: Vec<BlockId> = (0..blocks).map(BlockId).collect();
        order.shuffle(&mut StdRng::seed_from_u64(seed));
        Ok(Self { memory, base, shape, order, next: 0 })
    }

    /// Registers the pool with a store: a tensor for each row, one after another.
    ///
    /// # Errors
    /// When the memory is not contiguous for the devices.
    pub(crate) fn register(&self) -> Result<KvPool, RegistrationError> {
        let stride = u64::from(self.shape.object_bytes);
        let blocks = self.order.len() as u32;
        let tensor = stride * u64::from(blocks);
        let first = self.memory.offset() as u64;
        let rows = (0..u64::from(self.shape.rows())).map(|row| first + row * tensor).collect();
        let memory = self.memory.memory().clone();
        KvPool::new(memory, &kv_shape(&self.shape), rows, stride, blocks)
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

    /// Makes the contents of one object, as the engine's layer would.
    ///
    /// No transfer may be using the block.
    pub(crate) fn make(&mut self, block: BlockId, key: BlockKey, layer: u32, segment: u32) {
        let at = self.object(block, layer, segment);
        let contents = Contents::of(key.0, layer, segment);
        // SAFETY: `object` gives `object_bytes` bytes of the pool; `&mut self` is the only way to
        // them on this side, and the engine waits for a block's transfers before it calls this.
        unsafe { contents.write(at, 0, self.shape.object_bytes as usize) };
    }

    /// Overwrites a part of an object with bytes that are wrong for every block.
    ///
    /// No transfer may be using the block.
    pub(crate) fn poison(&mut self, block: BlockId, layer: u32, segment: u32, part: Part) {
        let at = self.part(block, layer, segment, part);
        // SAFETY: as in `make`; `part` checked the bounds.
        unsafe { contents::poison(at, part.1) };
    }

    /// Compares a part of an object with what the block `key` should have there.
    ///
    /// No transfer may be using the block.
    pub(crate) fn check(
        &self,
        block: BlockId,
        key: BlockKey,
        layer: u32,
        segment: u32,
        part: Part,
    ) -> Result<(), Difference> {
        let at = self.part(block, layer, segment, part);
        // SAFETY: as in `make`; nobody writes while the engine looks.
        unsafe { Contents::of(key.0, layer, segment).check(at, part.0, part.1) }
    }

    fn part(&self, block: BlockId, layer: u32, segment: u32, (offset, len): Part) -> NonNull<u8> {
        let object = self.shape.object_bytes as usize;
        assert!(offset + len <= object, "bytes {offset}+{len} of an object of {object}");
        let at = self.object(block, layer, segment);
        // SAFETY: the assertion above keeps it inside the object.
        unsafe { at.add(offset) }
    }

    /// The first byte of an object.
    fn object(&self, block: BlockId, layer: u32, segment: u32) -> NonNull<u8> {
        let blocks = self.order.len();
        assert!((block.0 as usize) < blocks, "block {block} of a pool of {blocks}");
        assert!(layer < self.shape.layers && segment < self.shape.segments);
        let row = (layer * self.shape.segments + segment) as usize;
        let offset = (row * blocks + block.0 as usize) * self.shape.object_bytes as usize;
        // SAFETY: row and block are within the pool, so all of the object is, as `new` asserted;
        // `memory` keeps it allocated.
        unsafe { self.base.add(offset) }
    }
}

// SAFETY: `base` is an address inside `memory`, which is Send + Sync; only the pool accesses it.
unsafe impl Send for Pool {}

#[cfg(test)]
mod tests {
    use nvme_driver::DmaSpace as _;
    use nvme_emu::EmuDomain;

    use super::*;
    use crate::model::MODELS;

    fn pool(blocks: u32) -> Pool {
        let shape = Shape::new(&MODELS[0], 64).unwrap();
        let bytes = Pool::bytes(&shape, blocks) as usize;
        let memory = EmuDomain::new("test").alloc(bytes).unwrap();
        Pool::new(DmaSlice::whole(memory).unwrap(), shape, blocks, 3).unwrap()
    }

    #[test]
    fn blocks_are_handed_out_scattered_and_all_of_them() {
        let mut pool = pool(64);
        let first = pool.take(64);
        let mut sorted = first.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..64).map(BlockId).collect::<Vec<_>>());
        let neighbours = first.windows(2).filter(|pair| pair[1].0 == pair[0].0 + 1).count();
        assert!(neighbours < 8, "{neighbours} of 63 neighbours");
        let (some, others) = (pool.take(40), pool.take(24));
        assert!(others.iter().all(|block| !some.contains(block)));
        assert_eq!(pool.take(0), []);
    }

    #[test]
    fn objects_do_not_overlap() {
        let mut pool = pool(5);
        let rows = || (0..2).flat_map(|layer| (0..2).map(move |segment| (layer, segment)));
        let key = |block: u32| BlockKey(u128::from(block) << 70 | 1);
        for block in 0..5 {
            for (layer, segment) in rows() {
                pool.make(BlockId(block), key(block), layer, segment);
            }
        }
        pool.poison(BlockId(2), 1, 0, (64, 64));
        for block in 0..5 {
            for (layer, segment) in rows() {
                let found = pool.check(BlockId(block), key(block), layer, segment, (0, 128));
                let poisoned = (block, layer, segment) == (2, 1, 0);
                let wanted = if poisoned { Some(64) } else { None };
                assert_eq!(found.err().map(|difference| difference.offset), wanted);
            }
        }
    }

    #[test]
    #[should_panic(expected = "block 5 of a pool of 5")]
    fn there_is_nothing_behind_the_last_block() {
        pool(5).make(BlockId(5), BlockKey(1), 0, 0);
    }

    #[test]
    #[should_panic(expected = "of an object of 128")]
    fn there_is_nothing_behind_an_object() {
        pool(5).poison(BlockId(0), 0, 0, (64, 72));
    }
}
