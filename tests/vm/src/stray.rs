//! Memory under an address that it does not have: what a wrong mapping, or a freed one, looks like
//! to a device.
#![allow(unsafe_code, reason = "memory that lies to the driver about where the device finds it")]

use std::alloc::{Layout, alloc_zeroed};
use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::{Context, Result};
use nvme_driver::{DevicePtr, DmaMemory, DmaSlice, ExternalMemory, Iova, IovaRange};

/// An address that nothing is ever mapped at in these tests: spaces are filled from below.
pub const NOWHERE: Iova = Iova(0x70_0000_0000);

/// Memory of this process, never freed, which no IOMMU knows of.
#[derive(Debug)]
pub struct Stray {
    host: NonNull<u8>,
    len: usize,
    range: [IovaRange; 1],
}

// SAFETY: the addresses are only given away.
unsafe impl Send for Stray {}
// SAFETY: as above.
unsafe impl Sync for Stray {}

// SAFETY: the memory is never freed, the addresses never change, and no reference to it exists. No
// device reaches it, which is what it is for: the promise about DMA is kept by the IOMMU.
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
    /// `len` bytes that claim to be at `iova`.
    pub fn new(len: usize, iova: Iova) -> Result<Arc<Self>> {
        let len = len.next_multiple_of(4096);
        let layout = Layout::from_size_align(len, 4096)?;
        // SAFETY: the size is not zero.
        let host = NonNull::new(unsafe { alloc_zeroed(layout) }).context("no memory")?;
        Ok(Arc::new(Self { host, len, range: [IovaRange { iova, len: len as u64 }] }))
    }

    /// What begins `odd` bytes after a multiple of 2 MiB, as memory of a GPU at `device`.
    pub fn on_gpu(self: &Arc<Self>, device: DevicePtr, odd: u64) -> ExternalMemory {
        let host = self.host.as_ptr().addr() as u64;
        let offset = (odd.wrapping_sub(host) % (2 << 20)) as usize;
        // SAFETY: below 2 MiB, and the memory is longer.
        let host = unsafe { self.host.add(offset) };
        // SAFETY: the memory is never freed, and nobody refers to it.
        unsafe { ExternalMemory::new(Some(host), Some(device), self.len - offset, self.clone()) }
    }

    /// All of it.
    pub fn slice(self: &Arc<Self>) -> Result<DmaSlice> {
        Ok(DmaSlice::whole(self.clone())?)
    }
}
