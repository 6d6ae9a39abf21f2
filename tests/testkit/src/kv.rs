//! An engine's KV blocks and their expected contents.

use std::{ops::Range, sync::Arc};

use gio_kernels::{HostExecutor, HostOptions, InlineExecutor};
use nvme_driver::{Clock, DmaSlice, DmaSpace, platform::buffer::Buffer};
use rand::{Rng as _, TryRngCore as _, rngs::OsRng};

use objstore::{
    BlockId, BlockKey, Codec, ExecutorFactory, Format, KeyChain, KvPool, KvShape, Layer, Overwrite,
    Row, StoreId,
};

/// Returns the format of test stores, which overwrites anything.
#[must_use]
pub fn format(shape: KvShape) -> Format {
    // Stores on the same devices must have different IDs.
    let store = StoreId(OsRng.unwrap_err().random());
    Format { overwrite: Overwrite::Anything, ..Format::new(store, shape) }
}

/// Returns keys, all different.
#[must_use]
pub fn keys(range: Range<u32>) -> Vec<BlockKey> {
    let mut chain = KeyChain::new(b"test");
    let all: Vec<BlockKey> = (0..range.end).map(|n| chain.next(&[n])).collect();
    all[range.start as usize..].to_vec()
}

/// Returns the blocks from `first` on.
#[must_use]
pub fn blocks(first: u32, count: usize) -> Vec<BlockId> {
    (first..).take(count).map(BlockId).collect()
}

/// Returns the object of `row` in version `version` of the block with `key`: scalars of bf16, most
/// of them of about the same size, and some much smaller.
#[must_use]
pub fn object(key: BlockKey, version: u64, row: Row, bytes: u32) -> Vec<u8> {
    let seed = (key.seed() as u64) ^ version << 40 ^ u64::from(row.0) << 20;
    let mut object = crate::pattern(bytes as usize, seed);
    for byte in object.iter_mut().skip(1).step_by(2) {
        *byte = match *byte {
            small @ 0xF8.. => small & 0x3F,
            byte => [0x3C, 0x3D, 0xBC, 0xBD][usize::from(byte % 4)],
        };
    }
    object
}

/// Returns this codec if objects of this size are smaller with it, on LBAs of this size.
#[must_use]
pub fn useful(codec: Codec, shape: &KvShape, lba_bytes: u32) -> Codec {
    let padded = |shape: KvShape| shape.object_bytes.next_multiple_of(lba_bytes);
    let is_smaller = codec.stored(shape).is_some_and(|stored| padded(stored) < padded(*shape));
    if is_smaller { codec } else { Codec::None }
}

/// Returns the I/O kernel on the caller's thread.
#[must_use]
pub fn inline_executor(clock: Arc<dyn Clock>) -> ExecutorFactory {
    Box::new(move || Ok(Box::new(InlineExecutor::new(clock.clone()))))
}

/// Returns the I/O kernel on host threads.
#[must_use]
pub fn host_executor(clock: Arc<dyn Clock>) -> ExecutorFactory {
    Box::new(move || Ok(Box::new(HostExecutor::new(HostOptions::default(), clock.clone()))))
}

/// A KV pool in host memory.
#[derive(Debug)]
pub struct KvMemory {
    /// Shape of a block.
    pub shape: KvShape,
    /// The pool in a store's format.
    pub pool: KvPool,
    memory: Buffer,
}

impl KvMemory {
    /// Allocates `blocks` blocks of `shape` in memory of `space`.
    #[must_use]
    pub fn new(space: &dyn DmaSpace, shape: KvShape, blocks: u32) -> Self {
        let bytes = shape.block_bytes() * u64::from(blocks);
        let memory = space.alloc(bytes as usize).expect("memory for the KV pool");
        let pool = KvPool::contiguous(memory.clone(), &shape, blocks).expect("a pool");
        let memory = DmaSlice::whole(memory).expect("one range");
        Self { shape, pool, memory: Buffer::new(memory).expect("reachable memory") }
    }

    fn rows(&self) -> impl Iterator<Item = Row> + use<> {
        (0..self.shape.rows()).map(Row)
    }

    fn object(&self, key: BlockKey, version: u64, row: Row) -> Vec<u8> {
        object(key, version, row, self.shape.object_bytes)
    }

    /// Overwrites an object.
    pub fn write(&mut self, block: BlockId, row: Row, bytes: &[u8]) {
        let offset = self.pool.offset(block, row).expect("a block and row that exist");
        self.memory.write(offset as usize, bytes).expect("inside the pool");
    }

    /// Reads an object.
    pub fn read(&self, block: BlockId, row: Row, into: &mut [u8]) {
        let offset = self.pool.offset(block, row).expect("a block and row that exist");
        self.memory.read(offset as usize, into).expect("inside the pool");
    }

    /// Fills version `version` of `key` into `block`.
    pub fn fill(&mut self, block: BlockId, key: BlockKey, version: u64) {
        self.rows().for_each(|row| self.write(block, row, &self.object(key, version, row)));
    }

    /// Overwrites `block` with bytes that belong to no key.
    pub fn wipe(&mut self, block: BlockId) {
        let nothing = vec![0xEE; self.shape.object_bytes as usize];
        self.rows().for_each(|row| self.write(block, row, &nothing));
    }

    /// Returns true if `block` holds all bytes of version `version` of `key` in `layer`.
    #[must_use]
    pub fn holds(&self, block: BlockId, layer: Layer, key: BlockKey, version: u64) -> bool {
        let mut bytes = vec![0; self.shape.object_bytes as usize];
        self.shape.layer_rows(layer).map(Row).all(|row| {
            self.read(block, row, &mut bytes);
            bytes == self.object(key, version, row)
        })
    }
}
