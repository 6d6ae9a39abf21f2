//! Drivers of PCI functions, read and changed without the program under test.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use nvme_pci::{DEVICES, Function, PROBE, Root, VFIO};

use crate::program;
use crate::runner::until;

/// Returns the sysfs folder of a function.
pub fn folder(bdf: &str) -> PathBuf {
    Path::new(DEVICES).join(bdf)
}

fn function(bdf: &str) -> Option<Function> {
    Function::read(&Root::machine(), bdf.parse().ok()?)
}

/// Returns the driver of a function.
pub fn driver(bdf: &str) -> Option<String> {
    function(bdf)?.driver
}

/// Returns the IOMMU group of a function.
pub fn group(bdf: &str) -> Result<String> {
    let group = function(bdf).and_then(|function| function.group);
    Ok(group.with_context(|| format!("{bdf} is in no IOMMU group"))?.to_string())
}

/// Returns an attribute file of a function, without the newline.
pub fn attribute(bdf: &str, name: &str) -> Result<String> {
    let path = folder(bdf).join(name);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    Ok(text.trim().to_owned())
}

/// Returns the disks of an NVMe function: one per namespace, sorted.
pub fn disks(bdf: &str) -> Result<Vec<String>> {
    let mut disks = Vec::new();
    for controller in names(&folder(bdf).join("nvme"))? {
        let found = names(&folder(bdf).join("nvme").join(&controller))?;
        disks.extend(found.into_iter().filter(|name| name.starts_with(&format!("{controller}n"))));
    }
    disks.sort();
    Ok(disks)
}

/// Waits until `bdf` has `driver`: the kernel probes drives in the background.
pub fn wait_for_driver(bdf: &str, wanted: Option<&str>) -> Result<()> {
    until(&format!("{bdf} has {wanted:?}"), || Ok(driver(bdf).as_deref() == wanted))
}

/// Waits until a drive has this number of disks.
pub fn wait_for_disks(bdf: &str, number: usize) -> Result<Vec<String>> {
    let mut found = Vec::new();
    until(&format!("{bdf} has {number} disks"), || {
        found = disks(bdf).unwrap_or_default();
        let is_there = |disk| Path::new("/dev").join(disk).exists();
        Ok(found.len() == number && found.iter().all(is_there))
    })?;
    Ok(found)
}

/// Loads the VFIO modules.
pub fn load_vfio() -> Result<()> {
    for module in [VFIO, "vfio_iommu_type1"] {
        program::run("modprobe", &[module])?.success()?;
    }
    ensure!(Path::new("/dev/vfio/vfio").exists(), "there is no /dev/vfio/vfio");
    Ok(())
}

/// Binds functions to vfio-pci.
pub fn give_to_vfio(functions: &[&str]) -> Result<()> {
    load_vfio()?;
    for bdf in functions {
        if driver(bdf).as_deref() == Some(VFIO) {
            continue;
        }
        ensure!(driver(bdf).is_none(), "{bdf} has {:?}", driver(bdf));
        fs::write(folder(bdf).join("driver_override"), VFIO).context("driver_override")?;
        fs::write(PROBE, bdf).context("drivers_probe")?;
        wait_for_driver(bdf, Some(VFIO))?;
    }
    Ok(())
}

/// Returns the sorted names in a folder.
pub fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}
