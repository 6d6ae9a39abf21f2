//! The KV pool: memory that the engine owns, or that is allocated for it.

#![allow(unsafe_code, reason = "describes memory that an engine owns, by its address")]

use std::{any::Any, fmt, ptr::NonNull, sync::Arc};

use nvme_driver::{DmaError, DmaMemory, DmaSpace, ExternalMemory};
use objstore::{KvPool, KvShape};

use crate::error::StackError;

/// Memory of this process that an engine owns. Its begin and its length may have any alignment.
#[derive(Clone)]
pub struct EngineMemory {
    base: NonNull<u8>,
    bytes: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: an address; the owner is Send + Sync.
unsafe impl Send for EngineMemory {}
// SAFETY: as above; nothing is accessed through a shared one but by raw copies.
unsafe impl Sync for EngineMemory {}

impl fmt::Debug for EngineMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { base, bytes, .. } = self;
        f.debug_struct("EngineMemory").field("base", base).field("bytes", bytes).finish()
    }
}

impl EngineMemory {
    /// `bytes` bytes from `base` on.
    ///
    /// # Safety
    /// The bytes stay allocated, readable and writable until `owner` is dropped, and no Rust
    /// reference into them exists while a store moves them.
    #[must_use]
    pub unsafe fn new(base: NonNull<u8>, bytes: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { base, bytes, owner }
    }

    /// First byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Maps the pages that the memory is in: them, and where in them it begins.
    fn map(&self, space: &dyn DmaSpace) -> Result<(Arc<dyn DmaMemory>, usize), DmaError> {
        let page = rustix::param::page_size();
        let head = self.base.as_ptr().addr() % page;
        let len = (head + self.bytes).next_multiple_of(page);
        // SAFETY: pages are mapped in this process as a whole, so those around the memory exist as
        // long as it does. Bytes beside it are never named: `Pool::new` registers rows inside it.
        let memory = unsafe {
            let first = NonNull::new_unchecked(self.base.as_ptr().wrapping_sub(head));
            ExternalMemory::new(Some(first), None, len, self.owner.clone())
        };
        Ok((space.import(memory)?, head))
    }
}

/// Where KV blocks are in a pool: the object of block `b` in row `r` is at
/// `rows[r] + b * block_stride`. Row `layer * segments + segment` is that of a layer's segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolLayout {
    /// Offset of block 0 of each row, in bytes.
    pub rows: Vec<u64>,
    /// Bytes from one block's object to the next one's.
    pub block_stride: u64,
    /// Blocks.
    pub blocks: u32,
}

impl PoolLayout {
    /// One tensor after another, a row each: `[rows, blocks, object]`.
    #[must_use]
    pub fn contiguous(shape: &KvShape, blocks: u32) -> Self {
        let stride = u64::from(shape.object_bytes);
        let tensor = stride * u64::from(blocks);
        let rows = (0..u64::from(shape.rows())).map(|row| row * tensor).collect();
        Self { rows, block_stride: stride, blocks }
    }

    /// Whether every object begins at a multiple of `unit`, in memory that begins at `base`.
    pub(crate) fn is_aligned(&self, base: NonNull<u8>, unit: u64) -> bool {
        let base = base.as_ptr().addr() as u64;
        let mut starts = self.rows.iter().map(|row| base + row);
        starts.all(|start| start.is_multiple_of(unit)) && self.block_stride.is_multiple_of(unit)
    }

    /// Bytes from the first object to the end of the last one.
    pub(crate) fn span(&self, shape: &KvShape) -> u64 {
        let first = self.rows.iter().min().copied().unwrap_or(0);
        self.end(shape).saturating_sub(first)
    }

    /// Where the last object ends.
    fn end(&self, shape: &KvShape) -> u64 {
        let last = self.rows.iter().max().copied().unwrap_or(0);
        let gap = u64::from(self.blocks.saturating_sub(1)).saturating_mul(self.block_stride);
        last.saturating_add(gap).saturating_add(u64::from(shape.object_bytes))
    }

    /// Registers `memory`, which was mapped and begins `head` bytes into its mapping.
    fn register(
        self,
        memory: Arc<dyn DmaMemory>,
        head: usize,
        shape: &KvShape,
    ) -> Result<KvPool, StackError> {
        let rows = self.rows.into_iter().map(|row| row.saturating_add(head as u64)).collect();
        Ok(KvPool::new(memory, shape, rows, self.block_stride, self.blocks)?)
    }
}

/// Registers an engine's memory as it is.
///
/// # Errors
/// [`StackError::Memory`], [`StackError::Pool`].
pub(crate) fn register(
    memory: &EngineMemory,
    layout: PoolLayout,
    space: &dyn DmaSpace,
    shape: &KvShape,
) -> Result<KvPool, StackError> {
    let end = layout.end(shape);
    if end > memory.bytes as u64 {
        let (offset, total) = (usize::try_from(end).unwrap_or(usize::MAX), memory.bytes);
        return Err(DmaError::OutOfRange { offset, len: 0, total }.into());
    }
    let (mapped, head) = memory.map(space)?;
    layout.register(mapped, head, shape)
}

/// Allocates a pool of `blocks` blocks, one tensor after another.
///
/// # Errors
/// [`StackError::Memory`], [`StackError::Pool`].
pub(crate) fn allocate(
    blocks: u32,
    space: &dyn DmaSpace,
    shape: &KvShape,
) -> Result<KvPool, StackError> {
    let bytes = shape.block_bytes().saturating_mul(u64::from(blocks));
    let memory = space.alloc(usize::try_from(bytes).unwrap_or(usize::MAX))?;
    PoolLayout::contiguous(shape, blocks).register(memory, 0, shape)
}
