//! Memory of another PCI function as a target of a controller's DMA.
#![allow(unsafe_code, reason = "a BAR is offered as memory for DMA")]

use std::{fmt, ops::Range, sync::Arc};

use nvme_pci::PciAddress;

use super::{
    bar::BarMap,
    capability::Area,
    device::{Device, MEMORY_SPACE, Region},
    error::{Call, VfioError},
    space::VfioSpace,
};
use crate::{
    dma::{DmaMemory, DmaSlice, DmaSpace, ExternalMemory},
    platform::window::Window,
};

/// A BAR of a function bound to vfio-pci, mapped into this process and for all devices of a space.
///
/// Controllers then access it without involving the CPU or main memory. GPU memory that is mapped
/// into the process by other means ([`ExternalMemory`]) uses the same path.
/// [`crate::platform::p2p::prove`] tests whether the platform lets one function reach the other.
pub struct PeerBar {
    memory: Arc<dyn DmaMemory>,
    address: PciAddress,
    bar: u8,
}

impl PeerBar {
    /// Maps `range` (bytes of the BAR, whole pages; `None`: all of it) of BAR `bar` of the function
    /// at `address` into `space`.
    ///
    /// # Errors
    /// Returns [`VfioError`] as [`super::VfioBus::open`] does, and [`VfioError::Unsupported`] if
    /// the function has no such BAR or the kernel does not allow mapping that part.
    pub fn open(
        space: &Arc<VfioSpace>,
        address: PciAddress,
        bar: u8,
        range: Option<Range<u64>>,
    ) -> Result<Self, VfioError> {
        let span = tracing::info_span!("open_peer", function = %address, bar);
        let _entered = span.enter();
        let device = Arc::new(Device::open(space.container(), address)?);
        // It only has to respond to accesses; it needs no DMA of its own.
        device.set_command(MEMORY_SPACE, 0)?;
        let region = device.bar(bar)?;
        let page = space.container().page();
        let area = choose(&region, range.clone(), page).map_err(|what| {
            let what = format!("BAR {bar}: {what}");
            VfioError::unsupported(address, what, "ask for another part of it, or another BAR")
        })?;
        let map = BarMap::new(&device, &region, area, page).map_err(device.os(Call::MapBar))?;
        let (base, len) = (map.base(), area.len as usize);
        // SAFETY: the mapping lives as long as its owner `map`, is not shared, and is accessed only
        // through `Window`, which creates no references.
        let memory = unsafe { ExternalMemory::new(Some(base), None, len, Arc::new(map)) };
        let memory = space.import(memory)?;
        let iova = memory.segments().first().map(|range| range.iova);
        tracing::info!(len, ?iova, "peer memory mapped");
        Ok(Self { memory, address, bar })
    }

    /// Returns the memory, for queues and data. It stays mapped as long as a handle to it exists.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn DmaMemory> {
        &self.memory
    }

    /// Returns the memory for the CPU, with volatile accesses at the speed of uncached bus reads.
    #[must_use]
    pub fn window(&self) -> Option<Window> {
        Window::new(DmaSlice::whole(self.memory.clone()).ok()?)
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns whether the memory is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }
}

impl fmt::Debug for PeerBar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerBar({} BAR {}, {} bytes)", self.address, self.bar, self.len())
    }
}

/// Returns the requested part of the BAR, if it can be mapped.
fn choose(region: &Region, range: Option<Range<u64>>, page: u64) -> Result<Area, String> {
    let size = region.size;
    let range = range.unwrap_or(0..size);
    let Range { start, end } = range;
    if start >= end || end > size {
        return Err(format!("bytes {start:#x} to {end:#x} were asked for, it has {size:#x}"));
    }
    if start % page != 0 || end % page != 0 {
        return Err(format!("bytes {start:#x} to {end:#x} are not whole pages of {page} bytes"));
    }
    let fits = |area: &&Area| area.offset <= start && end <= area.offset + area.len;
    if region.areas.iter().any(|area| fits(&area)) {
        return Ok(Area { offset: start, len: end - start });
    }
    let parts: Vec<_> = region
        .areas
        .iter()
        .map(|area| format!("{:#x} to {:#x}", area.offset, area.offset + area.len))
        .collect();
    let parts = if parts.is_empty() { "nothing of it".into() } else { parts.join(", ") };
    Err(format!("{start:#x} to {end:#x} cannot be mapped in one piece; the kernel maps {parts}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_that_was_asked_for() {
        let area = |offset, len| Area { offset, len };
        let areas = vec![area(0, 0x2000), area(0x3000, 0x5000)];
        let region = Region { size: 0x8000, offset: 0, areas };
        let choose = |range| choose(&region, range, 4096);
        assert_eq!(choose(Some(0x4000..0x6000)), Ok(area(0x4000, 0x2000)));
        assert_eq!(choose(Some(0..0x2000)), Ok(area(0, 0x2000)));
        assert!(choose(None).unwrap_err().contains("0x0 to 0x2000, 0x3000 to 0x8000"));
        assert!(choose(Some(0x1000..0x4000)).unwrap_err().contains("one piece"));
        assert!(choose(Some(0x7000..0x9000)).unwrap_err().contains("it has 0x8000"));
        assert!(choose(Some(0x5000..0x5000)).unwrap_err().contains("asked for"));
        assert!(choose(Some(0x4100..0x5000)).unwrap_err().contains("whole pages"));
        let whole = Region { size: 0x8000, offset: 0, areas: vec![area(0, 0x8000)] };
        assert_eq!(super::choose(&whole, None, 4096), Ok(area(0, 0x8000)));
        let none = Region { size: 0x8000, offset: 0, areas: vec![] };
        assert!(super::choose(&none, None, 4096).unwrap_err().contains("nothing of it"));
    }
}
