#![allow(unsafe_code, reason = "memory shared with the kernel is mapped here")]
//! Memory shared by host threads and the caller: anonymous pages.

use std::ptr::NonNull;

use gio_uring::{ExecutorError, SharedMemory};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Alignment required by `SharedMemory`; lengths are rounded up to it.
const ALIGN: usize = 4096;

/// An anonymous mapping, unmapped on drop.
struct Pages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: Pages is only ever dropped; the memory is accessed through its SharedMemory.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `alloc`, and unused once its owner is dropped.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        if let Err(error) = unmapped {
            tracing::error!(%error, len = self.len, "unmapping shared memory failed");
        }
    }
}

/// Allocates `len` zeroed bytes, rounded up to whole pages.
pub(crate) fn alloc(executor: &'static str, len: usize) -> Result<SharedMemory, ExecutorError> {
    let failed = |cause: String| ExecutorError::Memory { executor, len, cause };
    let rounded = len.max(1).checked_next_multiple_of(ALIGN);
    let rounded = rounded.ok_or_else(|| failed("the length overflows".into()))?;
    // SAFETY: a new anonymous mapping overlaps nothing.
    let start = unsafe {
        mmap_anonymous(
            std::ptr::null_mut(),
            rounded,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    };
    let start = start.map_err(|error| failed(error.to_string()))?;
    let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| failed("mapped at 0".into()))?;
    let address = start.as_ptr().expose_provenance() as u64;
    let owner = Box::new(Pages { start, len: rounded });
    // SAFETY: anonymous pages are zeroed, page aligned, at the same address for the kernel (which
    // runs in this process), and mapped until `owner` is dropped.
    Ok(unsafe { SharedMemory::new(start, address, rounded, owner) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_aligned_and_rounded_up() {
        let memory = alloc("host", 5000).expect("two pages");
        assert_eq!(memory.len(), 8192);
        assert_eq!(memory.address() % 4096, 0);
        for offset in 0..memory.len() {
            // SAFETY: inside the mapping.
            assert_eq!(unsafe { memory.host().add(offset).read_volatile() }, 0);
        }
        assert_eq!(alloc("host", 0).expect("a page").len(), 4096);
    }

    #[test]
    fn too_much_memory_is_an_error_and_says_how_much() {
        for len in [usize::MAX, usize::MAX / 2] {
            let error = alloc("host", len).expect_err("more than there is");
            assert!(error.to_string().contains(&len.to_string()), "{error}");
        }
    }
}
