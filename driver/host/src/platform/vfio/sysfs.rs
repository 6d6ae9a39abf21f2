//! What the kernel says about PCI functions and IOMMU groups in its file systems.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    address::PciAddress,
    error::{Blocker, Holder, VfioError},
};

/// Drivers that do not touch their device, or that only pass it on to a user.
fn is_harmless(driver: &str) -> bool {
    matches!(driver, "pci-stub" | "pcieport") || driver.contains("vfio")
}

/// The file systems below a root, which is `/` except in tests.
#[derive(Debug, Clone)]
pub(super) struct Sysfs {
    root: PathBuf,
}

impl Sysfs {
    pub(super) fn new() -> Self {
        Self { root: PathBuf::from("/") }
    }

    fn function(&self, address: PciAddress) -> PathBuf {
        self.root.join("sys/bus/pci/devices").join(address.to_string())
    }

    /// The IOMMU group of a function.
    pub(super) fn group(&self, address: PciAddress) -> Result<u32, VfioError> {
        let function = self.function(address);
        if !function.exists() {
            return Err(VfioError::NotThere { address });
        }
        let name = link_name(&function.join("iommu_group"));
        name.and_then(|name| name.parse().ok()).ok_or(VfioError::NoIommu { address })
    }

    /// The driver a function is bound to.
    pub(super) fn driver(&self, address: PciAddress) -> Option<String> {
        link_name(&self.function(address).join("driver"))
    }

    /// Whether a driver has the function that hands it to VFIO.
    pub(super) fn is_bound(&self, address: PciAddress) -> bool {
        self.driver(address).is_some_and(|driver| driver.contains("vfio"))
    }

    /// The memory node nearest to a function; `None` when the machine has only one or does not say.
    pub(super) fn numa_node(&self, address: PciAddress) -> Option<u32> {
        let text = fs::read_to_string(self.function(address).join("numa_node")).ok()?;
        // -1 stands for "not known".
        text.trim().parse().ok()
    }

    /// The devices of a group that a driver of the kernel uses.
    pub(super) fn blockers(&self, group: u32) -> Vec<Blocker> {
        let devices = self.root.join(format!("sys/kernel/iommu_groups/{group}/devices"));
        let mut blockers: Vec<Blocker> = entries(&devices)
            .filter_map(|entry| {
                let driver = link_name(&entry.join("driver"))?;
                let device = entry.file_name()?.to_string_lossy().into_owned();
                (!is_harmless(&driver)).then_some(Blocker { device, driver })
            })
            .collect();
        blockers.sort_by(|a, b| a.device.cmp(&b.device));
        blockers
    }

    /// The processes that have a group open, as far as this user may see.
    pub(super) fn holders(&self, group: u32) -> Vec<Holder> {
        let node = PathBuf::from(format!("/dev/vfio/{group}"));
        let opened = |process: &Path| {
            entries(&process.join("fd")).any(|fd| fs::read_link(fd).is_ok_and(|to| to == node))
        };
        let mut holders: Vec<Holder> = entries(&self.root.join("proc"))
            .filter_map(|process| {
                let pid = process.file_name()?.to_str()?.parse().ok()?;
                let name = || fs::read_to_string(process.join("comm")).unwrap_or_default();
                opened(&process).then(|| Holder { pid, name: name().trim().to_owned() })
            })
            .collect();
        holders.sort_by_key(|holder| holder.pid);
        holders
    }
}

/// Last part of what a symbolic link points to.
fn link_name(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_string_lossy().into_owned())
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A small tree: one drive of group 7 with a sound card beside it, one function without IOMMU.
    fn tree() -> (tempfile::TempDir, Sysfs) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let function = |name: &str, driver: Option<&str>, group: Option<&str>| {
            let device = root.join("sys/bus/pci/devices").join(name);
            fs::create_dir_all(&device).unwrap();
            if let Some(driver) = driver {
                symlink(format!("../../../bus/pci/drivers/{driver}"), device.join("driver"))
                    .unwrap();
            }
            if let Some(group) = group {
                symlink(format!("../../kernel/iommu_groups/{group}"), device.join("iommu_group"))
                    .unwrap();
                let devices = root.join(format!("sys/kernel/iommu_groups/{group}/devices"));
                fs::create_dir_all(&devices).unwrap();
                symlink(&device, devices.join(name)).unwrap();
            }
        };
        function("0000:65:00.0", Some("vfio-pci"), Some("7"));
        function("0000:65:00.1", Some("snd_hda_intel"), Some("7"));
        function("0000:65:00.2", None, Some("7"));
        function("0000:64:00.0", Some("pcieport"), Some("7"));
        function("0000:01:00.0", None, None);
        let drive = root.join("sys/bus/pci/devices/0000:65:00.0");
        fs::write(drive.join("numa_node"), "1\n").unwrap();
        fs::write(root.join("sys/bus/pci/devices/0000:01:00.0/numa_node"), "-1\n").unwrap();
        for (pid, comm, open) in [("41", "bash", "/dev/null"), ("42", "qemu", "/dev/vfio/7")] {
            let process = root.join("proc").join(pid);
            fs::create_dir_all(process.join("fd")).unwrap();
            fs::write(process.join("comm"), format!("{comm}\n")).unwrap();
            symlink(open, process.join("fd/3")).unwrap();
        }
        let sysfs = Sysfs { root: root.to_owned() };
        (folder, sysfs)
    }

    fn at(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    #[test]
    fn groups_drivers_and_nodes() {
        let (_folder, sysfs) = tree();
        assert_eq!(sysfs.group(at("65:00.0")).unwrap(), 7);
        assert!(matches!(sysfs.group(at("01:00.0")), Err(VfioError::NoIommu { .. })));
        assert!(matches!(sysfs.group(at("02:00.0")), Err(VfioError::NotThere { .. })));
        assert!(sysfs.is_bound(at("65:00.0")));
        assert!(!sysfs.is_bound(at("65:00.1")));
        assert_eq!(sysfs.driver(at("65:00.2")), None);
        assert_eq!(sysfs.numa_node(at("65:00.0")), Some(1));
        assert_eq!(sysfs.numa_node(at("01:00.0")), None);
    }

    #[test]
    fn who_is_in_the_way() {
        let (_folder, sysfs) = tree();
        let blocker = Blocker { device: "0000:65:00.1".into(), driver: "snd_hda_intel".into() };
        assert_eq!(sysfs.blockers(7), [blocker]);
        assert_eq!(sysfs.blockers(8), []);
        assert_eq!(sysfs.holders(7), [Holder { pid: 42, name: "qemu".into() }]);
        assert_eq!(sysfs.holders(70), []);
    }
}
