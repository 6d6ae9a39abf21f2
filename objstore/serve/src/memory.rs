//! Memory that a client shares with the server.

#![allow(unsafe_code, reason = "maps memory that another process writes at any time")]

use std::{
    ffi::c_void,
    io,
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
    sync::Arc,
};

use nvme_driver::platform::mmio;
use ripieno_stack::EngineMemory;
use rustix::{
    fs::{FallocateFlags, MemfdFlags, SealFlags},
    mm::{Advice, MapFlags, ProtFlags},
};

/// Name of the memory in `/proc/PID/maps`.
pub(crate) const NAME: &str = "ripieno-pool";
/// Type of the file system that anonymous shared memory is on (`TMPFS_MAGIC`). Pages of huge-page
/// file systems can run out when they are first used, which is a signal in the server.
const TMPFS: i64 = 0x0102_1994;

/// A mapping of shared memory, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address, which is valid on every thread; memory is accessed by raw copies only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: impl AsFd, len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses: no other memory changes.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0)?
        };
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::InvalidData)?;
        let mapping = Self { base, len };
        // A part of a huge page that the kernel writes to cannot be replaced (`discard`).
        // SAFETY: the advice is about the size of pages, in the mapping that was just made.
        let advised =
            unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxNoHugepage) };
        match advised {
            // A kernel without huge pages.
            Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(mapping),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the first byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Copies bytes into the memory. Returns false if they are not inside it.
    pub(crate) fn write(&self, at: usize, from: &[u8]) -> bool {
        let fits = self.has(at, from.len());
        if fits {
            // SAFETY: the range is inside the mapping, which nothing of this process refers to.
            unsafe { self.base.add(at).copy_from_nonoverlapping(source(from), from.len()) };
        }
        fits
    }

    /// Copies bytes out of the memory. Returns false if they are not inside it.
    pub(crate) fn read(&self, at: usize, into: &mut [u8]) -> bool {
        let fits = self.has(at, into.len());
        if let (true, Some(to)) = (fits, NonNull::new(into.as_mut_ptr())) {
            // SAFETY: as above.
            unsafe { self.base.add(at).copy_to_nonoverlapping(to, into.len()) };
        }
        fits
    }

    /// Returns a word that another process, or its GPU, may write; `None` beyond the end.
    pub(crate) fn word(&self, at: u32) -> Option<u32> {
        let offset = at as usize * size_of::<u32>();
        // SAFETY: inside the mapping and aligned, because that begins at a page; it is written by
        // whole words.
        self.has(offset, size_of::<u32>())
            .then(|| unsafe { mmio::load_acquire32(self.base.add(offset).cast()) })
    }

    fn has(&self, at: usize, bytes: usize) -> bool {
        at.checked_add(bytes).is_some_and(|end| end <= self.len)
    }
}

fn source(from: &[u8]) -> NonNull<u8> {
    NonNull::from(from).cast()
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped by `new` with this length, and nothing uses it any more: the
        // server's devices were shown not to, and a client's own accesses are copies.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.len) };
        assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// Makes shared memory that can neither shrink nor grow, of whole pages.
pub(crate) fn make(bytes: u64) -> io::Result<(OwnedFd, Mapping)> {
    let bytes = bytes.next_multiple_of(rustix::param::page_size() as u64);
    let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let file = rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    let mapping = Mapping::new(&file, len)?;
    Ok((file, mapping))
}

/// Replaces the pages in a range of shared memory by new ones, of zeros, for all that map it. Pages
/// that the kernel writes to meanwhile belong to nobody then.
///
/// # Errors
/// Returns [`io::ErrorKind::InvalidInput`] for a range that is not of whole pages: the others in it
/// would be changed, too.
pub(crate) fn discard(file: &OwnedFd, at: u64, bytes: u64) -> io::Result<()> {
    let page = rustix::param::page_size() as u64;
    if !at.is_multiple_of(page) || !bytes.is_multiple_of(page) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, flags, at, bytes)?)
}

/// Maps the memory of a client. An access to it never fails: it cannot shrink.
///
/// # Errors
/// Returns the reason why the file is refused.
pub(crate) fn take(file: &OwnedFd, bytes_max: u64) -> Result<Mapping, String> {
    let seals = rustix::fs::fcntl_get_seals(file);
    if !seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
        return Err("the pool's memory is not sealed against shrinking (F_SEAL_SHRINK)".to_owned());
    }
    let failed = |error: rustix::io::Errno| format!("the pool's memory cannot be used: {error}");
    let on = rustix::fs::fstatfs(file).map_err(failed)?;
    if on.f_type != TMPFS {
        return Err("the pool's memory is not a memfd of small pages".to_owned());
    }
    let found = rustix::fs::fstat(file).map_err(failed)?;
    let bytes = u64::try_from(found.st_size).unwrap_or(0);
    if bytes == 0 || bytes > bytes_max {
        return Err(format!("the pool has {bytes} bytes; 1 to {bytes_max} are possible"));
    }
    if !bytes.is_multiple_of(rustix::param::page_size() as u64) {
        return Err(format!("the pool has {bytes} bytes, which are not whole pages"));
    }
    let len = usize::try_from(bytes).map_err(|error| error.to_string())?;
    Mapping::new(file, len).map_err(|error| format!("mapping the pool's memory: {error}"))
}

/// Describes a mapping for a store.
pub(crate) fn engine(mapping: Arc<Mapping>) -> EngineMemory {
    let (base, len) = (mapping.base(), mapping.len());
    // SAFETY: the mapping lives as long as its owner; this process makes no reference into it.
    unsafe { EngineMemory::new(base, len, mapping) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_that_cannot_shrink_is_mapped() {
        let (file, own) = make(10_000).unwrap();
        assert!(own.len() >= 10_000 && own.len().is_multiple_of(rustix::param::page_size()));
        let mapped = take(&file, 1 << 20).unwrap();
        assert!(own.write(7, b"shared"));
        let mut found = [0; 6];
        assert!(mapped.read(7, &mut found));
        assert_eq!(&found, b"shared");
        assert!(!mapped.read(own.len() - 5, &mut found) && !mapped.write(usize::MAX, b"a"));
        assert!(rustix::fs::ftruncate(&file, 0).is_err(), "it is sealed");
        assert!(take(&file, 8192).unwrap_err().contains("1 to 8192"));

        discard(&file, 0, 4096).unwrap();
        assert!(mapped.read(7, &mut found) && found == [0; 6], "the pages are new");
        assert!(discard(&file, 512, 4096).is_err(), "others are in the same pages");

        let open = rustix::fs::memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 8192).unwrap();
        assert!(take(&open, 1 << 20).unwrap_err().contains("F_SEAL_SHRINK"));
        rustix::fs::ftruncate(&open, 0).unwrap();
        rustix::fs::fcntl_add_seals(&open, SealFlags::SHRINK).unwrap();
        assert!(take(&open, 1 << 20).unwrap_err().contains("0 bytes"));
        rustix::fs::ftruncate(&open, 5000).unwrap();
        assert!(take(&open, 1 << 20).unwrap_err().contains("whole pages"));
        let file = tempfile::tempfile().unwrap();
        assert!(take(&file.into(), 1 << 20).unwrap_err().contains("F_SEAL_SHRINK"));
    }
}
