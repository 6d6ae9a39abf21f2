//! Checks of the IOMMU: its presence and its DMA mode.

use std::collections::BTreeMap;

use super::{Facts, Finding, Verdict};
use crate::pci;

pub(super) fn present(facts: &Facts<'_>) -> Finding {
    let looked_at = [
        "/sys/class/iommu",
        "/sys/kernel/iommu_groups",
        "/proc/cmdline",
        "/sys/firmware/acpi/tables",
    ];
    let finding = Finding::new("iommu", "IOMMU is on", &looked_at);
    let units = facts.root.names("/sys/class/iommu");
    let (groups, no_iommu) = pci::groups(facts.root);
    let groups = groups.len();
    if groups == 0 && !no_iommu.is_empty() {
        let found = format!(
            "VFIO's no-IOMMU mode: nothing translates for the functions in its {} groups, and a \
             drive could write anywhere in memory",
            no_iommu.len()
        );
        let fix = "that mode is not supported: turn the IOMMU on in the firmware (in a virtual \
                    machine, give it one), and set enable_unsafe_noiommu_mode of the module vfio \
                    to N";
        return finding.says(Verdict::Fail, found).fix(fix);
    }
    if !units.is_empty() && groups > 0 {
        return finding.says(Verdict::Ok, format!("{} with {groups} groups", units.join(" ")));
    }
    if groups > 0 {
        return finding.says(Verdict::Ok, format!("{groups} groups"));
    }
    // The firmware describes an IOMMU in DMAR (Intel), IVRS (AMD) or IORT (Arm).
    let tables = facts.root.names("/sys/firmware/acpi/tables");
    let table = ["DMAR", "IVRS", "IORT"].into_iter().find(|name| tables.iter().any(|t| t == name));
    let off = ["intel_iommu", "amd_iommu", "iommu"]
        .into_iter()
        .filter(|name| facts.parameter(name) == Some("off"))
        .map(|name| format!("{name}=off"));
    let off: Vec<String> = off.collect();
    let (found, fix) = if !off.is_empty() {
        let found = format!("no groups: the kernel command line has {}", off.join(" "));
        (found, "remove that from the kernel command line and reboot".to_owned())
    } else if let Some(table) = table {
        let found = format!("no groups, although the firmware has an IOMMU (table {table})");
        let fix = "add intel_iommu=on (Intel; on AMD it is on by default) to the kernel command \
                    line (GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub) and reboot";
        (found, fix.to_owned())
    } else {
        let found =
            "no IOMMU: no units, no groups, and no table DMAR, IVRS or IORT of the firmware";
        let fix = "turn on VT-d (Intel) or IOMMU (AMD) in the firmware's settings; in a virtual \
                    machine, give it an IOMMU";
        (found.to_owned(), fix.to_owned())
    };
    finding.says(Verdict::Fail, found).fix(fix)
}

pub(super) fn mode(facts: &Facts<'_>) -> Finding {
    let looked_at = ["/sys/kernel/iommu_groups/*/type", "/proc/cmdline"];
    let finding = Finding::new("iommu-mode", "IOMMU mode: translated or passthrough", &looked_at);
    let root = facts.root;
    let mut types: BTreeMap<String, usize> = BTreeMap::new();
    for group in pci::groups(root).0 {
        if let Some(kind) = root.text(format!("{}/{group}/type", pci::GROUPS)) {
            *types.entry(kind).or_default() += 1;
        }
    }
    let parameters = ["iommu", "iommu.passthrough", "intel_iommu", "amd_iommu", "iommu.strict"];
    let parameters: Vec<String> = parameters
        .into_iter()
        .filter_map(|name| Some(format!("{name}={}", facts.parameter(name)?)))
        .collect();
    let words = if parameters.is_empty() { "nothing".into() } else { parameters.join(" ") };
    if types.is_empty() {
        let found = format!("no group says its type; the command line says {words} about it");
        return finding.says(Verdict::Skip, found);
    }
    let list: Vec<String> =
        types.iter().map(|(kind, count)| format!("{count} of type {kind}")).collect();
    let found = format!("groups: {}; the command line says {words} about it", list.join(", "));
    // VFIO creates a translated domain of its own, so both modes work for bound devices.
    if types.contains_key("identity") {
        let fix = "nothing for VFIO, which always translates. For DMA that the kernel's drivers \
                    do to GPU memory, passthrough (iommu=pt) is the mode to have";
        return finding.says(Verdict::Ok, format!("{found} (passthrough for the kernel)")).fix(fix);
    }
    finding.says(Verdict::Ok, format!("{found} (translated)"))
}
