//! The executor interface: runs the I/O kernel.

use std::{any::Any, fmt, ops::Range, ptr::NonNull, sync::Arc};

use nvme_driver::{GrantEpoch, Nanos, Place, Quiesced};

/// Memory shared by the caller and the I/O kernel: rings, IOCBs, maps, warp state. Zeroed and
/// aligned to 4096 bytes. Freed by the owner stored inside.
pub struct SharedMemory {
    host: NonNull<u8>,
    address: u64,
    len: usize,
    _owner: Box<dyn Any + Send + Sync>,
    mirror: Option<Arc<dyn Mirror>>,
}

/// Copies memory between the host and the kernel's device when they do not share it. A range must
/// lie inside the memory.
pub trait Mirror: Send + Sync + fmt::Debug {
    /// Copies these bytes of the host to the kernel, which must not use them.
    ///
    /// # Errors
    /// Returns [`ExecutorError::Failed`] if the copy fails; the kernel's bytes are then undefined.
    fn push(&self, range: Range<usize>) -> Result<(), ExecutorError>;

    /// Copies these bytes of the kernel to the host, also while the kernel runs. No word is torn.
    ///
    /// # Errors
    /// Returns [`ExecutorError::Failed`] if the copy fails; it may have copied a part.
    fn pull(&self, range: Range<usize>) -> Result<(), ExecutorError>;
}

// SAFETY: an address range whose owner is Send + Sync; all accesses go through crate::shared.
#[allow(unsafe_code, reason = "an address that crosses threads")]
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
#[allow(unsafe_code, reason = "an address that crosses threads")]
unsafe impl Sync for SharedMemory {}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMemory").field("len", &self.len).finish_non_exhaustive()
    }
}

impl SharedMemory {
    /// Describes memory that an executor allocated.
    ///
    /// # Safety
    /// `len` zeroed bytes at `host` (in this process) and at `address` (for the kernel) are the
    /// same memory, aligned to 4096 bytes, valid until `owner` is dropped, and not otherwise used.
    /// For this process it is ordinary cacheable memory, ordered by release and acquire.
    #[allow(unsafe_code, reason = "the executor vouches for its memory")]
    pub unsafe fn new(
        host: NonNull<u8>,
        address: u64,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { host, address, len, _owner: owner, mirror: None }
    }

    /// Describes a host copy and a kernel copy, which `mirror` synchronizes.
    ///
    /// # Safety
    /// Same as [`SharedMemory::new`], except that the two ranges are different memory.
    #[allow(unsafe_code, reason = "the executor vouches for its memory")]
    pub unsafe fn mirrored(
        host: NonNull<u8>,
        address: u64,
        len: usize,
        mirror: Arc<dyn Mirror>,
    ) -> Self {
        Self { host, address, len, _owner: Box::new(()), mirror: Some(mirror) }
    }

    /// Makes the host's writes to `range` visible to operations that are submitted afterwards.
    pub fn push(&self, range: Range<usize>) -> Result<(), ExecutorError> {
        self.mirror.as_ref().map_or(Ok(()), |mirror| mirror.push(range))
    }

    /// Makes the kernel's writes to `range` visible to the host.
    pub fn pull(&self, range: Range<usize>) -> Result<(), ExecutorError> {
        self.mirror.as_ref().map_or(Ok(()), |mirror| mirror.pull(range))
    }

    /// Returns the first byte's address in this process.
    #[must_use]
    pub fn host(&self) -> NonNull<u8> {
        self.host
    }

    /// Returns the first byte's address in the kernel.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The result of one [`IoExecutor::poll`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Commands were submitted or completed.
    Moved,
    /// There was nothing to do, or nothing has completed yet.
    Idle,
}

/// Runs the I/O kernel on host threads, the calling thread, or a GPU.
///
/// Lifecycle: any number of `alloc`, `start`, then `submitted` and `poll`, then `stop`. After a
/// successful `stop` it may be started again with new arguments (recovered queues); ring positions
/// restart at 0. If dropped without a successful `stop`, it neither waits forever nor frees memory
/// that its kernel may still use; the ring then leaks its own memory too.
pub trait IoExecutor: Send + fmt::Debug {
    /// Returns the executor's name in reports: `host`, `inline`, `cuda`.
    fn name(&self) -> &'static str;

    /// Allocates `len` zeroed bytes (rounded up to 4096) shared by caller and kernel.
    ///
    /// # Errors
    /// Returns [`ExecutorError::Memory`] if the allocation failed.
    fn alloc(&self, len: usize) -> Result<SharedMemory, ExecutorError>;

    /// Same as [`IoExecutor::alloc`], for state that only the kernel writes while it runs and that
    /// the host reads occasionally. It lies in device memory if the kernel runs on a device
    /// ([`SharedMemory::push`], [`SharedMemory::pull`]). Must not be called while the kernel runs;
    /// the next call may return the same memory.
    ///
    /// # Errors
    /// Returns [`ExecutorError::Memory`] if the allocation failed.
    fn alloc_state(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        self.alloc(len)
    }

    /// Same as [`IoExecutor::alloc`], for tables that the host writes and the kernel only reads: in
    /// device memory if the kernel runs on a device ([`SharedMemory::push`]).
    ///
    /// # Errors
    /// Returns [`ExecutorError::Memory`] if the allocation failed, or a kernel on a device runs.
    fn alloc_tables(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        self.alloc(len)
    }

    /// Returns the address at which the kernel dereferences `place`, or `None` if unreachable.
    fn address(&self, place: &Place) -> Option<u64>;

    /// Starts the kernel. `args` is a filled `gio_args`; everything it points to lies in memory of
    /// [`IoExecutor::alloc`] or behind `grants`, and stays valid until `stop` succeeds.
    ///
    /// # Errors
    /// Returns [`ExecutorError`] if threads or kernels cannot be started; nothing runs then.
    fn start(&mut self, args: crate::abi::Args, grants: &[GrantEpoch])
    -> Result<(), ExecutorError>;

    /// Notifies the kernel that submission ring entries before position `tail` are published. `sms`
    /// is the number of SMs the caller wants to spend on them; executors without SMs ignore it.
    ///
    /// # Errors
    /// Returns [`ExecutorError::Failed`] if the kernel can no longer run.
    fn submitted(&mut self, tail: u32, sms: u32) -> Result<(), ExecutorError>;

    /// Runs the kernel for one turn if it has no thread of its own; otherwise checks its health.
    ///
    /// # Errors
    /// Returns [`ExecutorError::Failed`] if the kernel can no longer run.
    fn poll(&mut self) -> Result<Progress, ExecutorError>;

    /// Ends the kernel. The caller has set the stop word. On success no part of the kernel runs any
    /// more; the returned proof covers the grants passed to the last `start`.
    ///
    /// # Errors
    /// Returns [`ExecutorError::StopTimeout`] if it did not end before `deadline` (on the
    /// [`nvme_driver::Clock`] of the ring): the grants' memory must then be leaked.
    fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, ExecutorError>;
}

/// An executor could not carry out a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecutorError {
    /// Shared memory could not be allocated.
    #[error("{executor}: allocating {len} bytes of shared memory failed: {cause}")]
    Memory {
        /// The executor.
        executor: &'static str,
        /// Requested length in bytes.
        len: usize,
        /// Cause.
        cause: String,
    },
    /// The kernel could not be started, or ended by itself.
    #[error("{executor}: the I/O kernel cannot run: {cause}")]
    Failed {
        /// The executor.
        executor: &'static str,
        /// Cause.
        cause: String,
    },
    /// The kernel did not end in time.
    #[error("{executor}: the I/O kernel did not stop in time; its queues stay quarantined")]
    StopTimeout {
        /// The executor.
        executor: &'static str,
    },
    /// The kernel cannot reach a granted address.
    #[error("{executor}: the kernel cannot reach the {what} of queue {qid}; place it elsewhere")]
    Unreachable {
        /// The executor.
        executor: &'static str,
        /// Part of the grant.
        what: &'static str,
        /// The queue.
        qid: u16,
    },
}
