//! Operations that a store enqueues on the engine's streams: event waits, signals, and copies of
//! objects between staging memory and the pool.

use std::fmt;

use nvme_driver::{DevicePtr, ExternalMemory};

/// A stream of the engine: a `CUstream`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawStream(u64);

impl RawStream {
    /// Wraps a stream handle; 0 is the default stream.
    ///
    /// # Safety
    /// The handle is a stream on the GPU of the store's [`StreamOps`]. It exists as long as this
    /// value is used, and is not destroyed before its enqueued work has finished.
    #[must_use]
    #[allow(unsafe_code, reason = "a driver trusts a handle")]
    pub unsafe fn new(handle: u64) -> Self {
        Self(handle)
    }

    /// Returns the handle.
    #[must_use]
    pub fn handle(self) -> u64 {
        self.0
    }
}

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScatterGatherOp {
    /// From staging memory into blocks of the pool.
    Scatter,
    /// From blocks of the pool into staging memory.
    Gather,
}

/// The objects of some rows of a request: scattered over blocks in the pool; contiguous or also in
/// blocks in staging memory. Addresses are the GPU's.
///
/// Object (row i, position p) is at `staging + i * staging_row + s * object_bytes`, with s =
/// `staging_blocks[p]` (or p if `None`), and at `rows[i] + blocks[p] * block_stride`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScatterGather {
    /// Direction.
    pub op: ScatterGatherOp,
    /// First byte of staging memory.
    pub staging: DevicePtr,
    /// Bytes from one row to the next in staging memory.
    pub staging_row: u64,
    /// `u32[count]`: the block of each position in staging memory, where blocks are contiguous.
    /// `None`: block = position.
    pub staging_blocks: Option<DevicePtr>,
    /// `u64[row_count]`: address of block 0 of each row in the pool.
    pub rows: DevicePtr,
    /// Number of rows.
    pub row_count: u32,
    /// `u32[count]`: the block of each position in the pool.
    pub blocks: DevicePtr,
    /// Number of positions.
    pub count: u32,
    /// Bytes from one block to the next in the pool.
    pub block_stride: u64,
    /// Bytes of an object.
    pub object_bytes: u32,
    /// Checksums of the objects, if any.
    pub checksums: Option<MoveChecksums>,
}

/// The CRC-32C of each copied object, over its bytes in the pool: a gather stores it, a scatter
/// verifies it. Addresses are the GPU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoveChecksums {
    /// `u32[row_count * count]`: object (row i, position p) has element `i * count + p`.
    pub values: DevicePtr,
    /// `u32[count]`, for a scatter: set to the word of
    /// [`IoStatus::Checksum`](crate::IoStatus::Checksum) for each position with a mismatched
    /// object, otherwise unchanged.
    pub status: DevicePtr,
    /// `u64`, for a scatter: incremented by the number of mismatched objects.
    pub errors: DevicePtr,
}

/// A stream rejected an operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{cause}")]
pub struct StreamError {
    /// The driver's message.
    pub cause: String,
}

/// Stream operations of a GPU for a store. No method waits for the stream; each operation is
/// appended to it.
///
/// The value must outlive its work on other owners' streams: a store keeps it until it is closed,
/// and the caller waits for those streams before closing the store.
///
/// # Safety
/// An implementation performs each method's effect as documented, in stream order, and does not
/// otherwise access the memory it is given.
#[allow(unsafe_code, reason = "callers that wait for events rely on their order")]
pub unsafe trait StreamOps: Send + Sync + fmt::Debug {
    /// Returns the store's own stream, for callers that pass none.
    fn own_stream(&self) -> RawStream;

    /// Allocates `len` zeroed bytes of page-locked memory of this process, in whole pages, with a
    /// GPU address: staging memory for stream copies. May wait for running kernels.
    ///
    /// # Errors
    /// Returns [`StreamError`] if the allocation fails.
    fn host_memory(&self, len: usize) -> Result<ExternalMemory, StreamError>;

    /// Enqueues a write of `value` to the word, after all earlier work in the stream is done and
    /// visible system-wide.
    ///
    /// # Errors
    /// Returns [`StreamError`] if nothing was enqueued.
    ///
    /// # Safety
    /// The word must stay allocated until the stream is past the operation.
    unsafe fn write_word(
        &self,
        stream: RawStream,
        word: DevicePtr,
        value: u32,
    ) -> Result<(), StreamError>;

    /// Enqueues a wait until `word - value` is not negative as a signed number. Later work in the
    /// stream sees everything written before the word, including a device's writes to GPU memory.
    ///
    /// # Errors
    /// Returns [`StreamError`] if nothing was enqueued.
    ///
    /// # Safety
    /// Same as [`StreamOps::write_word`].
    unsafe fn wait_word(
        &self,
        stream: RawStream,
        word: DevicePtr,
        value: u32,
    ) -> Result<(), StreamError>;

    /// Enqueues a copy of objects. Later work in the stream sees the copied data.
    ///
    /// # Errors
    /// Returns [`StreamError`] if nothing was enqueued.
    ///
    /// # Safety
    /// All memory named by `moves` must stay allocated until the stream is past the copy, and its
    /// destination must not be otherwise used.
    unsafe fn scatter_gather(
        &self,
        stream: RawStream,
        moves: &ScatterGather,
    ) -> Result<(), StreamError>;
}
