//! The scattered memory of one transfer, with the owners that keep it allocated.
#![allow(unsafe_code, reason = "addresses that cross threads; nothing is dereferenced here")]

use std::{any::Any, fmt, ptr::NonNull, sync::Arc};

use nvme_driver::{CopyDirection, DeviceCopy, DevicePtr};

use crate::{bounce::Bounce, memory::HostMap};

/// Start address of memory, and the owner that keeps it allocated.
pub(crate) struct Backing {
    pub(crate) side: Side,
    pub(crate) _owner: Owner,
}

/// Address space of memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Side {
    /// This process, and possibly a GPU, too.
    Host(NonNull<u8>),
    /// A GPU alone.
    Device(DevicePtr),
}

#[allow(dead_code, reason = "held for what their drops do")]
pub(crate) enum Owner {
    Map(HostMap),
    External(Arc<dyn Any + Send + Sync>),
}

// SAFETY: an address with an owner that is Send + Sync; all accesses are raw (see `DmaMemory`).
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

/// An entry of a transfer: memory of this process, or a bit bucket.
///
/// It is only an address: code that dereferences it must hold the [`crate::DmaAccess`] or the
/// [`SgList`] that it came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SgEntry {
    /// First byte; `None` for a bit bucket, or for GPU memory before the controller has assigned a
    /// bounce buffer ([`SgList::lacks_bounce`]).
    pub host: Option<NonNull<u8>>,
    /// Length in bytes.
    pub len: usize,
}

// SAFETY: an address; the memory is kept by the `SgList` around it.
unsafe impl Send for SgEntry {}
// SAFETY: as above.
unsafe impl Sync for SgEntry {}

/// The scattered memory of one transfer, in order, kept allocated for the lifetime of the list.
///
/// Reusable: [`SgList::clear`] keeps the capacity.
#[derive(Default)]
pub struct SgList {
    list: Vec<SgEntry>,
    pins: Vec<Arc<Backing>>,
    bytes: u64,
    /// Parts on a GPU. `None` in most transfers; may be present but empty in reused lists.
    on_device: Option<Box<OnDevice>>,
}

/// Parts of a transfer that only a GPU can address.
#[derive(Default)]
struct OnDevice {
    parts: Vec<DeviceRange>,
    bytes: usize,
    /// Their bounce buffer in this process, one after the other.
    bounce: Option<Bounce>,
}

struct DeviceRange {
    /// Index of the entry that contains the range; adjacent ranges share one.
    entry: usize,
    device: DevicePtr,
    len: usize,
}

impl SgList {
    /// Creates an empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends `len` bytes at `host`, which `backing` keeps.
    #[inline]
    pub(crate) fn append(&mut self, host: NonNull<u8>, len: usize, backing: &Arc<Backing>) {
        self.bytes += len as u64;
        if !self.pin(backing)
            && let Some(SgEntry { host: Some(last), len: before }) = self.list.last_mut()
            && last.as_ptr().wrapping_add(*before) == host.as_ptr()
        {
            *before += len;
            return;
        }
        self.list.push(SgEntry { host: Some(host), len });
    }

    /// Appends `len` bytes of GPU memory at `device`, which `backing` keeps.
    #[cold]
    pub(crate) fn append_device(&mut self, device: DevicePtr, len: usize, backing: &Arc<Backing>) {
        let fresh = self.pin(backing);
        let joins = self.ends_on_device();
        self.bytes += len as u64;
        match self.list.last_mut() {
            Some(last) if joins => last.len += len,
            _ => self.list.push(SgEntry { host: None, len }),
        }
        let entry = self.list.len() - 1;
        let on_device = self.on_device.get_or_insert_default();
        on_device.bytes += len;
        match on_device.parts.last_mut() {
            // Not across allocations, even if their addresses are consecutive.
            Some(last) if joins && !fresh && last.device.0 + last.len as u64 == device.0 => {
                last.len += len;
            }
            _ => on_device.parts.push(DeviceRange { entry, device, len }),
        }
    }

    /// Keeps `backing`. Returns `false` if the last entry already does.
    #[inline]
    fn pin(&mut self, backing: &Arc<Backing>) -> bool {
        let fresh = self.pins.last().is_none_or(|pin| !Arc::ptr_eq(pin, backing));
        if fresh {
            self.pins.push(backing.clone());
        }
        fresh
    }

    /// Returns whether the last entry is on a GPU.
    fn ends_on_device(&self) -> bool {
        let last = self.on_device.as_ref().and_then(|on_device| on_device.parts.last());
        last.is_some_and(|part| part.entry + 1 == self.list.len())
    }

    /// Returns whether some bytes still have to be copied to or from a GPU.
    #[must_use]
    #[inline]
    pub fn is_on_device(&self) -> bool {
        self.on_device.as_ref().is_some_and(|on_device| !on_device.parts.is_empty())
    }

    /// Returns whether a part lacks an address in this process, so that no medium can access it.
    #[must_use]
    #[inline]
    pub fn lacks_bounce(&self) -> bool {
        self.is_on_device()
            && self.on_device.as_ref().is_some_and(|on_device| on_device.bounce.is_none())
    }

    /// Returns the number of bytes that only a GPU can address.
    pub(crate) fn device_bytes(&self) -> usize {
        self.on_device.as_ref().map_or(0, |on_device| on_device.bytes)
    }

    /// Maps the GPU's parts to `bounce`, which is long enough for all of them, for use by media.
    pub(crate) fn bounce_through(&mut self, bounce: Bounce) {
        let Some(on_device) = &mut self.on_device else { return };
        assert!(on_device.bytes <= bounce.len(), "too little memory between medium and GPU");
        let mut at = bounce.host();
        for part in &on_device.parts {
            if let Some(entry) = self.list.get_mut(part.entry) {
                entry.host.get_or_insert(at);
            }
            // SAFETY: the parts add up to at most the memory's length, as asserted.
            at = unsafe { at.add(part.len) };
        }
        on_device.bounce = Some(bounce);
    }

    /// Appends the copies between the GPU's parts and the bounce buffer.
    pub(crate) fn copies(&self, direction: CopyDirection, to: &mut Vec<DeviceCopy>) {
        let Some(on_device) = &self.on_device else { return };
        let Some(bounce) = &on_device.bounce else { return };
        let mut host = bounce.host();
        for &DeviceRange { device, len, .. } in &on_device.parts {
            to.push(DeviceCopy { host, device, len, direction });
            // SAFETY: `bounce_through` checked that all of them fit.
            host = unsafe { host.add(len) };
        }
    }

    /// Marks the copies as done: the rest is an ordinary transfer.
    pub(crate) fn copied(&mut self) {
        if let Some(on_device) = &mut self.on_device {
            on_device.parts.clear();
            on_device.bytes = 0;
        }
    }

    /// Appends `len` bytes of bit bucket.
    pub fn push_hole(&mut self, len: usize) {
        self.bytes += len as u64;
        let joins = !self.ends_on_device();
        if let Some(SgEntry { host: None, len: before }) = self.list.last_mut()
            && joins
        {
            *before += len;
        } else {
            self.list.push(SgEntry { host: None, len });
        }
    }

    /// Truncates the transfer to its first `bytes` bytes.
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

    /// Returns the entries, in order.
    #[must_use]
    pub fn as_slice(&self) -> &[SgEntry] {
        &self.list
    }

    /// Returns the total length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Releases the memory and keeps the capacity.
    pub fn clear(&mut self) {
        self.list.clear();
        self.pins.clear();
        self.bytes = 0;
        if let Some(on_device) = &mut self.on_device {
            on_device.parts.clear();
            on_device.bytes = 0;
            on_device.bounce = None;
        }
    }
}

impl fmt::Debug for SgList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SgList({} bytes in {} parts)", self.bytes, self.list.len())
    }
}
