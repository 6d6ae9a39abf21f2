//! `nvme-bind` on a running kernel that has the drives.

mod crash;
mod refuse;

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::hardware::{DRIVE_A, DRIVE_B, PEER, SERIAL_A, SERIAL_B};
use crate::pci;
use crate::program::{self, Ran};
use crate::runner::{SECONDS_MAX, Suite, tests};

pub const SUITE: Suite = Suite {
    name: "bind",
    seconds_max: SECONDS_MAX,
    tests: tests![
        list_shows_what_is_there,
        doctor_finds_the_iommu,
        a_rehearsal_changes_nothing,
        a_drive_goes_and_comes_back,
        its_bytes_are_untouched,
        the_node_belongs_to_the_user,
        both_drives_or_none,
        what_is_no_drive_is_refused,
        what_binds_at_boot_is_removed_again,
        mounted,
        swap,
        open,
        a_group_in_use_is_not_taken_back,
        killed_at_any_moment,
        two_at_once_on_one_drive,
        two_at_once_on_two_drives,
    ],
};

use crash::{killed_at_any_moment, two_at_once_on_one_drive, two_at_once_on_two_drives};
use refuse::{a_group_in_use_is_not_taken_back, mounted, open, swap};

const VFIO: Option<&str> = Some("vfio-pci");
const NVME: Option<&str> = Some("nvme");

fn nvme_bind(arguments: &[&str]) -> Result<Ran> {
    program::run("nvme-bind", arguments)
}

/// Checks the state around each test: the kernel has both drives, and there are no records.
fn as_at_boot() -> Result<()> {
    for (bdf, disks) in [(DRIVE_A, 1), (DRIVE_B, 2)] {
        pci::wait_for_driver(bdf, NVME)?;
        pci::wait_for_disks(bdf, disks)?;
        let forced = pci::attribute(bdf, "driver_override")?;
        ensure!(forced == "(null)" || forced.is_empty(), "{bdf} still has the override {forced}");
    }
    let left = journals();
    ensure!(left.is_empty(), "journals were left behind: {left:?}");
    Ok(())
}

fn journals() -> Vec<PathBuf> {
    let folders = ["/run/nvme-bind", "/var/lib/nvme-bind"].into_iter();
    let entries = folders.filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    let is_record = |path: &PathBuf| {
        // A name with a leading dot is an unfinished file: harmless, and not a record.
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name != "lock" && !name.starts_with('.')
    };
    entries.map(|entry| entry.path()).filter(is_record).collect()
}

/// Returns the entry of a drive in an answer with `drives`.
fn entry(answer: &Value, bdf: &str) -> Result<Value> {
    let drives = answer["drives"].as_array().context("an answer without drives")?;
    let drive = drives.iter().find(|drive| drive["bdf"] == bdf);
    drive.cloned().with_context(|| format!("{bdf} is not in {answer}"))
}

fn list_shows_what_is_there() -> Result<()> {
    as_at_boot()?;
    let list = nvme_bind(&["list", "--json"])?.success()?.json()?;
    ensure!(list["drives"].as_array().map(Vec::len) == Some(2), "{list}");
    for (bdf, serial, disks) in [(DRIVE_A, SERIAL_A, 1), (DRIVE_B, SERIAL_B, 2)] {
        let drive = entry(&list, bdf)?;
        ensure!(drive["serial"] == serial && drive["driver"] == "nvme", "{drive}");
        ensure!(drive["group"] == pci::group(bdf)?.parse::<u32>()?, "{drive}");
        ensure!(drive["disks"].as_array().map(Vec::len) == Some(disks), "{drive}");
        ensure!(drive["in_use"] == false, "{drive}");
    }
    let table = nvme_bind(&["list"])?.success()?.out;
    ensure!(table.contains(DRIVE_A) && table.contains("nvme"), "{table}");
    Ok(())
}

fn doctor_finds_the_iommu() -> Result<()> {
    let report = nvme_bind(&["doctor", "--json"])?.success()?.json()?.to_string();
    ensure!(report.contains("IOMMU"), "{report}");
    Ok(())
}

fn a_rehearsal_changes_nothing() -> Result<()> {
    let plan = nvme_bind(&["bind", DRIVE_A, "--dry-run"])?.success()?.out;
    for part in ["driver_override", "unbind", DRIVE_A] {
        ensure!(plan.contains(part), "`{part}` is not in the plan:\n{plan}");
    }
    as_at_boot()
}

/// The first test that binds: also checks that the modules get loaded.
fn a_drive_goes_and_comes_back() -> Result<()> {
    as_at_boot()?;
    ensure!(!Path::new("/sys/module/vfio_pci").exists(), "VFIO was there before");
    let bound = nvme_bind(&["bind", DRIVE_A, "--json"])?.success()?.json()?;
    ensure!(bound["bound"][0]["bdf"] == DRIVE_A, "{bound}");
    ensure!(pci::driver(DRIVE_A).as_deref() == VFIO, "it has {:?}", pci::driver(DRIVE_A));
    ensure!(pci::driver(DRIVE_B).as_deref() == NVME, "the other has {:?}", pci::driver(DRIVE_B));
    for module in ["vfio_pci", "vfio_iommu_type1"] {
        ensure!(Path::new("/sys/module").join(module).exists(), "{module} was not loaded");
    }
    let node = format!("/dev/vfio/{}", pci::group(DRIVE_A)?);
    ensure!(Path::new(&node).exists(), "there is no {node}");
    let status = nvme_bind(&["status", "--json"])?.success()?.json()?;
    ensure!(entry(&status, DRIVE_A)?["state"] == "bound", "{status}");
    // Binding twice is no error.
    nvme_bind(&["bind", DRIVE_A])?.success()?;
    nvme_bind(&["unbind", DRIVE_A])?.success()?;
    as_at_boot()?;
    nvme_bind(&["unbind", DRIVE_A])?.success()?;
    Ok(())
}

fn its_bytes_are_untouched() -> Result<()> {
    let disk = pci::wait_for_disks(DRIVE_A, 1)?.remove(0);
    let path = format!("/dev/{disk}");
    let text = vec![0x5a; 1 << 20];
    fs::write(&path, &text)?;
    // Named by its disk this time.
    nvme_bind(&["bind", &path])?.success()?;
    ensure!(!Path::new(&path).exists(), "{path} is still there");
    nvme_bind(&["restore"])?.success()?;
    let disk = pci::wait_for_disks(DRIVE_A, 1)?.remove(0);
    // Only a part: some of its LBAs cannot be read.
    let mut found = vec![0; text.len()];
    fs::File::open(format!("/dev/{disk}"))?.read_exact(&mut found)?;
    ensure!(found == text, "{disk} reads as something else");
    fs::write(format!("/dev/{disk}"), vec![0; text.len()])?;
    as_at_boot()
}

fn the_node_belongs_to_the_user() -> Result<()> {
    nvme_bind(&["bind", DRIVE_A, "--user", "1234", "--group", "567"])?.success()?;
    let node = format!("/dev/vfio/{}", pci::group(DRIVE_A)?);
    let found = fs::metadata(&node)?;
    let owner = (found.uid(), found.gid(), found.mode() & 0o777);
    nvme_bind(&["unbind", DRIVE_A])?.success()?;
    ensure!(owner == (1234, 567, 0o660), "{node} belongs to {owner:?}");
    as_at_boot()
}

fn both_drives_or_none() -> Result<()> {
    nvme_bind(&["bind", DRIVE_A, DRIVE_B])?.success()?;
    ensure!([DRIVE_A, DRIVE_B].iter().all(|bdf| pci::driver(bdf).as_deref() == VFIO));
    nvme_bind(&["restore"])?.success()?;
    as_at_boot()?;
    let disk = pci::disks(DRIVE_B)?.remove(1);
    let held = fs::File::open(format!("/dev/{disk}"))?;
    nvme_bind(&["bind", DRIVE_A, DRIVE_B])?.with_code(3)?;
    drop(held);
    as_at_boot()
}

fn what_is_no_drive_is_refused() -> Result<()> {
    for (name, part) in [(PEER, "not an NVMe drive"), ("0000:1f:1f.7", "1f:1f.7"), ("sda", "sda")] {
        let refused = nvme_bind(&["bind", name])?.with_code(2)?;
        ensure!(refused.err.contains(part), "{name}: {}", refused.err);
    }
    ensure!(pci::driver(PEER).is_none());
    as_at_boot()
}

fn what_binds_at_boot_is_removed_again() -> Result<()> {
    let before = files(Path::new("/etc"))?;
    nvme_bind(&["bind", DRIVE_A, "--persist"])?.success()?;
    let during = files(Path::new("/etc"))?;
    // The unit and the rule that starts it.
    ensure!(during.len() >= before.len() + 2, "nothing was written: {during:?}");
    nvme_bind(&["unbind", DRIVE_A])?.success()?;
    ensure!(files(Path::new("/etc"))? == during, "unbind alone must not forget the next boot");
    nvme_bind(&["restore", "--persist"])?.success()?;
    let after = files(Path::new("/etc"))?;
    ensure!(after == before, "left behind: {after:?}");
    as_at_boot()
}

/// Returns all files below a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)?.flatten() {
        match entry.file_type()?.is_dir() {
            true => found.extend(files(&entry.path())?),
            false => found.push(entry.path()),
        }
    }
    found.sort();
    Ok(found)
}

/// Runs a program of busybox that must succeed.
fn tool(line: &str) -> Result<()> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let output =
        Command::new(words[0]).args(&words[1..]).output().with_context(|| line.to_owned())?;
    ensure!(output.status.success(), "`{line}`: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
