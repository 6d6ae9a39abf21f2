//! Staging memory: buffers for a layer's objects between the devices and a pool that no device
//! reaches.
//!
//! It is cut into buffers, and an operation takes a whole one. The ring has a pool for each, in
//! which the rows of all layers have the same addresses and a block's number is its position in the
//! request, so that an operation on it is like any other one. A buffer is free again when its
//! operation has ended and the stream that moves the objects is past the move: a cancelled
//! operation ends before its stream gets there.

use gio_uring::{
    DeviceArray, MoveChecksums, PoolHandle, ScatterGather, ScatterGatherOp, Uring, Wait,
};
use nvme_driver::{DevicePtr, DmaSlice, Iova};
use nvme_spec::nvm::Direction;

use kv_catalog::{KvShape, Layer};

use crate::{
    error::StoreError,
    registration::{KvPool, PAGE, staging_row_bytes},
};

/// Dimensions of the buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StagingLayout {
    pub(super) buffers: u32,
    /// Blocks that fit into a buffer.
    pub(super) slots: u32,
    /// Distance in bytes between rows of a buffer.
    pub(super) row_bytes: u64,
    /// Bytes of a buffer.
    pub(super) bytes: u64,
}

impl StagingLayout {
    /// Divides `len` bytes into `buffers` equal parts.
    pub(super) fn new(len: u64, shape: &KvShape, buffers: u32) -> Result<Self, StoreError> {
        let wrong = |field, problem| Err(StoreError::Config { field, problem });
        if buffers == 0 {
            return wrong("staging_buffers", "at least one buffer is needed".to_owned());
        }
        let rows = u64::from(buffers) * u64::from(shape.segments);
        let row = (len / rows) & !(PAGE - 1);
        let slots = u32::try_from(row / u64::from(shape.object_bytes)).unwrap_or(u32::MAX);
        if slots == 0 {
            let problem = format!(
                "{len} bytes of staging memory do not give {buffers} buffers for one block each; \
                 {} bytes do",
                KvPool::staging_bytes(shape, 1, buffers)
            );
            return wrong("pool", problem);
        }
        let row_bytes = staging_row_bytes(shape.object_bytes, slots);
        Ok(Self { buffers, slots, row_bytes, bytes: row_bytes * u64::from(shape.segments) })
    }

    /// Returns buffer `at` of `pool`'s staging memory.
    fn slice(&self, at: u32, pool: &KvPool) -> Result<DmaSlice, StoreError> {
        let offset = (u64::from(at) * self.bytes) as usize;
        let slice = DmaSlice::new(pool.memory().clone(), offset, self.bytes as usize);
        slice.map_err(|source| {
            let problem = format!("staging buffer {at} cannot be used: {source}");
            StoreError::Config { field: "pool", problem }
        })
    }

    /// Returns the device address of block 0 in each row of buffer `at` of `pool`'s staging memory.
    pub(super) fn row_iova(
        &self,
        at: u32,
        pool: &KvPool,
        shape: &KvShape,
    ) -> Result<Vec<Iova>, StoreError> {
        let slice = self.slice(at, pool)?;
        let row = |row| slice.iova().offset(u64::from(row % shape.segments) * self.row_bytes);
        Ok((0..shape.rows()).map(row).collect())
    }
}

/// Use of a buffer by a stream.
#[derive(Debug, Clone)]
pub(super) enum Until {
    /// None.
    Now,
    /// A move that is over once this is reached.
    Reached(Wait),
    /// A copy that will run at an unknown time.
    Never,
}

impl Until {
    fn is_over(&self) -> bool {
        match self {
            Self::Now => true,
            Self::Reached(mark) => mark.is_reached(),
            Self::Never => false,
        }
    }
}

/// Use of a buffer, and resources kept alive meanwhile.
#[derive(Debug)]
struct Held {
    /// An operation of the ring uses it.
    operating: bool,
    until: Until,
    _first: Option<Wait>,
    _blocks: DeviceArray<u32>,
}

/// A buffer.
#[derive(Debug)]
struct Buffer {
    pool: PoolHandle,
    /// GPU address of its first byte.
    device: DevicePtr,
    held: Option<Held>,
}

/// The staging memory of a store.
#[derive(Debug)]
pub(super) struct Staging {
    layout: StagingLayout,
    buffers: Vec<Buffer>,
    /// GPU address of block 0 in each row of the pool.
    rows: DeviceArray<u64>,
    segments: u32,
    block_stride: u64,
    object_bytes: u32,
}

impl Staging {
    /// Creates buffers for the pools that were registered for them.
    pub(super) fn new(
        ring: &mut Uring,
        layout: StagingLayout,
        pool: &KvPool,
        shape: &KvShape,
        pools: Vec<PoolHandle>,
    ) -> Result<Self, StoreError> {
        let device = pool.memory().device().expect("checked when it was registered");
        let buffer = |(at, pool)| {
            let device = DevicePtr(device.0 + at as u64 * layout.bytes);
            Buffer { pool, device, held: None }
        };
        let rows = pool.row_device();
        Ok(Self {
            layout,
            buffers: pools.into_iter().enumerate().map(buffer).collect(),
            rows: ring.upload(rows.into_iter())?,
            segments: shape.segments,
            block_stride: pool.block_stride(),
            object_bytes: pool.object_bytes(),
        })
    }

    /// Returns the number of blocks that fit into a buffer.
    pub(super) fn slots(&self) -> u32 {
        self.layout.slots
    }

    /// Returns buffer `at` of `pool`'s staging memory.
    pub(super) fn slice(&self, at: usize, pool: &KvPool) -> Result<DmaSlice, StoreError> {
        self.layout.slice(at as u32, pool)
    }

    /// Returns the offset in a buffer of the object of a layer's segment and a position.
    pub(super) fn offset(&self, segment: usize, position: usize) -> usize {
        segment * self.layout.row_bytes as usize + position * self.object_bytes as usize
    }

    /// Returns a free buffer, if there is one.
    pub(super) fn free(&self) -> Option<usize> {
        let is_free = |buffer: &Buffer| match &buffer.held {
            None => true,
            Some(held) => !held.operating && held.until.is_over(),
        };
        self.buffers.iter().position(is_free)
    }

    /// Returns the error of having no free buffer.
    pub(super) fn busy(&self) -> StoreError {
        StoreError::StagingBusy { buffers: self.layout.buffers }
    }

    /// Returns the ring's pool for buffer `at`.
    pub(super) fn pool(&self, at: usize) -> &PoolHandle {
        &self.buffers[at].pool
    }

    /// Takes buffer `at`, and keeps the other resources of its move alive.
    pub(super) fn hold(
        &mut self,
        at: usize,
        until: Until,
        first: Option<Wait>,
        blocks: DeviceArray<u32>,
    ) {
        let held = Held { operating: false, until, _first: first, _blocks: blocks };
        self.buffers[at].held = Some(held);
    }

    /// Sets the use of buffer `at` by a stream.
    pub(super) fn set_until(&mut self, at: usize, until: Until) {
        if let Some(held) = &mut self.buffers[at].held {
            held.until = until;
        }
    }

    /// Marks buffer `at` as used by an operation of the ring.
    pub(super) fn begin(&mut self, at: usize) {
        if let Some(held) = &mut self.buffers[at].held {
            held.operating = true;
        }
    }

    /// Marks the operation of buffer `at` as ended.
    pub(super) fn end(&mut self, at: usize) {
        let held = &mut self.buffers[at].held;
        if held.as_ref().is_some_and(|held| held.until.is_over()) {
            // Now, not on the next use of the buffer: its resources may have to be freed.
            *held = None;
        } else if let Some(held) = held {
            held.operating = false;
        }
    }

    /// Returns the move of `layer`'s objects between buffer `at` and the pool.
    pub(super) fn scatter_gather(
        &self,
        at: usize,
        direction: Direction,
        layer: Layer,
        blocks: &DeviceArray<u32>,
        checksums: Option<MoveChecksums>,
    ) -> ScatterGather {
        let row = layer.0 as usize * self.segments as usize;
        ScatterGather {
            op: match direction {
                Direction::Read => ScatterGatherOp::Scatter,
                Direction::Write => ScatterGatherOp::Gather,
            },
            staging: self.buffers[at].device,
            staging_row: self.layout.row_bytes,
            staging_blocks: None,
            rows: self.rows.address(row),
            row_count: self.segments,
            blocks: blocks.address(0),
            count: blocks.len() as u32,
            block_stride: self.block_stride,
            object_bytes: self.object_bytes,
            checksums,
        }
    }

    /// Takes over the streams' uses of the buffers from a ring that is replaced.
    pub(super) fn inherit(&mut self, old: &mut Self) {
        for (new, old) in self.buffers.iter_mut().zip(&mut old.buffers) {
            new.held = old.held.take();
        }
    }
}
