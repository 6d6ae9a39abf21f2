//! The scattered memory of one transfer, and what keeps it allocated.
#![allow(unsafe_code, reason = "addresses that cross threads; nothing is dereferenced here")]

use std::{any::Any, fmt, ptr::NonNull, sync::Arc};

use crate::memory::HostMap;

/// What keeps the bytes allocated.
pub(crate) struct Backing {
    pub(crate) host: NonNull<u8>,
    pub(crate) _owner: Owner,
}

#[allow(dead_code, reason = "held for what their drops do")]
pub(crate) enum Owner {
    Map(HostMap),
    External(Arc<dyn Any + Send + Sync>),
}

// SAFETY: an address with an owner that is Send + Sync; all accesses are raw, as `DmaMemory` asks.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

/// A part of a transfer: memory of this process, or bytes that go nowhere (a bit bucket).
///
/// It is an address and no right: whoever dereferences it holds the [`crate::DmaAccess`] or the
/// [`Pieces`] that it came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPiece {
    /// First byte; `None` discards what is read.
    pub host: Option<NonNull<u8>>,
    /// Length in bytes.
    pub len: usize,
}

// SAFETY: an address; the memory is kept by the `Pieces` around it.
unsafe impl Send for HostPiece {}
// SAFETY: as above.
unsafe impl Sync for HostPiece {}

/// The scattered memory of one transfer, in order, kept allocated for as long as this lives.
///
/// Made to be reused: [`Pieces::clear`] keeps the capacity.
#[derive(Default)]
pub struct Pieces {
    list: Vec<HostPiece>,
    pins: Vec<Arc<Backing>>,
    bytes: u64,
}

impl Pieces {
    /// No pieces.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends `len` bytes at `host`, which `backing` keeps.
    #[inline]
    pub(crate) fn append(&mut self, host: NonNull<u8>, len: usize, backing: &Arc<Backing>) {
        self.bytes += len as u64;
        if self.pins.last().is_none_or(|pin| !Arc::ptr_eq(pin, backing)) {
            self.pins.push(backing.clone());
        } else if let Some(HostPiece { host: Some(last), len: before }) = self.list.last_mut()
            && last.as_ptr().wrapping_add(*before) == host.as_ptr()
        {
            *before += len;
            return;
        }
        self.list.push(HostPiece { host: Some(host), len });
    }

    /// Appends `len` bytes that go nowhere.
    pub fn push_hole(&mut self, len: usize) {
        self.bytes += len as u64;
        if let Some(HostPiece { host: None, len: before }) = self.list.last_mut() {
            *before += len;
        } else {
            self.list.push(HostPiece { host: None, len });
        }
    }

    /// Shortens the transfer to its first `bytes` bytes.
    pub fn truncate(&mut self, bytes: u64) {
        while self.bytes > bytes {
            let Some(last) = self.list.last_mut() else { return };
            let excess = self.bytes - bytes;
            if (last.len as u64) <= excess {
                self.bytes -= last.len as u64;
                self.list.pop();
            } else {
                last.len -= usize::try_from(excess).unwrap_or(last.len);
                self.bytes = bytes;
            }
        }
    }

    /// The parts, in order.
    #[must_use]
    pub fn as_slice(&self) -> &[HostPiece] {
        &self.list
    }

    /// Bytes of all parts together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Lets go of the memory and keeps the capacity.
    pub fn clear(&mut self) {
        self.list.clear();
        self.pins.clear();
        self.bytes = 0;
    }
}

impl fmt::Debug for Pieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pieces({} bytes in {} parts)", self.bytes, self.list.len())
    }
}
