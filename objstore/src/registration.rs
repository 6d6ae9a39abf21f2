//! The engine's KV memory: which bytes of it belong to which block and row.
//!
//! Registration is linear (decision 3): the object of block `b` in row `r` is the `object_bytes`
//! at `rows[r] + b * block_stride`, and as each row is one range for the device, its address is
//! `row_iova[r] + b * block_stride`. No table of pages or blocks exists on either side.
//!
//! A staged pool is one that no device reaches. Its objects go through staging memory, which the
//! devices do reach: there they lie by their position in the request and not by their block.

use std::{any::Any, fmt, ops::Range, sync::Arc};

use nvme_driver::{DevicePtr, DmaError, DmaMemory, DmaSlice, ExternalMemory, Iova, Place};

use kv_catalog::{BlockId, KvShape, Row};

use crate::{error::RegistrationError, stats::Path};

/// What a page is, for the addresses in staging memory.
pub(crate) const PAGE: u64 = 4096;

/// A registered pool of KV blocks, and the way that data takes to it. Clones are the same pool.
#[derive(Debug, Clone)]
pub struct KvPool {
    path: Path,
    /// What the devices reach: the pool, or its staging memory.
    memory: Arc<dyn DmaMemory>,
    /// Staged: the pool itself.
    gpu: Option<GpuMemory>,
    rows: Vec<u64>,
    /// Where devices find block 0 of each row; empty if they do not.
    row_iova: Vec<Iova>,
    block_stride: u64,
    blocks: u32,
    object_bytes: u32,
}

impl KvPool {
    /// Registers memory of this process. `rows[r]` is the offset of block 0's object of row `r`,
    /// `block_stride` the bytes from one block's object to the next one's.
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
        let length = row_len(shape, &rows, block_stride, blocks)?;
        let mut row_iova = Vec::with_capacity(rows.len());
        for (row, offset) in rows.iter().map(|row| offset(*row)).enumerate() {
            let slice = DmaSlice::new(memory.clone(), offset, length)
                .map_err(|source| RegistrationError::Row { row, offset, length, source })?;
            row_iova.push(slice.iova());
        }
        disjoint(&rows, block_stride, blocks, u64::from(shape.object_bytes))?;
        let object_bytes = shape.object_bytes;
        let path = Path::Host;
        Ok(Self { path, memory, gpu: None, rows, row_iova, block_stride, blocks, object_bytes })
    }

    /// As [`KvPool::new`], for memory of a GPU that the devices reach themselves.
    ///
    /// # Errors
    /// As for [`KvPool::new`], and [`RegistrationError::NoDeviceAddress`] for memory that has no
    /// address on the GPU.
    pub fn on_gpu(
        memory: Arc<dyn DmaMemory>,
        shape: &KvShape,
        rows: Vec<u64>,
        block_stride: u64,
        blocks: u32,
    ) -> Result<Self, RegistrationError> {
        if memory.device().is_none() {
            return Err(RegistrationError::NoDeviceAddress { what: "the pool" });
        }
        let pool = Self::new(memory, shape, rows, block_stride, blocks)?;
        Ok(Self { path: Path::Direct, ..pool })
    }

    /// Registers memory of a GPU that the devices do not reach, and `staging`, which both they and
    /// the GPU do: page-locked memory of this process with an address on the GPU. How much of it is
    /// needed: [`KvPool::staging_bytes`].
    ///
    /// # Errors
    /// As for [`KvPool::new`], and [`RegistrationError::NoDeviceAddress`] when one of the two has
    /// no address on the GPU or [`RegistrationError::NoHostAddress`] when staging memory has none
    /// in this process.
    pub fn staged(
        pool: ExternalMemory,
        staging: Arc<dyn DmaMemory>,
        shape: &KvShape,
        rows: Vec<u64>,
        block_stride: u64,
        blocks: u32,
    ) -> Result<Self, RegistrationError> {
        let length = row_len(shape, &rows, block_stride, blocks)?;
        let (_, device, total, owner) = pool.into_parts();
        let device = device.ok_or(RegistrationError::NoDeviceAddress { what: "the pool" })?;
        if staging.device().is_none() {
            return Err(RegistrationError::NoDeviceAddress { what: "the staging memory" });
        }
        if staging.host().is_none() {
            return Err(RegistrationError::NoHostAddress { what: "the staging memory" });
        }
        for (row, offset) in rows.iter().map(|row| offset(*row)).enumerate() {
            if offset.checked_add(length).is_none_or(|end| end > total) {
                let source = DmaError::OutOfRange { offset, len: length, total };
                return Err(RegistrationError::Row { row, offset, length, source });
            }
        }
        disjoint(&rows, block_stride, blocks, u64::from(shape.object_bytes))?;
        Ok(Self {
            path: Path::Staged,
            memory: staging,
            gpu: Some(GpuMemory { device, len: total, _owner: owner }),
            rows,
            row_iova: Vec::new(),
            block_stride,
            blocks,
            object_bytes: shape.object_bytes,
        })
    }

    /// Bytes of staging memory for `buffers` buffers, each for requests of up to `slots` blocks.
    #[must_use]
    pub fn staging_bytes(shape: &KvShape, slots: u32, buffers: u32) -> u64 {
        staging_row_bytes(shape.object_bytes, slots)
            .saturating_mul(u64::from(shape.segments))
            .saturating_mul(u64::from(buffers))
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

    /// Gives the memory back to the engine: when this returns, no device has it mapped any more and
    /// it may be freed. Close the store first ([`crate::Store::close`]).
    ///
    /// # Errors
    /// [`InUse`], with the pool, while anything else still holds the mapping: a store, a clone of
    /// this pool, the engine's own handle.
    pub fn unregister(mut self) -> Result<(), InUse> {
        if Arc::get_mut(&mut self.memory).is_none() {
            let others = Arc::strong_count(&self.memory) - 1;
            return Err(InUse { pool: Box::new(self), others });
        }
        // The last handle: dropping it unmaps.
        drop(self);
        Ok(())
    }

    /// How data gets to the pool.
    #[must_use]
    pub fn path(&self) -> Path {
        self.path
    }

    /// The memory that the devices reach: the pool's, or its staging memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn DmaMemory> {
        &self.memory
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.rows.len() as u32
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

    /// Where the devices find block 0 of each row; empty for a staged pool: they do not reach it.
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

    /// Where the GPU finds an object; `None` for a block or row that does not exist, and for memory
    /// that is not on a GPU.
    #[must_use]
    pub fn device(&self, block: BlockId, row: Row) -> Option<DevicePtr> {
        Some(DevicePtr(self.device_base()?.0 + self.offset(block, row)?))
    }

    /// Whether this process cannot read it.
    pub(crate) fn is_device_only(&self) -> bool {
        self.gpu.is_some() || self.memory.host().is_none()
    }

    fn device_base(&self) -> Option<DevicePtr> {
        match &self.gpu {
            Some(gpu) => Some(gpu.device),
            None => self.memory.device(),
        }
    }

    /// Where in [`KvPool::memory`] the part begins and ends that the devices use.
    pub(crate) fn used(&self) -> Range<u64> {
        if self.gpu.is_some() {
            return 0..self.memory.len() as u64;
        }
        let span = u64::from(self.blocks - 1) * self.block_stride + u64::from(self.object_bytes);
        let first = self.rows.iter().min().copied().unwrap_or(0);
        first..self.rows.iter().max().copied().unwrap_or(0) + span
    }

    /// Where the GPU finds block 0 of each row; empty without one.
    pub(crate) fn row_device(&self) -> Vec<u64> {
        let base = self.device_base();
        let rows = self.rows.iter();
        base.map(|base| rows.map(|row| base.0 + row).collect()).unwrap_or_default()
    }

    /// Block 0's object of each row, as an I/O kernel may reach it; empty for a staged pool.
    pub(crate) fn row_places(&self) -> Vec<Place> {
        let place = |(row, iova): (&u64, &Iova)| Place {
            host: self.memory.host().map(|base| base.as_ptr().expose_provenance() as u64 + row),
            device: self.memory.device().map(|base| DevicePtr(base.0 + row)),
            iova: *iova,
        };
        self.rows.iter().zip(&self.row_iova).map(place).collect()
    }

    /// Where the devices find an object; `None` for a block or row that does not exist, and for a
    /// staged pool.
    #[must_use]
    pub fn iova(&self, block: BlockId, row: Row) -> Option<Iova> {
        let base = self.row_iova.get(row.0 as usize)?;
        (block.0 < self.blocks).then(|| base.offset(u64::from(block.0) * self.block_stride))
    }

    /// The largest power of two that divides every object's address for the devices and the
    /// object's size: what descriptors with an alignment rule need to know.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        let bits = self.row_iova.iter().fold(0, |bits, iova| bits | iova.0);
        if self.gpu.is_some() {
            // In staging memory objects lie one after another from a page's begin on.
            return 1 << (PAGE | u64::from(self.object_bytes)).trailing_zeros();
        }
        1 << (bits | self.block_stride | u64::from(self.object_bytes)).trailing_zeros()
    }
}

/// A pool that no device reaches.
#[derive(Clone)]
struct GpuMemory {
    device: DevicePtr,
    len: usize,
    /// Frees it.
    _owner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, len, .. } = self;
        f.debug_struct("GpuMemory").field("device", device).field("len", len).finish()
    }
}

/// Something still holds the mapping of a pool that was to be unregistered.
#[derive(Debug, thiserror::Error)]
#[error(
    "the pool's memory is still mapped: {others} others hold it; close the store and drop every \
     copy of the pool and its memory, then unregister it again"
)]
pub struct InUse {
    /// The pool, registered as before.
    pub pool: Box<KvPool>,
    /// How many others hold its memory.
    pub others: usize,
}

/// Bytes of one row in a staging buffer for `slots` blocks. Rows start at pages, which suits every
/// descriptor.
pub(crate) fn staging_row_bytes(object_bytes: u32, slots: u32) -> u64 {
    (u64::from(object_bytes) * u64::from(slots)).next_multiple_of(PAGE)
}

/// Checks the numbers of a pool; the bytes from a row's first object to the end of its last one.
fn row_len(
    shape: &KvShape,
    rows: &[u64],
    block_stride: u64,
    blocks: u32,
) -> Result<usize, RegistrationError> {
    if rows.len() as u64 != u64::from(shape.rows()) {
        return Err(RegistrationError::Rows { given: rows.len(), shape: shape.rows() });
    }
    let object = u64::from(shape.object_bytes);
    let stride = RegistrationError::Stride { blocks, block_stride, object };
    if blocks == 0 || object == 0 || block_stride < object {
        return Err(stride);
    }
    let length = u64::from(blocks - 1).checked_mul(block_stride).map(|gap| gap + object);
    length.and_then(|length| usize::try_from(length).ok()).ok_or(stride)
}

/// An offset that is beyond the address space is beyond any memory, too.
fn offset(row: u64) -> usize {
    usize::try_from(row).unwrap_or(usize::MAX)
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
