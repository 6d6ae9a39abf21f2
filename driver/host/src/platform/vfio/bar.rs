//! A part of a BAR mapped into this process.
#![allow(unsafe_code, reason = "registers are mapped and accessed here")]

use std::{io, ptr::NonNull, sync::Arc};

use super::{
    capability::Area,
    device::{Device, Region},
    mapping::Mapping,
};
use crate::platform::mmio;

/// A mapped part of a BAR. Keeps its function open.
#[derive(Debug)]
pub(super) struct BarMap {
    mapping: Mapping,
    area: Area,
    page: usize,
    /// Unused, but the function must not be closed under the mapping.
    _device: Arc<Device>,
}

impl BarMap {
    /// Maps `area`: whole pages that the kernel reports as mappable.
    pub(super) fn new(
        device: &Arc<Device>,
        region: &Region,
        area: Area,
        page: u64,
    ) -> io::Result<Self> {
        let len = usize::try_from(area.len).map_err(io::Error::other)?;
        let page = usize::try_from(page).map_err(io::Error::other)?;
        let mapping = Mapping::new(device.file(), region.offset + area.offset, len)?;
        Ok(Self { mapping, area, page, _device: device.clone() })
    }

    /// Returns whether an access found the mapping revoked.
    pub(super) fn is_revoked(&self) -> bool {
        self.mapping.is_revoked()
    }

    /// Returns the address of the first byte in this process.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    /// Returns the mapped part of the BAR.
    pub(super) fn area(&self) -> Area {
        self.area
    }

    /// Returns the dword at `offset` of the BAR, if it lies in this part.
    pub(super) fn dword(&self, offset: u64) -> Option<NonNull<u32>> {
        let at = offset.checked_sub(self.area.offset)?;
        if !at.is_multiple_of(4) || at.checked_add(4)? > self.area.len {
            return None;
        }
        // SAFETY: `at + 4` is inside the mapping (`len` fitted in a usize), and 4-aligned.
        Some(unsafe { self.base().add(at as usize) }.cast())
    }

    /// Reads a register of this part.
    pub(super) fn read(&self, offset: u64) -> Option<u32> {
        // SAFETY: `dword` checked bounds and alignment; the mapping lives as long as `self`.
        Some(unsafe { mmio::read_register32(self.dword(offset)?) })
    }

    /// Writes a register of this part.
    pub(super) fn write(&self, offset: u64, value: u32) -> Option<()> {
        // SAFETY: `dword` checked bounds and alignment; the mapping lives as long as `self`.
        unsafe { mmio::write_register32(self.dword(offset)?, value) };
        Some(())
    }

    /// Reads one dword of each page in the `len` bytes from `from` on. The kernel faults in BAR
    /// pages on first use, and a GPU that is given the mapping needs them present. (The IOMMU does
    /// not: the kernel faults pages in when it maps them for DMA.)
    pub(super) fn touch(&self, from: u64, len: u64) {
        let last = from.saturating_add(len);
        let mut at = from;
        while at < last {
            let Some(_) = self.read(at) else { return };
            at = at / self.page as u64 * self.page as u64 + self.page as u64;
        }
    }
}
