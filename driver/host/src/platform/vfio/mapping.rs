//! Device memory mapped into this process, which the kernel may revoke.
//!
//! An access to a BAR whose function lost power or memory decoding raises SIGBUS, which kills the
//! process by default. The handler here replaces the page with one of all ones, which is how a dead
//! link reads, and marks the mapping as revoked. This covers every access, including those to
//! doorbells by code that knows only their address. Any other SIGBUS is forwarded to the previous
//! handler.
#![allow(unsafe_code, reason = "maps device memory and handles the signal of its loss")]

use std::{
    ffi::{c_int, c_void},
    io,
    mem::{MaybeUninit, transmute},
    os::fd::AsFd,
    ptr::{NonNull, null_mut, without_provenance_mut},
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
    },
};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// A mapping of device memory.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    range: &'static Range,
}

// SAFETY: an address range that this value owns; accesses are volatile or atomic.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset` on, in whole pages.
    pub(super) fn new(file: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        install()?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap(null_mut(), len, protection, MapFlags::SHARED, file, offset)? };
        let base = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, range: Range::claim(base.as_ptr().addr(), len) })
    }

    /// Returns the address of the first byte in this process.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns whether an access found a part revoked. Such parts read as all ones, and writes to
    /// them are lost.
    pub(super) fn is_revoked(&self) -> bool {
        self.range.revoked.load(Ordering::Acquire)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First: what another thread maps at these addresses is not for the handler to replace.
        self.range.release();
        // SAFETY: this value owns the range; every user of an address in it keeps the value alive.
        if let Err(error) = unsafe { munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::error!(len = self.len, %error, "a BAR could not be unmapped");
        }
    }
}

/// An address range that the handler covers. Ranges are reused but never freed, because the handler
/// may be reading the list at any time.
#[derive(Debug, Default)]
struct Range {
    used: AtomicBool,
    /// Zero if unused.
    start: AtomicUsize,
    end: AtomicUsize,
    revoked: AtomicBool,
    /// Constant once the range is in the list.
    next: AtomicPtr<Range>,
}

/// List head; newest first.
static RANGES: AtomicPtr<Range> = AtomicPtr::new(null_mut());

fn ranges() -> impl Iterator<Item = &'static Range> {
    let load = |link: &AtomicPtr<Range>| {
        // SAFETY: ranges in the list are leaked, and only shared references to them exist.
        unsafe { link.load(Ordering::Acquire).as_ref::<'static>() }
    };
    std::iter::successors(load(&RANGES), move |range| load(&range.next))
}

impl Range {
    fn claim(start: usize, len: usize) -> &'static Self {
        let range = ranges().find(|range| !range.used.swap(true, Ordering::AcqRel));
        let range = range.unwrap_or_else(Self::push);
        range.revoked.store(false, Ordering::Relaxed);
        range.end.store(start + len, Ordering::Relaxed);
        // Ordering: pairs with the handler's load, which then sees the fields above.
        range.start.store(start, Ordering::Release);
        range
    }

    fn push() -> &'static Self {
        let range: &'static Self = Box::leak(Box::default());
        range.used.store(true, Ordering::Relaxed);
        let new = std::ptr::from_ref(range).cast_mut();
        let mut head = RANGES.load(Ordering::Relaxed);
        loop {
            range.next.store(head, Ordering::Relaxed);
            match RANGES.compare_exchange(head, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return range,
                Err(now) => head = now,
            }
        }
    }

    fn release(&self) {
        self.start.store(0, Ordering::Release);
        self.used.store(false, Ordering::Release);
    }

    fn contains(&self, at: usize) -> bool {
        let start = self.start.load(Ordering::Acquire);
        start != 0 && (start..self.end.load(Ordering::Relaxed)).contains(&at)
    }
}

/// The previous SIGBUS action.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the handler, once per process.
fn install() -> io::Result<()> {
    static DONE: OnceLock<Result<(), i32>> = OnceLock::new();
    let done = DONE.get_or_init(|| {
        let mut old = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: all zeroes are a sigaction (the default action, no flags, an empty mask).
        let mut action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
        action.sa_sigaction = handler as usize;
        // On the alternate stack, which Rust's own handler needs.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: only reads the current action into `old`; no action is changed.
        let old = unsafe {
            if libc::sigaction(libc::SIGBUS, std::ptr::null(), old.as_mut_ptr()) != 0 {
                return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
            }
            old.assume_init()
        };
        let _ = PREVIOUS.set(old);
        // SAFETY: the handler calls only async-signal-safe functions: atomics and the system call
        // mmap, which rustix makes without errno.
        match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        }
    });
    done.map_err(io::Error::from_raw_os_error)
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo to a handler with SA_SIGINFO.
    let at = unsafe { (*info).si_addr() }.addr();
    if let Some(range) = ranges().find(|range| range.contains(at))
        && replace(at).is_ok()
    {
        range.revoked.store(true, Ordering::Release);
        return;
    }
    let previous = PREVIOUS.get();
    match previous.map_or(libc::SIG_DFL, |action| action.sa_sigaction) {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: as in `install`. The access is repeated and then takes the default action.
            unsafe {
                let action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
                libc::sigaction(signal, &raw const action, null_mut());
            }
        }
        handler if previous.is_some_and(|old| old.sa_flags & libc::SA_SIGINFO != 0) => {
            // SAFETY: installed with SA_SIGINFO, so it is a function of this type.
            unsafe {
                transmute::<usize, extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void)>(
                    handler,
                )(signal, info, context);
            }
        }
        // SAFETY: as above, without SA_SIGINFO.
        handler => unsafe { transmute::<usize, extern "C" fn(c_int)>(handler)(signal) },
    }
}

/// Replaces the page at `at` with one of all ones.
fn replace(at: usize) -> rustix::io::Result<()> {
    let page = rustix::param::page_size();
    let start = without_provenance_mut::<c_void>(at / page * page);
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: the page belongs to a live `Mapping` and is no longer accessible. Only the faulting
    // instruction is accessing it.
    unsafe {
        let fresh = mmap_anonymous(start, page, protection, flags | MapFlags::FIXED)?;
        fresh.cast::<u8>().write_bytes(0xFF, page);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::platform::mmio;

    /// A truncated file raises SIGBUS just like a revoked BAR.
    #[test]
    fn a_revoked_mapping_reads_as_all_ones() {
        let page = rustix::param::page_size();
        let file = memfd_create("bar", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 3 * page as u64).unwrap();
        let mapping = Mapping::new(&file, 0, 3 * page).unwrap();
        let other = Mapping::new(&file, 0, page).unwrap();
        // SAFETY: inside the three pages, as everywhere below, and the start of a page is aligned.
        let at = |page_index: usize| unsafe { mapping.base().add(page_index * page) }.cast();
        // SAFETY: see above.
        unsafe { mmio::store_release32(at(1), 7) };
        ftruncate(&file, page as u64).unwrap();
        assert!(!mapping.is_revoked());
        // SAFETY: see above.
        unsafe {
            assert_eq!(mmio::load_acquire32(at(1)), u32::MAX);
            mmio::store_release32(at(2), 9);
            assert_eq!(mmio::load_acquire32(at(2)), 9, "it went nowhere but into the page");
            assert_eq!(mmio::load_acquire32(at(0)), 0, "this one is still there");
        }
        assert!(mapping.is_revoked() && !other.is_revoked());
        drop(mapping);
        let again = Mapping::new(&file, 0, page).unwrap();
        assert!(!again.is_revoked(), "its place in the list is used again");
    }
}
