//! Drives in use.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Result, ensure};

use super::{NVME, VFIO, as_at_boot, entry, nvme_bind, tool};
use crate::hardware::{DRIVE_A, DRIVE_B};
use crate::pci;

/// Tries all ways to bind the drive, which must keep its driver.
fn is_refused(bdf: &str, words: &[&str]) -> Result<()> {
    let attempts: [&[&str]; 3] =
        [&["bind", bdf], &["bind", bdf, "--dry-run"], &["bind", bdf, "--ignore-members"]];
    for attempt in attempts {
        let refused = nvme_bind(attempt)?.with_code(3)?;
        for word in words {
            ensure!(refused.err.contains(word), "`{word}` is not in: {}", refused.err);
        }
        ensure!(pci::driver(bdf).as_deref() == NVME, "it was taken all the same");
    }
    let list = nvme_bind(&["list", "--json"])?.success()?.json()?;
    ensure!(entry(&list, bdf)?["in_use"] == true, "{list}");
    Ok(())
}

/// A mount of the second namespace protects the first one and the drive.
pub fn mounted() -> Result<()> {
    as_at_boot()?;
    let disk = pci::disks(DRIVE_B)?.remove(1);
    tool(&format!("mke2fs -F /dev/{disk}"))?;
    tool(&format!("mount -t ext2 /dev/{disk} /mnt"))?;
    fs::write("/mnt/file", "kept")?;
    let refused = is_refused(DRIVE_B, &["/mnt", &disk]);
    let text = fs::read_to_string("/mnt/file");
    tool("umount /mnt")?;
    refused?;
    ensure!(text? == "kept");
    // An unmounted file system does not prevent it, and is intact afterwards.
    nvme_bind(&["bind", DRIVE_B])?.success()?;
    ensure!(pci::driver(DRIVE_B).as_deref() == VFIO);
    nvme_bind(&["unbind", DRIVE_B])?.success()?;
    let disk = pci::wait_for_disks(DRIVE_B, 2)?.remove(1);
    tool(&format!("mount -t ext2 /dev/{disk} /mnt"))?;
    let text = fs::read_to_string("/mnt/file");
    tool("umount /mnt")?;
    ensure!(text? == "kept");
    as_at_boot()
}

pub fn swap() -> Result<()> {
    as_at_boot()?;
    let disk = pci::disks(DRIVE_A)?.remove(0);
    tool(&format!("mkswap /dev/{disk}"))?;
    tool(&format!("swapon /dev/{disk}"))?;
    let refused = is_refused(DRIVE_A, &["swap", &disk]);
    tool(&format!("swapoff /dev/{disk}"))?;
    refused?;
    as_at_boot()
}

pub fn open() -> Result<()> {
    as_at_boot()?;
    let disk = pci::disks(DRIVE_A)?.remove(0);
    let held = File::open(format!("/dev/{disk}"))?;
    let refused = is_refused(DRIVE_A, &["open", "vm-tests", &disk]);
    drop(held);
    refused?;
    // The controller's open character device is a use, too.
    let name = pci::names(&pci::folder(DRIVE_A).join("nvme"))?.remove(0);
    let held = File::open(format!("/dev/{name}"))?;
    let refused = is_refused(DRIVE_A, &["open", &name]);
    drop(held);
    refused?;
    as_at_boot()
}

/// The kernel would block the unbind until the group's user closes it.
pub fn a_group_in_use_is_not_taken_back() -> Result<()> {
    nvme_bind(&["bind", DRIVE_A])?.success()?;
    let node = format!("/dev/vfio/{}", pci::group(DRIVE_A)?);
    let held = File::options().read(true).write(true).open(&node)?;
    for command in ["unbind", "restore"] {
        let refused = nvme_bind(&[command, DRIVE_A])?.with_code(3)?;
        ensure!(refused.err.contains("vm-tests"), "{}", refused.err);
        ensure!(pci::driver(DRIVE_A).as_deref() == VFIO);
    }
    drop(held);
    ensure!(Path::new(&node).exists());
    nvme_bind(&["restore"])?.success()?;
    as_at_boot()
}
