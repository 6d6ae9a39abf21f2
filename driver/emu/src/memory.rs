//! Memory of this process, and the crate's copy routine.
#![allow(unsafe_code, reason = "mmap, munmap and copies between raw memory")]

use std::{io, ptr::NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Returns the page size of this machine in bytes.
pub(crate) fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// Rounds `len` up to whole pages, at least one. Returns `None` on overflow.
pub(crate) fn page_ceil(len: usize) -> Option<usize> {
    len.max(1).checked_next_multiple_of(page_bytes())
}

/// Length from which mappings request large pages, to reduce TLB misses of copies. The memory of a
/// driver's blocking calls (4 MiB) is below: clearing a large page for one command may take
/// milliseconds, a hundred times as long as powering a controller on.
pub(crate) const LARGE_BYTES: usize = 8 << 20;

/// Owned pages, unmapped on drop. No Rust reference into them is ever created.
#[derive(Debug)]
pub(crate) struct HostMap {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is owned, and its bytes are only touched through raw pointers.
unsafe impl Send for HostMap {}
// SAFETY: as above; `&HostMap` gives out addresses and never references.
unsafe impl Sync for HostMap {}

impl HostMap {
    /// Maps zeroed pages that are allocated on first touch and not reserved before.
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        Self::map(len, MapFlags::PRIVATE | MapFlags::NORESERVE)
    }

    /// Maps zeroed pages that can be mapped a second time, as a GPU does with doorbells.
    pub(crate) fn shared(len: usize) -> io::Result<Self> {
        Self::map(len, MapFlags::SHARED)
    }

    fn map(len: usize, flags: MapFlags) -> io::Result<Self> {
        let len = page_ceil(len).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a null hint lets the kernel choose an unused range.
        let raw = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )
        }?;
        let ptr = NonNull::new(raw.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let map = Self { ptr, len };
        if len >= LARGE_BYTES {
            // A hint: without large pages, small ones do.
            // SAFETY: the range is the new mapping.
            let _ = unsafe { rustix::mm::madvise(raw, len, Advice::LinuxHugepage) };
        }
        Ok(map)
    }

    /// Returns the first byte.
    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Returns the length in bytes, a multiple of the page size.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the byte at `offset`, checking that `len` bytes from it are inside the mapping.
    ///
    /// # Panics
    /// Panics if the range is outside: every caller has checked it against its own, smaller limit.
    pub(crate) fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "outside the mapping");
        // SAFETY: the assertion keeps the result inside the mapping (or one past its end).
        unsafe { self.ptr.add(offset) }
    }

    /// Zeroes `len` bytes from `offset` on; whole pages are returned to the kernel.
    pub(crate) fn zero(&self, offset: usize, len: usize) -> io::Result<()> {
        let (page, end) = (page_bytes(), offset + len);
        let first = self.at(offset, len);
        let inner = offset.next_multiple_of(page)..end / page * page;
        // SAFETY: `at` checked the range; it is private anonymous memory, where DONTNEED gives zero
        // pages; raw writes are the only other accesses.
        unsafe {
            if inner.is_empty() {
                first.write_bytes(0, len);
                return Ok(());
            }
            first.write_bytes(0, inner.start - offset);
            self.ptr.add(inner.end).write_bytes(0, end - inner.end);
            let pages = self.ptr.add(inner.start).as_ptr().cast();
            rustix::mm::madvise(pages, inner.len(), Advice::LinuxDontNeed)?;
        }
        Ok(())
    }
}

impl Drop for HostMap {
    fn drop(&mut self) {
        // SAFETY: the range is ours, and the owner of the last handle is its last user.
        if let Err(error) = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) } {
            tracing::error!(len = self.len, %error, "unmapping memory failed; it leaks");
        }
    }
}

/// Copies `len` bytes like a device: without references, because other agents may access them.
///
/// # Safety
/// Both ranges must be valid for `len` bytes and must not overlap. Concurrent accesses by other
/// agents are a race in the protocol above (a host that touches a buffer of a running command),
/// with whole bytes but no guaranteed order.
#[inline]
pub(crate) unsafe fn copy(from: NonNull<u8>, to: NonNull<u8>, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_covers_edges_and_pages() {
        let page = page_bytes();
        let map = HostMap::anonymous(4 * page).unwrap();
        for (offset, len) in [(0, 10), (5, page), (page - 3, 2 * page + 7), (page, 2 * page)] {
            // SAFETY: inside the mapping, which only this test accesses.
            unsafe { map.ptr().write_bytes(0xA5, map.len()) };
            map.zero(offset, len).unwrap();
            for at in 0..map.len() {
                // SAFETY: as above.
                let byte = unsafe { map.ptr().add(at).read() };
                let zeroed = (offset..offset + len).contains(&at);
                assert_eq!(byte, if zeroed { 0 } else { 0xA5 }, "byte {at} of {offset}+{len}");
            }
        }
    }

    #[test]
    fn lengths_round_up() {
        assert_eq!(page_ceil(0), Some(page_bytes()));
        assert_eq!(page_ceil(page_bytes() + 1), Some(2 * page_bytes()));
        assert_eq!(page_ceil(usize::MAX), None);
    }
}
