//! PCI functions as sysfs shows them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::root::Root;

pub(crate) const DEVICES: &str = "/sys/bus/pci/devices";
pub(crate) const DRIVERS: &str = "/sys/bus/pci/drivers";
pub(crate) const PROBE: &str = "/sys/bus/pci/drivers_probe";
pub(crate) const VFIO: &str = "vfio-pci";

/// The address of a function: domain, bus, device, function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct Bdf {
    /// Wider than the 16 bits of PCI: Linux numbers the domains of VMD from 10000h.
    pub(crate) domain: u32,
    pub(crate) bus: u8,
    pub(crate) device: u8,
    pub(crate) function: u8,
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        f.pad(&format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
    }
}

impl From<Bdf> for String {
    fn from(bdf: Bdf) -> Self {
        bdf.to_string()
    }
}

impl TryFrom<String> for Bdf {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl FromStr for Bdf {
    type Err = String;

    /// Reads `0000:65:00.0`, and the short form `65:00.0` as one of domain 0.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("`{text}` is not an address like 0000:65:00.0 or 65:00.0");
        let hex = |part: &str, digits: usize| {
            let fits = !part.is_empty() && part.len() <= digits;
            let digits = part.bytes().all(|byte| byte.is_ascii_hexdigit());
            (fits && digits).then(|| u32::from_str_radix(part, 16).ok()).flatten()
        };
        let (address, function) = text.rsplit_once('.').ok_or_else(wrong)?;
        let (before, device) = address.rsplit_once(':').ok_or_else(wrong)?;
        let (domain, bus) = before.rsplit_once(':').unwrap_or(("0", before));
        let parts = (hex(domain, 8), hex(bus, 2), hex(device, 2), hex(function, 1));
        let (Some(domain), Some(bus), Some(device), Some(function)) = parts else {
            return Err(wrong());
        };
        if device > 0x1f || function > 7 {
            return Err(format!("`{text}`: the device goes up to 1f and the function up to 7"));
        }
        let byte = |value: u32| u8::try_from(value).map_err(|_| wrong());
        Ok(Self { domain, bus: byte(bus)?, device: byte(device)?, function: byte(function)? })
    }
}

/// A function and what sysfs says about it.
#[derive(Debug, Clone)]
pub(crate) struct Function {
    pub(crate) bdf: Bdf,
    /// 24 bits: base class, subclass, programming interface.
    pub(crate) class: u32,
    pub(crate) vendor: u16,
    pub(crate) device: u16,
    pub(crate) driver: Option<String>,
    pub(crate) driver_override: Option<String>,
    pub(crate) group: Option<u32>,
    pub(crate) numa: Option<u32>,
    /// The functions from the root port down to this one, which is the last.
    pub(crate) chain: Vec<Bdf>,
    /// The host bridge: `pci0000:64`.
    pub(crate) host_bridge: String,
}

impl Function {
    /// Reads one function; None if there is no such.
    pub(crate) fn read(root: &Root, bdf: Bdf) -> Option<Self> {
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
            chain: parts.iter().filter_map(|part| full_bdf(part)).collect(),
            host_bridge: parts
                .iter()
                .find(|part| part.starts_with("pci") && part.contains(':'))
                .map(|part| (*part).to_owned())
                .unwrap_or_default(),
        })
    }

    pub(crate) fn is_nvme(&self) -> bool {
        self.class == 0x01_08_02
    }

    pub(crate) fn is_bridge(&self) -> bool {
        self.class >> 16 == 0x06
    }

    pub(crate) fn is_display(&self) -> bool {
        self.class >> 16 == 0x03
    }

    pub(crate) fn is_gpu(&self) -> bool {
        // 0300h is a VGA card: a GPU if one of the makers whose cards compute made it.
        self.class >> 8 == 0x0302 || self.is_display() && [0x10de, 0x1002].contains(&self.vendor)
    }

    /// Whether a VFIO driver has it.
    pub(crate) fn is_vfio(&self) -> bool {
        self.driver.as_deref().is_some_and(is_vfio_driver)
    }

    /// Whether the group can be used by VFIO with this function as it is (the kernel's
    /// `driver_managed_dma`, and the list of older kernels).
    pub(crate) fn is_viable(&self) -> bool {
        match self.driver.as_deref() {
            None | Some("pci-stub" | "pcieport") => true,
            Some(driver) => is_vfio_driver(driver),
        }
    }

    /// `144d:a80a`.
    pub(crate) fn ids(&self) -> String {
        format!("{:04x}:{:04x}", self.vendor, self.device)
    }

    /// What kind of thing it is, in a word or two.
    pub(crate) fn kind(&self) -> &'static str {
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
pub(crate) fn sysfs(bdf: Bdf) -> String {
    format!("{DEVICES}/{bdf}")
}

/// An address in full, as sysfs spells it; the parts of a path also have other things with dots.
pub(crate) fn full_bdf(text: &str) -> Option<Bdf> {
    text.parse().ok().filter(|bdf: &Bdf| bdf.to_string() == text)
}

/// All functions, by address.
pub(crate) fn functions(root: &Root) -> Vec<Function> {
    let names = root.names(DEVICES);
    names.iter().filter_map(|name| Function::read(root, full_bdf(name)?)).collect()
}

/// The functions of an IOMMU group, by address.
pub(crate) fn group_members(root: &Root, group: u32) -> Vec<Function> {
    let names = root.names(format!("/sys/kernel/iommu_groups/{group}/devices"));
    names.iter().filter_map(|name| Function::read(root, full_bdf(name)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_in_all_forms() {
        let bdf: Bdf = "65:00.0".parse().unwrap();
        assert_eq!(bdf.to_string(), "0000:65:00.0");
        assert_eq!("0000:65:00.0".parse(), Ok(bdf));
        assert_eq!("10000:e1:1f.7".parse::<Bdf>().unwrap().to_string(), "10000:e1:1f.7");
        for wrong in ["", "65", "65:00", "65:20.0", "65:00.8", "165:00.0", "g5:00.0", "+5:00.0"] {
            assert!(wrong.parse::<Bdf>().is_err(), "{wrong}");
        }
        assert_eq!(full_bdf("65:00.0"), None);
    }
}
