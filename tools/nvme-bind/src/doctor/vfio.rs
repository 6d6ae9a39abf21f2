//! Checks of VFIO: modules, its node, and the groups of the drives.

use super::{Facts, Finding, Verdict};
use crate::pci;

/// Required modules, and the path that shows each is loaded or built in.
const NEEDED: &[(&str, &str)] = &[
    ("vfio", "/sys/module/vfio"),
    ("vfio_iommu_type1", "/sys/module/vfio_iommu_type1"),
    ("vfio-pci", "/sys/bus/pci/drivers/vfio-pci"),
];

pub(super) fn modules(facts: &Facts<'_>) -> Finding {
    let looked_at = [
        "/sys/module",
        "/sys/bus/pci/drivers",
        "/lib/modules/*/modules.dep",
        "/lib/modules/*/modules.builtin",
    ];
    let finding = Finding::new("vfio-modules", "VFIO modules", &looked_at);
    let root = facts.root;
    let release = root.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let list = |name: &str| root.text(format!("/lib/modules/{release}/{name}")).unwrap_or_default();
    let known = format!("{}\n{}", list("modules.dep"), list("modules.builtin"));
    let (mut loaded, mut there, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    for &(module, sign) in NEEDED {
        // `kernel/drivers/vfio/pci/vfio-pci.ko.xz: ...`; file names use dashes or underscores.
        let file = |spelling: &str| known.contains(&format!("/{spelling}.ko"));
        if root.exists(sign) {
            loaded.push(module);
        } else if file(module) || file(&module.replace('-', "_")) {
            there.push(module);
        } else {
            missing.push(module);
        }
    }
    if missing.is_empty() && there.is_empty() {
        return finding.says(Verdict::Ok, format!("loaded: {}", loaded.join(", ")));
    }
    let mut parts = Vec::new();
    for (word, names) in [("loaded", &loaded), ("not loaded", &there), ("not there", &missing)] {
        if !names.is_empty() {
            parts.push(format!("{word}: {}", names.join(", ")));
        }
    }
    let found = parts.join("; ");
    if missing.is_empty() {
        let fix = format!("`nvme-bind bind` loads them; by hand: modprobe -a {}", there.join(" "));
        return finding.says(Verdict::Warn, found).fix(fix);
    }
    let fix = "install the modules of this kernel (Debian: linux-image-amd64 and not a kernel \
                without modules), or build it with CONFIG_VFIO_PCI and CONFIG_VFIO_IOMMU_TYPE1";
    finding.says(Verdict::Fail, found).fix(fix)
}

pub(super) fn node(facts: &Facts<'_>) -> Finding {
    let looked_at = ["/dev/vfio/vfio", "/dev/iommu", "/sys/module/vfio_iommu_type1"];
    let finding = Finding::new("vfio-container", "VFIO container", &looked_at);
    let root = facts.root;
    let Some((uid, gid, mode)) = root.owner("/dev/vfio/vfio") else {
        let found = "/dev/vfio/vfio is not there";
        let fix = "modprobe -a vfio-pci vfio_iommu_type1, once the modules are there";
        return finding.says(Verdict::Fail, found).fix(fix);
    };
    let found = format!("/dev/vfio/vfio is {uid}:{gid} {mode:04o}");
    if !root.exists("/sys/module/vfio_iommu_type1") && root.exists("/dev/iommu") {
        let found = format!("{found}, with the compatibility layer of iommufd behind it");
        let fix = "modprobe vfio_iommu_type1: iommufd refuses to map the memory of other devices, \
                    such as a GPU's BAR; the type1 container accepts it";
        return finding.says(Verdict::Warn, found).fix(fix);
    }
    if mode & 0o006 != 0o006 {
        let fix = "chmod 0666 /dev/vfio/vfio: it gives access to nothing by itself, and whoever \
                    drives a group needs it";
        return finding.says(Verdict::Warn, found).fix(fix);
    }
    finding.says(Verdict::Ok, found)
}

pub(super) fn groups(facts: &Facts<'_>) -> Finding {
    let looked_at = ["/sys/bus/pci/devices/*/iommu_group", "/sys/kernel/iommu_groups/*/devices"];
    let finding = Finding::new("groups", "Each drive in a group that VFIO can take", &looked_at);
    if facts.drives.is_empty() {
        return finding.says(Verdict::Skip, "no NVMe drive");
    }
    let (mut shared, mut without, mut with_gpu) = (Vec::new(), Vec::new(), false);
    for drive in &facts.drives {
        let function = &drive.function;
        let Some(group) = function.group else {
            without.push(function.bdf.to_string());
            continue;
        };
        let members = pci::group_members(facts.root, group);
        let others = members.iter().filter(|other| other.bdf != function.bdf && !other.is_viable());
        let others: Vec<String> = others
            .inspect(|other| with_gpu |= other.is_gpu())
            .map(|other| format!("{} ({})", other.bdf, other.kind()))
            .collect();
        if !others.is_empty() {
            shared.push(format!(
                "{} shares group {group} with {}",
                function.bdf,
                others.join(", ")
            ));
        }
    }
    if !without.is_empty() {
        let found = format!("in no group: {}", without.join(", "));
        return finding.says(Verdict::Fail, found).fix("turn the IOMMU on, see above");
    }
    if with_gpu {
        // Binding the whole group would take the GPU from the driver that is to use the drive.
        let fix = "VFIO does not take a drive whose group has a GPU that its driver uses: use a \
                   slot whose switch or root port has ACS; or turn ACS on in the firmware";
        return finding.says(Verdict::Fail, shared.join("; ")).fix(fix);
    }
    if !shared.is_empty() {
        let fix = "bind with --whole-group if you can do without the others; or use a slot whose \
                    switch or root port has ACS; or turn ACS on in the firmware";
        return finding.says(Verdict::Warn, shared.join("; ")).fix(fix);
    }
    let found = format!("{} drives, none shares its group with others", facts.drives.len());
    finding.says(Verdict::Ok, found)
}
