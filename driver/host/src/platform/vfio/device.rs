//! A PCI function: configuration space, regions, reset.

use std::{ffi::CString, fs::File, io, os::unix::fs::FileExt, sync::Arc};

use nvme_pci::PciAddress;
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_PCI_CONFIG_REGION_INDEX,
    VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_WRITE,
};

use super::{
    capability::{Area, mappable},
    container::{Container, Group},
    error::{Call, VfioError},
    sys,
};

/// Offset of the command register in configuration space.
const COMMAND: u64 = 4;
/// Offset of revision and class code.
const CLASS: u64 = 8;

/// Command register: respond to memory accesses, that is, to BARs.
pub(super) const MEMORY_SPACE: u16 = 1 << 1;
/// Command register: allow DMA and interrupt messages.
pub(super) const BUS_MASTER: u16 = 1 << 2;
/// Command register: never assert an interrupt pin.
pub(super) const INTX_DISABLE: u16 = 1 << 10;

/// A region of the function's file descriptor.
#[derive(Debug, Clone)]
pub(super) struct Region {
    pub(super) size: u64,
    /// Offset in the file.
    pub(super) offset: u64,
    /// The parts that can be mapped into a process.
    pub(super) areas: Vec<Area>,
}

/// A function opened by this process.
#[derive(Debug)]
pub(super) struct Device {
    address: PciAddress,
    can_reset: bool,
    config: Region,
    page: u64,
    // Declared before the group: a group can leave its container only after its functions close.
    file: File,
    group: Arc<Group>,
}

impl Device {
    pub(super) fn open(container: &Arc<Container>, address: PciAddress) -> Result<Self, VfioError> {
        let os = |call| move |source| VfioError::os(address, call, source);
        let group = container.join(address)?;
        let name = CString::new(address.to_string()).map_err(io::Error::other);
        let file = match (group.file(), name) {
            (Some(group), Ok(name)) => sys::device(group, &name),
            (_, Err(error)) => Err(error),
            (None, _) => Err(io::ErrorKind::NotFound.into()),
        };
        let file = file.map_err(os(Call::DeviceFd))?;
        let info = sys::device_info(&file).map_err(os(Call::DeviceInfo))?;
        if info.flags & VFIO_DEVICE_FLAGS_PCI == 0 {
            let what = "VFIO does not take it for a PCI function";
            return Err(VfioError::unsupported(address, what, "bind it to vfio-pci"));
        }
        let page = container.page();
        let config =
            read_region(&file, VFIO_PCI_CONFIG_REGION_INDEX, page).map_err(os(Call::RegionInfo))?;
        let can_reset = info.flags & VFIO_DEVICE_FLAGS_RESET != 0;
        Ok(Self { address, can_reset, config, page, file, group })
    }

    pub(super) fn address(&self) -> PciAddress {
        self.address
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn group(&self) -> u32 {
        self.group.id()
    }

    pub(super) fn os(&self, call: Call) -> impl FnOnce(io::Error) -> VfioError + use<> {
        let address = self.address;
        move |source| VfioError::os(address, call, source)
    }

    /// Returns BAR `index` (0 to 5).
    pub(super) fn bar(&self, index: u8) -> Result<Region, VfioError> {
        let none = |hint| {
            let what = format!("it has no BAR {index}");
            Err(VfioError::unsupported(self.address, what, hint))
        };
        if index > 5 {
            return none("a PCI function has BARs 0 to 5");
        }
        let region = read_region(&self.file, u32::from(index), self.page)
            .map_err(self.os(Call::RegionInfo))?;
        if region.size == 0 {
            return none("the upper half of a 64-bit BAR has no number of its own");
        }
        Ok(region)
    }

    /// Resets the function, which returns all its registers to their power-on values. Fails with
    /// [`io::ErrorKind::Unsupported`] if it has no reset.
    pub(super) fn reset(&self) -> io::Result<()> {
        if self.can_reset { sys::reset(&self.file) } else { Err(io::ErrorKind::Unsupported.into()) }
    }

    /// Returns the vendor and device identifiers.
    pub(super) fn id(&self) -> Option<(u16, u16)> {
        let mut bytes = [0; 4];
        self.file.read_exact_at(&mut bytes, self.config.offset).ok()?;
        let [vendor_low, vendor_high, device_low, device_high] = bytes;
        let vendor = u16::from_le_bytes([vendor_low, vendor_high]);
        Some((vendor, u16::from_le_bytes([device_low, device_high])))
    }

    /// Returns the revision and class code.
    pub(super) fn class(&self) -> io::Result<u32> {
        let mut bytes = [0; 4];
        self.file.read_exact_at(&mut bytes, self.config.offset + CLASS)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Returns whether the function is absent: even configuration space does not answer. Reads the
    /// class code because the kernel emulates some other fields.
    pub(super) fn is_absent(&self) -> bool {
        self.class().map_or(true, |class| class == u32::MAX)
    }

    fn command(&self) -> io::Result<u16> {
        let mut bytes = [0; 2];
        self.file.read_exact_at(&mut bytes, self.config.offset + COMMAND)?;
        Ok(u16::from_le_bytes(bytes))
    }

    /// Sets and clears bits of the command register and checks that they stick.
    pub(super) fn set_command(&self, set: u16, clear: u16) -> Result<(), VfioError> {
        let config = |source| VfioError::os(self.address, Call::Config, source);
        let command = self.command().map_err(config)? & !clear | set;
        self.file
            .write_all_at(&command.to_le_bytes(), self.config.offset + COMMAND)
            .map_err(config)?;
        let now = self.command().map_err(config)?;
        if now & set == set && now & clear == 0 {
            return Ok(());
        }
        if self.is_absent() {
            return Err(VfioError::Gone { address: self.address });
        }
        let what =
            format!("its command register reads {now:#06x} after {command:#06x} was written");
        let hint = "it cannot be switched to DMA; is its slot powered?";
        Err(VfioError::unsupported(self.address, what, hint))
    }
}

fn read_region(file: &File, index: u32, page: u64) -> io::Result<Region> {
    let (info, answer) = sys::region_info(file, index)?;
    // A read-only region is of no use as a BAR, so it is not mapped.
    let needed = VFIO_REGION_INFO_FLAG_MMAP | VFIO_REGION_INFO_FLAG_WRITE;
    let areas = if info.flags & needed == needed {
        let sparse = answer.sparse_areas();
        let msix_mappable = answer.msix_mappable();
        tracing::trace!(index, size = info.size, ?sparse, msix_mappable, "region");
        mappable(info.size, sparse, page)
    } else {
        Vec::new()
    };
    Ok(Region { size: info.size, offset: info.offset, areas })
}
