//! A container as a [`DmaSpace`], and its mapped memory.
#![allow(unsafe_code, reason = "memory for devices is allocated and its life vouched for here")]

use std::{
    any::Any,
    io,
    mem::ManuallyDrop,
    ptr::{NonNull, null_mut},
    sync::Arc,
};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::{
    container::{Container, SpaceStatus},
    error::VfioError,
};
use crate::dma::{DevicePtr, DmaError, DmaMemory, DmaSpace, ExternalMemory, IovaRange};

/// Size of a large page in bytes.
const LARGE_PAGE: usize = 2 << 20;

/// Page size of memory that the space allocates. Larger pages need fewer IOMMU entries and far less
/// time to pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HugePages {
    /// The kernel's small pages.
    Never,
    /// Transparent huge pages, if the kernel can provide them.
    #[default]
    Transparent,
    /// 2 MiB pages from the kernel's reserve (`vm.nr_hugepages`), else transparent ones.
    Reserved,
}

/// Options of [`VfioSpace::open`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SpaceOptions {
    /// Page size of allocations of 2 MiB and more.
    pub huge_pages: HugePages,
}

/// An address space of the IOMMU that any number of PCI functions share: memory mapped once has the
/// same I/O virtual address for all of them.
///
/// Its groups are those of the functions opened in it ([`super::VfioBus`], [`super::PeerBar`]); a
/// group leaves with its last function. Memory stays valid without any group, and is mapped again
/// when the next one joins.
#[derive(Debug)]
pub struct VfioSpace {
    container: Arc<Container>,
    options: SpaceOptions,
}

impl VfioSpace {
    /// Creates a space. Allocations need a function opened in it; `name` is for messages.
    ///
    /// # Errors
    /// Returns [`VfioError`] if this machine has no VFIO, or this user no access to it.
    pub fn open(name: &str, options: SpaceOptions) -> Result<Arc<Self>, VfioError> {
        Ok(Arc::new(Self { container: Container::open(name)?, options }))
    }

    pub(super) fn container(&self) -> &Arc<Container> {
        &self.container
    }

    /// Returns usage and limits.
    #[must_use]
    pub fn status(&self) -> SpaceStatus {
        self.container.status()
    }

    fn map(
        &self,
        host: NonNull<u8>,
        device: Option<DevicePtr>,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn DmaMemory>, DmaError> {
        let container = self.container.clone();
        // SAFETY: `owner` keeps the memory (this file's allocation, or ExternalMemory's promise),
        // and VfioMemory drops it only after `unmap`. ExternalMemory also rules out references.
        let iova = unsafe { container.map(host, device, len)? };
        let range = [IovaRange { iova, len: len as u64 }];
        let owner = ManuallyDrop::new(owner);
        Ok(Arc::new(VfioMemory { host, device, len, range, owner, container }))
    }
}

impl DmaSpace for VfioSpace {
    fn name(&self) -> &str {
        self.container.name()
    }

    fn alloc_on(&self, len: usize, node: Option<u32>) -> Result<Arc<dyn DmaMemory>, DmaError> {
        // Without a preference, use the node of the functions, if they share one.
        let node = node.or_else(|| self.container.node());
        let page = usize::try_from(self.container.page()).unwrap_or(usize::MAX);
        let memory = len.max(1).checked_next_multiple_of(page).ok_or_else(|| no_memory(len));
        let memory = memory.and_then(|len| Anonymous::new(len, self.options.huge_pages)).map_err(
            |source| {
                let hint = "the machine or this process's limits have no memory left".into();
                DmaError::Os { space: self.name().to_owned(), len, source, hint }
            },
        )?;
        memory.place(node);
        let (host, len) = (memory.base, memory.len);
        self.map(host, None, len, Arc::new(memory))
    }

    fn import(&self, memory: ExternalMemory) -> Result<Arc<dyn DmaMemory>, DmaError> {
        let (host, device, len, owner) = memory.into_parts();
        let Some(host) = host else {
            return Err(DmaError::Unsupported {
                space: self.name().to_owned(),
                what: format!("memory of {len} bytes without an address in this process"),
                hint: "the kernel maps by process address: map the GPU's memory into the process \
                       first (GDRCopy, or a dma-buf that can be mapped)"
                    .into(),
            });
        };
        self.map(host, device, len, owner)
    }
}

/// Mapped memory. Holds the owner of the bytes and the container, so neither is dropped first.
#[derive(Debug)]
struct VfioMemory {
    host: NonNull<u8>,
    device: Option<DevicePtr>,
    len: usize,
    range: [IovaRange; 1],
    /// Dropped only once the devices can no longer access the bytes.
    owner: ManuallyDrop<Arc<dyn Any + Send + Sync>>,
    container: Arc<Container>,
}

// SAFETY: the addresses are only handed out; the owner is Send + Sync.
unsafe impl Send for VfioMemory {}
// SAFETY: as above.
unsafe impl Sync for VfioMemory {}

// SAFETY: the fields never change; the kernel mapped `len` bytes at `host` to one range; `owner`
// keeps them until they are unmapped, and its creator promised that no reference exists.
unsafe impl DmaMemory for VfioMemory {
    fn len(&self) -> usize {
        self.len
    }

    fn host(&self) -> Option<NonNull<u8>> {
        Some(self.host)
    }

    fn device(&self) -> Option<DevicePtr> {
        self.device
    }

    fn segments(&self) -> &[IovaRange] {
        &self.range
    }
}

impl Drop for VfioMemory {
    fn drop(&mut self) {
        let (space, iova, len) = (self.container.name(), self.range[0].iova, self.len);
        match self.container.unmap(iova) {
            // SAFETY: dropped once, here, and not used afterwards.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.owner) },
            Err(error) => tracing::error!(
                %space, %iova, len, %error,
                "memory could not be unmapped; devices may still reach it, so it is leaked"
            ),
        }
    }
}

/// Zeroed memory private to this process.
#[derive(Debug)]
struct Anonymous {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range that this value owns; it is accessed elsewhere.
unsafe impl Send for Anonymous {}
// SAFETY: as above.
unsafe impl Sync for Anonymous {}

fn no_memory(len: usize) -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, format!("{len} bytes are too many"))
}

impl Anonymous {
    fn new(len: usize, pages: HugePages) -> io::Result<Self> {
        let large = len >= LARGE_PAGE;
        if large && pages == HugePages::Reserved {
            let flags = MapFlags::HUGETLB | MapFlags::HUGE_2MB;
            let rounded = len.checked_next_multiple_of(LARGE_PAGE).ok_or_else(|| no_memory(len))?;
            match Self::map(rounded, flags) {
                Ok(memory) => return Ok(memory),
                Err(error) => tracing::warn!(
                    len, %error,
                    "no reserved large pages; using the kernel's own. To have them: \
                     sysctl vm.nr_hugepages={}", rounded / LARGE_PAGE
                ),
            }
        }
        if !large {
            return Self::map(len, MapFlags::empty());
        }
        let advice =
            if pages == HugePages::Never { Advice::LinuxNoHugepage } else { Advice::LinuxHugepage };
        let memory = Self::map_aligned(len)?;
        // SAFETY: this value owns the range; the advice changes no contents.
        if let Err(error) = unsafe { madvise(memory.base.as_ptr().cast(), len, advice) } {
            tracing::debug!(len, ?advice, %error, "the kernel chooses the size of pages itself");
        }
        Ok(memory)
    }

    fn map(len: usize, flags: MapFlags) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(null_mut(), len, protection, MapFlags::PRIVATE | flags) }?;
        let base = NonNull::new(at.cast::<u8>()).ok_or_else(|| no_memory(len))?;
        let memory = Self { base, len };
        // A child process must not share these pages: copy-on-write could move this process to
        // another page than the one that the devices use.
        // SAFETY: this value owns the range; the advice changes no contents.
        unsafe { madvise(at, len, Advice::LinuxDontFork) }?;
        Ok(memory)
    }

    /// Requests pages on a NUMA node, or on others if that has none left. Must precede the first
    /// use: mapping the memory for a device allocates all pages.
    fn place(&self, node: Option<u32>) {
        const BITS: u32 = u64::BITS;
        let Some(node) = node else { return };
        let len = self.len;
        let mut nodes = [0u64; 16];
        let Some(word) = nodes.get_mut((node / BITS) as usize) else { return };
        *word = 1 << (node % BITS);
        // SAFETY: this value owns the range, and a policy changes no contents. `nodes` has as many
        // bits as stated (the kernel subtracts one).
        let code = unsafe {
            let (mode, bits) = (libc::MPOL_PREFERRED, nodes.len() as u32 * BITS + 1);
            libc::syscall(libc::SYS_mbind, self.base, len, mode, nodes.as_ptr(), bits, 0)
        };
        if code == 0 {
            tracing::debug!(len, node, "memory is placed on the node");
        } else {
            // A kernel without NUMA, or a container without the permission.
            let error = io::Error::last_os_error();
            tracing::debug!(len, node, %error, "memory is where the kernel puts it");
        }
    }

    /// Maps `len` bytes aligned to a large page.
    fn map_aligned(len: usize) -> io::Result<Self> {
        let roomy = len.checked_add(LARGE_PAGE).ok_or_else(|| no_memory(len))?;
        let all = ManuallyDrop::new(Self::map(roomy, MapFlags::empty())?);
        let head = all.base.as_ptr().addr().next_multiple_of(LARGE_PAGE) - all.base.as_ptr().addr();
        let tail = LARGE_PAGE - head;
        // SAFETY: `head <= LARGE_PAGE`, so both addresses lie in the `roomy` bytes of `all`, and
        // head + len + tail is all of them. The unmapped parts have no other owner.
        unsafe {
            let base = all.base.add(head);
            if head > 0 {
                munmap(all.base.as_ptr().cast(), head)?;
            }
            if tail > 0 {
                munmap(base.add(len).as_ptr().cast(), tail)?;
            }
            Ok(Self { base, len })
        }
    }
}

impl Drop for Anonymous {
    fn drop(&mut self) {
        // SAFETY: this value owns the range, and mappings for devices keep the value alive.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::error!(len = self.len, %error, "memory could not be given back");
        }
    }
}

#[cfg(test)]
mod tests;
