//! Routes to software controllers: each is tried with a small replay, in which every byte that
//! comes back is checked.

use std::sync::Arc;

use crate::cli::{Executor, GpuChoice, ReplayArgs, Route};
use crate::gpu::Gpu;
use crate::replay;
use crate::size::Size;

use super::{Finding, Verdict};

/// Every route with the GPU, a resident kernel, and the way without a GPU.
pub(super) fn try_all(choice: GpuChoice, gpu: Option<&Arc<Gpu>>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for route in Route::ALL {
        let finding = finding(route, "cuda");
        findings.push(match gpu {
            Some(_) => tried(finding, Executor::Cuda(choice), route, gpu),
            None if route == Route::Host => continue,
            None => finding
                .says(Verdict::Fails, "no GPU that can be used")
                .mend("a GPU of NVIDIA with its driver; see above"),
        });
    }
    if gpu.is_some() {
        let resident = GpuChoice { is_resident: true, ..choice };
        let finding = Finding::new("resident", "resident I/O kernel");
        findings.push(tried(finding, Executor::Cuda(resident), Route::Host, gpu));
    }
    findings.push(tried(finding(Route::Host, "host"), Executor::Host, Route::Host, None));
    findings
}

fn finding(route: Route, executor: &str) -> Finding {
    let title = format!("route {route}, --executor {executor}");
    Finding::new(format!("{route}-{executor}"), title).about(route)
}

fn tried(finding: Finding, executor: Executor, route: Route, gpu: Option<&Arc<Gpu>>) -> Finding {
    let report = match replay::trial(&ReplayArgs::trial(executor, route), gpu) {
        Ok(report) => report,
        Err(error) => return finding.fails(&error),
    };
    let checked = Size(report.verified_bytes);
    if !report.is_clean() {
        let (wrong, failed) = (report.mismatches, report.io_errors);
        let found = format!("{wrong} wrong objects, {failed} failed transfers, {checked} checked");
        return finding.says(Verdict::Fails, found);
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
    finding.says(Verdict::Works, found)
}
