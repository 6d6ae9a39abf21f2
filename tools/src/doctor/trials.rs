//! Routes to software controllers, each tested with a small replay that checks every byte.

use std::sync::Arc;

use nvme_bind::doctor::{Finding, Verdict};
use ripieno_stack::{CudaChoice, Executor, Gpu, Route, StackConfig};

use crate::config::StoreArgs;
use crate::replay;
use crate::size::Size;

use super::findings::{Findings, check, failed};

/// Tests every route with the GPU, a resident kernel, and the route without a GPU.
pub(super) fn try_all(
    config: &StackConfig,
    choice: CudaChoice,
    gpu: Option<&Arc<Gpu>>,
    findings: &mut Findings<'_>,
) -> anyhow::Result<()> {
    // The route without a GPU comes first: a kernel that hangs keeps the process from continuing.
    let devices = config.files().unwrap_or(1);
    let tried = |finding, choice, route, gpu| tried(finding, devices, choice, route, gpu);
    findings.add(tried(finding(Route::Host, "host"), None, Route::Host, None))?;
    for &route in &Route::ALL {
        let finding = finding(route, "cuda");
        findings.add(match gpu {
            Some(_) => tried(finding, Some(choice), route, gpu),
            None if route == Route::Host => continue,
            None => finding
                .says(Verdict::Fail, "no GPU that can be used")
                .fix("a GPU of NVIDIA with its driver; see above"),
        })?;
    }
    if gpu.is_some() {
        let resident = CudaChoice { is_resident: true, ..choice };
        let finding = check("resident", "resident I/O kernel");
        findings.add(tried(finding, Some(resident), Route::Host, gpu))?;
    }
    Ok(())
}

fn finding(route: Route, executor: &str) -> Finding {
    let title = format!("route {route}, --executor {executor}");
    check(format!("{route}-{executor}"), title).about(route.name())
}

/// Returns the arguments of a small replay with software controllers that checks every byte:
/// enough requests that some hit, and so few pool blocks that requests are moved in parts.
fn trial(devices: u32, choice: Option<CudaChoice>, route: Route) -> anyhow::Result<StoreArgs> {
    let executor = if choice.is_some() { "cuda" } else { "host" };
    let line = format!(
        "--model tiny --requests 24 --pool-blocks 32 --verify full --devices {devices} --depth 64 \
         --quiet --executor {executor} --route {route}"
    );
    let args = StoreArgs::from_line(&line)?;
    Ok(StoreArgs { executor: choice.map_or(args.executor, Executor::Cuda), ..args })
}

fn tried(
    finding: Finding,
    devices: u32,
    choice: Option<CudaChoice>,
    route: Route,
    gpu: Option<&Arc<Gpu>>,
) -> Finding {
    let report = match trial(devices, choice, route).and_then(|args| replay::trial(&args, gpu)) {
        Ok(report) => report,
        Err(error) => return failed(finding, &error),
    };
    let tally = report.tally();
    let checked = Size(tally.findings.bytes);
    if !report.is_clean() {
        let (wrong, failed) = (tally.findings.mismatches, tally.io_errors);
        let found = format!("{wrong} wrong objects, {failed} failed transfers, {checked} checked");
        return finding.says(Verdict::Fail, found);
    }
    let place = match report.setting.gpu {
        Some(_) => report.setting.placement.memory(),
        None => "everything in host memory".to_owned(),
    };
    let found = format!(
        "a replay of {} requests moved {} there and {checked} back, every byte checked; {place}",
        tally.requests,
        Size(tally.store.bytes()),
    );
    finding.says(Verdict::Ok, found)
}
