//! Conversion of measurements to ratios and counts.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use gio_kernels::cuda::LaunchMode;
use objstore::{KvShape, Route};

use super::{
    GpuArgs, caller,
    device::Gpu,
    rate::{self, Case, Found},
    retrieve,
    stack::Plan,
};
use crate::report::{Aim, Ratio, Report};

/// Millions of commands a second of the best published GPU-initiated path.
const BEST_PUBLISHED: f64 = 61.5;
/// Launch modes of the I/O kernel.
const MODES: [(LaunchMode, &str); 2] =
    [(LaunchMode::PerBatch, "launch per batch"), (LaunchMode::Resident, "resident")];

/// Returns the requested launch modes.
fn modes(args: &GpuArgs) -> &'static [(LaunchMode, &'static str)] {
    if args.per_batch { &MODES[..1] } else { &MODES }
}
/// Warps per SM.
const WARPS: [u32; 6] = [1, 2, 4, 8, 12, 16];
/// Maximum warps of a case: each has a controller on an SM of its own, on one GPU.
const WARPS_MAX: u32 = 96;

/// Returns the SMs and warps per SM for the rate measurements.
fn rate_cases(args: &GpuArgs) -> Vec<Case> {
    let (sms, warps): (&[u32], &[u32]) =
        if args.tiny { (&[1, 2], &WARPS[..2]) } else { (&[1, 2, 4, 6, 8], &WARPS) };
    let mut cases = Vec::new();
    for &sms in sms {
        for &warps in warps {
            // A single SM is a single block, which has at most four warps.
            if (sms > 1 || warps <= 4) && sms * warps <= WARPS_MAX {
                cases.push(Case { sms, warps, per_batch: args.per_batch });
            }
        }
    }
    cases
}

/// Measures commands a second.
pub fn rate(args: &GpuArgs, gpu: &Arc<Gpu>, report: &mut Report) -> Result<()> {
    let cases = measured(args, rate_cases(args), report, |round, case, found| {
        rate::measure(gpu, case, args.tiny || round == 0, found)?;
        let (Case { sms, warps, .. }, rate) = (case, found.rate.median());
        Ok(format!("{sms} SMs x {warps} warps: {rate:.2} M/s"))
    })?;
    rate_table(&cases, report);
    Ok(())
}

/// Measures each case once a round with `measure`, which returns the progress.
fn measured(
    args: &GpuArgs,
    cases: impl IntoIterator<Item = Case>,
    report: &Report,
    measure: impl Fn(u32, Case, &mut Found) -> Result<String>,
) -> Result<Vec<(Case, Found)>> {
    let mut cases: Vec<_> = cases.into_iter().map(|case| (case, Found::default())).collect();
    // The first round is a warm-up: the driver compiles, the GPU's clocks rise.
    for round in 0..=args.rounds {
        for (case, found) in &mut cases {
            let mut warm = Found::default();
            let found = if round == 0 { &mut warm } else { found };
            let progress = measure(round, *case, found)
                .with_context(|| format!("{} SMs, {} warps each", case.sms, case.warps))?;
            report.progress(&format!("round {round}: {progress}"));
        }
    }
    Ok(cases)
}

/// Measures the cost of a small operation by number of warps.
pub fn operation(args: &GpuArgs, gpu: &Arc<Gpu>, report: &mut Report) -> Result<()> {
    let shapes: &[(u32, u32)] = if args.tiny {
        &[(1, 1), (2, 2)]
    } else {
        &[(1, 1), (1, 4), (4, 4), (8, 4), (4, 12), (8, 8), (8, 12)]
    };
    let repeats = if args.tiny { 3 } else { 500 };
    let case = |&(sms, warps): &(u32, u32)| Case { sms, warps, per_batch: args.per_batch };
    let cases = measured(args, shapes.iter().map(case), report, |_, case, found| {
        rate::measure_small(gpu, case, repeats, found)?;
        let (warps, us) = (case.sms * case.warps, found.operation_us.median());
        Ok(format!("{warps} warps: {us:.1} us an operation"))
    })?;
    let (one, first) = (cases[0].1.operation_us.median(), cases[0].0.sms * cases[0].0.warps);
    for (case, found) in &cases[1..] {
        let warps = case.sms * case.warps;
        let name = format!("operation of 32 commands a warp, {warps} warps against {first}");
        report.ratios.push(Ratio::new(name, "us", found.operation_us.median(), one));
    }
    Ok(())
}

fn rate_table(cases: &[(Case, Found)], report: &mut Report) {
    let best = |sms: u32| {
        let of = cases.iter().filter(|(case, _)| case.sms == sms);
        of.max_by(|a, b| a.1.rate.median().total_cmp(&b.1.rate.median()))
    };
    let mut sizes: Vec<u32> = cases.iter().map(|(case, _)| case.sms).collect();
    sizes.dedup();
    for (case, found) in sizes.into_iter().filter_map(best) {
        let name = format!("commands/s, {} SMs, {} warps each", case.sms, case.warps);
        let (low, high) = (found.rate.quantile(0.0), found.rate.quantile(1.0));
        let mut ratio = Ratio::new(name.clone(), "M/s", found.rate.median(), BEST_PUBLISHED)
            .published("best published GPU-initiated");
        ratio.spread = Some((low / BEST_PUBLISHED, high / BEST_PUBLISHED));
        report.ratios.push(ratio.aim(Aim::Open));
        report.counts.push((format!("{name}: commands a doorbell"), found.per_doorbell.median()));
        report
            .counts
            .push((format!("{name}: controller idle, %"), found.controller_idle.median() * 100.0));
        report.counts.push((format!("{name}: SMs of controllers"), found.controller_sms as f64));
    }
    for (case, found) in cases {
        let name = format!("M commands/s, {} SMs x {} warps", case.sms, case.warps);
        report.counts.push((name, found.rate.median()));
        let asked = case.sms;
        let note = match &found.instead {
            Some(why) => format!("{asked} SMs: no partition, so the number is not kept to: {why}"),
            None if found.granted != asked => {
                format!("{asked} SMs: {} were granted", found.granted)
            }
            None => continue,
        };
        if !report.notes.contains(&note) {
            report.notes.push(note);
        }
    }
}

/// Measures the retrieve bandwidth.
pub fn retrieve(args: &GpuArgs, gpu: &Arc<Gpu>, report: &mut Report) -> Result<()> {
    // Layers of 64 MiB: far larger than a cache, with many objects.
    let (layers, object_bytes, blocks, devices) =
        if args.tiny { (2, 8 << 10, 16, 2) } else { (4, 128 << 10, 512, 4) };
    let shape = KvShape { layers, segments: 1, object_bytes, block_tokens: 64 };
    for route in [Route::Staged, Route::Direct] {
        for &(mode, name) in modes(args) {
            let plan = Plan { route, mode, devices, shape, blocks };
            let found = retrieve::measure(gpu, plan, args.rounds)
                .with_context(|| format!("{} route, {name}", route.name()))?;
            let name = format!(
                "retrieve into HBM, {} KiB objects, {devices} drives, {}, {name}",
                object_bytes >> 10,
                route.name()
            );
            let ratio = Ratio::sides(name, "GiB/s", &found);
            let Ratio { name, value, against, .. } = &ratio;
            report.progress(&format!("{name}: {value:.2} GiB/s, copy {against:.2}"));
            report.ratios.push(ratio);
        }
    }
    report.notes.push(
        "retrieve: software controllers copy every byte with a processor of the host first, once \
         for the staged route (medium to staging memory) and once for the direct one (medium to \
         bounce memory); a drive would not"
            .into(),
    );
    Ok(())
}

/// Measures the caller's CPU time.
pub fn caller(args: &GpuArgs, gpu: &Arc<Gpu>, report: &mut Report) -> Result<()> {
    let (few, blocks, layers) = if args.tiny { (4, 64, 4) } else { (64, 8192, 32) };
    let shape = KvShape { layers, segments: 2, object_bytes: 512, block_tokens: 16 };
    for route in [Route::Host, Route::Staged] {
        let mut many = Vec::new();
        for &(mode, name) in modes(args) {
            let plan = Plan { route, mode, devices: 1, shape, blocks };
            let found = caller::measure(gpu, plan, few, args.rounds)
                .with_context(|| format!("{} route, {name}", route.name()))?;
            let what = format!(
                "caller's CPU time a layer, {blocks} against {few} blocks, {}, {name}",
                route.name()
            );
            let ratio = Ratio::sides(what, "ns", &found).aim(Aim::AtMost(1.2));
            let Ratio { name, value, against, .. } = &ratio;
            report.progress(&format!("{name}: {value:.0} and {against:.0} ns"));
            many.push(*value);
            report.ratios.push(ratio);
        }
        if let [launch, resident] = many[..] {
            let what = format!(
                "caller's CPU time a layer, resident against launch per batch, {blocks} blocks, {}",
                route.name()
            );
            report.ratios.push(Ratio::new(what, "ns", resident, launch));
        }
    }
    Ok(())
}
