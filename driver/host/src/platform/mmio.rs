//! Accessors of memory that a device writes or watches: doorbells, queue entries, DMA buffers.
//!
//! No Rust reference to such memory ever exists; bounds and alignment are asserted here.
//!
//! Ordering: [`store_release32`] (a doorbell) pairs with the controller's read of it, and
//! [`load_acquire32`] (the dword of a completion that holds the phase) with the controller's store.
#![allow(unsafe_code, reason = "the one place where device memory is touched")]

use std::{
    ptr::NonNull,
    sync::atomic::{AtomicU32, Ordering},
};

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
