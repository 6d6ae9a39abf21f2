//! The GPU's part: driver, device, what runs there, and what opens its memory.

use std::sync::Arc;

use gio_kernels::cuda::{CudaDevice, CudaDriver, WritesOrdering};

use crate::cli::GpuChoice;
use crate::gpu::Gpu;

use super::{Finding, Verdict};

const NO_DRIVER: &str = "without the driver there is nothing to look at";
const NO_GPU: &str = "without a GPU there is nothing to look at";

/// What is there, and the GPU if it can be used.
pub(super) fn examine(choice: GpuChoice) -> (Vec<Finding>, Option<Arc<Gpu>>) {
    let driver = Finding::new("driver", "NVIDIA driver");
    let loaded = match CudaDriver::load() {
        Ok(loaded) => loaded,
        Err(error) => {
            let driver = driver.says(Verdict::Fails, error.to_string()).mend(
                "everything else works without a GPU, with --executor host, which is the default",
            );
            return (skipped(driver, NO_DRIVER), None);
        }
    };
    let version = loaded.version();
    let (major, minor, gpus) = (version / 1000, version % 1000 / 10, loaded.devices());
    let found = format!("for CUDA {major}.{minor}; GPUs: {gpus}");
    let driver = driver.says(Verdict::Works, found);
    let finding = Finding::new("gpu", "GPU");
    let device = match loaded.device(choice.ordinal) {
        Ok(device) => device,
        Err(error) => {
            let finding = finding.says(Verdict::Fails, error.to_string()).mend("choose with --gpu");
            let mut findings = vec![driver];
            findings.extend(skipped(finding, NO_GPU));
            return (findings, None);
        }
    };
    let finding = finding.says(Verdict::Works, device.report().to_string());
    let mut findings = vec![driver, finding];
    let kernel = Finding::new("kernel", "I/O kernel");
    let gpu = match Gpu::on(device.clone(), choice) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            findings.extend(skipped(kernel.says(Verdict::Fails, error.to_string()), NO_GPU));
            return (findings, None);
        }
    };
    findings.push(kernel.says(Verdict::Works, "the driver compiled the PTX"));
    findings.extend(gpu.as_ref().map(|gpu| partition(gpu)));
    findings.push(ordering(&device));
    findings.extend(gpu.as_ref().map(|gpu| gdrcopy(gpu)));
    (findings, gpu)
}

fn gdrcopy(gpu: &Gpu) -> Finding {
    let finding = Finding::new("gdrcopy", "GDRCopy");
    match gpu.gdrcopy() {
        Ok(_) => finding.says(Verdict::Works, "it maps GPU memory into a process"),
        Err(error) => finding.says(Verdict::Limited, error.to_string()).mend(
            "only drives need it, for the direct route and for queues in GPU memory: install \
             libgdrapi, and the gdrdrv module of the same version",
        ),
    }
}

/// `last`, and the checks after it, for this reason.
fn skipped(last: Finding, why: &str) -> Vec<Finding> {
    let all = [
        ("driver", "NVIDIA driver"),
        ("gpu", "GPU"),
        ("kernel", "I/O kernel"),
        ("partition", "SMs of its own"),
        ("ordering", "Order of peers' writes"),
        ("gdrcopy", "GDRCopy"),
    ];
    let rest = all.into_iter().skip_while(|(id, _)| *id != last.id).skip(1);
    let rest: Vec<_> =
        rest.map(|(id, title)| Finding::new(id, title).says(Verdict::Skipped, why)).collect();
    std::iter::once(last).chain(rest).collect()
}

fn partition(gpu: &Gpu) -> Finding {
    let finding = Finding::new("partition", "SMs of its own");
    let Some(report) = gpu.report() else { return finding };
    let found = report.partition_words();
    match &report.partition_missing {
        None => finding.says(Verdict::Works, found),
        Some(_) => finding
            .says(Verdict::Limited, found)
            .mend("green contexts came with CUDA 12.5: update the driver (R580 or later is best)"),
    }
}

/// What a drive wrote into GPU memory must be there when its completion is.
fn ordering(device: &CudaDevice) -> Finding {
    let finding = Finding::new("ordering", "Order of peers' writes");
    let report = device.report();
    let found = match report.writes_ordering {
        WritesOrdering::Owner => "in order for the kernels of the GPU that owns the memory",
        WritesOrdering::AllDevices => "in order for the kernels of all GPUs",
        WritesOrdering::None => "not in order",
        _ => "the driver does not say",
    };
    if report.writes_ordering.is_ordered() {
        return finding.says(Verdict::Works, found);
    }
    if report.flush_remote_writes {
        let found = format!("{found}; streams flush them where they wait for a layer");
        return finding.says(Verdict::Limited, found);
    }
    finding
        .says(Verdict::Fails, format!("{found}, and streams cannot flush them"))
        .mend("the staged route does not need it; for the direct one, another GPU is needed")
}
