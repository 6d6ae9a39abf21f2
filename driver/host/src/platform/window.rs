//! DMA memory that the CPU accesses only with volatile loads and stores: memory of another device.
#![allow(unsafe_code, reason = "device memory is accessed through raw pointers")]

use std::ptr::NonNull;

use crate::dma::{DmaError, DmaSlice, Iova, check_range};

/// Part of DMA memory, accessed in dwords if address and length allow, else in bytes.
///
/// Unlike [`super::buffer::Buffer`] it never uses wider or repeated accesses, which some BARs do
/// not support.
#[derive(Debug, Clone)]
pub struct Window {
    base: NonNull<u8>,
    memory: DmaSlice,
}

// SAFETY: `memory` (Send + Sync) keeps what `base` points to mapped; accesses are volatile.
unsafe impl Send for Window {}

impl Window {
    /// Wraps all of `memory`. Returns `None` if the CPU cannot access it.
    #[must_use]
    pub fn new(memory: DmaSlice) -> Option<Self> {
        Some(Self { base: memory.host()?, memory })
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns whether the window is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// Returns the I/O virtual address of the first byte.
    #[must_use]
    pub fn iova(&self) -> Iova {
        self.memory.iova()
    }

    fn at(&self, offset: usize, len: usize) -> Result<NonNull<u8>, DmaError> {
        check_range(offset, len, self.len())?;
        // SAFETY: inside the `len()` bytes that DmaMemory promises behind `base`.
        Ok(unsafe { self.base.add(offset) })
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// Returns [`DmaError::OutOfRange`] past the end.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DmaError> {
        let to = self.at(offset, bytes.len())?;
        let dwords = if to.cast::<u32>().is_aligned() { bytes.len() / 4 * 4 } else { 0 };
        let (wide, narrow) = bytes.split_at(dwords);
        for (index, dword) in wide.as_chunks::<4>().0.iter().enumerate() {
            // SAFETY: `at` checked the bounds and `to` is aligned.
            unsafe { to.cast::<u32>().add(index).write_volatile(u32::from_ne_bytes(*dword)) };
        }
        for (index, byte) in narrow.iter().enumerate() {
            // SAFETY: `at` checked the bounds.
            unsafe { to.add(dwords + index).write_volatile(*byte) };
        }
        Ok(())
    }

    /// Copies from `offset` into `bytes`.
    ///
    /// # Errors
    /// Returns [`DmaError::OutOfRange`] past the end.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DmaError> {
        let from = self.at(offset, bytes.len())?;
        let dwords = if from.cast::<u32>().is_aligned() { bytes.len() / 4 * 4 } else { 0 };
        let (wide, narrow) = bytes.split_at_mut(dwords);
        for (index, dword) in wide.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            // SAFETY: `at` checked the bounds and `from` is aligned.
            *dword = unsafe { from.cast::<u32>().add(index).read_volatile() }.to_ne_bytes();
        }
        for (index, byte) in narrow.iter_mut().enumerate() {
            // SAFETY: `at` checked the bounds.
            *byte = unsafe { from.add(dwords + index).read_volatile() };
        }
        Ok(())
    }
}
