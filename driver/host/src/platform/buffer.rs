//! DMA buffers as safe copies: bytes in, bytes out, never a reference.
#![allow(unsafe_code, reason = "DMA buffers are memory a device also uses")]

use std::ptr::NonNull;

use super::mmio;
use crate::dma::{DmaError, DmaSlice, Iova};

/// Bytes of a copy that are in the first cache at a time, and leave room there.
const PIECE_BYTES: usize = 4 << 10;

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

    /// Copies `len` bytes from `at` of another buffer to `offset`, past the caches: for more than
    /// they hold. Shows `see` what it copies, in order and in pieces, so that it can be summed up
    /// while it is there: what is written is what was seen, whoever writes to `from` meanwhile.
    ///
    /// # Errors
    /// [`DmaError::OutOfRange`] past the end of either; nothing is copied then.
    #[inline]
    pub fn copy_from(
        &mut self,
        offset: usize,
        from: &Self,
        at: usize,
        len: usize,
        mut see: impl FnMut(&[u8]),
    ) -> Result<(), DmaError> {
        let (to, from) = (self.at(offset, len)?, from.at(at, len)?);
        let mut piece = [0; PIECE_BYTES];
        for done in (0..len).step_by(PIECE_BYTES) {
            let piece = &mut piece[..PIECE_BYTES.min(len - done)];
            // SAFETY: `at` checked the bounds of both; the fence is below.
            unsafe {
                mmio::copy_from(from.add(done), piece);
                see(piece);
                mmio::copy_to_uncached(to.add(done), piece);
            }
        }
        mmio::uncached_fence();
        Ok(())
    }

    /// Zeroes everything.
    pub fn zero(&mut self) {
        // SAFETY: DmaMemory promises `len` bytes behind `base`.
        unsafe { mmio::zero(self.base, self.len) };
    }
}
