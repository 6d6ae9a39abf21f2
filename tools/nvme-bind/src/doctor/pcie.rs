//! Checks of the PCIe path between drive and GPU.

use super::{Facts, Finding, Verdict};
use crate::pci::Root;
use crate::pci::{self, PciAddress};
use crate::topology::{self, Meeting};

/// Extended capabilities start here; no more than these fit into the 4 KiB.
const EXTENDED: usize = 0x100;
const CAPABILITIES_MAX: usize = (4096 - EXTENDED) / 8;
const ACS_ID: u32 = 0x000d;
/// P2P Request Redirect (PCIe 6.1, 7.9.13.3).
const REQUEST_REDIRECT: u16 = 0b0100;
const PRICE: &str = "the price is that all of it crosses the uplink of the switch twice, which \
                     everything below it shares";

/// ACS state in the configuration space of a bridge.
#[derive(Debug, PartialEq, Eq)]
enum Acs {
    /// Visible only to root.
    Hidden,
    None,
    Control(u16),
}

pub(super) fn acs(facts: &Facts<'_>) -> Finding {
    let looked_at = ["/sys/bus/pci/devices/*/config of the bridges", "/proc/cmdline"];
    let finding = Finding::new("acs", "ACS between drives and GPUs", &looked_at);
    let mut words = Vec::new();
    for name in ["pcie_acs_override", "pci"] {
        let value = facts.parameter(name).filter(|value| name != "pci" || value.contains("acs"));
        words.extend(value.map(|value| format!("the command line has {name}={value}")));
    }
    let ports = deciding(facts);
    if ports.is_empty() {
        words.push("no drive and GPU are below a common bridge, so it does not matter".into());
        return finding.says(Verdict::Skip, words.join("; "));
    }
    let states: Vec<(PciAddress, Acs)> =
        ports.iter().map(|&bdf| (bdf, read_acs(facts.root, bdf))).collect();
    if states.iter().any(|(_, state)| *state == Acs::Hidden) {
        words.push("the bridges show their ACS only to root".into());
        return finding.says(Verdict::Skip, words.join("; ")).fix("run doctor as root");
    }
    let redirects =
        |state: &Acs| matches!(state, Acs::Control(bits) if bits & REQUEST_REDIRECT != 0);
    let names = |on: bool| {
        let those = states.iter().filter(|(_, state)| redirects(state) == on);
        those.map(|(bdf, _)| bdf.to_string()).collect::<Vec<_>>().join(", ")
    };
    let (on, off) = (names(true), names(false));
    if off.is_empty() {
        words.push(format!(
            "peer traffic is redirected to the IOMMU by {on}, as drives under VFIO need; {PRICE}"
        ));
        return finding.says(Verdict::Ok, words.join("; "));
    }
    words.push(format!("peer traffic is not redirected to the IOMMU by {off}"));
    let fix = format!(
        "a drive under VFIO sends I/O virtual addresses: a switch that does not redirect them \
         takes some for the BAR of a peer, and drive and GPU are in one IOMMU group, which VFIO \
         does not take while the GPU has its driver. Turn ACS on in the firmware, and take \
         pci=disable_acs_redir and pci=config_acs off the kernel command line; {PRICE}"
    );
    finding.says(Verdict::Fail, words.join("; ")).fix(fix)
}

/// Returns the ports that route a drive's requests to a GPU: with both below a common bridge, the
/// downstream port through which the drive's requests reach it.
fn deciding(facts: &Facts<'_>) -> Vec<PciAddress> {
    let mut ports = Vec::new();
    for drive in &facts.drives {
        for gpu in &facts.gpus {
            let (from, to) = (&drive.function.chain, &gpu.function.chain);
            let shared = from.iter().zip(to).take_while(|(a, b)| a == b).count();
            // The last of a chain is the function itself: in that case both are on one card.
            if shared > 0 && shared + 1 < from.len() {
                ports.push(from[shared]);
            }
        }
    }
    ports.sort();
    ports.dedup();
    ports
}

fn read_acs(root: &Root, bdf: PciAddress) -> Acs {
    let config = root.bytes(format!("{}/config", pci::sysfs(bdf)), 0, 4096).unwrap_or_default();
    let word = |at: usize| {
        let bytes = config.get(at..)?.first_chunk()?;
        Some(u32::from_le_bytes(*bytes))
    };
    let mut at = EXTENDED;
    for _ in 0..CAPABILITIES_MAX {
        let Some(header) = word(at) else { return Acs::Hidden };
        if header & 0xffff == ACS_ID {
            // Capability in the lower half, control in the upper.
            return word(at + 4).map_or(Acs::Hidden, |both| Acs::Control((both >> 16) as u16));
        }
        at = (header >> 20) as usize;
        if at < EXTENDED {
            return Acs::None;
        }
    }
    Acs::None
}

pub(super) fn nearest(facts: &Facts<'_>) -> Finding {
    let looked_at = ["the device tree of /sys/devices", "/sys/bus/pci/devices/*/numa_node"];
    let finding = Finding::new("distance", "Drive and GPU under one switch", &looked_at);
    if facts.drives.is_empty() || facts.gpus.is_empty() {
        return finding.says(Verdict::Skip, "a drive and a GPU are needed to be near each other");
    }
    let mut parts = Vec::new();
    let mut worst = Meeting::SameSwitch;
    for drive in &facts.drives {
        if let Some((gpu, way)) = topology::nearest(&drive.function, &facts.gpus) {
            let (drive, gpu) = (drive.function.bdf, gpu.function.bdf);
            parts.push(format!("{drive} to {gpu}: {}, {} hops", way.meeting.words(), way.hops));
            worst = worst.max(way.meeting);
        }
    }
    let found = parts.join("; ");
    match worst {
        Meeting::SameSwitch | Meeting::SameRootPort => finding.says(Verdict::Ok, found),
        Meeting::SameHostBridge | Meeting::SameNode => finding.says(Verdict::Warn, found).fix(
            "it works through the CPU's root complex, where bandwidth differs much between models; \
             use a slot under the GPU's switch if there is one",
        ),
        Meeting::AcrossNodes => finding.says(Verdict::Warn, found).fix(
            "traffic between sockets is slow and may stop altogether under load: use a drive that \
             is near the GPU",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acs_is_read_from_configuration_space() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::new(folder.path()).unwrap();
        let bdf: PciAddress = "01:00.0".parse().unwrap();
        let file = root.at(format!("{}/config", pci::sysfs(bdf)));
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        let mut config = vec![0_u8; 4096];
        let mut put =
            |at: usize, word: u32| config[at..at + 4].copy_from_slice(&word.to_le_bytes());
        put(0x100, 0x148 << 20 | 1 << 16 | 0x0001);
        put(0x148, 1 << 16 | ACS_ID);
        put(0x14c, 0x001d << 16 | 0x005f);
        std::fs::write(&file, &config).unwrap();
        assert_eq!(read_acs(&root, bdf), Acs::Control(0x1d));
        // Without root, sysfs shows 64 bytes. A capability may point to itself.
        std::fs::write(&file, &config[..64]).unwrap();
        assert_eq!(read_acs(&root, bdf), Acs::Hidden);
        config[0x100..0x104].copy_from_slice(&(0x100_u32 << 20 | 1).to_le_bytes());
        std::fs::write(&file, &config).unwrap();
        assert_eq!(read_acs(&root, bdf), Acs::None);
    }
}
