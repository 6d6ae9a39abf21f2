//! `doctor`: checks the obstacles to drives writing to GPU memory on this machine. Each check
//! reports its sources, its finding and the fix; a failed check is not an error of the program.

mod finding;
mod gpu;
mod iommu;
mod limits;
mod pcie;
mod vfio;

use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value};

use crate::drive::{self, Drive};
use crate::gpu::{Gpu, gpus};
use crate::pci::Root;
use crate::pci::{self, Function, Use};
use crate::report::Paint;
use crate::usage::{Claims, Scene, Usage};

pub use finding::{Finding, Report, Verdict};

/// Exit code of `doctor --strict` if a check failed.
pub(crate) const EXIT_UNFIT: u8 = 6;

/// Data shared by several checks.
struct Facts<'a> {
    root: &'a Root,
    functions: Vec<Function>,
    drives: Vec<Drive>,
    gpus: Vec<Gpu>,
    cmdline: String,
}

impl Facts<'_> {
    /// Returns the value of a kernel parameter, the last if repeated; empty if it has no value.
    fn parameter(&self, name: &str) -> Option<&str> {
        let words = self.cmdline.split_whitespace().rev();
        words.filter_map(|word| word.strip_prefix(name)).find_map(|rest| match rest {
            "" => Some(""),
            _ => rest.strip_prefix('='),
        })
    }
}

/// Runs all checks on this machine, in the order in which problems should be fixed, and passes each
/// finding to `each` immediately.
///
/// # Errors
/// Returns the first error of `each`, or an error if the root directory cannot be opened.
pub fn machine_checks<E: From<std::io::Error>>(
    mut each: impl FnMut(Finding) -> Result<(), E>,
) -> Result<(), E> {
    examine(&Root::new(Path::new("/"))?, &mut each)
}

/// Runs `nvme-bind doctor`: writes the report, and returns the exit code.
pub(crate) fn run(
    root: &Root,
    strict: bool,
    as_json: bool,
    paint: Paint,
    out: &mut dyn Write,
) -> std::io::Result<u8> {
    let mut report = Report::new(out, as_json, paint)?;
    examine(root, &mut |finding| report.add(&finding))?;
    let failed = report.count(Verdict::Fail);
    report.finish(Map::from_iter([("fit".to_owned(), Value::from(failed == 0))]), "")?;
    Ok(if strict && failed > 0 { EXIT_UNFIT } else { 0 })
}

/// Runs all checks on the machine, in the order in which problems should be fixed, and passes each
/// finding to `each` immediately.
///
/// # Errors
/// Returns the first error of `each`.
pub(crate) fn examine<E>(
    root: &Root,
    each: &mut dyn FnMut(Finding) -> Result<(), E>,
) -> Result<(), E> {
    let facts = Facts {
        root,
        functions: pci::functions(root),
        drives: drive::drives(root),
        gpus: gpus(root),
        cmdline: root.text("/proc/cmdline").unwrap_or_default(),
    };
    let checks: &[fn(&Facts<'_>) -> Finding] = &[
        machine,
        drives,
        iommu::present,
        iommu::mode,
        vfio::modules,
        vfio::node,
        vfio::groups,
        pcie::acs,
        limits::memlock,
        limits::hugepages,
        gpu::driver,
        gpu::window,
        pcie::nearest,
        gpu::gdrdrv,
    ];
    checks.iter().try_for_each(|check| each(check(&facts)))
}

fn machine(facts: &Facts<'_>) -> Finding {
    let finding =
        Finding::new("machine", "Machine", &["/proc/cpuinfo", "/proc/sys/kernel/osrelease"]);
    let kernel = facts.root.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let kernel = if kernel.is_empty() { "an unknown kernel".into() } else { kernel };
    let cpu = facts.root.text("/proc/cpuinfo").unwrap_or_default();
    let flags = cpu.lines().find(|line| line.starts_with("flags"));
    if flags.is_some_and(|line| line.split(' ').any(|flag| flag == "hypervisor")) {
        let found = format!("a virtual machine with Linux {kernel}");
        let fix = "only what the hypervisor passes through can be bound: it must give this \
                    machine the drive, the GPU, and an IOMMU (QEMU: -device \
                    intel-iommu,intremap=on)";
        return finding.says(Verdict::Warn, found).fix(fix);
    }
    finding.says(Verdict::Ok, format!("Linux {kernel}"))
}

fn drives(facts: &Facts<'_>) -> Finding {
    let looked_at = ["/sys/bus/pci/devices", "/sys/block", "/proc/mounts", "/proc/swaps"];
    let finding = Finding::new("drives", "NVMe drives that could be bound", &looked_at);
    if facts.drives.is_empty() {
        let found = format!("no NVMe drive among {} PCI functions", facts.functions.len());
        let fix = "none is needed to try things out: the software controller is the default of \
                    ripieno. Behind a RAID controller or Intel VMD, turn that off in the firmware";
        return finding.says(Verdict::Fail, found).fix(fix);
    }
    let scene = Scene::read(facts.root);
    let usages: Vec<Usage> = facts
        .drives
        .iter()
        .map(|drive| scene.usage(facts.root, &drive.function, Claims::Try))
        .collect();
    let free = usages.iter().filter(|usage| !usage.uses.iter().any(Use::is_active)).count();
    let mut found = format!("{} NVMe drives, {free} of them not in use", facts.drives.len());
    if free > 0 && usages.iter().any(|usage| !usage.blind.is_empty()) {
        found += " as far as this user can see; `nvme-bind list` says what is not visible";
    }
    if free == 0 {
        return finding
            .says(Verdict::Fail, found)
            .fix("free one, or add one; see `nvme-bind list`");
    }
    finding.says(Verdict::Ok, found)
}
