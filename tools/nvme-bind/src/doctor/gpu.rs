//! Checks of the GPU: driver, BAR size and the modules that map it.

use super::{Facts, Finding, Verdict};
use crate::gpu::Gpu;
use crate::report::binary_size;

/// BAR size of cards without Resizable BAR.
const SMALL_WINDOW_BYTES: u64 = 256 << 20;

/// R565: the first driver that accepts the committed PTX (CUDA 12.7).
const DRIVER_MIN: [u32; 3] = [565, 0, 0];
/// The first driver that maps other devices' registers on kernels without follow_pfn (it uses
/// follow_pfnmap_start).
const DRIVER_MAPS: [u32; 3] = [570, 133, 7];
/// The first kernel that requires it.
const KERNEL_PFNMAP: [u32; 2] = [6, 12];

const NO_GPU: &str = "no GPU on the PCI bus; host memory is what drives can reach here";

pub(super) fn driver(facts: &Facts<'_>) -> Finding {
    let looked_at = [
        "/proc/driver/nvidia/version",
        "/proc/driver/nvidia/params",
        "/proc/sys/kernel/osrelease",
        "/sys/bus/pci/devices/*/driver",
    ];
    let finding = Finding::new("nvidia", "NVIDIA driver", &looked_at);
    let nvidia: Vec<_> = facts.gpus.iter().filter(|gpu| gpu.is_nvidia()).collect();
    if nvidia.is_empty() {
        let found = if facts.gpus.is_empty() { NO_GPU } else { "no GPU of NVIDIA" };
        return finding.says(Verdict::Skip, found);
    }
    let root = facts.root;
    let version = root.text("/proc/driver/nvidia/version").unwrap_or_default();
    let Some(line) = version.lines().next().filter(|line| !line.is_empty()) else {
        let without = nvidia.iter().filter(|gpu| gpu.function.driver.as_deref() != Some("nvidia"));
        let found = format!("not loaded; {} GPUs are not with it", without.count());
        return finding.says(Verdict::Fail, found).fix("install the driver with its open modules");
    };
    let found = line.trim_start_matches("NVRM version:").trim();
    let (driver, kernel) = (version_of(found), kernel_of(facts));
    let parameters = root.text("/proc/driver/nvidia/params").unwrap_or_default();
    let may_map = parameters.contains("PeerMappingOverride=1");
    let mapping =
        if may_map { "PeerMappingOverride=1 is set" } else { "PeerMappingOverride is not set" };
    let found = format!("{found}; {mapping}");
    if driver.is_some_and(|driver| driver < DRIVER_MIN) {
        let fix = "the I/O kernel needs R565 (CUDA 12.7) or later: update the driver";
        return finding.says(Verdict::Fail, found).fix(fix);
    }
    if kernel.is_some_and(|kernel| kernel >= KERNEL_PFNMAP)
        && driver.is_some_and(|driver| driver < DRIVER_MAPS)
    {
        let [major, minor] = kernel.unwrap_or_default();
        let fix = format!(
            "on Linux {major}.{minor} it cannot map a drive's doorbells into the GPU \
             (cuMemHostRegister returns 1): update it to 570.133.07 or later"
        );
        return finding.says(Verdict::Fail, found).fix(fix);
    }
    if !may_map {
        let fix = "without it only a process with CAP_SYS_ADMIN may map a drive's doorbells into \
                   the GPU (else cuMemHostRegister returns 800): options nvidia \
                   NVreg_RegistryDwords=\"PeerMappingOverride=1\" in /etc/modprobe.d";
        return finding.says(Verdict::Ok, found).fix(fix);
    }
    finding.says(Verdict::Ok, found)
}

/// Parses the driver's version line: `... Module for x86_64  570.86.15  Release Build`.
fn version_of(line: &str) -> Option<[u32; 3]> {
    line.split_whitespace().find_map(|word| {
        let mut parts = word.split('.').map(|part| part.parse::<u32>().ok());
        // Two or three numbers.
        let (major, minor) = (parts.next()??, parts.next()??);
        let patch = parts.next().map_or(Some(0), |patch| patch)?;
        Some([major, minor, patch])
    })
}

/// Returns the first two numbers of the kernel's version.
fn kernel_of(facts: &Facts<'_>) -> Option<[u32; 2]> {
    let release = facts.root.text("/proc/sys/kernel/osrelease")?;
    let mut parts = release.split(['.', '-']).map(|part| part.parse().ok());
    Some([parts.next()??, parts.next()??])
}

pub(super) fn window(facts: &Facts<'_>) -> Finding {
    let looked_at = ["/sys/bus/pci/devices/*/resource", "/sys/bus/pci/devices/*/resource*_resize"];
    let finding = Finding::new("bar1", "Window into GPU memory (BAR1)", &looked_at);
    if facts.gpus.is_empty() {
        return finding.says(Verdict::Skip, NO_GPU);
    }
    let size = |bytes: u64| match bytes {
        0 => "no address".to_owned(),
        bytes => binary_size(bytes),
    };
    let mut parts = Vec::new();
    for gpu in &facts.gpus {
        let more = gpu.sizes.iter().max().filter(|&&most| most > gpu.window_bytes);
        let more = more.map(|&most| format!(" of up to {}", size(most))).unwrap_or_default();
        let (bdf, name, window) = (gpu.function.bdf, &gpu.name, size(gpu.window_bytes));
        parts.push(format!("{bdf} {name}: {window}{more}"));
    }
    let found = parts.join("; ");
    let smallest = facts.gpus.iter().map(|gpu| gpu.window_bytes).min().unwrap_or(0);
    let fix = "peers see only what is in the window: turn on Above 4G Decoding and Resizable BAR \
                in the firmware; on data centre cards, nvidia-smi and displaymodeselector can set \
                the size of BAR1";
    match smallest {
        0 => finding.says(Verdict::Fail, found).fix(fix),
        bytes if bytes <= SMALL_WINDOW_BYTES => finding.says(Verdict::Warn, found).fix(fix),
        _ => finding.says(Verdict::Ok, found),
    }
}

pub(super) fn gdrdrv(facts: &Facts<'_>) -> Finding {
    let looked_at = ["/sys/module/gdrdrv", "/dev/gdrdrv"];
    let finding = Finding::new("gdrdrv", "GDRCopy (gdrdrv)", &looked_at);
    if !facts.gpus.iter().any(Gpu::is_nvidia) {
        return finding.says(Verdict::Skip, "no GPU of NVIDIA");
    }
    let root = facts.root;
    let fix = "it maps GPU memory into a process, which VFIO can then hand to the drive: install \
                the gdrdrv-dkms package of GDRCopy and `modprobe gdrdrv`";
    match (root.exists("/sys/module/gdrdrv"), root.owner("/dev/gdrdrv")) {
        (true, Some((_, _, mode))) if mode & 0o006 == 0o006 => {
            finding.says(Verdict::Ok, "loaded, and open to all users")
        }
        (true, Some((uid, gid, mode))) => {
            let found = format!("loaded; /dev/gdrdrv is {uid}:{gid} {mode:04o}");
            finding.says(Verdict::Warn, found).fix("let the user of the drive open /dev/gdrdrv")
        }
        (true, None) => {
            let found = "loaded, but /dev/gdrdrv is not there";
            finding.says(Verdict::Warn, found).fix("the insmod.sh of GDRCopy makes the node")
        }
        (false, _) => finding.says(Verdict::Warn, "not loaded").fix(fix),
    }
}
