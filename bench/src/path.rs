//! `bench path`: the whole path on software controllers.

mod command;
mod retrieve;

use anyhow::{Context as _, Result};
use ripieno_sim::{Line, Plot};

use crate::{
    Part, PathArgs,
    report::{Aim, Ratio, Report},
    sample,
};

/// Object size of the headline ratio.
const HEADLINE_BYTES: u32 = 128 << 10;
/// Object sizes of the plot: 16 to 64 tokens of one segment, smaller and larger.
const SIZES: [u32; 5] = [4 << 10, 16 << 10, 32 << 10, HEADLINE_BYTES, 512 << 10];
/// Cycles per command of the best published CPU path.
const BEST_PUBLISHED: f64 = 107.0;
/// Published cycles per command of SPDK's driver.
const SPDK_PUBLISHED: f64 = 370.0;

/// Measures everything.
pub fn run(args: &PathArgs) -> Result<Report> {
    let mut report = Report::new("path");
    let wanted = |part| args.only.is_none_or(|only| only == part);
    if wanted(Part::Retrieve) {
        retrieve_ratios(args, &mut report).context("retrieve against memcpy")?;
    }
    if wanted(Part::Checksums) {
        checksum_ratios(args, &mut report).context("retrieve with checksums against without")?;
    }
    if wanted(Part::Dram) {
        dram_ratios(args, &mut report).context("with host memory against without")?;
    }
    if wanted(Part::Command) {
        command_ratios(args, &mut report).context("cycles of a command")?;
    }
    Ok(report)
}

fn retrieve_ratios(args: &PathArgs, report: &mut Report) -> Result<()> {
    let [mut ours, mut copy] = ["retrieve", "memcpy, one thread"].map(|it| Line::new(it, []));
    for bytes in SIZES {
        let (gib_s, commands_per_doorbell) = retrieve::measure(bytes, args.rounds)?;
        let x = f64::from(bytes >> 10);
        ours.points.push((x, gib_s.ours.median()));
        copy.points.push((x, gib_s.theirs.median()));
        if bytes == HEADLINE_BYTES {
            let name = "retrieve, 128 KiB objects, one device";
            let ratio = Ratio::sides(name, "GiB/s", &gib_s);
            report.ratios.push(ratio.aim(Aim::AtLeast(0.6, 0.8)));
            report.counts.push((
                "commands per submission doorbell, 512 objects of 128 KiB".into(),
                commands_per_doorbell,
            ));
        }
    }
    let plot = Plot::new("Retrieve over memory media", "object, KiB", "GiB/s", [ours, copy]);
    report.plot(&args.plots, "path-retrieve.svg", &plot)
}

fn checksum_ratios(args: &PathArgs, report: &mut Report) -> Result<()> {
    for bytes in [4 << 10, 32 << 10, HEADLINE_BYTES, 1 << 20] {
        let [gib_s, cpu_ms] = retrieve::checksums(bytes, args.rounds)?;
        let name = format!("retrieve with checksums, against without, {} KiB objects", bytes >> 10);
        let ratio = Ratio::rounds(&name, "GiB/s", &gib_s);
        report.ratios.push(ratio.aim(Aim::AtLeast(0.9, 0.9)));
        let name = format!("{name}, CPU time of all threads");
        report.ratios.push(Ratio::rounds(name, "ms", &cpu_ms));
    }
    Ok(())
}

fn dram_ratios(args: &PathArgs, report: &mut Report) -> Result<()> {
    for bytes in [4 << 10, 32 << 10, HEADLINE_BYTES, 1 << 20] {
        let [hits, storing] = retrieve::dram(bytes, args.rounds)?;
        for (what, found) in [("hits", hits), ("storing", storing)] {
            let name =
                format!("{what} with host memory, against the media, {} KiB objects", bytes >> 10);
            let (floor, aim) = if what == "hits" { (0.9, 1.0) } else { (0.5, 0.77) };
            let ratio = Ratio::rounds(name, "GiB/s", &found);
            report.ratios.push(ratio.aim(Aim::AtLeast(floor, aim)));
        }
    }
    Ok(())
}

fn command_ratios(args: &PathArgs, report: &mut Report) -> Result<()> {
    let host = command::host_queue(args.rounds)?;
    let kernel = command::kernel(args.rounds)?;
    for (name, samples) in [
        ("submit and reap a command, host queue pair", host),
        ("submit and reap a command, I/O kernel on a CPU", kernel),
    ] {
        for (against, source) in
            [(BEST_PUBLISHED, "best published CPU path"), (SPDK_PUBLISHED, "SPDK, published")]
        {
            report.ratios.push(
                Ratio::new(name, sample::TICK, samples.median(), against)
                    .published(source)
                    .aim(Aim::AtMost(1.0)),
            );
        }
    }
    Ok(())
}
