//! GPU memory of an engine in another process, and memory of this one that its layers go through.

#![allow(unsafe_code, reason = "copies between memory that two processes own")]

use std::{
    fmt,
    mem::ManuallyDrop,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use gio_kernels::cuda::{CudaCopies, CudaDriver, ForeignMemory, GpuHandle, PinnedMemory};
use kv_catalog::lock;
use nvme_driver::{CopyDirection, CopyEngine as _, DeviceCopy, DevicePtr};

pub use nvme_driver::CopyFence;

use crate::{error::StackError, pool::EngineMemory};

/// Time for copies in flight when the memory is given back. A link transfers gigabytes a second.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between looks at them.
const PAUSE: Duration = Duration::from_micros(50);

/// GPU memory of an engine in another process, staging memory of this one, and a copy engine
/// between them. Dropping it waits for copies in flight; if they do not end, the memory leaks.
pub struct ForeignGpu {
    /// Dropped last, and only if no copy is in flight.
    memory: ManuallyDrop<ForeignMemory>,
    staging: ManuallyDrop<Arc<PinnedMemory>>,
    copies: CudaCopies,
    last: Mutex<CopyFence>,
}

impl fmt::Debug for ForeignGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ForeignGpu({:?}, {:?})", *self.memory, *self.staging)
    }
}

impl ForeignGpu {
    /// Maps the memory that another process has named, and allocates staging memory. The name may
    /// be anything: it is checked.
    ///
    /// # Errors
    /// Returns [`StackError::Cuda`]: there is no driver, this process does not see the GPU, the
    /// handle is none or its process has ended, or too little memory can be pinned.
    pub fn open(named: &GpuHandle, staging_bytes: usize) -> Result<Self, StackError> {
        let device = CudaDriver::load()?.device_at(&named.gpu)?;
        let memory = named.open(&device)?;
        let staging = Arc::new(device.pinned(staging_bytes)?);
        let copies = CudaCopies::with_host_memory(&device, 0)?;
        let (memory, staging) = (ManuallyDrop::new(memory), ManuallyDrop::new(staging));
        Ok(Self { memory, staging, copies, last: Mutex::default() })
    }

    /// Describes the staging memory, which lives as long as any description.
    #[must_use]
    pub fn staging(&self) -> EngineMemory {
        let staging = (*self.staging).clone();
        // SAFETY: pinned memory that its owner keeps, into which no reference is ever made.
        unsafe { EngineMemory::new(staging.host(), staging.len(), staging) }
    }

    /// Starts copies of {offset in the staging memory, offset in the engine's, bytes}, in any
    /// order. Their destinations must not be used otherwise until [`ForeignGpu::is_done`] says so,
    /// or their contents are undefined.
    ///
    /// # Errors
    /// Returns [`StackError::Config`] for a range that is not inside both, or
    /// [`StackError::Failed`]: no copy is in flight then, unless the GPU is lost.
    pub fn copy(
        &self,
        direction: CopyDirection,
        ranges: impl Iterator<Item = (usize, usize, usize)>,
    ) -> Result<CopyFence, StackError> {
        let fits =
            |at: usize, len: usize, all: usize| at.checked_add(len).is_some_and(|end| end <= all);
        let copy = |(staged, at, len): (usize, usize, usize)| {
            if !fits(staged, len, self.staging.len()) || !fits(at, len, self.memory.len()) {
                let problem = format!("{len} bytes at {at}, staged at {staged}, are not inside it");
                return Err(StackError::Config { field: "pool", problem });
            }
            // SAFETY: inside the staging memory, see above.
            let host = unsafe { self.staging.host().add(staged) };
            let device = DevicePtr(self.memory.device().0 + at as u64);
            Ok(DeviceCopy { host, device, len, direction })
        };
        let copies = ranges.map(copy).collect::<Result<Vec<_>, _>>()?;
        // SAFETY: both memories stay allocated until no copy is in flight (`drop`).
        let fence = unsafe { self.copies.submit(&copies) };
        let fence = fence.map_err(|error| failed(error.to_string()))?;
        let mut last = lock(&self.last);
        *last = fence.max(*last);
        Ok(fence)
    }

    /// Returns true if copies have ended.
    ///
    /// # Errors
    /// Returns [`StackError::Failed`] if the GPU is lost.
    pub fn is_done(&self, fence: CopyFence) -> Result<bool, StackError> {
        self.copies.is_done(fence).map_err(|error| failed(error.to_string()))
    }
}

fn failed(cause: String) -> StackError {
    StackError::Failed { what: "moving a layer to or from a GPU".to_owned(), source: cause.into() }
}

impl Drop for ForeignGpu {
    fn drop(&mut self) {
        let last = *self.last.get_mut().unwrap_or_else(PoisonError::into_inner);
        let since = Instant::now();
        let are_over = loop {
            match self.copies.is_done(last) {
                Ok(true) => break true,
                Ok(false) if since.elapsed() < TIMEOUT => thread::sleep(PAUSE),
                _ => break false,
            }
        };
        if !are_over {
            tracing::error!("copies of a client's memory do not end: it stays mapped");
            return;
        }
        // SAFETY: dropped once, here, and not used again.
        unsafe {
            ManuallyDrop::drop(&mut self.memory);
            ManuallyDrop::drop(&mut self.staging);
        }
    }
}
