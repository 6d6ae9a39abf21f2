#![allow(unsafe_code, reason = "copies between memory of the host and of the GPU")]
//! Memory of the GPU with an image on the host: the state of the kernel's warps (slots, counters,
//! operations in progress), and the tables that it reads (pools, maps, expected checksums).
//!
//! A warp accesses both with every command, which over the bus would cost more than the command.
//! The host writes tables once and reads counters occasionally, and copies to do so.

use std::{
    fmt,
    mem::ManuallyDrop,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use gio_uring::{ExecutorError, Mirror, SharedMemory};
use nvme_driver::{CopyDirection, CopyEngine as _, CopyError, CopyFence, DeviceCopy, DevicePtr};

use super::{
    copy::CudaCopies,
    device::CudaDevice,
    error::{CudaError, NAME},
    memory::{DeviceMemory, PinnedMemory},
};

/// Timeout of one copy of at most some megabytes: a host with busy processors is slow to look.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Memory of the GPU, and the host's image of it.
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

    /// Returns false if a copy that was given up may still go on: it would change what the next
    /// user finds.
    pub(super) fn is_idle(&self) -> bool {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        self.copies.is_done(last).is_ok_and(|is_done| is_done)
    }

    /// Returns the memory for a ring, with a zeroed image. A previous user must have finished.
    pub(super) fn share(self: &Arc<Self>) -> SharedMemory {
        let (host, len) = (self.image.host(), self.len());
        // SAFETY: `len` bytes of pinned memory that only the ring uses.
        unsafe { host.as_ptr().write_bytes(0, len) };
        // SAFETY: both memories are page aligned, of the same length, and allocated until the
        // mirror, which synchronizes them, is dropped.
        unsafe { SharedMemory::mirrored(host, self.memory.device().0, len, self.clone()) }
    }

    fn copy(&self, direction: CopyDirection, range: Range<usize>) -> Result<(), ExecutorError> {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {self:?}");
        let failed = |cause| ExecutorError::Failed { executor: NAME, cause };
        let words = |error: CopyError| failed(format!("its memory on the GPU: {error}"));
        let device = DevicePtr(self.memory.device().0 + range.start as u64);
        // SAFETY: the range is inside the image.
        let host = unsafe { self.image.host().byte_add(range.start) };
        let copy = DeviceCopy { host, device, len: range.len(), direction };
        // SAFETY: `self` keeps both, and releases them only after the fence; the ring uses the
        // image from one thread, which waits here.
        let fence = unsafe { self.copies.submit(&[copy]) }.map_err(words)?;
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = fence;
        let start = Instant::now();
        while !self.copies.is_done(fence).map_err(words)? {
            if start.elapsed() > TIMEOUT {
                let seconds = TIMEOUT.as_secs();
                return Err(failed(format!(
                    "its memory on the GPU was not copied within {seconds} s"
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
            found => tracing::error!(?found, "a copy to or from the GPU may go on: leaked"),
        }
    }
}

impl Mirror for State {
    fn push(&self, range: Range<usize>) -> Result<(), ExecutorError> {
        self.copy(CopyDirection::HostToDevice, range)
    }

    fn pull(&self, range: Range<usize>) -> Result<(), ExecutorError> {
        self.copy(CopyDirection::DeviceToHost, range)
    }
}
