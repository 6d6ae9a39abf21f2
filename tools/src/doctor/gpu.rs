//! Checks of the GPU: driver, device, kernels, and access to its memory.

use std::sync::Arc;

use gio_kernels::cuda::{CudaDevice, CudaDriver, WritesOrdering};
use nvme_bind::doctor::{Finding, Verdict};
use ripieno_stack::{CudaChoice, Gpu};

use crate::gpu::GpuReport;

use super::findings::{Findings, check};

const NO_DRIVER: &str = "without the driver there is nothing to look at";
const NO_GPU: &str = "without a GPU there is nothing to look at";

/// Checks the GPU and returns it if it is usable.
pub(super) fn examine(
    choice: CudaChoice,
    findings: &mut Findings<'_>,
) -> anyhow::Result<Option<Arc<Gpu>>> {
    let driver = check("driver", "CUDA driver");
    let loaded = match CudaDriver::load() {
        Ok(loaded) => loaded,
        Err(error) => {
            let driver = driver.says(Verdict::Fail, error.to_string()).fix(
                "everything else works without a GPU, with --executor host, which is the default",
            );
            return skip_after(driver, NO_DRIVER, findings);
        }
    };
    let version = loaded.version();
    let (major, minor, gpus) = (version / 1000, version % 1000 / 10, loaded.devices());
    let found = format!("for CUDA {major}.{minor}; GPUs: {gpus}");
    findings.add(driver.says(Verdict::Ok, found))?;
    let finding = check("gpu", "GPU");
    let device = match loaded.device(choice.ordinal) {
        Ok(device) => device,
        Err(error) => {
            let finding = finding.says(Verdict::Fail, error.to_string()).fix("choose with --gpu");
            return skip_after(finding, NO_GPU, findings);
        }
    };
    findings.add(finding.says(Verdict::Ok, device.report().to_string()))?;
    let kernel = check("kernel", "I/O kernel");
    let gpu = match Gpu::on(device.clone(), choice) {
        Ok(gpu) => gpu,
        Err(error) => {
            return skip_after(kernel.says(Verdict::Fail, error.to_string()), NO_GPU, findings);
        }
    };
    findings.add(kernel.says(Verdict::Ok, "the driver compiled the PTX"))?;
    findings.add(partition(&gpu))?;
    findings.add(ordering(&device))?;
    findings.add(gdrcopy(&gpu))?;
    Ok(Some(gpu))
}

fn gdrcopy(gpu: &Gpu) -> Finding {
    let finding = check("gdrcopy", "GDRCopy");
    match gpu.gdrcopy() {
        Ok(_) => finding.says(Verdict::Ok, "it maps GPU memory into a process"),
        Err(error) => finding.says(Verdict::Warn, error.to_string()).fix(
            "only drives need it, for the direct route and for queues in GPU memory: install \
             libgdrapi, and the gdrdrv module of the same version",
        ),
    }
}

/// Adds `last`, and skips the checks after it for this reason.
fn skip_after(
    last: Finding,
    why: &str,
    findings: &mut Findings<'_>,
) -> anyhow::Result<Option<Arc<Gpu>>> {
    let all = [
        ("driver", "CUDA driver"),
        ("gpu", "GPU"),
        ("kernel", "I/O kernel"),
        ("partition", "SMs of its own"),
        ("ordering", "Order of peers' writes"),
        ("gdrcopy", "GDRCopy"),
    ];
    let rest = all.iter().position(|(id, _)| *id == last.id).map_or(0, |last| last + 1);
    findings.add(last)?;
    for &(id, title) in &all[rest..] {
        findings.add(check(id, title).says(Verdict::Skip, why))?;
    }
    Ok(None)
}

fn partition(gpu: &Gpu) -> Finding {
    let finding = check("partition", "SMs of its own");
    let Some(report) = gpu.report() else { return finding };
    let report = GpuReport::new(&report);
    let found = report.partition_words();
    match &report.partition_missing {
        None => finding.says(Verdict::Ok, found),
        Some(_) => finding
            .says(Verdict::Warn, found)
            .fix("green contexts came with CUDA 12.5: update the driver (R580 or later is best)"),
    }
}

/// Checks that data a drive wrote into GPU memory is visible no later than its completion.
fn ordering(device: &CudaDevice) -> Finding {
    let finding = check("ordering", "Order of peers' writes");
    let report = device.report();
    let found = match report.writes_ordering {
        WritesOrdering::Owner => "in order for the kernels of the GPU that owns the memory",
        WritesOrdering::AllDevices => "in order for the kernels of all GPUs",
        WritesOrdering::None => "not in order",
        _ => "the driver does not say",
    };
    if report.writes_ordering.is_ordered() {
        return finding.says(Verdict::Ok, found);
    }
    if report.flush_remote_writes {
        let found = format!("{found}; streams flush them where they wait for a layer");
        return finding.says(Verdict::Warn, found);
    }
    finding
        .says(Verdict::Fail, format!("{found}, and streams cannot flush them"))
        .fix("the staged route does not need it; for the direct one, another GPU is needed")
}
