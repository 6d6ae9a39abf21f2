//! The KV pool: memory that the engine owns, in this process or on a GPU, or memory allocated for
//! it.

#![allow(unsafe_code, reason = "describes memory that an engine owns, by its address")]

use std::{any::Any, fmt, ptr::NonNull, sync::Arc};

use gio_kernels::cuda::{CudaDevice, CudaDriver, GpuHandle};
use nvme_driver::{DevicePtr, DmaSpace, ExternalMemory};
use objstore::{KvPool, KvShape, PoolLayout};

use crate::error::StackError;

/// Memory of this process that an engine owns, with any alignment and length.
#[derive(Clone)]
pub struct EngineMemory {
    base: NonNull<u8>,
    bytes: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: a plain address; the owner is Send + Sync.
unsafe impl Send for EngineMemory {}
// SAFETY: as above; memory is accessed through a shared value only by raw copies.
unsafe impl Sync for EngineMemory {}

impl fmt::Debug for EngineMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { base, bytes, .. } = self;
        f.debug_struct("EngineMemory").field("base", base).field("bytes", bytes).finish()
    }
}

impl EngineMemory {
    /// Describes `bytes` bytes from `base` on.
    ///
    /// # Safety
    /// The bytes must stay allocated, readable and writable until `owner` is dropped, and no Rust
    /// reference into them may exist while a store moves them.
    #[must_use]
    pub unsafe fn new(base: NonNull<u8>, bytes: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { base, bytes, owner }
    }

    /// Returns the first byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn external(&self) -> ExternalMemory {
        // SAFETY: the contract of `EngineMemory::new`.
        unsafe { ExternalMemory::new(Some(self.base), None, self.bytes, self.owner.clone()) }
    }
}

/// Memory of a GPU that an engine owns, with any alignment and length.
#[derive(Clone)]
pub struct GpuMemory {
    base: DevicePtr,
    bytes: usize,
    ordinal: u32,
    owner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { base: DevicePtr(base), bytes, ordinal, .. } = self;
        write!(f, "GpuMemory({bytes} bytes at {base:#x} of GPU {ordinal})")
    }
}

impl GpuMemory {
    /// Describes `bytes` bytes from `base` on, on the GPU with this CUDA ordinal.
    ///
    /// # Safety
    /// The bytes must stay allocated until `owner` is dropped, in the primary context of the GPU,
    /// and the engine's kernels must be ordered with the store's transfers of the same blocks.
    #[must_use]
    pub unsafe fn new(
        base: DevicePtr,
        bytes: usize,
        ordinal: u32,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { base, bytes, ordinal, owner }
    }

    /// Returns the GPU's ordinal.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Returns what names the memory to another process, and the GPU.
    ///
    /// # Errors
    /// Returns [`StackError::Cuda`], also if CUDA cannot share it.
    pub fn share(&self) -> Result<(GpuHandle, Arc<CudaDevice>), StackError> {
        let device = CudaDriver::load()?.device(self.ordinal)?;
        Ok((GpuHandle::of(&device, self.base, self.bytes)?, device))
    }

    /// Returns the first byte.
    #[must_use]
    pub fn base(&self) -> DevicePtr {
        self.base
    }

    /// Returns the length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Describes the memory as it is.
    pub(crate) fn external(&self) -> ExternalMemory {
        // SAFETY: the contract of `GpuMemory::new`.
        unsafe { ExternalMemory::new(None, Some(self.base), self.bytes, self.owner.clone()) }
    }
}

/// Extends memory to whole pages, and returns its offset in them.
///
/// Devices map whole pages. Those at the edges exist as long as the memory does, because memory is
/// allocated in whole pages; bytes beside it are never addressed: a pool's rows are inside it.
pub(crate) fn whole_pages(memory: ExternalMemory) -> (ExternalMemory, usize) {
    let page = rustix::param::page_size();
    let (host, device, len, owner) = memory.into_parts();
    let head = match (host, device) {
        (Some(host), _) => host.as_ptr().addr() % page,
        (None, Some(DevicePtr(device))) => (device % page as u64) as usize,
        (None, None) => 0,
    };
    let len = (head + len).next_multiple_of(page);
    let device = device.map(|DevicePtr(device)| DevicePtr(device - head as u64));
    // SAFETY: a page does not begin at 0, and see above.
    let whole = unsafe {
        let first = |host: NonNull<u8>| NonNull::new_unchecked(host.as_ptr().wrapping_sub(head));
        ExternalMemory::new(host.map(first), device, len, owner)
    };
    (whole, head)
}

/// Location of the KV pool.
#[derive(Debug, Clone)]
pub enum PoolMemory {
    /// In memory of the engine, in this process.
    Engine {
        /// The memory.
        memory: EngineMemory,
        /// The blocks' offsets in it.
        layout: PoolLayout,
    },
    /// In memory of the engine, on a GPU.
    Gpu {
        /// The memory.
        memory: GpuMemory,
        /// The blocks' offsets in it.
        layout: PoolLayout,
    },
    /// In memory allocated for it, one tensor after another: on the GPU that runs the I/O kernel,
    /// if there is one and a route leads there.
    Own {
        /// Number of blocks.
        blocks: u32,
    },
}

/// Checks that all objects of a layout are in `bytes` bytes.
///
/// # Errors
/// Returns [`StackError::Config`] if one is not.
pub(crate) fn check(layout: &PoolLayout, shape: &KvShape, bytes: usize) -> Result<(), StackError> {
    let PoolLayout { rows, block_stride, blocks } = layout;
    let end = layout.used(shape.object_bytes).end;
    if end > bytes as u64 {
        let problem = format!(
            "with {shape}, the last of its {blocks} blocks ends at byte {end}, and its memory has \
             {bytes} bytes; it has {} rows and a block each {block_stride} bytes: give the pool \
             and the shape that belong together",
            rows.len()
        );
        return Err(StackError::config("pool", problem));
    }
    Ok(())
}

/// Registers an engine's memory in this process without bounce buffers.
///
/// # Errors
/// Returns an error of [`check`], [`StackError::Memory`] or [`StackError::Pool`].
pub(crate) fn register(
    memory: &EngineMemory,
    layout: PoolLayout,
    space: &dyn DmaSpace,
    shape: &KvShape,
) -> Result<KvPool, StackError> {
    check(&layout, shape, memory.bytes)?;
    let (pages, head) = whole_pages(memory.external());
    Ok(KvPool::new(space.import(pages)?, shape, layout.after(head))?)
}
