//! A recycling allocator of executor memory: one near the kernel, for tables that it only reads,
//! and one for words that it writes.
//!
//! Allocating from an executor is slow and may even wait for the GPU, so the arena takes memory in
//! chunks and keeps it for the life of the ring. Blocks are powers of two with one free list per
//! size: after the first few requests of a workload, uploads reuse free blocks and nothing is
//! allocated any more. Free blocks of different sizes are not merged; a workload holds at most the
//! sum of its peaks per size.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{
    error::Error,
    executor::{ExecutorError, IoExecutor, SharedMemory},
    shared::Region,
};

/// Smallest block: two cache lines, so that an event shares none with its neighbour.
const BLOCK_BYTES_MIN: usize = 128;
/// Alignment of the executor's memory. A block is aligned to the smaller of its size and this.
const CHUNK_ALIGN: usize = 4096;

/// A block of executor memory, at least as long as requested. Not cleared: it holds the previous
/// owner's data.
#[derive(Debug)]
pub(crate) struct Block {
    region: Option<Region>,
    arena: Arc<Arena>,
}

impl Block {
    /// Returns the memory.
    pub(crate) fn region(&self) -> &Region {
        self.region.as_ref().expect("taken only by drop")
    }

    /// Returns the arena that owns the block.
    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Returns true if the block belongs to `arena`.
    pub(crate) fn is_of(&self, arena: &Arc<Arena>) -> bool {
        Arc::ptr_eq(&self.arena, arena)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(region) = self.region.take() {
            self.arena.give_back(region);
        }
    }
}

/// A method of an executor that allocates memory.
pub(crate) type Allocate = fn(&dyn IoExecutor, usize) -> Result<SharedMemory, ExecutorError>;

/// The allocator.
#[derive(Debug)]
pub(crate) struct Arena {
    chunk_bytes: usize,
    allocate: Allocate,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Free blocks by log2 of their size.
    free: Vec<Vec<Region>>,
    /// The chunk that blocks are carved from, and how many of its bytes are used.
    chunk: Option<(Region, usize)>,
    /// Empty permutation vectors returned by maps, for reuse.
    orders: Vec<Vec<u32>>,
    usage: Usage,
}

/// Memory usage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Bytes taken from the executor.
    pub bytes: u64,
    /// Bytes in use.
    pub used: u64,
    /// Number of chunks allocated.
    pub growths: u64,
}

impl Arena {
    /// Creates an arena that grows by chunks of `chunk_bytes`; allocates the first one.
    pub(crate) fn new(
        chunk_bytes: usize,
        allocate: Allocate,
        executor: &dyn IoExecutor,
    ) -> Result<Arc<Self>, Error> {
        let chunk_bytes = chunk_bytes.max(CHUNK_ALIGN).next_multiple_of(CHUNK_ALIGN);
        let arena = Self { chunk_bytes, allocate, state: Mutex::default() };
        arena.lock().grow(allocate(executor, chunk_bytes)?);
        Ok(Arc::new(arena))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code under the lock panics with the lists half changed, so a poisoned lock is sound.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates a block of at least `len` bytes.
    pub(crate) fn take(
        self: &Arc<Self>,
        len: usize,
        executor: &dyn IoExecutor,
    ) -> Result<Block, Error> {
        let size = len.max(BLOCK_BYTES_MIN).checked_next_power_of_two().ok_or_else(|| {
            ExecutorError::Memory {
                executor: executor.name(),
                len,
                cause: "the size is beyond any address space".to_owned(),
            }
        })?;
        let mut state = self.lock();
        let region = match state.recycled(size).or_else(|| state.cut(size)) {
            Some(region) => region,
            None => {
                state.grow((self.allocate)(executor, size.max(self.chunk_bytes))?);
                state.cut(size).expect("the new chunk is at least as long")
            }
        };
        state.usage.used += size as u64;
        Ok(Block { region: Some(region), arena: self.clone() })
    }

    fn give_back(&self, region: Region) {
        let mut state = self.lock();
        state.usage.used -= region.len() as u64;
        state.keep(region);
    }

    /// Returns an empty vector for a permutation.
    pub(crate) fn take_order(&self) -> Vec<u32> {
        self.lock().orders.pop().unwrap_or_default()
    }

    /// Keeps the vector of a permutation for reuse.
    pub(crate) fn give_back_order(&self, mut order: Vec<u32>) {
        order.clear();
        self.lock().orders.push(order);
    }

    /// Returns the memory usage.
    pub(crate) fn usage(&self) -> Usage {
        self.lock().usage
    }
}

impl State {
    fn recycled(&mut self, size: usize) -> Option<Region> {
        self.free.get_mut(size.ilog2() as usize)?.pop()
    }

    fn keep(&mut self, region: Region) {
        let class = region.len().ilog2() as usize;
        if self.free.len() <= class {
            self.free.resize_with(class + 1, Vec::new);
        }
        self.free[class].push(region);
    }

    /// Carves a block from the chunk.
    fn cut(&mut self, size: usize) -> Option<Region> {
        let (chunk, cut) = self.chunk.as_mut()?;
        let at = cut.next_multiple_of(size.min(CHUNK_ALIGN));
        let end = at.checked_add(size).filter(|&end| end <= chunk.len())?;
        *cut = end;
        Some(chunk.slice(at, size))
    }

    /// Adds a chunk; the rest of the old one goes to the free lists.
    fn grow(&mut self, chunk: SharedMemory) {
        let chunk = Region::whole(chunk);
        let mut size = CHUNK_ALIGN;
        while size >= BLOCK_BYTES_MIN {
            while let Some(rest) = self.cut(size) {
                self.keep(rest);
            }
            size /= 2;
        }
        self.usage.bytes += chunk.len() as u64;
        self.usage.growths += 1;
        self.chunk = Some((chunk, 0));
    }
}
