//! DMA buffers as safe copies: bytes in, bytes out, never a reference.
#![allow(unsafe_code, reason = "DMA buffers are memory a device also uses")]

use std::ptr::NonNull;

use super::mmio;
use crate::dma::{DmaError, DmaSlice, Iova};

/// A part of DMA memory that the CPU reaches.
///
/// The controller may write into it while a command is outstanding, and another thread through
/// another buffer of the same memory: reading then yields some bytes or others. The queue code only
/// reads after the completion was seen.
#[derive(Debug, Clone)]
pub struct Buffer {
    base: NonNull<u8>,
    len: usize,
    memory: DmaSlice,
}

// SAFETY: `memory` (Send + Sync) keeps what `base` points to mapped; accesses are raw copies.
unsafe impl Send for Buffer {}

impl Buffer {
    /// The whole of `memory`; `None` when the CPU cannot reach it.
    #[must_use]
    pub fn new(memory: DmaSlice) -> Option<Self> {
        Some(Self { base: memory.host()?, len: memory.len(), memory })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First byte for the controller.
    #[must_use]
    pub fn iova(&self) -> Iova {
        self.memory.iova()
    }

    /// What keeps it mapped.
    #[must_use]
    pub fn memory(&self) -> &DmaSlice {
        &self.memory
    }

    fn at(&self, offset: usize, len: usize) -> Result<NonNull<u8>, DmaError> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(DmaError::OutOfRange { offset, len, total: self.len });
        }
        // SAFETY: inside the `len` bytes that DmaMemory promises behind `base`.
        Ok(unsafe { self.base.add(offset) })
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// [`DmaError::OutOfRange`] past the end.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), DmaError> {
        let to = self.at(offset, bytes.len())?;
        // SAFETY: `at` checked the bounds.
        unsafe { mmio::copy_to(to, bytes) };
        Ok(())
    }

    /// Copies from `offset` into `bytes`.
    ///
    /// # Errors
    /// [`DmaError::OutOfRange`] past the end.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DmaError> {
        let from = self.at(offset, bytes.len())?;
        // SAFETY: `at` checked the bounds.
        unsafe { mmio::copy_from(from, bytes) };
        Ok(())
    }

    /// Zeroes everything.
    pub fn zero(&mut self) {
        // SAFETY: DmaMemory promises `len` bytes behind `base`.
        unsafe { mmio::zero(self.base, self.len) };
    }
}
