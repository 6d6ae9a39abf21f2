//! The guest's memory as this process sees it: a file that QEMU and this process map.
#![allow(unsafe_code, reason = "maps memory that a device model in another process uses too")]

use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    io,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nvme_driver::{
    DevicePtr, DmaError, DmaMemory, DmaSpace, ExternalMemory, Iova, IovaRange, platform::mmio,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// First guest address that is allocated. Below are the holes and tables of a PC.
const FIRST: u64 = 16 << 20;
/// Unused bytes after each allocation, so that overruns do not hit a neighbour.
const GUARD: u64 = PAGE as u64;

/// A mapping of this process.
#[derive(Debug)]
pub struct Map {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: it is an address; all accesses go through the accessors of `platform::mmio`.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Maps all of `file`, shared.
    pub fn file(file: &File, len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing of ours.
        let base =
            unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0) }?;
        Self::new(base.cast(), len)
    }

    /// Maps zeroed memory that is private to this process.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as in `file`.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, protection, MapFlags::PRIVATE) }?;
        Self::new(base.cast(), len)
    }

    fn new(base: *mut u8, len: usize) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Self { base, len })
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Loads the dword at `offset`, with acquire ordering.
    #[must_use]
    pub fn load(&self, offset: usize) -> u32 {
        // SAFETY: `dword` checked bounds and alignment; all accesses to these dwords are atomic.
        unsafe { mmio::load_acquire32(self.dword(offset)) }
    }

    /// Stores the dword at `offset`, with release ordering.
    pub fn store(&self, offset: usize, value: u32) {
        // SAFETY: as in `load`.
        unsafe { mmio::store_release32(self.dword(offset), value) };
    }

    fn dword(&self, offset: usize) -> NonNull<u32> {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.len, "dword at {offset}");
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.base.add(offset) }.cast()
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `new` was given, and nothing outlives its owner.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        assert!(unmapped.is_ok(), "unmapping our own mapping");
    }
}

/// Allocator of guest memory, in pages. There is no IOMMU: the device's address of a byte is its
/// guest physical address, which is its offset in the file.
pub struct Ram {
    map: Map,
    /// Free ranges: length by start.
    free: Mutex<BTreeMap<u64, u64>>,
    this: std::sync::Weak<Self>,
}

impl Ram {
    /// Makes all of `map` free but its first megabytes.
    #[must_use]
    pub fn new(map: Map) -> Arc<Self> {
        let free = BTreeMap::from([(FIRST, map.len() as u64 - FIRST)]);
        Arc::new_cyclic(|this| Self { map, free: Mutex::new(free), this: this.clone() })
    }

    fn free(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, len: u64) -> Option<u64> {
        let mut free = self.free();
        let (&start, &room) = free.iter().find(|(_, room)| **room >= len)?;
        free.remove(&start);
        if room > len {
            free.insert(start + len, room - len);
        }
        Some(start)
    }

    fn give_back(&self, mut start: u64, mut len: u64) {
        let mut free = self.free();
        if let Some((&before, &room)) = free.range(..start).next_back()
            && before + room == start
        {
            (start, len) = (before, room + len);
        }
        if let Some(room) = free.remove(&(start + len)) {
            len += room;
        }
        free.insert(start, len);
    }
}

impl fmt::Debug for Ram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ram({} bytes)", self.map.len())
    }
}

impl DmaSpace for Ram {
    fn name(&self) -> &str {
        "guest memory"
    }

    fn alloc_on(&self, len: usize, _node: Option<u32>) -> Result<Arc<dyn DmaMemory>, DmaError> {
        let none = || DmaError::NoIova { space: self.name().into(), len };
        let bytes = len.max(1).checked_next_multiple_of(PAGE).ok_or_else(none)?;
        let ram = self.this.upgrade().ok_or_else(none)?;
        let start = self.take(bytes as u64 + GUARD).ok_or_else(none)?;
        // SAFETY: `take` gave `bytes` of the mapping to us alone.
        unsafe { mmio::zero(self.map.base().add(start as usize), bytes) };
        let segments = [IovaRange { iova: Iova(start), len: bytes as u64 }];
        Ok(Arc::new(Part { ram, segments }))
    }

    fn import(&self, memory: ExternalMemory) -> Result<Arc<dyn DmaMemory>, DmaError> {
        let (_, _, len, _) = memory.into_parts();
        Err(DmaError::Unsupported {
            space: self.name().into(),
            what: format!("{len} bytes that are not guest memory"),
            hint: "allocate them from this space".into(),
        })
    }
}

/// Allocated pages of the guest.
#[derive(Debug)]
struct Part {
    ram: Arc<Ram>,
    segments: [IovaRange; 1],
}

// SAFETY: the file stays mapped while `ram` lives, the pages belong to this value until it is
// dropped, and there are no references into the mapping.
unsafe impl DmaMemory for Part {
    fn len(&self) -> usize {
        self.segments[0].len as usize
    }
    fn host(&self) -> Option<NonNull<u8>> {
        // SAFETY: the range lies inside the mapping.
        Some(unsafe { self.ram.map.base().add(self.segments[0].iova.0 as usize) })
    }
    fn device(&self) -> Option<DevicePtr> {
        None
    }
    fn segments(&self) -> &[IovaRange] {
        &self.segments
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let [range] = self.segments;
        self.ram.give_back(range.iova.0, range.len + GUARD);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_whole() {
        let ram = Ram::new(Map::anonymous(32 << 20).unwrap());
        let all = ram.free().clone();
        let mut parts: Vec<_> = [1, 4096, 4097, 1 << 20].map(|len| ram.alloc(len)).into();
        assert_eq!(parts[2].as_ref().unwrap().len(), 8192);
        assert!(ram.alloc(32 << 20).is_err());
        // Free them in another order than that of the allocation.
        parts.swap(0, 2);
        drop(parts);
        assert_eq!(*ram.free(), all);
    }
}
