//! The scattered memory of one transfer, and what keeps it allocated.
#![allow(unsafe_code, reason = "addresses that cross threads; nothing is dereferenced here")]

use std::{any::Any, fmt, ptr::NonNull, sync::Arc};

use nvme_driver::{CopyWay, DeviceCopy, DevicePtr};

use crate::{bounce::Bounce, memory::HostMap};

/// Where bytes begin, and what keeps them allocated.
pub(crate) struct Backing {
    pub(crate) side: Side,
    pub(crate) _owner: Owner,
}

/// Who addresses the bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Side {
    /// This process, and maybe a GPU too.
    Host(NonNull<u8>),
    /// A GPU alone.
    Device(DevicePtr),
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
    /// First byte; `None` discards what is read, or is a GPU's memory before the controller has
    /// found memory in between for it ([`Pieces::is_adrift`]).
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
    /// What is on a GPU. None in most transfers, and empty in those that reuse one that had some.
    remote: Option<Box<Remote>>,
}

/// The parts of a transfer that only a GPU addresses.
#[derive(Default)]
struct Remote {
    parts: Vec<RemotePart>,
    bytes: usize,
    /// Their place in this process, one after the other.
    bounce: Option<Bounce>,
}

struct RemotePart {
    /// Which piece they are in; neighbours share one.
    piece: usize,
    device: DevicePtr,
    len: usize,
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
        if !self.pin(backing)
            && let Some(HostPiece { host: Some(last), len: before }) = self.list.last_mut()
            && last.as_ptr().wrapping_add(*before) == host.as_ptr()
        {
            *before += len;
            return;
        }
        self.list.push(HostPiece { host: Some(host), len });
    }

    /// Appends `len` bytes of a GPU at `device`, which `backing` keeps.
    #[cold]
    pub(crate) fn append_remote(&mut self, device: DevicePtr, len: usize, backing: &Arc<Backing>) {
        let fresh = self.pin(backing);
        let joins = self.ends_remote();
        self.bytes += len as u64;
        match self.list.last_mut() {
            Some(last) if joins => last.len += len,
            _ => self.list.push(HostPiece { host: None, len }),
        }
        let piece = self.list.len() - 1;
        let remote = self.remote.get_or_insert_default();
        remote.bytes += len;
        match remote.parts.last_mut() {
            // Not across allocations, even where their addresses follow each other.
            Some(last) if joins && !fresh && last.device.0 + last.len as u64 == device.0 => {
                last.len += len;
            }
            _ => remote.parts.push(RemotePart { piece, device, len }),
        }
    }

    /// Keeps `backing`; `false` when the last piece does already.
    #[inline]
    fn pin(&mut self, backing: &Arc<Backing>) -> bool {
        let fresh = self.pins.last().is_none_or(|pin| !Arc::ptr_eq(pin, backing));
        if fresh {
            self.pins.push(backing.clone());
        }
        fresh
    }

    /// Whether the last piece is a GPU's.
    fn ends_remote(&self) -> bool {
        let last = self.remote.as_ref().and_then(|remote| remote.parts.last());
        last.is_some_and(|part| part.piece + 1 == self.list.len())
    }

    /// Whether bytes of it are still to be copied to or from a GPU.
    #[must_use]
    #[inline]
    pub fn is_remote(&self) -> bool {
        self.remote.as_ref().is_some_and(|remote| !remote.parts.is_empty())
    }

    /// Whether bytes of it have no address in this process, so that no medium can move them.
    #[must_use]
    #[inline]
    pub fn is_adrift(&self) -> bool {
        self.is_remote() && self.remote.as_ref().is_some_and(|remote| remote.bounce.is_none())
    }

    /// Bytes that only a GPU addresses.
    pub(crate) fn remote_bytes(&self) -> usize {
        self.remote.as_ref().map_or(0, |remote| remote.bytes)
    }

    /// Lets the GPU's parts stand in `bounce` for the media, which is long enough for all of them.
    pub(crate) fn bounce_through(&mut self, bounce: Bounce) {
        let Some(remote) = &mut self.remote else { return };
        assert!(remote.bytes <= bounce.len(), "too little memory between medium and GPU");
        let mut at = bounce.host();
        for part in &remote.parts {
            if let Some(piece) = self.list.get_mut(part.piece) {
                piece.host.get_or_insert(at);
            }
            // SAFETY: the parts add up to at most the memory's length, as asserted.
            at = unsafe { at.add(part.len) };
        }
        remote.bounce = Some(bounce);
    }

    /// Appends the copies between the GPU's parts and where they stand.
    pub(crate) fn copies(&self, way: CopyWay, to: &mut Vec<DeviceCopy>) {
        let Some(remote) = &self.remote else { return };
        let Some(bounce) = &remote.bounce else { return };
        let mut host = bounce.host();
        for &RemotePart { device, len, .. } in &remote.parts {
            to.push(DeviceCopy { host, device, len, way });
            // SAFETY: `bounce_through` checked that all of them fit.
            host = unsafe { host.add(len) };
        }
    }

    /// The copies are done: what is left is a transfer like any other.
    pub(crate) fn landed(&mut self) {
        if let Some(remote) = &mut self.remote {
            remote.parts.clear();
            remote.bytes = 0;
        }
    }

    /// Appends `len` bytes that go nowhere.
    pub fn push_hole(&mut self, len: usize) {
        self.bytes += len as u64;
        let joins = !self.ends_remote();
        if let Some(HostPiece { host: None, len: before }) = self.list.last_mut()
            && joins
        {
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
        if let Some(remote) = &mut self.remote {
            remote.parts.clear();
            remote.bytes = 0;
            remote.bounce = None;
        }
    }
}

impl fmt::Debug for Pieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pieces({} bytes in {} parts)", self.bytes, self.list.len())
    }
}
