//! Accessors of memory that a device writes or polls: doorbells, queue entries, DMA buffers.
//!
//! No Rust reference to such memory ever exists. Bounds and alignment are asserted here or by the
//! safe types next to this module ([`super::ring`], [`super::buffer`]).
//!
//! Ordering: [`store_release32`] (a doorbell) pairs with the controller's read of it, and
//! [`load_acquire32`] (the dword of a completion that holds the phase) with the controller's store.
//! Everything else is relaxed, and ordered by one of those two.
//!
//! Control registers are volatile accesses, with a barrier if a device must see memory first.
//! Doorbells are atomic stores behind the same barrier: with the software controller they are
//! memory that another thread reads.
//!
//! Every other access is atomic, including copies, which use 8-byte words, and single bytes for the
//! unaligned ends. Two handles to the same memory on two threads may thus see a mix of old and new
//! bytes, but never a data race in the sense of the language. (Overlapping accesses of different
//! sizes rely on the processor, which defines them on x86-64 and AArch64.) Long copies on x86-64
//! use string instructions in assembly, which stand for relaxed loads and stores of each byte,
//! because the compiler does not vectorize atomic accesses.
#![allow(unsafe_code, reason = "the one place where device memory is touched")]

use std::{
    ptr::NonNull,
    sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, Ordering::Relaxed, fence},
};

use volatile::VolatilePtr;

/// Bytes of a submission queue entry.
pub const SQE_BYTES: usize = 64;
/// Bytes of a completion queue entry.
pub const CQE_BYTES: usize = 16;

/// Reads a dword; later accesses in program order are not reordered before it.
///
/// # Safety
/// `ptr` must be valid for reads of 4 bytes, aligned to 4, and only accessed atomically meanwhile.
#[must_use]
#[inline]
pub unsafe fn load_acquire32(ptr: NonNull<u32>) -> u32 {
    debug_assert!(ptr.is_aligned());
    // SAFETY: validity and alignment are the caller's promise.
    unsafe { AtomicU32::from_ptr(ptr.as_ptr()) }.load(Ordering::Acquire)
}

/// Reads a dword with no ordering of its own.
///
/// # Safety
/// Same as [`load_acquire32`].
#[must_use]
#[inline]
pub unsafe fn load_relaxed32(ptr: NonNull<u32>) -> u32 {
    debug_assert!(ptr.is_aligned());
    // SAFETY: validity and alignment are the caller's promise.
    unsafe { AtomicU32::from_ptr(ptr.as_ptr()) }.load(Ordering::Relaxed)
}

/// Writes a dword; earlier accesses in program order are not reordered after it.
///
/// # Safety
/// `ptr` must be valid for writes of 4 bytes, aligned to 4, and only accessed atomically meanwhile.
#[inline]
pub unsafe fn store_release32(ptr: NonNull<u32>, value: u32) {
    debug_assert!(ptr.is_aligned());
    // SAFETY: validity and alignment are the caller's promise.
    unsafe { AtomicU32::from_ptr(ptr.as_ptr()) }.store(value, Ordering::Release);
}

/// Reads a control register; later accesses in program order are not reordered before it.
///
/// # Safety
/// `ptr` must be valid for reads of 4 bytes, aligned to 4, and point to memory of a device that no
/// other code of this process writes.
#[must_use]
#[inline]
pub unsafe fn read_register32(ptr: NonNull<u32>) -> u32 {
    // SAFETY: validity and alignment are the caller's promise.
    let value = unsafe { VolatilePtr::new(ptr) }.read();
    fence(Ordering::Acquire);
    value
}

/// Writes a control register; earlier writes in program order are visible to the device when it
/// sees the value.
///
/// # Safety
/// Same as [`read_register32`], for writes.
#[inline]
pub unsafe fn write_register32(ptr: NonNull<u32>, value: u32) {
    device_write_barrier();
    // SAFETY: validity and alignment are the caller's promise.
    unsafe { VolatilePtr::new(ptr) }.write(value);
}

/// Makes writes to memory visible to a device before it sees a later write to its registers.
///
/// On x86-64 the processor keeps stores in order; only the compiler needs a fence. On AArch64 a
/// release orders stores for other processors only; a device is in the outer shareable domain.
#[inline]
pub fn device_write_barrier() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier; it touches neither memory nor flags.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
    fence(Ordering::Release);
}

/// Writes one submission queue entry: `first`, then `words` without its first word. Unordered: the
/// doorbell that publishes the entry is a release store.
///
/// # Safety
/// `entry` must be valid for writes of 64 bytes, aligned to 16, and the controller must not read it
/// before the next doorbell.
#[inline]
pub unsafe fn write_sqe(entry: NonNull<u8>, first: u64, words: &[u64; SQE_BYTES / 8]) {
    debug_assert!(entry.as_ptr().addr().is_multiple_of(16));
    let to: NonNull<u64> = entry.cast();
    // SAFETY: 64 aligned bytes are valid (the caller's promise).
    unsafe {
        word(to).store(first, Relaxed);
        for (index, value) in words.iter().enumerate().skip(1) {
            word(to.add(index)).store(*value, Relaxed);
        }
    }
}

/// # Safety
/// `at` must be valid for 8 bytes and aligned to 8.
#[inline]
unsafe fn word<'a>(at: NonNull<u64>) -> &'a AtomicU64 {
    // SAFETY: the caller's promise; all accesses are atomic.
    unsafe { AtomicU64::from_ptr(at.as_ptr()) }
}

/// # Safety
/// `at` must be valid for 1 byte.
#[inline]
unsafe fn byte<'a>(at: NonNull<u8>) -> &'a AtomicU8 {
    // SAFETY: the caller's promise; all accesses are atomic.
    unsafe { AtomicU8::from_ptr(at.as_ptr()) }
}

/// Returns how many of `len` bytes at `at` come before the first aligned word.
#[inline]
fn head(at: NonNull<u8>, len: usize) -> usize {
    at.as_ptr().align_offset(8).min(len)
}

/// Length from which a string instruction pays off.
#[cfg(target_arch = "x86_64")]
const STRING_BYTES: usize = 512;
/// Size of a non-temporal store: one cache line.
#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;

/// Copies bytes into DMA memory with non-temporal stores, for data that exceeds the caches and is
/// not used soon. Until [`uncached_fence`], another thread or a device may see a mix of old and new
/// bytes.
///
/// # Safety
/// `to` must be valid for writes of `from.len()` bytes, and the caller must call [`uncached_fence`]
/// before it publishes them.
#[inline]
pub unsafe fn copy_to_uncached(to: NonNull<u8>, from: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        let before = to.as_ptr().align_offset(LINE_BYTES).min(from.len());
        let (first, rest) = from.split_at(before);
        let (lines, last) = rest.split_at(rest.len() / LINE_BYTES * LINE_BYTES);
        // SAFETY: the three parts make up `from.len()` bytes (the caller's promise). The middle one
        // begins on a cache line, as such stores require, and is whole lines. The assembly reads
        // `lines` and stands for relaxed stores of its bytes to `middle`.
        unsafe {
            let middle = to.add(first.len());
            copy_to(to, first);
            copy_to(middle.add(lines.len()), last);
            if !lines.is_empty() {
                std::arch::asm!(
                    "2:",
                    "movups {a}, [{from}]",
                    "movups {b}, [{from} + 16]",
                    "movups {c}, [{from} + 32]",
                    "movups {d}, [{from} + 48]",
                    "movntps [{to}], {a}",
                    "movntps [{to} + 16], {b}",
                    "movntps [{to} + 32], {c}",
                    "movntps [{to} + 48], {d}",
                    "add {from}, 64",
                    "add {to}, 64",
                    "sub {len}, 64",
                    "jnz 2b",
                    from = inout(reg) lines.as_ptr() => _,
                    to = inout(reg) middle.as_ptr() => _,
                    len = inout(reg) lines.len() => _,
                    a = out(xmm_reg) _, b = out(xmm_reg) _,
                    c = out(xmm_reg) _, d = out(xmm_reg) _,
                    options(nostack)
                );
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's promise.
    unsafe {
        copy_to(to, from);
    }
}

/// Orders non-temporal copies before every later store.
#[inline]
pub fn uncached_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a barrier; it touches neither memory nor flags.
    unsafe {
        std::arch::asm!("sfence", options(nostack, preserves_flags));
    }
}

/// Copies a long run of bytes between regions that do not overlap, with relaxed loads and stores of
/// each byte.
///
/// # Safety
/// `from` must be valid for reads and `to` for writes of `len` bytes.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy_string(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's promise. The direction flag is clear on entry to inline assembly.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rdi") to => _,
            inout("rsi") from => _,
            inout("rcx") len => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Copies bytes into DMA memory. Concurrent readers see a mix of old and new bytes.
///
/// # Safety
/// `to` must be valid for writes of `from.len()` bytes.
#[inline]
pub unsafe fn copy_to(to: NonNull<u8>, from: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if from.len() >= STRING_BYTES {
        // SAFETY: the caller's promise; `from` is a Rust reference.
        return unsafe { copy_string(to.as_ptr(), from.as_ptr(), from.len()) };
    }
    let (first, rest) = from.split_at(head(to, from.len()));
    let (words, last) = rest.as_chunks::<8>();
    // SAFETY: the three parts make up `from.len()` bytes (the caller's promise), and the middle one
    // begins at an aligned word.
    unsafe {
        let middle = to.add(first.len());
        let end = middle.add(words.len() * 8);
        first.iter().enumerate().for_each(|(at, value)| byte(to.add(at)).store(*value, Relaxed));
        for (at, value) in words.iter().enumerate() {
            word(middle.cast().add(at)).store(u64::from_ne_bytes(*value), Relaxed);
        }
        last.iter().enumerate().for_each(|(at, value)| byte(end.add(at)).store(*value, Relaxed));
    }
}

/// Copies bytes out of DMA memory. Concurrent writes are seen in part.
///
/// # Safety
/// `from` must be valid for reads of `to.len()` bytes.
#[inline]
pub unsafe fn copy_from(from: NonNull<u8>, to: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if to.len() >= STRING_BYTES {
        // SAFETY: the caller's promise; `to` is an exclusive Rust reference.
        return unsafe { copy_string(to.as_mut_ptr(), from.as_ptr(), to.len()) };
    }
    let (first, rest) = to.split_at_mut(head(from, to.len()));
    let (words, last) = rest.as_chunks_mut::<8>();
    // SAFETY: as in `copy_to`.
    unsafe {
        let middle = from.add(first.len());
        let end = middle.add(words.len() * 8);
        first.iter_mut().enumerate().for_each(|(at, to)| *to = byte(from.add(at)).load(Relaxed));
        for (at, to) in words.iter_mut().enumerate() {
            *to = word(middle.cast().add(at)).load(Relaxed).to_ne_bytes();
        }
        last.iter_mut().enumerate().for_each(|(at, to)| *to = byte(end.add(at)).load(Relaxed));
    }
}

/// Zeroes `len` bytes of DMA memory.
///
/// # Safety
/// `to` must be valid for writes of `len` bytes.
#[inline]
pub unsafe fn zero(to: NonNull<u8>, len: usize) {
    const ZEROES: [u8; 4096] = [0; 4096];
    for at in (0..len).step_by(ZEROES.len()) {
        // SAFETY: inside the `len` bytes of the caller's promise.
        unsafe { copy_to(to.add(at), &ZEROES[..(len - at).min(ZEROES.len())]) };
    }
}

#[cfg(test)]
mod tests;
