//! What a store enqueues on the engine's streams: waits for events, signals, and copies of objects
//! between staging memory and the pool.

use std::fmt;

use nvme_driver::{DevicePtr, ExternalMemory};

/// A stream of the engine: a `CUstream`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawStream(u64);

impl RawStream {
    /// The stream with this handle; 0 is the default stream.
    ///
    /// # Safety
    /// It is a stream of the GPU that the store's [`StreamOps`] belongs to, exists for as long as
    /// this value is used, and is not destroyed before what was enqueued on it is done.
    #[must_use]
    #[allow(unsafe_code, reason = "a driver trusts a handle")]
    pub unsafe fn new(handle: u64) -> Self {
        Self(handle)
    }

    /// The handle.
    #[must_use]
    pub fn handle(self) -> u64 {
        self.0
    }
}

/// Which way objects are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScatterGatherOp {
    /// From staging memory into blocks of the pool.
    Scatter,
    /// From blocks of the pool into staging memory.
    Gather,
}

/// The objects of some rows of a request: in the pool wherever their blocks are, in staging memory
/// one after another or in blocks, too. Addresses are the GPU's.
///
/// Object (row i, position p) is at `staging + i * staging_row + s * object_bytes`, where s is
/// `staging_blocks[p]`, or p without it, and at `rows[i] + blocks[p] * block_stride`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScatterGather {
    /// Which way.
    pub op: ScatterGatherOp,
    /// First byte of staging memory.
    pub staging: DevicePtr,
    /// Bytes from one row to the next in staging memory.
    pub staging_row: u64,
    /// `u32[count]`: the block of each position in staging memory, which has them one after
    /// another. `None`: the position itself.
    pub staging_blocks: Option<DevicePtr>,
    /// `u64[row_count]`: where block 0 of each row is in the pool.
    pub rows: DevicePtr,
    /// Number of rows.
    pub row_count: u32,
    /// `u32[count]`: the block of each position.
    pub blocks: DevicePtr,
    /// Number of positions.
    pub count: u32,
    /// Bytes from one block to the next.
    pub block_stride: u64,
    /// Bytes of an object.
    pub object_bytes: u32,
    /// The checksums of the objects, if they have some.
    pub checksums: Option<MoveChecksums>,
}

/// The CRC-32C of each object that is moved, over its bytes in the pool: a gather stores it, a
/// scatter compares with it. Addresses are the GPU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoveChecksums {
    /// `u32[row_count * count]`: that of object (row i, position p) is at `i * count + p`.
    pub values: DevicePtr,
    /// `u32[count]`, for a scatter: becomes the word of
    /// [`IoStatus::Checksum`](crate::IoStatus::Checksum) for each position with an object that
    /// differs, and stays as it is for the others.
    pub status: DevicePtr,
    /// `u64`, for a scatter: the number of objects that differ is added.
    pub errors: DevicePtr,
}

/// A stream did not take an operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{cause}")]
pub struct StreamError {
    /// The driver's message.
    pub cause: String,
}

/// What streams of a GPU do for a store. Nothing here waits; each operation takes its place at the
/// end of a stream.
///
/// It has to outlive what it put on streams of others: a store keeps it until it is closed, and who
/// closes a store waits for those streams first.
///
/// # Safety
/// An implementor does what each method says, in the order of the stream, and nothing else with
/// the memory it is given.
#[allow(unsafe_code, reason = "callers that wait for events rely on their order")]
pub unsafe trait StreamOps: Send + Sync + fmt::Debug {
    /// A stream of the store's own, for who gives none.
    fn own_stream(&self) -> RawStream;

    /// `len` zeroed bytes of page-locked memory of this process, in whole pages, with an address on
    /// the GPU: what streams move objects from and to. May wait for kernels that run.
    ///
    /// # Errors
    /// [`StreamError`] without memory.
    fn host_memory(&self, len: usize) -> Result<ExternalMemory, StreamError>;

    /// Once everything before it in the stream is done and visible to the whole system, the word
    /// becomes `value`.
    ///
    /// # Errors
    /// [`StreamError`]: nothing was enqueued.
    ///
    /// # Safety
    /// The word stays where it is until the stream is past it.
    unsafe fn write_word(
        &self,
        stream: RawStream,
        word: DevicePtr,
        value: u32,
    ) -> Result<(), StreamError>;

    /// What comes after it in the stream starts once `word - value` is not negative as a signed
    /// number, and sees what was written before the word, by a device into the GPU's memory, too.
    ///
    /// # Errors
    /// [`StreamError`]: nothing was enqueued.
    ///
    /// # Safety
    /// As for [`StreamOps::write_word`].
    unsafe fn wait_word(
        &self,
        stream: RawStream,
        word: DevicePtr,
        value: u32,
    ) -> Result<(), StreamError>;

    /// Moves objects. What comes after it in the stream sees them where they went.
    ///
    /// # Errors
    /// [`StreamError`]: nothing was enqueued.
    ///
    /// # Safety
    /// All memory that `moves` names stays allocated until the stream is past it, and what is
    /// written to is not otherwise used.
    unsafe fn scatter_gather(
        &self,
        stream: RawStream,
        moves: &ScatterGather,
    ) -> Result<(), StreamError>;
}
