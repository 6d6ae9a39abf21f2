//! Routes to real drives: whether each reaches the memory that a route needs. Nothing is written to
//! them.

use std::sync::Arc;

use anyhow::Context as _;
use gio_kernels::cuda::DoorbellKind;
use nvme_driver::platform::p2p;
use nvme_driver::platform::vfio::{PciAddress, VfioSpace};
use nvme_driver::{
    Clock, Controller, ControllerOptions, DmaMemory, DmaSlice, DmaSpace as _, MonotonicClock,
};

use crate::cli::Route;
use crate::drives;
use crate::gpu::Gpu;

use super::{Finding, Verdict};

/// The check of a drive that could not be looked at.
pub(super) const UNANSWERED: &str = "drive";

/// Every route, for every drive.
pub(super) fn try_all(addresses: &[PciAddress], gpu: Option<&Arc<Gpu>>) -> Vec<Finding> {
    let space = match drives::space() {
        Ok(space) => space,
        Err(error) => {
            let finding = Finding::new(UNANSWERED, "VFIO").fails(&error);
            return vec![finding.mend("see nvme-bind doctor")];
        }
    };
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let mut controllers = Vec::new();
    let mut findings = Vec::new();
    for address in addresses {
        let options = ControllerOptions::default();
        let opened = drives::open(&space, *address, &clock, options)
            .and_then(|drive| drives::usable(&drive).map(|()| drive).map_err(Into::into));
        match opened {
            Ok(drive) => controllers.push(drive),
            Err(error) => {
                let finding = Finding::new(UNANSWERED, format!("vfio:{address}"));
                findings
                    .push(finding.fails(&error).mend("see nvme-bind list and nvme-bind doctor"));
            }
        }
    }
    if let Some(gpu) = gpu.filter(|_| !controllers.is_empty()) {
        findings.push(doorbells(&controllers, gpu));
    }
    for route in Route::ALL {
        findings.push(try_one(route, &space, &mut controllers, gpu));
    }
    for mut drive in controllers {
        if let Err(error) = drive.shutdown() {
            let finding = Finding::new(UNANSWERED, format!("vfio:{}", drive.id()));
            findings.push(finding.fails(&error.into()));
        }
    }
    findings
}

/// A GPU has to ring the drives' doorbells, whatever the route of the data.
fn doorbells(drives: &[Controller], gpu: &Gpu) -> Finding {
    let finding = Finding::new("doorbells", "Doorbells");
    for drive in drives {
        if let Err(error) = gpu.doorbells(drive.bus(), DoorbellKind::Io) {
            return finding.fails(&error).mend(
                "the nvidia module may have to be told: options nvidia \
                 NVreg_RegistryDwords=\"PeerMappingOverride=1\" in /etc/modprobe.d",
            );
        }
    }
    finding.says(Verdict::Works, "the GPU can ring those of every drive")
}

fn try_one(
    route: Route,
    space: &Arc<VfioSpace>,
    drives: &mut [Controller],
    gpu: Option<&Arc<Gpu>>,
) -> Finding {
    let finding = Finding::new(route.name(), format!("route {route}")).about(route);
    let bytes = drives.iter().map(p2p::scratch_bytes).max().unwrap_or(0);
    if drives.is_empty() {
        return finding.says(Verdict::Skipped, "no drive could be opened");
    }
    let memory: anyhow::Result<Arc<dyn DmaMemory>> = match (route, gpu) {
        (Route::Host, _) => space.alloc(bytes).context("memory to try it with"),
        (_, None) => {
            return finding
                .says(Verdict::Fails, "no GPU that can be used")
                .mend("see above; data goes to host memory with --executor host");
        }
        (Route::Staged, Some(gpu)) => gpu.staging(&**space, bytes),
        (Route::Direct, Some(gpu)) => gpu.mapped(&**space, bytes).map(|(memory, _)| memory),
    };
    let scratch = memory.and_then(|memory| Ok(DmaSlice::new(memory, 0, bytes)?));
    let scratch = match scratch {
        Ok(scratch) => scratch,
        Err(error) => return finding.fails(&error),
    };
    let count = drives.len();
    for drive in drives {
        let id = drive.id().to_owned();
        match drives::prove(drive, &scratch) {
            Ok(None) => {}
            Ok(Some(why)) => {
                let found = format!("vfio:{id}: {why}");
                return finding.says(Verdict::Fails, found).mend("see nvme-bind doctor");
            }
            Err(error) => return finding.fails(&error.context(format!("vfio:{id}"))),
        }
    }
    let found = format!(
        "{count} drives fetch commands and data from this memory, and write both into it; nothing \
         was written to them"
    );
    finding.says(Verdict::Works, found)
}
