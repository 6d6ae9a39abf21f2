//! `doctor`: what stands between this machine and drives that write to GPU memory. Each check says
//! what it looked at, what it found and how to mend it; none of them is an error of the program.

mod gpu;
mod iommu;
mod limits;
mod pcie;
mod vfio;

use serde::Serialize;
use serde_json::json;

use crate::command::{Host, Reply};
use crate::drive::{self, Drive};
use crate::gpu::{Gpu, gpus};
use crate::pci::{self, Function};
use crate::report::{self, Paint};
use crate::root::Root;
use crate::usage::{Scene, Use};

/// The exit code of `doctor --strict` when a check failed.
pub(crate) const EXIT_UNFIT: u8 = 6;

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verdict {
    Ok,
    /// It will work, but worse than it could, or only for root.
    Warn,
    Fail,
    /// There is nothing here to judge.
    Skip,
}

/// What a check says.
#[derive(Debug, Serialize)]
pub(crate) struct Finding {
    pub(crate) id: &'static str,
    pub(crate) title: &'static str,
    pub(crate) looked_at: Vec<&'static str>,
    pub(crate) verdict: Verdict,
    pub(crate) found: String,
    pub(crate) mend: Option<String>,
}

impl Finding {
    fn new(id: &'static str, title: &'static str, looked_at: &[&'static str]) -> Self {
        let looked_at = looked_at.to_vec();
        Self { id, title, looked_at, verdict: Verdict::Skip, found: String::new(), mend: None }
    }

    fn says(mut self, verdict: Verdict, found: impl Into<String>) -> Self {
        (self.verdict, self.found) = (verdict, found.into());
        self
    }

    fn mend(mut self, how: impl Into<String>) -> Self {
        self.mend = Some(how.into());
        self
    }
}

/// What several checks need.
struct Patient<'a> {
    root: &'a Root,
    functions: Vec<Function>,
    drives: Vec<Drive>,
    gpus: Vec<Gpu>,
    cmdline: String,
}

impl Patient<'_> {
    /// The value of a kernel parameter, the last if it is there twice; empty if it has none.
    fn parameter(&self, name: &str) -> Option<&str> {
        let words = self.cmdline.split_whitespace().rev();
        words.filter_map(|word| word.strip_prefix(name)).find_map(|rest| match rest {
            "" => Some(""),
            _ => rest.strip_prefix('='),
        })
    }
}

pub(crate) fn run(host: &Host<'_>, strict: bool, paint: Paint) -> Reply {
    let findings = examine(host.root);
    let failed = findings.iter().filter(|finding| finding.verdict == Verdict::Fail).count();
    let json = json!({ "checks": findings, "fit": failed == 0 });
    let mut reply = Reply::new(report::doctor(&findings, paint), json);
    if strict && failed > 0 {
        reply.code = EXIT_UNFIT;
    }
    reply
}

/// All checks, in the order in which it makes sense to mend things.
pub(crate) fn examine(root: &Root) -> Vec<Finding> {
    let patient = Patient {
        root,
        functions: pci::functions(root),
        drives: drive::drives(root),
        gpus: gpus(root),
        cmdline: root.text("/proc/cmdline").unwrap_or_default(),
    };
    let checks: &[fn(&Patient<'_>) -> Finding] = &[
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
    checks.iter().map(|check| check(&patient)).collect()
}

fn machine(patient: &Patient<'_>) -> Finding {
    let finding =
        Finding::new("machine", "Machine", &["/proc/cpuinfo", "/proc/sys/kernel/osrelease"]);
    let kernel = patient.root.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let kernel = if kernel.is_empty() { "an unknown kernel".into() } else { kernel };
    let cpu = patient.root.text("/proc/cpuinfo").unwrap_or_default();
    let flags = cpu.lines().find(|line| line.starts_with("flags"));
    if flags.is_some_and(|line| line.split(' ').any(|flag| flag == "hypervisor")) {
        let found = format!("a virtual machine with Linux {kernel}");
        let mend = "only what the hypervisor passes through can be bound: it must give this \
                    machine the drive, the GPU, and an IOMMU (QEMU: -device \
                    intel-iommu,intremap=on)";
        return finding.says(Verdict::Warn, found).mend(mend);
    }
    finding.says(Verdict::Ok, format!("Linux {kernel}"))
}

fn drives(patient: &Patient<'_>) -> Finding {
    let looked_at = ["/sys/bus/pci/devices", "/sys/block", "/proc/mounts", "/proc/swaps"];
    let finding = Finding::new("drives", "NVMe drives that could be bound", &looked_at);
    if patient.drives.is_empty() {
        let found = format!("no NVMe drive among {} PCI functions", patient.functions.len());
        let mend = "none is needed to try things out: the software controller is the default of \
                    ripieno. Behind a RAID controller or Intel VMD, turn that off in the firmware";
        return finding.says(Verdict::Fail, found).mend(mend);
    }
    let scene = Scene::read(patient.root);
    let is_free = |drive: &&Drive| {
        let usage = scene.usage(patient.root, &drive.function, false);
        !usage.uses.iter().any(Use::is_active)
    };
    let free = patient.drives.iter().filter(is_free).count();
    let found = format!("{} NVMe drives, {free} of them not in use", patient.drives.len());
    if free == 0 {
        return finding
            .says(Verdict::Fail, found)
            .mend("free one, or add one; see `nvme-bind list`");
    }
    finding.says(Verdict::Ok, found)
}
