//! The fastest medium: memory, one copy per byte.
#![allow(unsafe_code, reason = "copies between two raw memories")]

use std::{fmt, io, ptr::NonNull, sync::Arc};

use nvme_driver::Nanos;

use super::{Media, MediaDone, MediaError, MediaKind, MediaOp};
use crate::{
    domain::{SgEntry, SgList},
    memory::{self, HostMap},
    random::SplitMix64,
};

/// Bytes in lazily allocated memory: a 1 TB medium takes only the memory written to, counted in the
/// large pages (2 MiB) that make copies half as fast again.
///
/// Clones are handles to the same bytes, so a test can restart a controller on an earlier one's
/// data. Only one of them should be in use at a time: concurrent writes to the same bytes leave a
/// mix of both, as with two hosts on one real drive.
///
/// Everything finishes inside [`Media::submit`], with exactly one copy between medium and memory.
#[derive(Clone)]
pub struct MemoryMedia {
    map: Arc<HostMap>,
    capacity: usize,
}

impl MemoryMedia {
    /// Creates a medium of `bytes` zero bytes.
    ///
    /// # Errors
    /// Fails if the address space is too small (no memory is reserved).
    pub fn new(bytes: u64) -> io::Result<Self> {
        let too_large = || {
            let text = format!("a medium of {bytes} bytes does not fit the address space");
            io::Error::new(io::ErrorKind::InvalidInput, text)
        };
        let capacity = usize::try_from(bytes).map_err(|_| too_large())?;
        Ok(Self { map: Arc::new(HostMap::anonymous(capacity)?), capacity })
    }

    /// Copies stored bytes out, bypassing the controller. For tests and tools.
    ///
    /// # Errors
    /// Returns [`MediaError::OutOfRange`] past the end.
    pub fn peek(&self, offset: u64, to: &mut [u8]) -> Result<(), MediaError> {
        let from = self.range(offset, to.len())?;
        // SAFETY: `range` checked; `to` is Rust's own memory, separate from the mapping.
        unsafe { memory::copy(from, NonNull::from(&mut *to).cast(), to.len()) };
        Ok(())
    }

    /// Overwrites stored bytes, bypassing the controller.
    ///
    /// # Errors
    /// Returns [`MediaError::OutOfRange`] past the end.
    pub fn poke(&self, offset: u64, from: &[u8]) -> Result<(), MediaError> {
        let to = self.range(offset, from.len())?;
        // SAFETY: as in `peek`.
        unsafe { memory::copy(NonNull::from(from).cast(), to, from.len()) };
        Ok(())
    }

    /// Flips one to eight bits within `len` bytes, by seed, like aging cells.
    ///
    /// # Errors
    /// Returns [`MediaError::OutOfRange`] past the end.
    pub fn rot(&self, offset: u64, len: u64, seed: u64) -> Result<(), MediaError> {
        let mut rng = SplitMix64::new(seed, 0);
        let count = (1 + rng.below(8)).min(len);
        // One bit in each of `count` parts, so that no bit is flipped twice.
        for part in 0..count {
            let (first, end) = (len * part / count, len * (part + 1) / count);
            let (at, mut byte) = (offset + first + rng.below(end - first), [0]);
            self.peek(at, &mut byte)?;
            self.poke(at, &[byte[0] ^ 1 << rng.below(8)])?;
        }
        Ok(())
    }

    fn range(&self, offset: u64, len: usize) -> Result<NonNull<u8>, MediaError> {
        let end = offset.checked_add(len as u64);
        match usize::try_from(offset) {
            Ok(start) if end.is_some_and(|end| end <= self.capacity as u64) => {
                Ok(self.map.at(start, len))
            }
            _ => {
                let capacity = self.capacity as u64;
                Err(MediaError::OutOfRange { offset, len: len as u64, capacity })
            }
        }
    }

    /// Executes `op` immediately.
    pub(super) fn execute(&self, op: &MediaOp) -> Result<(), MediaError> {
        op.check(self.capacity as u64)?;
        match op.kind {
            MediaKind::Read => self.load(op.offset, &op.sg_list),
            MediaKind::Write { .. } => self.store(op.offset, &op.sg_list),
            MediaKind::Flush => Ok(()),
            MediaKind::Deallocate | MediaKind::WriteZeroes => self.zero(op.offset, op.len),
        }
    }

    fn load(&self, mut offset: u64, sg_list: &SgList) -> Result<(), MediaError> {
        for SgEntry { host, len } in sg_list.as_slice() {
            let from = self.range(offset, *len)?;
            if let Some(to) = host {
                // SAFETY: `range` checked the medium; `sg_list` was checked against its mapping and
                // keeps it; medium and mapped memory are different mappings.
                unsafe { memory::copy(from, *to, *len) };
            }
            offset += *len as u64;
        }
        Ok(())
    }

    fn store(&self, mut offset: u64, sg_list: &SgList) -> Result<(), MediaError> {
        for SgEntry { host, len } in sg_list.as_slice() {
            let to = self.range(offset, *len)?;
            match host {
                // SAFETY: as in `load`.
                Some(from) => unsafe { memory::copy(*from, to, *len) },
                // SAFETY: `range` checked the medium.
                None => unsafe { to.write_bytes(0, *len) },
            }
            offset += *len as u64;
        }
        Ok(())
    }

    pub(super) fn zero(&self, offset: u64, len: u64) -> Result<(), MediaError> {
        let capacity = self.capacity as u64;
        let outside = MediaError::OutOfRange { offset, len, capacity };
        let (Ok(start), Ok(bytes)) = (usize::try_from(offset), usize::try_from(len)) else {
            return Err(outside);
        };
        self.range(offset, bytes)?;
        self.map.zero(start, bytes).map_err(|error| MediaError::os("discarding pages", &error))
    }
}

impl fmt::Debug for MemoryMedia {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryMedia({} bytes)", self.capacity)
    }
}

impl Media for MemoryMedia {
    fn capacity_bytes(&self) -> u64 {
        self.capacity as u64
    }

    fn granularity_bytes(&self) -> u32 {
        1
    }

    #[inline]
    fn submit(&mut self, op: MediaOp, _now: Nanos) -> Option<MediaDone> {
        let result = self.execute(&op);
        Some(op.done(result))
    }

    fn poll(&mut self, _now: Nanos, _done: &mut Vec<MediaDone>) {}

    fn next_event(&self) -> Option<Nanos> {
        None
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn cancel(&mut self) {}

    fn power_loss(&mut self) {}
}
