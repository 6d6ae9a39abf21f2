//! Memory at an address that is not its own, like a wrong or freed mapping from a device's view.
#![allow(unsafe_code, reason = "memory that lies to the driver about where the device finds it")]

use std::alloc::{Layout, alloc_zeroed};
use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::{Context, Result};
use nvme_driver::{DevicePtr, DmaMemory, DmaSlice, ExternalMemory, Iova, IovaRange};

/// An address that is never mapped in these tests: spaces are filled from below.
pub const NOWHERE: Iova = Iova(0x70_0000_0000);

/// Memory of this process, never freed, and not mapped in any IOMMU.
#[derive(Debug)]
pub struct Stray {
    host: NonNull<u8>,
    len: usize,
    range: [IovaRange; 1],
}

// SAFETY: the addresses are only passed on.
unsafe impl Send for Stray {}
// SAFETY: same as above.
unsafe impl Sync for Stray {}

// SAFETY: the memory is never freed, the addresses never change, and no reference to it exists. No
// device can reach it, by design: the IOMMU keeps the promise about DMA.
unsafe impl DmaMemory for Stray {
    fn len(&self) -> usize {
        self.len
    }

    fn host(&self) -> Option<NonNull<u8>> {
        Some(self.host)
    }

    fn device(&self) -> Option<DevicePtr> {
        None
    }

    fn segments(&self) -> &[IovaRange] {
        &self.range
    }
}

impl Stray {
    /// Allocates `len` bytes that claim to be at `iova`.
    pub fn new(len: usize, iova: Iova) -> Result<Arc<Self>> {
        let len = len.next_multiple_of(4096);
        let layout = Layout::from_size_align(len, 4096)?;
        // SAFETY: the size is not zero.
        let host = NonNull::new(unsafe { alloc_zeroed(layout) }).context("no memory")?;
        Ok(Arc::new(Self { host, len, range: [IovaRange { iova, len: len as u64 }] }))
    }

    /// Returns the part from `odd` bytes after a multiple of 2 MiB, as GPU memory at `device`.
    pub fn on_gpu(self: &Arc<Self>, device: DevicePtr, odd: u64) -> ExternalMemory {
        let host = self.host.as_ptr().addr() as u64;
        let offset = (odd.wrapping_sub(host) % (2 << 20)) as usize;
        // SAFETY: below 2 MiB, and the memory is longer.
        let host = unsafe { self.host.add(offset) };
        // SAFETY: the memory is never freed, and no reference to it exists.
        unsafe { ExternalMemory::new(Some(host), Some(device), self.len - offset, self.clone()) }
    }

    /// Returns all of it.
    pub fn slice(self: &Arc<Self>) -> Result<DmaSlice> {
        Ok(DmaSlice::whole(self.clone())?)
    }
}
