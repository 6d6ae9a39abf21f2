#![allow(unsafe_code, reason = "launches a kernel on memory that a store names")]
//! A store's operations on the engine's streams.

use std::{fmt, mem::ManuallyDrop, sync::Arc};

use gio_uring::{RawStream, ScatterGather, StreamError, StreamOps};
use nvme_driver::{DevicePtr, ExternalMemory};

use super::{
    device::CudaDevice,
    error::CudaError,
    module::{CudaFunction, CudaModule},
    stream::CudaStream,
};
use crate::{
    pool::{BLOCK_THREADS_MAX, ScatterGatherArgs},
    ptx::{POOL_PTX, SCATTER_GATHER_ENTRY},
};

/// Warps per block.
const BLOCK_WARPS: u64 = BLOCK_THREADS_MAX as u64 / 32;
/// Maximum blocks of a copy. Each warp has 2 KiB in flight; 256 warps have several times what a
/// link holds in flight, and the rest of the GPU stays free for the engine's kernels.
const MOVE_BLOCKS_MAX: u64 = 32;

/// Streams of a GPU for a store: the [`StreamOps`] of CUDA. Word operations and copies take any
/// stream of the GPU, the engine's or its own.
///
/// Keep it, like the memory of the copies, until every stream is past the last copy enqueued on it.
/// Work still in flight on its own stream at drop runs to its end, and its resources leak.
pub struct CudaStreams {
    // Leaked together.
    stream: ManuallyDrop<CudaStream>,
    mover: ManuallyDrop<CudaFunction>,
    device: Arc<CudaDevice>,
    /// True when waits flush peers' writes to the GPU's memory.
    flush: bool,
}

impl fmt::Debug for CudaStreams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaStreams({:?})", self.device)
    }
}

impl CudaStreams {
    /// Compiles the kernel, and creates a stream that does not synchronize with others. May wait
    /// for running kernels: call it before an executor starts.
    ///
    /// # Errors
    /// Returns [`CudaError::Compile`] or [`CudaError::Call`].
    pub fn new(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        let module = CudaModule::compile(device, POOL_PTX, "the pool's kernels")?;
        let mover = module.function(SCATTER_GATHER_ENTRY)?;
        mover.takes::<ScatterGatherArgs>()?;
        Ok(Self {
            stream: ManuallyDrop::new(CudaStream::new(device, None)?),
            mover: ManuallyDrop::new(mover),
            device: device.clone(),
            flush: device.report().flush_remote_writes,
        })
    }

    /// Returns its own stream.
    #[must_use]
    pub fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// Returns true if work after [`StreamOps::wait_word`] sees a peer's earlier writes to the
    /// GPU's memory, because such writes are ordered or because the wait flushes them. Otherwise a
    /// drive must not write to the GPU's memory. Host memory is always ordered.
    #[must_use]
    pub fn orders_peer_writes(&self) -> bool {
        self.flush || self.device.report().writes_ordering.is_ordered()
    }
}

fn refused(error: impl fmt::Display) -> StreamError {
    StreamError { cause: error.to_string() }
}

// SAFETY: the driver performs stream operations in stream order. A kernel sees everything written
// before it started, and its own writes are visible to later work.
unsafe impl StreamOps for CudaStreams {
    fn own_stream(&self) -> RawStream {
        // SAFETY: a stream of this GPU, which lives as long as `self`.
        unsafe { RawStream::new(self.stream.raw()) }
    }

    fn host_memory(&self, len: usize) -> Result<ExternalMemory, StreamError> {
        let pinned = self.device.pinned(len).map_err(refused)?;
        Ok(pinned.into_external())
    }

    unsafe fn write_word(
        &self,
        stream: RawStream,
        word: DevicePtr,
        value: u32,
    ) -> Result<(), StreamError> {
        // SAFETY: the caller's promise.
        unsafe { self.device.stream_write(stream.handle(), word, value) }.map_err(refused)
    }

    unsafe fn wait_word(
        &self,
        stream: RawStream,
        word: DevicePtr,
        value: u32,
    ) -> Result<(), StreamError> {
        // SAFETY: the caller's promise.
        unsafe { self.device.stream_wait(stream.handle(), word, value, self.flush) }
            .map_err(refused)
    }

    unsafe fn scatter_gather(
        &self,
        stream: RawStream,
        moves: &ScatterGather,
    ) -> Result<(), StreamError> {
        let args = ScatterGatherArgs::from(moves);
        let tiles = args.tiles().ok_or_else(|| refused("moving more than 2^64 bytes"))?;
        if tiles == 0 {
            return Ok(());
        }
        let blocks = tiles.div_ceil(BLOCK_WARPS).min(MOVE_BLOCKS_MAX) as u32;
        // SAFETY: `ScatterGatherArgs` is the kernel's argument; the caller promises the memory, and
        // the function lives as long as `self`.
        unsafe { self.mover.launch(stream, blocks, BLOCK_THREADS_MAX, args) }.map_err(refused)
    }
}

impl Drop for CudaStreams {
    fn drop(&mut self) {
        match self.stream.is_idle() {
            // A lost GPU runs nothing, and the driver frees nothing.
            Ok(true) | Err(_) => {
                // SAFETY: dropped once, here, and not used again.
                unsafe {
                    ManuallyDrop::drop(&mut self.mover);
                    ManuallyDrop::drop(&mut self.stream);
                }
            }
            Ok(false) => {
                tracing::warn!("dropping streams with work under way: kernel and stream leak");
            }
        }
    }
}
