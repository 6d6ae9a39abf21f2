//! Copies between memory of this process and memory that only a GPU addresses.
//!
//! A controller behind VFIO reaches GPU memory by itself, once it is mapped. The software
//! controller and the proof of a route have to ask the GPU to do it: this is what they ask.

use std::{fmt, ptr::NonNull};

use crate::dma::{DevicePtr, ExternalMemory};

/// Which way bytes go, in CUDA's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CopyDirection {
    /// From this process to the GPU.
    HostToDevice,
    /// From the GPU to this process.
    DeviceToHost,
}

/// One copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceCopy {
    /// First byte in this process.
    pub host: NonNull<u8>,
    /// First byte on the GPU.
    pub device: DevicePtr,
    /// Length in bytes.
    pub len: usize,
    /// Which way they go.
    pub direction: CopyDirection,
}

// SAFETY: addresses; who submits the copy vouches for the memory.
#[allow(unsafe_code, reason = "an address that crosses threads")]
unsafe impl Send for DeviceCopy {}
// SAFETY: as above.
#[allow(unsafe_code, reason = "an address that crosses threads")]
unsafe impl Sync for DeviceCopy {}

/// A point behind a batch of copies. Larger ones are later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CopyFence(pub u64);

/// The GPU did not copy. After this, nothing is known of copies under way.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("copying between host and GPU memory failed: {cause}")]
pub struct CopyError {
    /// Why, in the driver's words.
    pub cause: String,
}

/// What copies between this process and a GPU. Batches are carried out one after another, the
/// copies of a batch in any order.
pub trait CopyEngine: Send + Sync + fmt::Debug {
    /// `len` bytes of memory, page aligned, from and to which copies are fast and asynchronous.
    ///
    /// # Errors
    /// [`CopyError`] without memory.
    fn host_memory(&self, len: usize) -> Result<ExternalMemory, CopyError>;

    /// Starts a batch, and returns at once.
    ///
    /// # Errors
    /// [`CopyError`] when the GPU takes none: no copy of the batch was started, or the GPU is lost.
    ///
    /// # Safety
    /// Both ranges of every copy stay allocated, and the ranges written to are not otherwise used,
    /// until [`CopyEngine::is_done`] said so of the fence, or failed.
    #[allow(unsafe_code, reason = "the caller vouches for the memory")]
    unsafe fn submit(&self, copies: &[DeviceCopy]) -> Result<CopyFence, CopyError>;

    /// Whether all batches up to this fence are done.
    ///
    /// # Errors
    /// [`CopyError`] when the GPU is lost: no batch will get any further.
    fn is_done(&self, fence: CopyFence) -> Result<bool, CopyError>;
}
