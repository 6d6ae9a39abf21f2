//! Memory that a device can access, and the address spaces it is mapped in.

use std::{any::Any, fmt, ptr::NonNull, sync::Arc};

/// An I/O virtual address, as a controller puts it on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Iova(pub u64);

impl Iova {
    /// Returns the address `bytes` further on.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl fmt::Display for Iova {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// An address in a GPU kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePtr(pub u64);

/// `len` bytes from `iova` on, contiguous for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IovaRange {
    /// First byte.
    pub iova: Iova,
    /// Length in bytes.
    pub len: u64,
}

/// One address as each side sees it. Plain data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Address in this process (exposed provenance), if mapped there.
    pub host: Option<u64>,
    /// Address in a GPU kernel, if mapped there.
    pub device: Option<DevicePtr>,
    /// Address for the controller's DMA.
    pub iova: Iova,
}

/// Mapped memory. Dropping the last handle unmaps it; only then may the memory be freed.
///
/// # Safety
/// For the whole lifetime of the value, `host`, `device` and `segments` must keep returning the
/// same addresses; each must cover all of `len` bytes (`segments` in order and without gaps); the
/// memory must stay allocated and mapped; and no Rust reference to it may exist anywhere.
#[allow(unsafe_code, reason = "the trait's promise is what every DMA relies on")]
pub unsafe trait DmaMemory: Send + Sync + fmt::Debug {
    /// Returns the length in bytes.
    fn len(&self) -> usize;
    /// Returns whether the memory is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Returns the address in this process, if the CPU can access the memory.
    fn host(&self) -> Option<NonNull<u8>>;
    /// Returns the address in a GPU kernel, if the GPU can access the memory.
    fn device(&self) -> Option<DevicePtr>;
    /// Returns the I/O virtual ranges: one range if the platform allows, else several.
    fn segments(&self) -> &[IovaRange];
}

/// A DMA address space: a VFIO container, or that of the software controllers.
///
/// Allocation belongs to the space and not to a controller (ADR 0001) because a KV pool is mapped
/// once for all the drives that serve it.
pub trait DmaSpace: Send + Sync + fmt::Debug {
    /// Returns the display name.
    fn name(&self) -> &str;

    /// Allocates `len` zeroed bytes (rounded up to pages, page aligned) that CPU and device can
    /// access, as one contiguous range of I/O virtual addresses. Prefers NUMA node `node`, numbered
    /// as in [`crate::Bus::numa_node`]; `None` leaves the choice to the system.
    ///
    /// # Errors
    /// Returns [`DmaError`] if memory or address space runs out, or a lock limit is reached.
    fn alloc_on(&self, len: usize, node: Option<u32>) -> Result<Arc<dyn DmaMemory>, DmaError>;

    /// Calls [`DmaSpace::alloc_on`] without a node preference.
    fn alloc(&self, len: usize) -> Result<Arc<dyn DmaMemory>, DmaError> {
        self.alloc_on(len, None)
    }

    /// Maps memory allocated elsewhere. Its owner is kept alive until the memory is unmapped.
    ///
    /// # Errors
    /// Returns [`DmaError`] as [`DmaSpace::alloc`] does, and for memory that is not page aligned.
    fn import(&self, memory: ExternalMemory) -> Result<Arc<dyn DmaMemory>, DmaError>;
}

/// Memory offered for mapping: the engine's KV pool, a GPU BAR, pinned host memory.
#[derive(Debug)]
pub struct ExternalMemory {
    pub(crate) host: Option<NonNull<u8>>,
    pub(crate) device: Option<DevicePtr>,
    pub(crate) len: usize,
    pub(crate) owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the addresses are only used through platform accessors; the owner is Send + Sync.
#[allow(unsafe_code, reason = "addresses that cross threads")]
unsafe impl Send for ExternalMemory {}

impl ExternalMemory {
    /// Describes `len` bytes at `host`, `device`, or both.
    ///
    /// # Safety
    /// The bytes must stay allocated at these addresses until `owner` is dropped, and no Rust
    /// reference into them may exist while they are mapped.
    #[allow(unsafe_code, reason = "the caller vouches for memory Rust knows nothing about")]
    pub unsafe fn new(
        host: Option<NonNull<u8>>,
        device: Option<DevicePtr>,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { host, device, len, owner }
    }

    /// Returns the host address, device address, length in bytes, and owner.
    #[must_use]
    pub fn into_parts(
        self,
    ) -> (Option<NonNull<u8>>, Option<DevicePtr>, usize, Arc<dyn Any + Send + Sync>) {
        (self.host, self.device, self.len, self.owner)
    }
}

/// Part of mapped memory that is contiguous for the device. Keeps the mapping alive.
#[derive(Debug, Clone)]
pub struct DmaSlice {
    memory: Arc<dyn DmaMemory>,
    offset: usize,
    len: usize,
    iova: Iova,
}

impl DmaSlice {
    /// Takes `len` bytes from `offset` on.
    ///
    /// # Errors
    /// Returns [`DmaError::OutOfRange`] past the end, [`DmaError::NotContiguous`] across segments.
    pub fn new(memory: Arc<dyn DmaMemory>, offset: usize, len: usize) -> Result<Self, DmaError> {
        let total = memory.len();
        check_range(offset, len, total)?;
        let mut start = 0u64;
        for range in memory.segments() {
            let end = start + range.len;
            if (offset as u64) < end {
                if (offset + len) as u64 > end {
                    return Err(DmaError::NotContiguous { offset, len });
                }
                let iova = range.iova.offset(offset as u64 - start);
                return Ok(Self { memory, offset, len, iova });
            }
            start = end;
        }
        Err(DmaError::OutOfRange { offset, len, total })
    }

    /// Takes all of `memory`, which must be one contiguous range.
    ///
    /// # Errors
    /// Returns [`DmaError::NotContiguous`] if it is not.
    pub fn whole(memory: Arc<dyn DmaMemory>) -> Result<Self, DmaError> {
        let len = memory.len();
        Self::new(memory, 0, len)
    }

    /// Takes a part of this slice.
    ///
    /// # Errors
    /// Returns [`DmaError::OutOfRange`] past the end.
    pub fn slice(&self, offset: usize, len: usize) -> Result<Self, DmaError> {
        check_range(offset, len, self.len)?;
        Ok(Self {
            memory: self.memory.clone(),
            offset: self.offset + offset,
            len,
            iova: self.iova.offset(offset as u64),
        })
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the slice is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the offset within its mapping, in bytes.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the I/O virtual address of the first byte.
    #[must_use]
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Returns the first byte in this process, if the CPU can access it.
    #[must_use]
    pub fn host(&self) -> Option<NonNull<u8>> {
        let base = self.memory.host()?;
        NonNull::new(base.as_ptr().wrapping_add(self.offset))
    }

    /// Returns the first byte in a GPU kernel, if the GPU can access it.
    #[must_use]
    pub fn device(&self) -> Option<DevicePtr> {
        Some(DevicePtr(self.memory.device()?.0 + self.offset as u64))
    }

    /// Returns the address as each side sees it.
    #[must_use]
    pub fn place(&self) -> Place {
        Place {
            host: self.host().map(|p| p.as_ptr().expose_provenance() as u64),
            device: self.device(),
            iova: self.iova,
        }
    }

    /// Returns the mapping that contains this slice.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn DmaMemory> {
        &self.memory
    }
}

/// Checks that `len` bytes at `offset` are inside a mapping of `total` bytes.
pub(crate) fn check_range(offset: usize, len: usize, total: usize) -> Result<(), DmaError> {
    match offset.checked_add(len) {
        Some(end) if end <= total => Ok(()),
        _ => Err(DmaError::OutOfRange { offset, len, total }),
    }
}

/// Failure to allocate, map or address memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DmaError {
    /// The operating system had no memory or refused the mapping.
    #[error("{space}: mapping {len} bytes failed: {source}; {hint}")]
    Os {
        /// The address space.
        space: String,
        /// Requested bytes.
        len: usize,
        /// The cause.
        source: std::io::Error,
        /// Suggested remedy.
        hint: String,
    },
    /// No free range of I/O virtual addresses is long enough.
    #[error("{space}: no free I/O virtual address range of {len} bytes")]
    NoIova {
        /// The address space.
        space: String,
        /// Requested bytes.
        len: usize,
    },
    /// Address or length is not a multiple of the page size.
    #[error("memory at {address:#x} of {len} bytes is not aligned to pages of {page} bytes")]
    Unaligned {
        /// The address given.
        address: u64,
        /// The length given.
        len: usize,
        /// The page size needed.
        page: usize,
    },
    /// The part lies outside the mapping.
    #[error("{len} bytes at offset {offset} are outside a mapping of {total} bytes")]
    OutOfRange {
        /// Requested offset.
        offset: usize,
        /// Requested bytes.
        len: usize,
        /// Length of the mapping in bytes.
        total: usize,
    },
    /// The device sees the part as more than one range.
    #[error("{len} bytes at offset {offset} are not contiguous for the device")]
    NotContiguous {
        /// Requested offset.
        offset: usize,
        /// Requested bytes.
        len: usize,
    },
    /// This kind of memory cannot be mapped here.
    #[error("{space}: {what} cannot be mapped here; {hint}")]
    Unsupported {
        /// The address space.
        space: String,
        /// The memory offered.
        what: String,
        /// Suggested remedy.
        hint: String,
    },
}
