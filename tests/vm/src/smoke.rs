//! The machine itself. If this fails, the other suites are meaningless.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::hardware::{
    BAR_BYTES, DRIVE_A, DRIVE_B, FILE_A, FILE_B, FILE_BAR, NVME_IDS, PEER, PEER_IDS,
};
use crate::host::{self, Host};
use crate::kmsg::Kmsg;
use crate::pci;
use crate::runner::{SECONDS_MAX, Suite, tests};

pub const SUITE: Suite = Suite {
    name: "smoke",
    seconds_max: SECONDS_MAX,
    tests: tests![
        the_cpu_is_the_least,
        the_devices_are_where_the_tests_look,
        the_iommu_is_on,
        each_device_has_a_group_of_its_own,
        the_kernel_leaves_the_drives_alone,
        the_host_answers,
        vfio_takes_all_devices,
    ],
};

/// All suites then show that no more is needed.
fn the_cpu_is_the_least() -> Result<()> {
    let text = fs::read_to_string("/proc/cpuinfo").context("/proc/cpuinfo")?;
    let flags = text.lines().find(|line| line.starts_with("flags")).context("no flags")?;
    let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    ensure!(has("sse4_2") && has("popcnt"), "less than x86-64-v2: {flags}");
    ensure!(!has("avx") && !has("avx2"), "more than x86-64-v2: {flags}");
    Ok(())
}

fn the_devices_are_where_the_tests_look() -> Result<()> {
    for (bdf, ids) in [(DRIVE_A, NVME_IDS), (DRIVE_B, NVME_IDS), (PEER, PEER_IDS)] {
        let found = (pci::attribute(bdf, "vendor")?, pci::attribute(bdf, "device")?);
        ensure!(found == (ids.0.into(), ids.1.into()), "at {bdf} is {found:?}, not {ids:?}");
    }
    let resources = pci::attribute(PEER, "resource")?;
    let bar = resources.lines().nth(2).context("no BAR 2")?;
    let numbers: Vec<u64> = bar
        .split_whitespace()
        .map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16))
        .collect::<Result<_, _>>()?;
    let bytes = numbers[1] - numbers[0] + 1;
    ensure!(bytes == BAR_BYTES, "BAR 2 of {PEER} has {bytes} bytes");
    Ok(())
}

fn the_iommu_is_on() -> Result<()> {
    let iommus = pci::names(Path::new("/sys/class/iommu"))?;
    ensure!(!iommus.is_empty(), "the kernel found no IOMMU");
    let log = Kmsg::from_boot()?.lines();
    ensure!(
        log.iter().any(|line| line.contains("DMAR-IR: Enabled IRQ remapping")),
        "no interrupt remapping, without which VFIO refuses"
    );
    Ok(())
}

fn each_device_has_a_group_of_its_own() -> Result<()> {
    for bdf in [DRIVE_A, DRIVE_B, PEER] {
        let group = pci::group(bdf)?;
        let folder = format!("/sys/kernel/iommu_groups/{group}/devices");
        let members = pci::names(Path::new(&folder))?;
        ensure!(members == [bdf], "group {group} has {members:?}");
    }
    Ok(())
}

fn the_kernel_leaves_the_drives_alone() -> Result<()> {
    for bdf in [DRIVE_A, DRIVE_B] {
        ensure!(pci::driver(bdf).is_none(), "{bdf} has {:?}", pci::driver(bdf));
    }
    Ok(())
}

fn the_host_answers() -> Result<()> {
    let mut host = Host::open()?;
    let zeroes = host::hash(&[0; 4096]);
    for file in [FILE_A, FILE_B[0], FILE_B[1], FILE_BAR] {
        let found = host.hash(file, 8192, 4096)?;
        ensure!(found == zeroes, "a fresh {file} is not empty");
    }
    let status = host.ask("qmp {\"execute\": \"query-status\"}")?;
    ensure!(status.contains("running"), "QEMU says {status}");
    let version = host.monitor("info version")?;
    ensure!(version.starts_with(|c: char| c.is_ascii_digit()), "QEMU says {version}");
    ensure!(host.ask("hash /etc/passwd 0 1").is_err(), "the host gives away its files");
    ensure!(host.ask("nonsense").is_err(), "the host takes anything");
    Ok(())
}

fn vfio_takes_all_devices() -> Result<()> {
    pci::give_to_vfio(&[DRIVE_A, DRIVE_B, PEER])?;
    for bdf in [DRIVE_A, DRIVE_B, PEER] {
        let node = format!("/dev/vfio/{}", pci::group(bdf)?);
        ensure!(Path::new(&node).exists(), "there is no {node}");
    }
    Ok(())
}
