//! The engine's KV memory: the address of each block's object in each row.
//!
//! Registration is linear (decision 3): the object of block `b` in row `r` is the `object_bytes`
//! at `rows[r] + b * block_stride`. Each row is contiguous for the device, so its address is
//! `row_iova[r] + b * block_stride`. There is no table of pages or blocks on either side.
//!
//! No device reaches a staged pool. Its objects go through staging memory, which the devices do
//! reach and in which objects are ordered by position in the request, not by block.

use std::{any::Any, fmt, ops::Range, sync::Arc};

use gio_uring::PoolDesc;
use nvme_driver::{DevicePtr, DmaError, DmaMemory, DmaSlice, ExternalMemory, Iova, Place};

use kv_catalog::{BlockId, KvShape, Row};

use crate::{
    data_path::Route, engine_memory::EngineMemory, error::RegistrationError,
    pool_layout::PoolLayout,
};

/// Page size of the addresses in staging memory.
pub(crate) const PAGE: u64 = 4096;

/// A registered pool of KV blocks, and its data path. Clones refer to the same pool.
#[derive(Debug, Clone)]
pub struct KvPool {
    path: Route,
    /// Memory that the devices reach: the pool, or its staging memory.
    memory: Arc<dyn DmaMemory>,
    /// The pool itself, if it is staged.
    gpu: Option<GpuMemory>,
    /// The engine's memory, if this pool has its bounce buffers.
    engine: Option<Arc<EngineMemory>>,
    layout: PoolLayout,
    /// Device address of block 0 in each row; empty for a staged pool.
    row_iova: Vec<Iova>,
    object_bytes: u32,
}

impl KvPool {
    /// Registers memory of this process.
    ///
    /// A row may lie inside another one's stride (K and V interleaved by block), but no two
    /// objects may share a byte.
    ///
    /// # Errors
    /// Returns [`RegistrationError`] if a row leaves the memory or is not contiguous for the
    /// device, if objects overlap, or if the number of rows is not the shape's.
    pub fn new(
        memory: Arc<dyn DmaMemory>,
        shape: &KvShape,
        layout: PoolLayout,
    ) -> Result<Self, RegistrationError> {
        let pool = Self::of_rows(memory, shape, layout)?;
        disjoint(&pool.layout, u64::from(shape.object_bytes))?;
        Ok(pool)
    }

    /// Registers memory for the objects of `blocks` blocks in one layer at a time: the rows of all
    /// layers share their places, so no two layers may be in it at once.
    /// [`KvPool::staging_bytes`] for one buffer is its size.
    ///
    /// # Errors
    /// Same as [`KvPool::new`].
    pub fn of_layers(
        memory: Arc<dyn DmaMemory>,
        offset: u64,
        shape: &KvShape,
        blocks: u32,
    ) -> Result<Self, RegistrationError> {
        let row_bytes = staging_row_bytes(shape.object_bytes, blocks);
        let row = |row| offset + u64::from(row % shape.segments.max(1)) * row_bytes;
        let rows = (0..shape.rows()).map(row).collect();
        let layout = PoolLayout { rows, block_stride: shape.object_bytes.into(), blocks };
        Self::of_rows(memory, shape, layout)
    }

    fn of_rows(
        memory: Arc<dyn DmaMemory>,
        shape: &KvShape,
        layout: PoolLayout,
    ) -> Result<Self, RegistrationError> {
        let length = row_len(shape, &layout)?;
        let mut row_iova = Vec::with_capacity(layout.rows.len());
        for (row, offset) in layout.rows.iter().map(|row| offset(*row)).enumerate() {
            let slice = DmaSlice::new(memory.clone(), offset, length)
                .map_err(|source| bad_row(row, offset, length, &source))?;
            row_iova.push(slice.iova());
        }
        Ok(Self {
            path: Route::Host,
            memory,
            gpu: None,
            engine: None,
            layout,
            row_iova,
            object_bytes: shape.object_bytes,
        })
    }

    /// Same as [`KvPool::new`], for GPU memory that the devices reach themselves.
    ///
    /// # Errors
    /// Same as [`KvPool::new`], and if the memory has no address on the GPU.
    pub fn on_gpu(
        memory: Arc<dyn DmaMemory>,
        shape: &KvShape,
        layout: PoolLayout,
    ) -> Result<Self, RegistrationError> {
        if memory.device().is_none() {
            return Err(not_on_gpu("the pool"));
        }
        let pool = Self::new(memory, shape, layout)?;
        Ok(Self { path: Route::Direct, ..pool })
    }

    /// Registers GPU memory that the devices do not reach, and `staging`, which both they and the
    /// GPU reach: page-locked memory of this process with an address on the GPU.
    /// [`KvPool::staging_bytes`] computes its size.
    ///
    /// # Errors
    /// Same as [`KvPool::new`], and if one of the two has no address on the GPU, or the staging
    /// memory none in this process.
    pub fn staged(
        pool: ExternalMemory,
        staging: Arc<dyn DmaMemory>,
        shape: &KvShape,
        layout: PoolLayout,
    ) -> Result<Self, RegistrationError> {
        let (_, device, total, owner) = pool.into_parts();
        let device = device.ok_or_else(|| not_on_gpu("the pool"))?;
        if staging.device().is_none() {
            return Err(not_on_gpu("the staging memory"));
        }
        if staging.host().is_none() {
            return Err(not_here("the staging memory"));
        }
        check_layout(shape, &layout, total)?;
        Ok(Self {
            path: Route::Staged,
            memory: staging,
            gpu: Some(GpuMemory { device, len: total, _owner: owner }),
            engine: None,
            layout,
            row_iova: Vec::new(),
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

    /// Registers contiguous tensors, one per row: `[rows, blocks, object]`. Engines use this layout
    /// for one tensor per layer and segment in one allocation.
    ///
    /// # Errors
    /// Same as [`KvPool::new`].
    pub fn contiguous(
        memory: Arc<dyn DmaMemory>,
        shape: &KvShape,
        blocks: u32,
    ) -> Result<Self, RegistrationError> {
        Self::new(memory, shape, PoolLayout::contiguous(shape, blocks))
    }

    /// Makes this pool the bounce buffers of an engine's memory that no device describes: jobs name
    /// the engine's blocks, and the CPU copies them. `layout` is that of the engine's memory, of
    /// this process.
    ///
    /// # Errors
    /// Returns [`RegistrationError`] if a row leaves the memory, or this process cannot reach it.
    pub fn bounced(
        self,
        memory: ExternalMemory,
        shape: &KvShape,
        layout: PoolLayout,
    ) -> Result<Self, RegistrationError> {
        let length = row_len(shape, &layout)?;
        let (base, _, total, owner) = memory.into_parts();
        let base = base.ok_or_else(|| not_here("the pool"))?;
        check_inside(&layout.rows, length, total)?;
        let engine = EngineMemory { base, layout, _owner: owner };
        Ok(Self { engine: Some(Arc::new(engine)), ..self })
    }

    /// Returns the memory to the engine: afterwards no device has it mapped, and it may be freed.
    /// Close the store first ([`crate::Store::close`]).
    ///
    /// # Errors
    /// Returns [`InUse`], with the pool, if anything else still holds the mapping: a store, a clone
    /// of this pool, the engine's own handle.
    pub fn unregister(mut self) -> Result<(), InUse> {
        if Arc::get_mut(&mut self.memory).is_none() {
            let others = Arc::strong_count(&self.memory) - 1;
            return Err(InUse { pool: Box::new(self), others });
        }
        // The last handle: dropping it unmaps.
        drop(self);
        Ok(())
    }

    /// Returns the data path of the pool.
    #[must_use]
    pub fn path(&self) -> Route {
        self.path
    }

    /// Returns the memory that the devices reach: the pool's, or its staging memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn DmaMemory> {
        &self.memory
    }

    /// Returns the engine's memory, if this pool has its bounce buffers.
    pub(crate) fn engine(&self) -> Option<&EngineMemory> {
        self.engine.as_deref()
    }

    /// Returns true if blocks are copied through this pool, which has bounce buffers.
    #[must_use]
    pub fn is_bounced(&self) -> bool {
        self.engine.is_some()
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.layout.rows.len() as u32
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.layout.blocks
    }

    /// Returns the distance in bytes between the objects of neighbouring blocks.
    #[must_use]
    pub fn block_stride(&self) -> u64 {
        self.layout.block_stride
    }

    /// Returns the bytes of one object.
    #[must_use]
    pub fn object_bytes(&self) -> u32 {
        self.object_bytes
    }

    /// Returns an object's offset in the memory; `None` if the block or row does not exist.
    #[must_use]
    pub fn offset(&self, block: BlockId, row: Row) -> Option<u64> {
        self.layout.offset(block, row)
    }

    /// Returns an object's address on the GPU; `None` if the block or row does not exist or the
    /// memory is not on a GPU.
    #[must_use]
    pub fn device(&self, block: BlockId, row: Row) -> Option<DevicePtr> {
        Some(DevicePtr(self.device_base()?.0 + self.offset(block, row)?))
    }

    /// Returns true if this process cannot read the pool.
    pub(crate) fn is_device_only(&self) -> bool {
        self.gpu.is_some() || self.memory.host().is_none()
    }

    fn device_base(&self) -> Option<DevicePtr> {
        match &self.gpu {
            Some(gpu) => Some(gpu.device),
            None => self.memory.device(),
        }
    }

    /// Returns the range of [`KvPool::memory`] that the devices use.
    pub(crate) fn used(&self) -> Range<u64> {
        if self.gpu.is_some() {
            return 0..self.memory.len() as u64;
        }
        self.layout.used(self.object_bytes)
    }

    /// Returns the GPU address of block 0 in each row; empty without a GPU.
    pub(crate) fn row_device(&self) -> Vec<u64> {
        let base = self.device_base();
        let rows = self.layout.rows.iter();
        base.map(|base| rows.map(|row| base.0 + row).collect()).unwrap_or_default()
    }

    /// Completes the description of a ring's pool, for one that the devices reach.
    pub(crate) fn describe(&self, desc: &PoolDesc, checksums: bool) -> PoolDesc {
        PoolDesc {
            row_iova: self.row_iova.clone(),
            row_memory: if checksums { self.row_places() } else { Vec::new() },
            block_stride: self.block_stride(),
            blocks: self.blocks(),
            ..desc.clone()
        }
    }

    /// Returns block 0's object of each row, as an I/O kernel reaches it; empty if staged.
    fn row_places(&self) -> Vec<Place> {
        let place = |(row, iova): (&u64, &Iova)| Place {
            host: self.memory.host().map(|base| base.as_ptr().expose_provenance() as u64 + row),
            device: self.memory.device().map(|base| DevicePtr(base.0 + row)),
            iova: *iova,
        };
        self.layout.rows.iter().zip(&self.row_iova).map(place).collect()
    }

    /// Returns an object's device address; `None` if the block or row does not exist, and for a
    /// staged pool.
    #[must_use]
    pub fn iova(&self, block: BlockId, row: Row) -> Option<Iova> {
        let base = self.row_iova.get(row.0 as usize)?;
        let into = self.offset(block, row)? - self.layout.rows[row.0 as usize];
        Some(base.offset(into))
    }
}

/// GPU memory of a pool that no device reaches.
#[derive(Clone)]
struct GpuMemory {
    device: DevicePtr,
    len: usize,
    /// Frees the memory when dropped.
    _owner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, len, .. } = self;
        f.debug_struct("GpuMemory").field("device", device).field("len", len).finish()
    }
}

/// Error of [`KvPool::unregister`]: something else still holds the mapping.
#[derive(Debug, thiserror::Error)]
#[error(
    "the pool's memory is still mapped: {others} others hold it; close the store and drop every \
     copy of the pool and its memory, then unregister it again"
)]
pub struct InUse {
    /// The pool, registered as before.
    pub pool: Box<KvPool>,
    /// Number of other handles to its memory.
    pub others: usize,
}

/// Returns the bytes of one row in a staging buffer for `slots` blocks. Rows start at page
/// boundaries, which suits every descriptor.
pub(crate) fn staging_row_bytes(object_bytes: u32, slots: u32) -> u64 {
    (u64::from(object_bytes) * u64::from(slots)).next_multiple_of(PAGE)
}

/// Refuses a layout of which an object leaves memory of `bytes` bytes, or shares any with another.
///
/// # Errors
/// Same as [`KvPool::new`].
pub fn check_layout(
    shape: &KvShape,
    layout: &PoolLayout,
    bytes: usize,
) -> Result<(), RegistrationError> {
    check_inside(&layout.rows, row_len(shape, layout)?, bytes)?;
    disjoint(layout, u64::from(shape.object_bytes))
}

/// Refuses rows of `length` bytes that leave memory of `total` bytes.
fn check_inside(rows: &[u64], length: usize, total: usize) -> Result<(), RegistrationError> {
    for (row, offset) in rows.iter().map(|row| offset(*row)).enumerate() {
        if offset.checked_add(length).is_none_or(|end| end > total) {
            let source = DmaError::OutOfRange { offset, len: length, total };
            return Err(bad_row(row, offset, length, &source));
        }
    }
    Ok(())
}

/// Says that a row lies outside the memory, or is not contiguous for the device.
fn bad_row(row: usize, offset: usize, length: usize, why: &DmaError) -> RegistrationError {
    RegistrationError(format!(
        "row {row}, {length} bytes at offset {offset}, cannot be registered: {why}; each row's \
         tensor has to be one contiguous range for the device"
    ))
}

/// Says that memory which the GPU must reach has no address on it.
fn not_on_gpu(what: &str) -> RegistrationError {
    RegistrationError(format!(
        "{what} has no address on the GPU; give GPU memory, or page-locked memory that is mapped \
         there"
    ))
}

/// Says that memory which the CPU must reach has no address in this process.
fn not_here(what: &str) -> RegistrationError {
    RegistrationError(format!(
        "{what} has no address in this process; give page-locked host memory"
    ))
}

/// Checks a pool's dimensions; returns the bytes from a row's first object to the end of its last.
fn row_len(shape: &KvShape, layout: &PoolLayout) -> Result<usize, RegistrationError> {
    let PoolLayout { ref rows, block_stride, blocks } = *layout;
    if rows.len() as u64 != u64::from(shape.rows()) {
        let (given, shape) = (rows.len(), shape.rows());
        return Err(RegistrationError(format!(
            "{given} row offsets were given, the shape has {shape} rows (layers * segments)"
        )));
    }
    let object = u64::from(shape.object_bytes);
    let is_possible = blocks > 0 && object > 0 && block_stride >= object;
    let gap = u64::from(blocks.saturating_sub(1)).checked_mul(block_stride);
    let length = gap.filter(|_| is_possible).and_then(|gap| gap.checked_add(object));
    length.and_then(|length| usize::try_from(length).ok()).ok_or_else(|| {
        RegistrationError(format!(
            "{blocks} blocks of {object}-byte objects, {block_stride} bytes apart: at least one \
             block is needed, and the stride has to be at least the object's size and within 64 \
             bits"
        ))
    })
}

/// Converts a row's offset. One beyond the address space is beyond any memory, too.
fn offset(row: u64) -> usize {
    usize::try_from(row).unwrap_or(usize::MAX)
}

/// Checks that no two objects of different rows share a byte. Objects of one row never do: the
/// stride is at least their size.
fn disjoint(layout: &PoolLayout, object: u64) -> Result<(), RegistrationError> {
    let PoolLayout { ref rows, block_stride: stride, blocks } = *layout;
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
                return Err(RegistrationError(format!(
                    "objects of rows {first} and {second} overlap; check the offsets and the stride"
                )));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
