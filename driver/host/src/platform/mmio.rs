//! Accessors of memory that a device writes or watches: doorbells, queue entries, DMA buffers.
//!
//! No Rust reference to such memory ever exists; bounds and alignment are asserted here or by the
//! safe types beside this module ([`super::ring`], [`super::buffer`]).
//!
//! Ordering: [`store_release32`] (a doorbell) pairs with the controller's read of it, and
//! [`load_acquire32`] (the dword of a completion that holds the phase) with the controller's store.
//! Everything else is relaxed or plain, and ordered by one of those two.
#![allow(unsafe_code, reason = "the one place where device memory is touched")]

use std::{
    ptr::NonNull,
    sync::atomic::{AtomicU32, Ordering},
};

/// Bytes of a submission queue entry.
pub const SQE_BYTES: usize = 64;
/// Bytes of a completion queue entry.
pub const CQE_BYTES: usize = 16;

/// Reads a dword; nothing after it in program order is done before it.
///
/// # Safety
/// `ptr` is valid for reads of 4 bytes, aligned to 4, and only accessed atomically meanwhile.
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
/// As for [`load_acquire32`].
#[must_use]
#[inline]
pub unsafe fn load_relaxed32(ptr: NonNull<u32>) -> u32 {
    debug_assert!(ptr.is_aligned());
    // SAFETY: validity and alignment are the caller's promise.
    unsafe { AtomicU32::from_ptr(ptr.as_ptr()) }.load(Ordering::Relaxed)
}

/// Writes a dword; everything before it in program order is done before it.
///
/// # Safety
/// `ptr` is valid for writes of 4 bytes, aligned to 4, and only accessed atomically meanwhile.
#[inline]
pub unsafe fn store_release32(ptr: NonNull<u32>, value: u32) {
    debug_assert!(ptr.is_aligned());
    // SAFETY: validity and alignment are the caller's promise.
    unsafe { AtomicU32::from_ptr(ptr.as_ptr()) }.store(value, Ordering::Release);
}

/// Writes one submission queue entry with wide stores: `first`, then all of `words` but its first.
/// Not ordered: the doorbell that publishes the entry is a release store.
///
/// # Safety
/// `entry` is valid for writes of 64 bytes, aligned to 16, and the controller does not read it
/// before the next doorbell.
#[inline]
pub unsafe fn write_sqe(entry: NonNull<u8>, first: u64, words: &[u64; SQE_BYTES / 8]) {
    debug_assert!(entry.as_ptr().addr().is_multiple_of(16));
    let to: NonNull<u64> = entry.cast();
    // SAFETY: 64 bytes are valid (the caller's promise); the borrowed words cannot overlap device
    // memory, to which no Rust reference exists.
    unsafe {
        to.write(first);
        std::ptr::copy_nonoverlapping(words.as_ptr().add(1), to.as_ptr().add(1), words.len() - 1);
    }
}

/// Copies bytes into DMA memory.
///
/// # Safety
/// `to` is valid for writes of `from.len()` bytes and the device does not access them meanwhile.
#[inline]
pub unsafe fn copy_to(to: NonNull<u8>, from: &[u8]) {
    // SAFETY: validity is the caller's promise; no Rust slice lies in DMA memory (DmaMemory).
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) };
}

/// Copies bytes out of DMA memory.
///
/// # Safety
/// `from` is valid for reads of `to.len()` bytes and the device does not write them meanwhile.
#[inline]
pub unsafe fn copy_from(from: NonNull<u8>, to: &mut [u8]) {
    // SAFETY: validity is the caller's promise; no Rust slice lies in DMA memory (DmaMemory).
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) };
}

/// Sets `len` bytes of DMA memory to zero.
///
/// # Safety
/// `to` is valid for writes of `len` bytes and the device does not access them meanwhile.
#[inline]
pub unsafe fn zero(to: NonNull<u8>, len: usize) {
    // SAFETY: validity is the caller's promise.
    unsafe { std::ptr::write_bytes(to.as_ptr(), 0, len) };
}
