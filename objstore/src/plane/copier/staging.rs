//! Staging memory: buffers for a layer's objects between the devices and a pool that no device
//! reaches.
//!
//! It is cut into buffers, and an operation takes a whole one. The ring has a pool for each, in
//! which the rows of all layers have the same addresses and a block's number is its position in the
//! request, so that an operation on it is like any other one. A buffer is free again when its
//! operation has ended and the stream that moves the objects is past the move: a cancelled
//! operation ends before its stream gets there.

use gio_uring::{DeviceArray, PoolDesc, PoolHandle, Uring, Wait};
use kv_catalog::KvShape;
use nvme_driver::{DevicePtr, DmaSlice};

use super::copies::Uploaded;
use crate::{
    error::StoreError,
    registration::{KvPool, PAGE, staging_row_bytes},
};

/// Use of a buffer by a stream.
#[derive(Debug, Clone)]
pub(in crate::plane) enum Until {
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
pub(in crate::plane) struct Staging {
    buffers: Vec<Buffer>,
    /// Blocks that fit into a buffer.
    slots: u32,
    /// Distance in bytes between rows of a buffer.
    row_bytes: u64,
    /// Bytes of a buffer.
    bytes: u64,
}

impl Staging {
    /// Divides a pool's staging memory into equal buffers, and registers each with a ring. Takes
    /// over the streams' uses of the buffers from `old`, whose ring is replaced.
    pub(super) fn new(
        ring: &mut Uring,
        pool: &KvPool,
        shape: &KvShape,
        desc: &PoolDesc,
        count: u32,
        old: Option<Self>,
    ) -> Result<Self, StoreError> {
        let wrong = |field, problem| Err(StoreError::Config { field, problem });
        if count == 0 {
            return wrong("staging_buffers", "at least one buffer is needed".to_owned());
        }
        let (len, segments) = (pool.memory().len() as u64, u64::from(shape.segments));
        let row = (len / (u64::from(count) * segments)) & !(PAGE - 1);
        let slots = u32::try_from(row / u64::from(shape.object_bytes)).unwrap_or(u32::MAX);
        if slots == 0 {
            let problem = format!(
                "{len} bytes of staging memory do not give {count} buffers for one block each; {} \
                 bytes do",
                KvPool::staging_bytes(shape, 1, count)
            );
            return wrong("pool", problem);
        }
        let row_bytes = staging_row_bytes(shape.object_bytes, slots);
        let bytes = row_bytes * segments;
        let mut uses = old.into_iter().flat_map(|old| old.buffers).map(|buffer| buffer.held);
        let device = pool.memory().device().expect("checked when it was registered");
        let mut made = Self { buffers: Vec::new(), slots, row_bytes, bytes };
        for at in 0..count {
            let slice = made.slice(at as usize, pool)?;
            let row = |row| slice.iova().offset(u64::from(row % shape.segments) * row_bytes);
            let pool = ring.register_pool(&PoolDesc {
                row_iova: (0..shape.rows()).map(row).collect(),
                block_stride: u64::from(shape.object_bytes),
                blocks: slots,
                ..desc.clone()
            })?;
            let device = DevicePtr(device.0 + u64::from(at) * bytes);
            made.buffers.push(Buffer { pool, device, held: uses.next().flatten() });
        }
        Ok(made)
    }

    /// Returns the number of blocks that fit into a buffer.
    pub(in crate::plane) fn slots(&self) -> u32 {
        self.slots
    }

    /// Returns buffer `at` of `pool`'s staging memory.
    pub(in crate::plane) fn slice(&self, at: usize, pool: &KvPool) -> Result<DmaSlice, StoreError> {
        let (offset, bytes) = (at * self.bytes as usize, self.bytes as usize);
        DmaSlice::new(pool.memory().clone(), offset, bytes).map_err(|source| {
            let problem = format!("staging buffer {at} cannot be used: {source}");
            StoreError::Config { field: "pool", problem }
        })
    }

    /// Returns a free buffer, if there is one.
    pub(super) fn free(&self) -> Option<usize> {
        let is_free = |buffer: &Buffer| match &buffer.held {
            None => true,
            Some(held) => !held.operating && held.until.is_over(),
        };
        self.buffers.iter().position(is_free)
    }

    /// Returns the ring's pool for buffer `at`.
    pub(super) fn pool(&self, at: usize) -> &PoolHandle {
        &self.buffers[at].pool
    }

    /// Takes a free buffer, and keeps the other resources of its move alive.
    pub(in crate::plane) fn take(
        &mut self,
        first: Option<Wait>,
        blocks: &Uploaded,
    ) -> Result<usize, StoreError> {
        let buffers = self.buffers.len() as u32;
        let at = self.free().ok_or(StoreError::StagingBusy { buffers })?;
        let _blocks = blocks.engine.clone();
        let held = Held { operating: false, until: Until::Now, _first: first, _blocks };
        self.buffers[at].held = Some(held);
        Ok(at)
    }

    /// Sets the use of buffer `at` by a stream.
    pub(in crate::plane) fn set_until(&mut self, at: usize, until: Until) {
        if let Some(held) = &mut self.buffers[at].held {
            held.until = until;
        }
    }

    /// Marks buffer `at` as used by an operation of the ring.
    pub(in crate::plane) fn begin(&mut self, at: usize) {
        if let Some(held) = &mut self.buffers[at].held {
            held.operating = true;
        }
    }

    /// Marks the operation of buffer `at` as ended.
    pub(in crate::plane) fn end(&mut self, at: usize) {
        let held = &mut self.buffers[at].held;
        if held.as_ref().is_some_and(|held| held.until.is_over()) {
            // Now, not on the next use of the buffer: its resources may have to be freed.
            *held = None;
        } else if let Some(held) = held {
            held.operating = false;
        }
    }

    /// Returns the GPU address of buffer `at`, and the distance in bytes between its rows.
    pub(in crate::plane) fn place(&self, at: usize) -> (DevicePtr, u64) {
        (self.buffers[at].device, self.row_bytes)
    }
}
