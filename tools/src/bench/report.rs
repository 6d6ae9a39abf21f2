//! Report of the measurements: one JSON object for programs, a table for people.

use std::fmt::Write as _;

use serde::Serialize;

use super::check::Checks;
use super::load::{Found, Load, WINDOWS};
use super::rows::{NOISY, us};
use crate::replay::ratio;
use crate::size::{Size, grouped};
use crate::table::{figures, fold, row, table};
use crate::terminal;

/// Part of the highest IOPS at the knee of a sweep.
const KNEE: f64 = 0.9;
/// Heads of the table of figures.
pub(super) const COLUMNS: [&str; 12] = [
    "pattern",
    "size",
    "depth",
    "IOPS",
    "bandwidth",
    "p50",
    "p99",
    "p99.9",
    "p99.99",
    "CPU s/GB",
    "cmd/bell",
    "spread",
];
/// Bytes of a submission queue entry and of a completion, and of a doorbell.
const ENTRY_BYTES: u64 = 64 + 16;
const DOORBELL_BYTES: u64 = 4;

/// Setting of all measurements. Field names are the JSON keys.
#[derive(Debug, Serialize)]
pub(super) struct Setting {
    pub(super) device: String,
    pub(super) devices: u32,
    pub(super) queues_per_device: u16,
    /// Executor of the I/O kernel.
    pub(super) executor: String,
    /// Route of the data: host or direct.
    pub(super) path: &'static str,
    pub(super) memory: String,
    pub(super) descriptors: String,
    pub(super) runtime_s: f64,
    pub(super) ramp_s: f64,
    /// True when the controllers are software, whose CPU time is counted.
    pub(super) is_software: bool,
}

/// Microseconds from the submission of an operation to its completion.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Latency {
    mean: f64,
    min: f64,
    p50: f64,
    p90: f64,
    pub(super) p99: f64,
    #[serde(rename = "p99.9")]
    p99_9: f64,
    #[serde(rename = "p99.99")]
    p99_99: f64,
    max: f64,
}

/// A measurement. Field names are the JSON keys.
#[derive(Debug, Serialize)]
pub(super) struct Point {
    #[serde(skip)]
    load: Load,
    rw: String,
    /// Percentage of reads.
    read_percent: u32,
    pub(super) bs_bytes: u32,
    pub(super) iodepth: u32,
    /// Transfers of an operation on each queue: a latency is that of the slowest.
    together: u32,
    /// Problems; the figures are null then.
    wrong: Vec<String>,
    #[serde(flatten)]
    pub(super) figures: Option<Figures>,
}

/// Figures of a measurement that passed its checks.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    seconds: f64,
    pub(super) iops: f64,
    pub(super) bytes_s: f64,
    read_bytes_s: f64,
    write_bytes_s: f64,
    pub(super) latency_us: Latency,
    /// Largest bandwidth of a tenth of the time less the smallest, relative to the mean.
    spread: f64,
    is_noisy: bool,
    commands: u64,
    commands_per_doorbell: f64,
    /// Bytes of queue entries and doorbells, beside the payload.
    queue_bytes: u64,
    /// CPU seconds of the whole process per GB, with those of software controllers.
    cpu_s_gb: f64,
    /// CPU microseconds of the submitting thread per transfer.
    caller_us: f64,
    /// Bytes that were compared with what the devices hold.
    compared_bytes: u64,
    /// Part of the compared transfers that were all zeros.
    zeros: f64,
}

/// The smallest depth with nearly the highest IOPS.
#[derive(Debug, Serialize)]
struct Knee {
    rw: String,
    bs_bytes: u32,
    iodepth: u32,
    iops: f64,
    /// IOPS relative to the highest.
    of_highest: f64,
    p99_us: f64,
}

/// Reads and writes together against one after the other, for the same bytes.
#[derive(Debug, Serialize)]
struct Mixed {
    rw: String,
    bs_bytes: u32,
    iodepth: u32,
    /// Time one after the other, relative to the time together.
    factor: f64,
}

/// All measurements. Field names are the JSON keys.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    version: &'static str,
    pub(super) setting: Setting,
    pub(super) points: Vec<Point>,
    knees: Vec<Knee>,
    mixed: Vec<Mixed>,
    /// Measurements that did not pass their checks.
    failed: usize,
    interrupted: bool,
}

impl Latency {
    fn new(found: &Found) -> Self {
        let us = |nanos: u64| nanos as f64 / 1e3;
        let at = |quantile| us(found.latency.value_at_quantile(quantile));
        Self {
            mean: found.latency.mean() / 1e3,
            min: us(found.latency.min()),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p99_9: at(0.999),
            p99_99: at(0.9999),
            max: us(found.latency.max()),
        }
    }
}

impl Point {
    pub(super) fn new(load: &Load, found: &Found, checks: Checks) -> Self {
        let figures = checks.wrong.is_empty().then(|| Figures::new(load, found, &checks));
        Self {
            load: *load,
            rw: load.rw.name(),
            read_percent: load.rw.read_percent(),
            bs_bytes: load.bytes,
            iodepth: load.depth,
            together: load.together(),
            wrong: checks.wrong,
            figures,
        }
    }

    fn name(&self) -> String {
        format!("{}, {}, depth {}", self.rw, Size(self.bs_bytes.into()), self.iodepth)
    }
}

impl Figures {
    fn new(load: &Load, found: &Found, checks: &Checks) -> Self {
        let transfers = (found.reads + found.writes) as f64;
        let rate = |transfers: u64| transfers as f64 * f64::from(load.bytes) / found.seconds;
        let windows = found.windows.map(|bytes| bytes as f64);
        let most = windows.iter().fold(0.0_f64, |most, bytes| most.max(*bytes));
        let least = windows.iter().fold(f64::INFINITY, |least, bytes| least.min(*bytes));
        let mean = windows.iter().sum::<f64>() / WINDOWS as f64;
        let spread = if mean > 0.0 { (most - least) / mean } else { 0.0 };
        let counters = &found.counters;
        let doorbells = counters.sq_doorbells + counters.cq_doorbells;
        let bytes_s = rate(found.reads) + rate(found.writes);
        Self {
            seconds: found.seconds,
            iops: transfers / found.seconds,
            bytes_s,
            read_bytes_s: rate(found.reads),
            write_bytes_s: rate(found.writes),
            latency_us: Latency::new(found),
            spread,
            is_noisy: spread > NOISY,
            commands: counters.commands,
            commands_per_doorbell: ratio(counters.commands, counters.sq_doorbells),
            queue_bytes: counters.commands * ENTRY_BYTES + doorbells * DOORBELL_BYTES,
            cpu_s_gb: found.cpu_seconds / (bytes_s * found.seconds).max(1.0) * 1e9,
            caller_us: found.caller_seconds / transfers.max(1.0) * 1e6,
            compared_bytes: checks.compared,
            zeros: ratio(checks.zeros, checks.sampled),
        }
    }
}

/// Formats a rate of bytes, in powers of 1024.
fn bandwidth(bytes_s: f64) -> String {
    format!("{}/s", Size(bytes_s as u64))
}

impl Report {
    pub(super) fn new(setting: Setting, points: Vec<Point>, interrupted: bool) -> Self {
        let (knees, mixed) = (knees(&points), mixed(&points));
        let failed = points.iter().filter(|point| point.figures.is_none()).count();
        let version = env!("CARGO_PKG_VERSION");
        Self { version, setting, points, knees, mixed, failed, interrupted }
    }

    /// Returns true if every measurement passed its checks.
    pub(super) fn is_good(&self) -> bool {
        self.failed == 0
    }

    /// Writes the report to stdout.
    ///
    /// # Errors
    /// Returns an error if stdout cannot be written to.
    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        terminal::print(if json { serde_json::to_string(self)? } else { self.text() })
    }

    fn text(&self) -> String {
        let mut text = format!("ripieno {} bench raw\n\n", self.version);
        text += &table(&self.setting.rows());
        text += "\n\n";
        text += &self.figures();
        text.push('\n');
        for line in self.summary() {
            let _ = write!(text, "\n{line}");
        }
        for note in self.notes() {
            let _ = write!(text, "\n{}", fold(&note));
        }
        text
    }

    /// Returns a line for each knee and mixture.
    pub(super) fn summary(&self) -> Vec<String> {
        let knees = self.knees.iter().map(|knee| {
            let Knee { rw, iodepth, iops, of_highest, p99_us, bs_bytes } = knee;
            let (bytes, iops) = (Size((*bs_bytes).into()), grouped(*iops as u64));
            let (percent, p99) = (of_highest * 100.0, us(*p99_us));
            format!(
                "knee: {rw} of {bytes} has {iops} IOPS, {percent:.0} % of the highest, at depth \
                 {iodepth}; p99 {p99}"
            )
        });
        let mixed = self.mixed.iter().map(|Mixed { rw, bs_bytes, iodepth, factor }| {
            let bytes = Size((*bs_bytes).into());
            format!(
                "mixed: {rw} of {bytes} at depth {iodepth}: together {factor:.2} times as fast as \
                 one after the other"
            )
        });
        knees.chain(mixed).collect()
    }

    /// Returns the table of figures.
    fn figures(&self) -> String {
        figures(&COLUMNS, self.points.iter().map(Point::row).collect(), 3)
    }

    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for point in &self.points {
            for wrong in point.wrong.iter().take(3) {
                notes.push(format!("error: {}: no figures, because {wrong}", point.name()));
            }
            let zeros = point.figures.as_ref().map_or(0.0, |figures| figures.zeros);
            if zeros > 0.5 {
                notes.push(format!(
                    "warning: {}: {:.0} % of the compared blocks hold zeros only; a drive answers \
                     reads of blocks that were never written without reading, so write them first",
                    point.name(),
                    zeros * 100.0
                ));
            }
        }
        let good = self.points.iter().filter_map(|point| point.figures.as_ref());
        let noisy = good.clone().filter(|figures| figures.is_noisy).count();
        if noisy > 0 {
            notes.push(format!(
                "noisy: {noisy} of {} measurements spread by more than {:.0} %: other programs \
                 ran, the device throttles, or --runtime is too short",
                good.clone().count(),
                NOISY * 100.0
            ));
        }
        let compared: u64 = good.map(|figures| figures.compared_bytes).sum();
        notes.push(match compared {
            0 => "contents were not compared: this process cannot read the buffers, or too few \
                  bytes of the devices are used"
                .to_owned(),
            compared => format!(
                "checked: commands and bytes against the devices' SMART logs; {} of contents",
                Size(compared)
            ),
        });
        if self.interrupted {
            notes.push("interrupted: the rest was not measured".to_owned());
        }
        notes
    }
}

impl Point {
    /// Returns the pattern, with the percentage of reads of a mixture.
    pub(super) fn pattern(&self) -> String {
        match self.read_percent {
            0 | 100 => self.rw.clone(),
            percent => format!("{} {percent} %", self.rw),
        }
    }

    /// Returns the cells of [`COLUMNS`].
    pub(super) fn row(&self) -> Vec<String> {
        let mut row =
            vec![self.pattern(), Size(self.bs_bytes.into()).to_string(), self.iodepth.to_string()];
        let Some(figures) = &self.figures else {
            row.extend(std::iter::once("failed".to_owned()));
            row.extend((0..8).map(|_| String::new()));
            return row;
        };
        let Figures { latency_us: latency, .. } = figures;
        row.extend([
            grouped(figures.iops as u64),
            bandwidth(figures.bytes_s),
            us(latency.p50),
            us(latency.p99),
            us(latency.p99_9),
            us(latency.p99_99),
            format!("{:.2}", figures.cpu_s_gb),
            format!("{:.1}", figures.commands_per_doorbell),
            format!("{:.0} %", figures.spread * 100.0),
        ]);
        row
    }
}

impl Setting {
    pub(super) fn rows(&self) -> Vec<[String; 3]> {
        let cpu = match self.is_software {
            true => "of the whole process, with the software controllers",
            false => "of the whole process",
        };
        vec![
            row("device", self.devices, &self.device),
            row("queues", self.queues_per_device, "on each device; the depth is that of a queue"),
            row(
                "I/O kernel",
                &self.executor,
                "8 operations at a time on a queue: above depth 8, several transfers each",
            ),
            row("path", self.path, format!("memory: {}", self.memory)),
            row(
                "time",
                format!("{} s", self.runtime_s),
                format!("each, after {} s that do not count; CPU: {cpu}", self.ramp_s),
            ),
        ]
    }
}

/// Returns the knee of each sweep over three or more depths.
fn knees(points: &[Point]) -> Vec<Knee> {
    let mut knees: Vec<Knee> = Vec::new();
    for point in points {
        let is_same = |it: &&Point| it.load.rw == point.load.rw && it.bs_bytes == point.bs_bytes;
        let sweep: Vec<&Point> = points.iter().filter(is_same).collect();
        let is_first = std::ptr::eq(sweep[0], point);
        let mut found: Vec<(u32, &Figures)> =
            sweep.iter().filter_map(|it| Some((it.iodepth, it.figures.as_ref()?))).collect();
        if !is_first || found.len() < 3 {
            continue;
        }
        found.sort_by_key(|(depth, _)| *depth);
        let highest = found.iter().map(|(_, it)| it.iops).fold(0.0, f64::max);
        let knee = found.iter().find(|(_, it)| it.iops >= KNEE * highest);
        knees.extend(knee.map(|(iodepth, it)| Knee {
            rw: point.rw.clone(),
            bs_bytes: point.bs_bytes,
            iodepth: *iodepth,
            iops: it.iops,
            of_highest: it.iops / highest,
            p99_us: it.latency_us.p99,
        }));
    }
    knees
}

/// Compares each mixture with the reads and writes alone of the same size and depth.
fn mixed(points: &[Point]) -> Vec<Mixed> {
    let mut all = Vec::new();
    for point in points {
        let alone = |percent| {
            let is_alone = |it: &&Point| {
                (it.bs_bytes, it.iodepth) == (point.bs_bytes, point.iodepth)
                    && it.load.rw.is_random() == point.load.rw.is_random()
                    && it.read_percent == percent
            };
            points.iter().find(is_alone).and_then(|it| it.figures.as_ref())
        };
        let Some(together) = &point.figures else { continue };
        let is_mixture = !matches!(point.read_percent, 0 | 100);
        if let (true, Some(reads), Some(writes)) = (is_mixture, alone(100), alone(0)) {
            all.push(Mixed {
                rw: point.rw.clone(),
                bs_bytes: point.bs_bytes,
                iodepth: point.iodepth,
                factor: together.read_bytes_s / reads.bytes_s
                    + together.write_bytes_s / writes.bytes_s,
            });
        }
    }
    all
}
