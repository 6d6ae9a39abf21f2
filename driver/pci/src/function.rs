//! PCI functions as sysfs shows them.

use crate::{address::PciAddress, root::Root};

/// The functions of this machine.
pub const DEVICES: &str = "/sys/bus/pci/devices";
/// The drivers for them.
pub const DRIVERS: &str = "/sys/bus/pci/drivers";
/// Has the kernel look for a driver.
pub const PROBE: &str = "/sys/bus/pci/drivers_probe";
/// The driver that hands functions to userspace.
pub const VFIO: &str = "vfio-pci";
/// Class code of an NVM Express I/O controller (mass storage, NVM, I/O programming interface).
pub const CLASS_NVME: u32 = 0x01_08_02;

/// A function and what sysfs says about it.
#[derive(Debug, Clone)]
pub struct Function {
    /// Where it is.
    pub bdf: PciAddress,
    /// 24 bits: base class, subclass, programming interface.
    pub class: u32,
    /// Who made it.
    pub vendor: u16,
    /// What they call it.
    pub device: u16,
    /// The driver that has it.
    pub driver: Option<String>,
    /// The only driver that may have it, if that is set.
    pub driver_override: Option<String>,
    /// Its IOMMU group, if an IOMMU translates for it.
    pub group: Option<u32>,
    /// The memory node nearest to it, if there are several and the firmware says.
    pub numa: Option<u32>,
    /// The functions from the root port down to this one, which is the last.
    pub chain: Vec<PciAddress>,
    /// The host bridge: `pci0000:64`.
    pub host_bridge: String,
}

impl Function {
    /// Reads one function; None if there is no such.
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
            group: root.link_name(format!("{path}/iommu_group")).and_then(|n| n.parse().ok()),
            // -1 says that the firmware does not know.
            numa: root.number(format!("{path}/numa_node")),
            chain: parts.iter().filter_map(|part| full_address(part)).collect(),
            host_bridge: parts
                .iter()
                .find(|part| part.starts_with("pci") && part.contains(':'))
                .map(|part| (*part).to_owned())
                .unwrap_or_default(),
        })
    }

    /// Whether it is an NVMe I/O controller.
    #[must_use]
    pub fn is_nvme(&self) -> bool {
        self.class == CLASS_NVME
    }

    /// Whether it is a bridge.
    #[must_use]
    pub fn is_bridge(&self) -> bool {
        self.class >> 16 == 0x06
    }

    /// Whether it drives a display, or could.
    #[must_use]
    pub fn is_display(&self) -> bool {
        self.class >> 16 == 0x03
    }

    /// Whether it is a GPU.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        // 0300h is a VGA card: a GPU if one of the makers whose cards compute made it.
        self.class >> 8 == 0x0302 || self.is_display() && [0x10de, 0x1002].contains(&self.vendor)
    }

    /// Whether a VFIO driver has it.
    #[must_use]
    pub fn is_vfio(&self) -> bool {
        self.driver.as_deref().is_some_and(is_vfio_driver)
    }

    /// Whether the group can be used by VFIO with this function as it is (the kernel's
    /// `driver_managed_dma`, and the list of older kernels).
    #[must_use]
    pub fn is_viable(&self) -> bool {
        match self.driver.as_deref() {
            None | Some("pci-stub" | "pcieport") => true,
            Some(driver) => is_vfio_driver(driver),
        }
    }

    /// `144d:a80a`.
    #[must_use]
    pub fn ids(&self) -> String {
        format!("{:04x}:{:04x}", self.vendor, self.device)
    }

    /// What kind of thing it is, in a word or two.
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

fn is_vfio_driver(name: &str) -> bool {
    // Variant drivers: nvgrace-gpu-vfio-pci, mlx5_vfio_pci, vfio-pci itself.
    name.ends_with("vfio-pci") || name.ends_with("vfio_pci")
}

/// The folder of a function.
#[must_use]
pub fn sysfs(bdf: PciAddress) -> String {
    format!("{DEVICES}/{bdf}")
}

/// An address in full, as sysfs spells it; the parts of a path also have other things with dots.
#[must_use]
pub fn full_address(text: &str) -> Option<PciAddress> {
    text.parse().ok().filter(|bdf: &PciAddress| bdf.to_string() == text)
}

/// All functions, by address.
#[must_use]
pub fn functions(root: &Root) -> Vec<Function> {
    let names = root.names(DEVICES);
    names.iter().filter_map(|name| Function::read(root, full_address(name)?)).collect()
}

/// The functions of an IOMMU group, by address.
#[must_use]
pub fn group_members(root: &Root, group: u32) -> Vec<Function> {
    let names = root.names(format!("/sys/kernel/iommu_groups/{group}/devices"));
    names.iter().filter_map(|name| Function::read(root, full_address(name)?)).collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn only_full_addresses_are_names_in_sysfs() {
        assert_eq!(full_address("65:00.0"), None);
        assert_eq!(full_address("0000:65:00.0"), "65:00.0".parse().ok());
    }

    /// A drive of group 7 with a sound card beside it, below a port; a function without IOMMU.
    #[test]
    fn drivers_groups_and_nodes() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::new(folder.path()).unwrap();
        let function = |name: &str, class: &str, driver: Option<&str>, group: Option<u32>| {
            let device = root.at(DEVICES).join(name);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("class"), class).unwrap();
            if let Some(driver) = driver {
                symlink(format!("../../../bus/pci/drivers/{driver}"), device.join("driver"))
                    .unwrap();
            }
            if let Some(group) = group {
                symlink(format!("../../kernel/iommu_groups/{group}"), device.join("iommu_group"))
                    .unwrap();
                let devices = root.at(format!("/sys/kernel/iommu_groups/{group}/devices"));
                fs::create_dir_all(&devices).unwrap();
                symlink(&device, devices.join(name)).unwrap();
            }
        };
        function("0000:65:00.0", "0x010802", Some("vfio-pci"), Some(7));
        function("0000:65:00.1", "0x040300", Some("snd_hda_intel"), Some(7));
        function("0000:65:00.2", "0x020000", None, Some(7));
        function("0000:64:00.0", "0x060400", Some("pcieport"), Some(7));
        function("0000:01:00.0", "0x010802", Some("mlx5_vfio_pci"), None);
        fs::write(root.at(format!("{DEVICES}/0000:65:00.0/numa_node")), "1\n").unwrap();
        fs::write(root.at(format!("{DEVICES}/0000:01:00.0/numa_node")), "-1\n").unwrap();
        let at = |text: &str| Function::read(&root, text.parse().unwrap());
        let drive = at("65:00.0").unwrap();
        assert!(drive.is_nvme() && drive.is_vfio());
        assert_eq!((drive.group, drive.numa), (Some(7), Some(1)));
        let alone = at("01:00.0").unwrap();
        assert!(alone.is_vfio(), "a variant driver");
        assert_eq!((alone.group, alone.numa), (None, None));
        assert_eq!(at("65:00.2").unwrap().driver, None);
        assert!(at("02:00.0").is_none());
        let blocking = group_members(&root, 7).into_iter().filter(|other| !other.is_viable());
        let blocking: Vec<String> = blocking.map(|other| other.bdf.to_string()).collect();
        assert_eq!(blocking, ["0000:65:00.1"]);
        assert!(group_members(&root, 8).is_empty());
        assert_eq!(functions(&root).len(), 5);
    }
}
