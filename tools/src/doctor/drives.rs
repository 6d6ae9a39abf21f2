//! Routes to real drives: whether each reaches the memory that a route needs. Nothing is written to
//! them.

use std::sync::Arc;

use anyhow::Context as _;
use gio_kernels::cuda::DoorbellKind;
use nvme_bind::doctor::{Finding, Verdict};
use nvme_driver::platform::p2p;
use nvme_driver::platform::vfio::{PciAddress, VfioSpace};
use nvme_driver::{
    Clock, Controller, ControllerOptions, DmaMemory, DmaSlice, DmaSpace as _, MonotonicClock,
};
use ripieno_stack::{Gpu, Route, check_drive, open_drive, prove_reach, vfio_space};

use crate::problem::told;

use super::findings::{Findings, check, failed};

/// The check of a drive that could not be looked at.
pub(super) const UNANSWERED: &str = "drive";

/// Every route, for every drive.
pub(super) fn try_all(
    addresses: &[PciAddress],
    gpu: Option<&Arc<Gpu>>,
    findings: &mut Findings<'_>,
) -> anyhow::Result<()> {
    let space = match vfio_space().map_err(told) {
        Ok(space) => space,
        Err(error) => return findings.add(failed(check(UNANSWERED, "VFIO"), &error)),
    };
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let mut controllers = Vec::new();
    for address in addresses {
        let options = ControllerOptions::default();
        let opened = open_drive(&space, *address, &clock, options)
            .and_then(|drive| check_drive(&drive).map(|()| drive))
            .map_err(told);
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
        findings.add(try_one(route, &space, &mut controllers, gpu))?;
    }
    for mut drive in controllers {
        if let Err(error) = drive.shutdown() {
            let finding = check(UNANSWERED, format!("vfio:{}", drive.id()));
            findings.add(failed(finding, &error.into()))?;
        }
    }
    Ok(())
}

/// A GPU has to ring the drives' doorbells, whatever the route of the data.
fn doorbells(drives: &[Controller], gpu: &Gpu) -> Finding {
    let finding = check("doorbells", "Doorbells");
    for drive in drives {
        if let Err(error) = gpu.device().register_doorbells(drive.bus(), DoorbellKind::Io) {
            return failed(finding, &told(error.into())).fix(
                "the nvidia module may have to be told: options nvidia \
                 NVreg_RegistryDwords=\"PeerMappingOverride=1\" in /etc/modprobe.d",
            );
        }
    }
    finding.says(Verdict::Ok, "the GPU can ring those of every drive")
}

fn try_one(
    route: Route,
    space: &Arc<VfioSpace>,
    drives: &mut [Controller],
    gpu: Option<&Arc<Gpu>>,
) -> Finding {
    let finding = check(route.name(), format!("route {route}")).about(route.name());
    let bytes = drives.iter().map(p2p::scratch_bytes).max().unwrap_or(0);
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
        (Route::Staged, Some(gpu)) => gpu.staging(&**space, bytes).map_err(told),
        (Route::Direct, Some(gpu)) => {
            gpu.mapped(&**space, bytes).map(|(memory, _)| memory).map_err(told)
        }
    };
    let scratch = memory.and_then(|memory| Ok(DmaSlice::new(memory, 0, bytes)?));
    let scratch = match scratch {
        Ok(scratch) => scratch,
        Err(error) => return failed(finding, &error),
    };
    let count = drives.len();
    for drive in drives {
        let id = drive.id().to_owned();
        match prove_reach(drive, &scratch).map_err(told) {
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
    let found = format!(
        "{count} drives fetch commands and data from this memory, and write both into it; nothing \
         was written to them"
    );
    finding.says(Verdict::Ok, found)
}
