//! The engine's KV memory: which bytes of it belong to which block and row.
//!
//! Registration is linear (decision 3): the object of block `b` in row `r` is the `object_bytes`
//! at `rows[r] + b * block_stride`, and as each row is one range for the device, its address is
//! `row_iova[r] + b * block_stride`. No table of pages or blocks exists on either side.

use std::sync::Arc;

use nvme_driver::{DmaMemory, DmaSlice, Iova};

use crate::{
    error::RegistrationError,
    ids::{BlockId, Row},
    shape::KvShape,
};

/// A registered pool of KV blocks.
#[derive(Debug, Clone)]
pub struct KvPool {
    memory: Arc<dyn DmaMemory>,
    rows: Vec<u64>,
    row_iova: Vec<Iova>,
    block_stride: u64,
    blocks: u32,
    object_bytes: u32,
}

impl KvPool {
    /// Registers `memory`. `rows[r]` is the offset of block 0's object of row `r`, `block_stride`
    /// the bytes from one block's object to the next one's.
    ///
    /// A row may lie inside another one's stride (K and V interleaved by block), but no two
    /// objects may share a byte: one would overwrite the other.
    ///
    /// # Errors
    /// [`RegistrationError`] when a row leaves the memory or is not contiguous for the device,
    /// when objects overlap, or when the shape and the number of rows disagree.
    pub fn new(
        memory: Arc<dyn DmaMemory>,
        shape: &KvShape,
        rows: Vec<u64>,
        block_stride: u64,
        blocks: u32,
    ) -> Result<Self, RegistrationError> {
        if rows.len() as u64 != u64::from(shape.rows()) {
            return Err(RegistrationError::Rows { given: rows.len(), shape: shape.rows() });
        }
        let object = u64::from(shape.object_bytes);
        if blocks == 0 || object == 0 || block_stride < object {
            return Err(RegistrationError::Stride { blocks, block_stride, object });
        }
        let length = u64::from(blocks - 1).checked_mul(block_stride).map(|gap| gap + object);
        let mut row_iova = Vec::with_capacity(rows.len());
        for (row, offset) in rows.iter().enumerate() {
            let part = length
                .and_then(|length| usize::try_from(length).ok())
                .zip(usize::try_from(*offset).ok());
            let slice = match part {
                Some((length, offset)) => DmaSlice::new(memory.clone(), offset, length)
                    .map_err(|source| RegistrationError::Row { row, offset, length, source })?,
                None => return Err(RegistrationError::Stride { blocks, block_stride, object }),
            };
            row_iova.push(slice.iova());
        }
        disjoint(&rows, block_stride, blocks, object)?;
        let object_bytes = shape.object_bytes;
        Ok(Self { memory, rows, row_iova, block_stride, blocks, object_bytes })
    }

    /// Registers tensors that lie one after another, a row each: `[rows, blocks, object]`. This is
    /// how engines lay out one tensor per layer and segment in one allocation.
    ///
    /// # Errors
    /// As for [`KvPool::new`].
    pub fn contiguous(
        memory: Arc<dyn DmaMemory>,
        shape: &KvShape,
        blocks: u32,
    ) -> Result<Self, RegistrationError> {
        let stride = u64::from(shape.object_bytes);
        let tensor = stride * u64::from(blocks);
        let rows = (0..u64::from(shape.rows())).map(|row| row * tensor).collect();
        Self::new(memory, shape, rows, stride, blocks)
    }

    /// The registered memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn DmaMemory> {
        &self.memory
    }

    /// Blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Bytes from one block's object to the next one's.
    #[must_use]
    pub fn block_stride(&self) -> u64 {
        self.block_stride
    }

    /// Bytes of one object.
    #[must_use]
    pub fn object_bytes(&self) -> u32 {
        self.object_bytes
    }

    /// Where the device finds block 0 of each row.
    #[must_use]
    pub fn row_iova(&self) -> &[Iova] {
        &self.row_iova
    }

    /// Offset of an object in the memory; `None` for a block or row that does not exist.
    #[must_use]
    pub fn offset(&self, block: BlockId, row: Row) -> Option<u64> {
        let base = self.rows.get(row.0 as usize)?;
        (block.0 < self.blocks).then(|| base + u64::from(block.0) * self.block_stride)
    }

    /// Where the device finds an object; `None` for a block or row that does not exist.
    #[must_use]
    pub fn iova(&self, block: BlockId, row: Row) -> Option<Iova> {
        let base = self.row_iova.get(row.0 as usize)?;
        (block.0 < self.blocks).then(|| base.offset(u64::from(block.0) * self.block_stride))
    }

    /// The largest power of two that divides every object's address and the object's size: what
    /// descriptors with an alignment rule need to know.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        let bits = self.row_iova.iter().fold(0, |bits, iova| bits | iova.0);
        1 << (bits | self.block_stride | u64::from(self.object_bytes)).trailing_zeros()
    }
}

/// Checks that no two objects of different rows share a byte. Objects of one row cannot: the
/// stride is at least their size.
fn disjoint(rows: &[u64], stride: u64, blocks: u32, object: u64) -> Result<(), RegistrationError> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_unstable_by_key(|row| rows[*row]);
    for (i, &first) in order.iter().enumerate() {
        let end = rows[first] + u64::from(blocks - 1) * stride + object;
        for &second in order[i + 1..].iter().take_while(|row| rows[**row] < end) {
            // Block b of `second` starts `distance mod stride` after some object of `first`.
            let into = (rows[second] - rows[first]) % stride;
            let next = into + object > stride
                && (rows[second] - rows[first]) / stride + 1 < u64::from(blocks);
            if into < object || next {
                return Err(RegistrationError::Overlap { first, second });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
