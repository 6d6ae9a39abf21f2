#![allow(unsafe_code, reason = "copies between memory of the host and of the GPU")]
//! State of the kernel's warps in GPU memory: slots, counters, operations in progress.
//!
//! A warp accesses it with every command, which over the bus would cost more than the command. The
//! host reads counters only occasionally, and copies the state to do so.

use std::{
    fmt,
    mem::ManuallyDrop,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use gio_uring::{ExecutorError, Mirror, SharedMemory};
use nvme_driver::{CopyDirection, CopyEngine as _, CopyError, CopyFence, DeviceCopy};

use super::{
    copy::CudaCopies,
    device::CudaDevice,
    error::{CudaError, NAME},
    memory::{DeviceMemory, PinnedMemory},
};

/// Timeout of one copy. It is some kilobytes, which a healthy GPU copies much faster.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The state in GPU memory, and the host's image of it.
pub(super) struct State {
    copies: CudaCopies,
    /// Fence of the last copy.
    last: Mutex<CopyFence>,
    // Leaked together if that copy does not end.
    image: ManuallyDrop<PinnedMemory>,
    memory: ManuallyDrop<DeviceMemory>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "State({:?}, {:?})", self.image, self.memory)
    }
}

impl State {
    /// Allocates `len` zeroed bytes, rounded up to pages. Must be called before an executor starts.
    pub(super) fn new(device: &Arc<CudaDevice>, len: usize) -> Result<Arc<Self>, CudaError> {
        let image = device.pinned(len)?;
        let memory = device.allocate(image.len())?;
        // The preallocated host memory is not used here.
        let copies = CudaCopies::with_host_memory(device, 1)?;
        let (image, memory) = (ManuallyDrop::new(image), ManuallyDrop::new(memory));
        Ok(Arc::new(Self { copies, last: Mutex::default(), image, memory }))
    }

    /// Returns the length in bytes.
    pub(super) fn len(&self) -> usize {
        self.image.len()
    }

    /// Returns the state as zeroed memory of a ring. A previous user must have finished.
    pub(super) fn share(self: &Arc<Self>) -> SharedMemory {
        let (host, len) = (self.image.host(), self.len());
        // SAFETY: `len` bytes of pinned memory that only the ring uses.
        unsafe { host.as_ptr().write_bytes(0, len) };
        // SAFETY: both memories are page aligned, of the same length, and allocated until the
        // mirror, which synchronizes them, is dropped.
        unsafe { SharedMemory::mirrored(host, self.memory.device().0, len, self.clone()) }
    }

    fn copy(&self, direction: CopyDirection) -> Result<(), ExecutorError> {
        let failed = |cause| ExecutorError::Failed { executor: NAME, cause };
        let words = |error: CopyError| failed(format!("the state of its warps: {error}"));
        let (host, device) = (self.image.host(), self.memory.device());
        let copy = DeviceCopy { host, device, len: self.len(), direction };
        // SAFETY: `self` keeps both, and releases them only after the fence; the ring uses the
        // image from one thread, which waits here.
        let fence = unsafe { self.copies.submit(&[copy]) }.map_err(words)?;
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = fence;
        let start = Instant::now();
        while !self.copies.is_done(fence).map_err(words)? {
            if start.elapsed() > TIMEOUT {
                let seconds = TIMEOUT.as_secs();
                return Err(failed(format!(
                    "the state of its warps was not copied within {seconds} s"
                )));
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match self.copies.is_done(last) {
            // SAFETY: dropped once, here, and not used again.
            Ok(true) => unsafe {
                ManuallyDrop::drop(&mut self.image);
                ManuallyDrop::drop(&mut self.memory);
            },
            found => tracing::error!(?found, "a copy of the warps' state may go on: leaked"),
        }
    }
}

impl Mirror for State {
    fn push(&self) -> Result<(), ExecutorError> {
        self.copy(CopyDirection::HostToDevice)
    }

    fn pull(&self) -> Result<(), ExecutorError> {
        self.copy(CopyDirection::DeviceToHost)
    }
}
