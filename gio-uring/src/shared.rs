#![allow(unsafe_code, reason = "memory that a kernel writes is reached only through addresses")]
//! Accessors of memory that the kernel reads and writes concurrently.
//!
//! No reference to plain data in it ever exists: values are copied in and out by volatile accesses,
//! and words that both sides change are accessed atomically. Bounds and alignment are asserted in
//! [`Region::at`] and nowhere else. Offsets come from this crate's own layout, never from the
//! kernel, so a failed assertion is a defect of this crate.

use std::{ptr::NonNull, sync::Arc};

use zerocopy::{FromBytes, IntoBytes};

use crate::{
    executor::{ExecutorError, SharedMemory},
    sync::{Ordering, raw},
};

/// Plain data: every bit pattern is valid, and there is no padding.
pub(crate) trait Plain: Copy + FromBytes + IntoBytes {}
impl<T: Copy + FromBytes + IntoBytes> Plain for T {}

/// A part of shared memory. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Region {
    memory: Arc<SharedMemory>,
    offset: usize,
    len: usize,
}

impl Region {
    /// Wraps all of `memory`.
    pub(crate) fn whole(memory: SharedMemory) -> Self {
        let len = memory.len();
        Self { memory: Arc::new(memory), offset: 0, len }
    }

    /// Returns `len` bytes from `offset` on.
    pub(crate) fn slice(&self, offset: usize, len: usize) -> Self {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "{len} bytes at {offset} of a region of {}",
            self.len
        );
        Self { memory: self.memory.clone(), offset: self.offset + offset, len }
    }

    /// Makes the host's writes visible to operations that are submitted afterwards.
    pub(crate) fn push(&self) -> Result<(), ExecutorError> {
        self.memory.push(self.offset..self.offset + self.len)
    }

    /// Makes the kernel's writes visible to the host.
    pub(crate) fn pull(&self) -> Result<(), ExecutorError> {
        self.memory.pull(self.offset..self.offset + self.len)
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of byte `offset` in the kernel.
    pub(crate) fn address(&self, offset: usize) -> u64 {
        assert!(offset <= self.len);
        self.memory.address() + (self.offset + offset) as u64
    }

    /// Converts an offset to a pointer; the only function that does.
    fn at<T>(&self, offset: usize) -> NonNull<T> {
        assert!(
            offset.checked_add(size_of::<T>()).is_some_and(|end| end <= self.len),
            "{} bytes at {offset} of a region of {}",
            size_of::<T>(),
            self.len
        );
        // SAFETY: SharedMemory::new promises `len` bytes at `host`; slice() and the assertion above
        // keep the result inside them.
        let pointer = unsafe { self.memory.host().byte_add(self.offset + offset) }.cast::<T>();
        assert!(pointer.is_aligned(), "offset {offset} is not aligned to {}", align_of::<T>());
        pointer
    }

    /// Copies a value out.
    pub(crate) fn read<T: Plain>(&self, offset: usize) -> T {
        // SAFETY: at() checked bounds and alignment, the memory lives as long as `self.memory`, and
        // every bit pattern is a valid T (Plain). Callers read only data that the kernel has
        // published to them (ring.rs, `Ordering:`).
        unsafe { self.at::<T>(offset).read_volatile() }
    }

    /// Copies a value in.
    pub(crate) fn write<T: Plain>(&self, offset: usize, value: T) {
        // SAFETY: as in read(); callers write only memory that the kernel does not read yet.
        unsafe { self.at::<T>(offset).write_volatile(value) }
    }

    /// Copies in element `index` of an array that starts at `offset`.
    pub(crate) fn put<T: Plain>(&self, offset: usize, index: usize, value: T) {
        self.write(offset + index * size_of::<T>(), value);
    }

    /// Zeroes `len` bytes; `offset` and `len` are multiples of 4.
    pub(crate) fn zero(&self, offset: usize, len: usize) {
        for at in (offset..offset + len).step_by(size_of::<u32>()) {
            self.write(at, 0u32);
        }
    }

    fn word32(&self, offset: usize) -> &raw::AtomicU32 {
        // SAFETY: at() checked bounds and alignment; the memory lives as long as `self`. The word
        // is only accessed atomically while the kernel runs.
        unsafe { raw::AtomicU32::from_ptr(self.at::<u32>(offset).as_ptr()) }
    }

    fn word64(&self, offset: usize) -> &raw::AtomicU64 {
        // SAFETY: as in word32().
        unsafe { raw::AtomicU64::from_ptr(self.at::<u64>(offset).as_ptr()) }
    }

    /// Loads a word that the kernel may change.
    pub(crate) fn load32(&self, offset: usize, order: Ordering) -> u32 {
        self.word32(offset).load(order)
    }

    /// Stores a word that the kernel may read.
    pub(crate) fn store32(&self, offset: usize, value: u32, order: Ordering) {
        self.word32(offset).store(value, order);
    }

    #[cfg(all(test, not(loom)))]
    /// Adds to a word that the kernel also adds to; returns the previous value.
    pub(crate) fn add32(&self, offset: usize, value: u32, order: Ordering) -> u32 {
        self.word32(offset).fetch_add(value, order)
    }

    /// Loads a word that the kernel may change.
    pub(crate) fn load64(&self, offset: usize, order: Ordering) -> u64 {
        self.word64(offset).load(order)
    }

    /// Stores a word that the kernel may read.
    pub(crate) fn store64(&self, offset: usize, value: u64, order: Ordering) {
        self.word64(offset).store(value, order);
    }
}
