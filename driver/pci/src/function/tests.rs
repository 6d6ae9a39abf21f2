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
            symlink(format!("../../../bus/pci/drivers/{driver}"), device.join("driver")).unwrap();
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
