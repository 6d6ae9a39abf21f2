//! PCI functions as sysfs shows them.

use crate::{address::PciAddress, root::Root};

/// Directory with the functions of this machine.
pub const DEVICES: &str = "/sys/bus/pci/devices";
/// Directory with the PCI drivers.
pub const DRIVERS: &str = "/sys/bus/pci/drivers";
/// Directory with the IOMMU groups.
pub const GROUPS: &str = "/sys/kernel/iommu_groups";
/// File that makes the kernel look for a driver of the function written to it.
pub const PROBE: &str = "/sys/bus/pci/drivers_probe";
/// Driver that hands functions to userspace.
pub const VFIO: &str = "vfio-pci";
/// Class code of an NVM Express I/O controller (mass storage, NVM, I/O programming interface).
pub const CLASS_NVME: u32 = 0x01_08_02;

/// A function as sysfs describes it.
#[derive(Debug, Clone)]
pub struct Function {
    /// Its address.
    pub bdf: PciAddress,
    /// Class code, 24 bits: base class, subclass, programming interface.
    pub class: u32,
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// The driver that is bound to it.
    pub driver: Option<String>,
    /// The only driver that may bind to it, if that is set.
    pub driver_override: Option<String>,
    /// Its IOMMU group, if an IOMMU translates for it. A group of VFIO's no-IOMMU mode is none.
    pub group: Option<u32>,
    /// The nearest NUMA node, if there are several and the firmware names it.
    pub numa: Option<u32>,
    /// The functions on the path from the root port to this one, which is the last.
    pub chain: Vec<PciAddress>,
    /// The host bridge: `pci0000:64`.
    pub host_bridge: String,
}

impl Function {
    /// Reads one function; None if it does not exist.
    #[must_use]
    pub fn read(root: &Root, bdf: PciAddress) -> Option<Self> {
        let path = sysfs(bdf);
        let hex = |name: &str| {
            let text = root.text(format!("{path}/{name}"))?;
            u32::from_str_radix(text.trim_start_matches("0x"), 16).ok()
        };
        let class = hex("class")?;
        let real = root.resolve(&path)?;
        let parts: Vec<&str> = real.iter().filter_map(|part| part.to_str()).collect();
        let id = |name: &str| hex(name).and_then(|id| u16::try_from(id).ok()).unwrap_or(0);
        let forced = root.text(format!("{path}/driver_override"));
        Some(Self {
            bdf,
            class,
            vendor: id("vendor"),
            device: id("device"),
            driver: root.link_name(format!("{path}/driver")),
            driver_override: forced.filter(|name| !name.is_empty() && name != "(null)"),
            group: root
                .link_name(format!("{path}/iommu_group"))
                .and_then(|name| name.parse().ok())
                .filter(|&group| !is_no_iommu(root, group)),
            // -1 means that the firmware names no node.
            numa: root.number(format!("{path}/numa_node")),
            chain: parts.iter().filter_map(|part| full_address(part)).collect(),
            host_bridge: parts
                .iter()
                .find(|part| part.starts_with("pci") && part.contains(':'))
                .map(|part| (*part).to_owned())
                .unwrap_or_default(),
        })
    }

    /// Returns true if it is an NVMe I/O controller.
    #[must_use]
    pub fn is_nvme(&self) -> bool {
        self.class == CLASS_NVME
    }

    /// Returns true if it is a bridge.
    #[must_use]
    pub fn is_bridge(&self) -> bool {
        self.class >> 16 == 0x06
    }

    /// Returns true if it is a display controller (base class 03h).
    #[must_use]
    pub fn is_display(&self) -> bool {
        self.class >> 16 == 0x03
    }

    /// Returns true if it is a GPU that can compute.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        // 0300h is a VGA card: a GPU if it is from a vendor whose cards compute (NVIDIA, AMD).
        self.class >> 8 == 0x0302 || self.is_display() && [0x10de, 0x1002].contains(&self.vendor)
    }

    /// Returns true if a VFIO driver is bound to it.
    #[must_use]
    pub fn is_vfio(&self) -> bool {
        self.driver.as_deref().is_some_and(is_vfio_driver)
    }

    /// Returns true if this function, with its current driver, lets VFIO use the group (the
    /// kernel's `driver_managed_dma`, and the list of older kernels).
    #[must_use]
    pub fn is_viable(&self) -> bool {
        match self.driver.as_deref() {
            None | Some("pci-stub" | "pcieport") => true,
            Some(driver) => is_vfio_driver(driver),
        }
    }

    /// Returns vendor and device ID: `144d:a80a`.
    #[must_use]
    pub fn ids(&self) -> String {
        format!("{:04x}:{:04x}", self.vendor, self.device)
    }

    /// Returns a name for its class, in a word or two.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match (self.class >> 16, self.class >> 8) {
            _ if self.is_nvme() => "NVMe drive",
            (0x01, _) => "storage controller",
            (0x02, _) => "network card",
            (0x03, _) => "GPU",
            (_, 0x0403) => "audio device",
            (0x04, _) => "multimedia device",
            (0x06, _) => "bridge",
            (_, 0x0c03) => "USB controller",
            _ => "device",
        }
    }
}

/// Returns true for a group that VFIO made itself, in its no-IOMMU mode: nothing translates for the
/// functions in it, and a driver in userspace could have them write anywhere in memory.
#[must_use]
pub fn is_no_iommu(root: &Root, group: u32) -> bool {
    let about = |what: &str| root.text(format!("{GROUPS}/{group}/{what}"));
    about("name").as_deref() == Some("vfio-noiommu") || about("type").as_deref() == Some("")
}

/// Returns the numbers of the groups that an IOMMU translates for, and of those of VFIO's no-IOMMU
/// mode.
#[must_use]
pub fn groups(root: &Root) -> (Vec<u32>, Vec<u32>) {
    let numbers = root.names(GROUPS).into_iter().filter_map(|name| name.parse().ok());
    numbers.partition(|&group| !is_no_iommu(root, group))
}

fn is_vfio_driver(name: &str) -> bool {
    // Variant drivers: nvgrace-gpu-vfio-pci, mlx5_vfio_pci, vfio-pci itself.
    name.ends_with("vfio-pci") || name.ends_with("vfio_pci")
}

/// Returns the sysfs directory of a function.
#[must_use]
pub fn sysfs(bdf: PciAddress) -> String {
    format!("{DEVICES}/{bdf}")
}

/// Parses an address in full, as sysfs spells it; other parts of a path contain dots, too.
#[must_use]
pub fn full_address(text: &str) -> Option<PciAddress> {
    text.parse().ok().filter(|bdf: &PciAddress| bdf.to_string() == text)
}

/// Returns all functions, sorted by address.
#[must_use]
pub fn functions(root: &Root) -> Vec<Function> {
    let names = root.names(DEVICES);
    names.iter().filter_map(|name| Function::read(root, full_address(name)?)).collect()
}

/// Returns the functions of an IOMMU group, sorted by address.
#[must_use]
pub fn group_members(root: &Root, group: u32) -> Vec<Function> {
    let names = root.names(format!("{GROUPS}/{group}/devices"));
    names.iter().filter_map(|name| Function::read(root, full_address(name)?)).collect()
}

#[cfg(test)]
mod tests;
