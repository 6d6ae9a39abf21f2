//! Routes to software controllers: each is tried with a small replay, in which every byte that
//! comes back is checked.

use std::sync::Arc;

use crate::cli::{Executor, GpuChoice, ReplayArgs, Route};
use crate::gpu::Gpu;
use crate::replay;
use crate::size::Size;

use super::{Finding, Findings, Verdict, check, failed};

/// Every route with the GPU, a resident kernel, and the way without a GPU.
pub(super) fn try_all(
    choice: GpuChoice,
    gpu: Option<&Arc<Gpu>>,
    findings: &mut Findings<'_>,
) -> anyhow::Result<()> {
    // First what needs no GPU: a kernel that hangs keeps the process from going on.
    findings.add(tried(finding(Route::Host, "host"), Executor::Host, Route::Host, None))?;
    for route in Route::ALL {
        let finding = finding(route, "cuda");
        findings.add(match gpu {
            Some(_) => tried(finding, Executor::Cuda(choice), route, gpu),
            None if route == Route::Host => continue,
            None => finding
                .says(Verdict::Fail, "no GPU that can be used")
                .fix("a GPU of NVIDIA with its driver; see above"),
        })?;
    }
    if gpu.is_some() {
        let resident = GpuChoice { is_resident: true, ..choice };
        let finding = check("resident", "resident I/O kernel");
        findings.add(tried(finding, Executor::Cuda(resident), Route::Host, gpu))?;
    }
    Ok(())
}

fn finding(route: Route, executor: &str) -> Finding {
    let title = format!("route {route}, --executor {executor}");
    check(format!("{route}-{executor}"), title).about(route.name())
}

fn tried(finding: Finding, executor: Executor, route: Route, gpu: Option<&Arc<Gpu>>) -> Finding {
    let report = match replay::trial(&ReplayArgs::trial(executor, route), gpu) {
        Ok(report) => report,
        Err(error) => return failed(finding, &error),
    };
    let checked = Size(report.verified_bytes);
    if !report.is_clean() {
        let (wrong, failed) = (report.mismatches, report.io_errors);
        let found = format!("{wrong} wrong objects, {failed} failed transfers, {checked} checked");
        return finding.says(Verdict::Fail, found);
    }
    let place = match report.gpu {
        Some(_) => report.memory,
        None => "everything in host memory".to_owned(),
    };
    let found = format!(
        "a replay of {} requests moved {} there and {checked} back, every byte checked; {place}",
        report.requests,
        Size(report.stored_bytes),
    );
    finding.says(Verdict::Ok, found)
}
