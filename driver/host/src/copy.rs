//! Copies between memory of this process and memory that only the GPU can address.
//!
//! A controller behind VFIO reaches GPU memory directly, once it is mapped. The software controller
//! and the round-trip proof need the GPU to copy for them, through this interface.

use std::{fmt, ptr::NonNull};

use crate::dma::{DevicePtr, ExternalMemory};

/// Direction of a copy, in CUDA's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CopyDirection {
    /// From host to GPU memory.
    HostToDevice,
    /// From GPU to host memory.
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
    /// The direction.
    pub direction: CopyDirection,
}

// SAFETY: addresses; the submitter of the copy vouches for the memory.
#[allow(unsafe_code, reason = "an address that crosses threads")]
unsafe impl Send for DeviceCopy {}
// SAFETY: as above.
#[allow(unsafe_code, reason = "an address that crosses threads")]
unsafe impl Sync for DeviceCopy {}

/// A point in the sequence of batches. Larger values are later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CopyFence(pub u64);

/// Failure of a GPU copy. The state of copies in flight is then unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("copying between host and GPU memory failed: {cause}")]
pub struct CopyError {
    /// The cause, as the CUDA driver reports it.
    pub cause: String,
}

/// A copy engine between this process and a GPU. Batches run one after another, the copies of a
/// batch in any order.
pub trait CopyEngine: Send + Sync + fmt::Debug {
    /// Allocates `len` bytes of page-aligned memory with fast, asynchronous copies.
    ///
    /// # Errors
    /// Returns [`CopyError`] if there is no memory.
    fn host_memory(&self, len: usize) -> Result<ExternalMemory, CopyError>;

    /// Starts a batch and returns without waiting for it.
    ///
    /// # Errors
    /// Returns [`CopyError`] if no copy of the batch was started, or the GPU is lost.
    ///
    /// # Safety
    /// Both ranges of every copy must stay allocated, and the destinations must not be used
    /// otherwise, until [`CopyEngine::is_done`] returns true for the fence or fails.
    #[allow(unsafe_code, reason = "the caller vouches for the memory")]
    unsafe fn submit(&self, copies: &[DeviceCopy]) -> Result<CopyFence, CopyError>;

    /// Returns whether all batches up to this fence are done.
    ///
    /// # Errors
    /// Returns [`CopyError`] if the GPU is lost: no batch makes further progress.
    fn is_done(&self, fence: CopyFence) -> Result<bool, CopyError>;
}
