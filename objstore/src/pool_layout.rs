//! The places of KV blocks in a pool.

use std::ops::Range;

use kv_catalog::{BlockId, KvShape, Row};
use serde::{Deserialize, Serialize};

/// Offsets of KV blocks in a pool: the object of block `b` in row `r` is at `rows[r] + b *
/// block_stride`. Row `layer * segments + segment` is that of a layer's segment. As JSON it is a
/// part of the server's protocol.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolLayout {
    /// Offset of block 0 of each row, in bytes.
    pub rows: Vec<u64>,
    /// Bytes from one block's object to the next one's.
    pub block_stride: u64,
    /// Number of blocks.
    pub blocks: u32,
}

impl PoolLayout {
    /// Returns the layout of one tensor per row, in sequence: `[rows, blocks, object]`.
    #[must_use]
    pub fn contiguous(shape: &KvShape, blocks: u32) -> Self {
        let stride = u64::from(shape.object_bytes);
        let tensor = stride * u64::from(blocks);
        let rows = (0..u64::from(shape.rows())).map(|row| row * tensor).collect();
        Self { rows, block_stride: stride, blocks }
    }

    /// Returns an object's offset; `None` if the block or row does not exist.
    #[must_use]
    pub fn offset(&self, block: BlockId, row: Row) -> Option<u64> {
        let base = self.rows.get(row.0 as usize)?;
        (block.0 < self.blocks).then(|| base + u64::from(block.0) * self.block_stride)
    }

    /// Returns true when every object begins at a multiple of `unit`, in memory at `base`.
    #[must_use]
    pub fn is_aligned(&self, base: u64, unit: u64) -> bool {
        let mut starts = self.rows.iter().map(|row| base + row);
        starts.all(|start| start.is_multiple_of(unit)) && self.block_stride.is_multiple_of(unit)
    }

    /// Returns the range from the first object to the end of the last one, in bytes.
    #[must_use]
    pub fn used(&self, object_bytes: u32) -> Range<u64> {
        let first = self.rows.iter().min().copied().unwrap_or(0);
        let last = self.rows.iter().max().copied().unwrap_or(0);
        let gap = u64::from(self.blocks.saturating_sub(1)).saturating_mul(self.block_stride);
        first..last.saturating_add(gap).saturating_add(u64::from(object_bytes))
    }

    /// Shifts the layout by `head` bytes.
    #[must_use]
    pub fn after(self, head: usize) -> Self {
        let rows = self.rows.into_iter().map(|row| row.saturating_add(head as u64)).collect();
        Self { rows, ..self }
    }
}
