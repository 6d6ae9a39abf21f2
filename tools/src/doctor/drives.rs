//! Checks that each drive reaches the memory that a route needs. The drives are only read, never
//! written.

use std::sync::Arc;

use anyhow::Context as _;
use gio_kernels::cuda::DoorbellKind;
use nvme_bind::doctor::{Finding, Verdict};
use nvme_driver::platform::p2p;
use nvme_driver::platform::vfio::VfioSpace;
use nvme_driver::{
    Clock, Controller, ControllerOptions, DmaMemory, DmaSlice, DmaSpace as _, MonotonicClock,
};
use ripieno_stack::{
    CudaChoice, Devices, DriveAddress, Gpu, Route, check_drive, open_drive, prove_reach,
    trial_bytes, try_kernel, vfio_space,
};

use crate::problem::user_error;

use super::findings::{Findings, check, failed};

/// Name of the check of a drive that could not be examined.
pub(super) const UNANSWERED: &str = "drive";

/// Tests every route with every drive.
pub(super) fn try_all(
    drives: &[DriveAddress],
    choice: CudaChoice,
    gpu: Option<&Arc<Gpu>>,
    findings: &mut Findings<'_>,
) -> anyhow::Result<()> {
    let mut addresses = Vec::new();
    for drive in drives {
        match drive {
            DriveAddress::Vfio(address) => addresses.push(*address),
            DriveAddress::Ng(_) => findings.add(try_passthrough(drive))?,
        }
    }
    if addresses.is_empty() {
        return Ok(());
    }
    let space = match vfio_space().map_err(user_error) {
        Ok(space) => space,
        Err(error) => return findings.add(failed(check(UNANSWERED, "VFIO"), &error)),
    };
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let mut controllers = Vec::new();
    for address in addresses {
        let options = ControllerOptions::default();
        let opened = open_drive(&space, address, &clock, options)
            .and_then(|drive| check_drive(&drive).map(|()| drive))
            .map_err(user_error);
        match opened {
            Ok(drive) => controllers.push(drive),
            Err(error) => {
                let finding = check(UNANSWERED, format!("vfio:{address}"));
                findings.add(failed(finding, &error).fix("see nvme-bind list, and above"))?;
            }
        }
    }
    if let Some(gpu) = gpu.filter(|_| !controllers.is_empty()) {
        findings.add(doorbells(&controllers, gpu))?;
    }
    for &route in &Route::ALL {
        findings.add(try_one(route, &space, &mut controllers, choice, gpu))?;
    }
    for mut drive in controllers {
        if let Err(error) = drive.shutdown() {
            let finding = check(UNANSWERED, format!("vfio:{}", drive.id()));
            findings.add(failed(finding, &error.into()))?;
        }
    }
    Ok(())
}

/// Checks that the kernel's driver passes commands to a drive on. Its own memory is host memory.
fn try_passthrough(drive: &DriveAddress) -> Finding {
    let mut devices = Devices::drives(std::slice::from_ref(drive));
    match devices.attach(&ControllerOptions::default(), None).map_err(user_error) {
        Ok(()) => check("passthrough", drive.to_string())
            .about(Route::Host.name())
            .says(Verdict::Ok, "the kernel's driver passes commands on; nothing was written"),
        Err(error) => failed(check(UNANSWERED, drive.to_string()), &error),
    }
}

/// Checks that the drives' doorbells can be mapped into the GPU, which rings them on every route.
fn doorbells(drives: &[Controller], gpu: &Gpu) -> Finding {
    let finding = check("doorbells", "Doorbells");
    for drive in drives {
        if let Err(error) = gpu.device().register_doorbells(drive.bus(), DoorbellKind::Io) {
            // The remedy depends on the driver's error code and is in the message.
            return failed(finding, &user_error(error.into()));
        }
    }
    let found = "those of every drive are mapped into the GPU; that it rings them is tried below, \
                 with the routes direct and staged";
    finding.says(Verdict::Ok, found)
}

fn try_one(
    route: Route,
    space: &Arc<VfioSpace>,
    drives: &mut [Controller],
    choice: CudaChoice,
    gpu: Option<&Arc<Gpu>>,
) -> Finding {
    let finding = check(route.name(), format!("route {route}")).about(route.name());
    let needed = |drive: &Controller| p2p::scratch_bytes(drive).max(trial_bytes(drive));
    let bytes = drives.iter().map(needed).max().unwrap_or(0);
    if drives.is_empty() {
        return finding.says(Verdict::Skip, "no drive could be opened");
    }
    let memory: anyhow::Result<Arc<dyn DmaMemory>> = match (route, gpu) {
        (Route::Host, _) => space.alloc(bytes).context("memory to try it with"),
        (_, None) => {
            return finding
                .says(Verdict::Fail, "no GPU that can be used")
                .fix("see above; data goes to host memory with --executor host");
        }
        (Route::Staged, Some(gpu)) => gpu.staging(&**space, bytes).map_err(user_error),
        (Route::Direct, Some(gpu)) => {
            gpu.mapped(&**space, bytes).map(|(memory, _)| memory).map_err(user_error)
        }
    };
    let memory = match memory {
        Ok(memory) => memory,
        Err(error) => return failed(finding, &error),
    };
    // The host route is tested with the host's I/O kernel.
    let gpu = gpu.filter(|_| route != Route::Host);
    let count = drives.len();
    for drive in drives {
        let id = drive.id().to_owned();
        match try_drive(drive, choice, gpu, &memory, bytes) {
            Ok(None) => {}
            Ok(Some(why)) => {
                let found = format!("vfio:{id}: {why}");
                return finding.says(Verdict::Fail, found).fix("see above what the machine lacks");
            }
            Err(error) => {
                return failed(finding, &error.context(format!("vfio:{id}")));
            }
        }
    }
    let kernel = match gpu {
        Some(_) => "the I/O kernel on the GPU read an LBA of each through a queue in it",
        None => "the I/O kernel on the GPU was not tried with it",
    };
    let found = format!(
        "{count} drives fetch commands and data from this memory, and write both into it; \
         {kernel}; nothing was written to them"
    );
    finding.says(Verdict::Ok, found)
}

/// Tests that drive and memory, and GPU and drive, reach each other. Returns why not, or `None`.
fn try_drive(
    drive: &mut Controller,
    choice: CudaChoice,
    gpu: Option<&Arc<Gpu>>,
    memory: &Arc<dyn DmaMemory>,
    bytes: usize,
) -> anyhow::Result<Option<String>> {
    let scratch = DmaSlice::new(memory.clone(), 0, bytes)?;
    if let Some(why) = prove_reach(drive, &scratch).map_err(user_error)? {
        return Ok(Some(why));
    }
    let Some(gpu) = gpu else { return Ok(None) };
    try_kernel(drive, gpu, choice, memory).map_err(user_error)
}
