//! The executor seam: who runs the I/O kernel.

use std::{any::Any, fmt, ptr::NonNull, sync::Arc};

use nvme_driver::{GrantEpoch, Nanos, Place, Quiesced};

/// Memory that both the caller and the I/O kernel can reach: rings, IOCBs, maps, warp state.
/// Zeroed, aligned to 4096 bytes. The owner inside frees it.
pub struct SharedMemory {
    host: NonNull<u8>,
    address: u64,
    len: usize,
    _owner: Box<dyn Any + Send + Sync>,
    mirror: Option<Arc<dyn Mirror>>,
}

/// Keeps two memories alike: what the host has, and what the kernel has of it.
pub trait Mirror: Send + Sync + fmt::Debug {
    /// Puts the host's bytes where the kernel finds them. No kernel runs.
    ///
    /// # Errors
    /// [`ExecutorError::Failed`]: what the kernel would find is not known.
    fn push(&self) -> Result<(), ExecutorError>;

    /// Brings the host what the kernel has, which may be running: each word is one that it was.
    ///
    /// # Errors
    /// [`ExecutorError::Failed`]: the host has what it had before, or some of both.
    fn pull(&self) -> Result<(), ExecutorError>;
}

// SAFETY: an address range whose owner is Send + Sync; accesses go through crate::shared.
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
    /// Describes memory an executor allocated.
    ///
    /// # Safety
    /// `len` zeroed bytes at `host` (for this process) and at `address` (for the kernel) are the
    /// same memory, aligned to 4096 bytes, valid until `owner` is dropped, and not otherwise used.
    /// For this process it is ordinary cacheable memory: release and acquire order it.
    #[allow(unsafe_code, reason = "the executor vouches for its memory")]
    pub unsafe fn new(
        host: NonNull<u8>,
        address: u64,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { host, address, len, _owner: owner, mirror: None }
    }

    /// Describes two memories, of the host and of the kernel, that `mirror` keeps alike.
    ///
    /// # Safety
    /// As for [`SharedMemory::new`], but for being the same memory.
    #[allow(unsafe_code, reason = "the executor vouches for its memory")]
    pub unsafe fn mirrored(
        host: NonNull<u8>,
        address: u64,
        len: usize,
        mirror: Arc<dyn Mirror>,
    ) -> Self {
        Self { host, address, len, _owner: Box::new(()), mirror: Some(mirror) }
    }

    /// Makes what the host wrote visible to a kernel that is started afterwards.
    ///
    /// # Errors
    /// As for [`Mirror::push`].
    pub fn push(&self) -> Result<(), ExecutorError> {
        self.mirror.as_ref().map_or(Ok(()), |mirror| mirror.push())
    }

    /// Makes what the kernel wrote visible to the host.
    ///
    /// # Errors
    /// As for [`Mirror::pull`].
    pub fn pull(&self) -> Result<(), ExecutorError> {
        self.mirror.as_ref().map_or(Ok(()), |mirror| mirror.pull())
    }

    /// First byte in this process.
    #[must_use]
    pub fn host(&self) -> NonNull<u8> {
        self.host
    }

    /// First byte as the kernel addresses it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// What one call of [`IoExecutor::poll`] saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Commands were submitted or completed.
    Moved,
    /// Nothing to do, or nothing completed yet.
    Idle,
}

/// Runs the I/O kernel: host threads, the calling thread, or a GPU.
///
/// Life: `alloc` as often as needed, `start`, then `submitted` and `poll`, then `stop`. After a
/// successful `stop` it may be started again with new arguments (queues that were recovered), whose
/// ring positions begin at 0 again. Dropped without a successful `stop`, it neither waits without
/// end nor frees what its kernel may still use; the ring leaks its own memory then.
pub trait IoExecutor: Send + fmt::Debug {
    /// What a report calls it: `host`, `inline`, `cuda`.
    fn name(&self) -> &'static str;

    /// `len` zeroed bytes (rounded up to 4096) that caller and kernel both reach.
    ///
    /// # Errors
    /// [`ExecutorError::Memory`].
    fn alloc(&self, len: usize) -> Result<SharedMemory, ExecutorError>;

    /// As [`IoExecutor::alloc`], for state that the kernel alone changes while it runs and that the
    /// host reads now and then: in the kernel's memory, where that is elsewhere
    /// ([`SharedMemory::push`], [`SharedMemory::pull`]). Called while nothing runs; the next call
    /// may give the same memory again.
    ///
    /// # Errors
    /// [`ExecutorError::Memory`].
    fn alloc_state(&self, len: usize) -> Result<SharedMemory, ExecutorError> {
        self.alloc(len)
    }

    /// The address of `place` as this executor's kernel dereferences it; `None` when it cannot.
    fn address(&self, place: &Place) -> Option<u64>;

    /// Begins to run the kernel. `args` is a filled `gio_args`; everything it points to lives in
    /// memory of [`IoExecutor::alloc`] or behind `grants`, and stays valid until `stop`
    /// succeeded.
    ///
    /// # Errors
    /// [`ExecutorError`] when threads or kernels cannot be started; nothing runs then.
    fn start(&mut self, args: crate::abi::Args, grants: &[GrantEpoch])
    -> Result<(), ExecutorError>;

    /// Entries of the submission ring before position `tail` are published. `sms` is how many SMs
    /// the caller wants to spend on them; executors without SMs ignore it.
    ///
    /// # Errors
    /// [`ExecutorError::Failed`] when the kernel can no longer run.
    fn submitted(&mut self, tail: u32, sms: u32) -> Result<(), ExecutorError>;

    /// Gives the kernel a turn where it has no thread of its own, and reports its health where it
    /// has one.
    ///
    /// # Errors
    /// [`ExecutorError::Failed`] when the kernel can no longer run.
    fn poll(&mut self) -> Result<Progress, ExecutorError>;

    /// Ends the kernel. The stop word was set before. On success nothing of it runs any more: the
    /// proof covers the grants that the last `start` was given.
    ///
    /// # Errors
    /// [`ExecutorError::StopTimeout`] when it did not end before `deadline` (time as
    /// [`nvme_driver::Clock`] given to the ring tells it): the grants' memory must then be leaked.
    fn stop(&mut self, deadline: Nanos) -> Result<Quiesced, ExecutorError>;
}

/// An executor could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecutorError {
    /// No memory that both sides reach.
    #[error("{executor}: allocating {len} bytes of shared memory failed: {cause}")]
    Memory {
        /// The executor.
        executor: &'static str,
        /// Bytes asked for.
        len: usize,
        /// Why.
        cause: String,
    },
    /// The kernel could not be started, or ended by itself.
    #[error("{executor}: the I/O kernel cannot run: {cause}")]
    Failed {
        /// The executor.
        executor: &'static str,
        /// Why.
        cause: String,
    },
    /// The kernel did not end in time.
    #[error("{executor}: the I/O kernel did not stop in time; its queues stay quarantined")]
    StopTimeout {
        /// The executor.
        executor: &'static str,
    },
    /// A granted address is out of the kernel's reach.
    #[error("{executor}: the kernel cannot reach the {what} of queue {qid}; place it elsewhere")]
    Unreachable {
        /// The executor.
        executor: &'static str,
        /// Which part of the grant.
        what: &'static str,
        /// The queue.
        qid: u16,
    },
}
