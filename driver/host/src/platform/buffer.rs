//! DMA buffers accessed by safe copies, never by reference.
#![allow(unsafe_code, reason = "DMA buffers are memory a device also uses")]

use std::ptr::NonNull;

use super::mmio;
use crate::dma::{DmaError, DmaSlice, Iova, check_range};

/// Chunk size of a copy: fits in the L1 cache with room to spare.
const PIECE_BYTES: usize = 4 << 10;

/// Part of DMA memory that the CPU can access.
///
/// The controller may write it while a command is outstanding, and another thread may do so through
/// another buffer of the same memory; a read then returns a mix of old and new bytes. The queue
/// code reads only after it has seen the completion.
#[derive(Debug, Clone)]
pub struct Buffer {
    base: NonNull<u8>,
    len: usize,
    memory: DmaSlice,
}

// SAFETY: `memory` (Send + Sync) keeps what `base` points to mapped; accesses are raw copies.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Wraps all of `memory`. Returns `None` if the CPU cannot access it.
    #[must_use]
    pub fn new(memory: DmaSlice) -> Option<Self> {
        Some(Self { base: memory.host()?, len: memory.len(), memory })
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the buffer is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the I/O virtual address of the first byte.
    #[must_use]
    pub fn iova(&self) -> Iova {
        self.memory.iova()
    }

    /// Returns the slice that keeps the buffer mapped.
    #[must_use]
    pub fn memory(&self) -> &DmaSlice {
        &self.memory
    }

    fn at(&self, offset: usize, len: usize) -> Result<NonNull<u8>, DmaError> {
        check_range(offset, len, self.len)?;
        // SAFETY: inside the `len` bytes that DmaMemory promises behind `base`.
        Ok(unsafe { self.base.add(offset) })
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// Returns [`DmaError::OutOfRange`] past the end.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), DmaError> {
        let to = self.at(offset, bytes.len())?;
        // SAFETY: `at` checked the bounds.
        unsafe { mmio::copy_to(to, bytes) };
        Ok(())
    }

    /// Copies from `offset` into `bytes`.
    ///
    /// # Errors
    /// Returns [`DmaError::OutOfRange`] past the end.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DmaError> {
        let from = self.at(offset, bytes.len())?;
        // SAFETY: `at` checked the bounds.
        unsafe { mmio::copy_from(from, bytes) };
        Ok(())
    }

    /// Copies `len` bytes from `at` of another buffer to `offset` with non-temporal stores, for
    /// data larger than the caches. Passes the bytes to `see`, in order and in chunks, for instance
    /// for a checksum: it sees exactly the bytes written, even if `from` changes concurrently.
    ///
    /// # Errors
    /// Returns [`DmaError::OutOfRange`], without copying, past the end of either buffer.
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

    /// Zeroes the whole buffer.
    pub fn zero(&mut self) {
        // SAFETY: DmaMemory promises `len` bytes behind `base`.
        unsafe { mmio::zero(self.base, self.len) };
    }
}
