//! `ripieno bench table`: measures the cost of batches by size, and the interference of reads and
//! writes. That is half of a slack table; an engine writes the other half, the layer times.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use kv_schedule::{Curve, IoCosts, Setting, SlackTable};
use objstore::Overwrite;
use serde::Serialize;

use crate::config::{ReplayFlags, StoreArgs};
use crate::devices::Devices;
use crate::file;
use crate::interrupt::Interrupt;
use crate::layer_times::{self, Layers, Steps, TableFile, is_there};
use crate::problem::{Interrupted, Problem};
use crate::size::Size;
use crate::table::{row, table};
use crate::terminal;
use crate::timing::{self, Medium};

use super::measure::{Found, Measure, Point};
use super::reads;
use super::session;

pub(super) const HELP: &str = "\
Batches of a layer's objects are stored and retrieved through the whole stack, in sizes that double;
then four operations are kept in flight, from reads only to writes only; factor: the time of the
same bytes, first all reads and then all writes, relative to the time together. With --out the costs
are written to a slack table for the scheduler; layer times are learned while serving.

Examples:
  ripieno bench table --out slack.json
  ripieno bench table --devices vfio:0000:65:00.0            # only reads
  ripieno bench table --devices vfio:0000:65:00.0 --overwrite anything --out slack.json
  ripieno bench table --pace --out slack.json   # then: ripieno pace --slack slack.json
  ripieno bench table --layer-times serving.jsonl --against offline.jsonl
  ripieno bench table --layer-times serving.jsonl --out slack.json

Drives are only read, unless --overwrite is given: batches then come from their first bytes, without
a store. With --out, the costs of writes are those that the table has already.

Flags of requests (--trace, --requests, --capacity, --keep) are refused. Larger batches need a
larger pool (--pool-blocks). On drives, what was just written may be read from their cache.

Exit codes:
  0    measured, and with --out written
  1    I/O failed
  2    bad input: the command line, a table of another setting, or something that this machine
       does not have
  130  interrupted by Ctrl-C (143 by SIGTERM, 129 by SIGHUP); nothing was written";

/// Flags of `ripieno bench table`.
#[derive(Debug, Args)]
pub(crate) struct TableFlags {
    /// Slack table to write; layer times of one for the same setting are kept
    #[arg(long, value_name = "FILE", help_heading = "Table")]
    out: Option<PathBuf>,

    /// GPU that the table is for
    #[arg(long, value_name = "NAME", default_value = timing::GPU, help_heading = "Table",
        conflicts_with = "layer_times")]
    for_gpu: String,

    /// Engine that the table is for, with its version
    #[arg(long, value_name = "NAME", default_value = timing::ENGINE, help_heading = "Table",
        conflicts_with = "layer_times")]
    for_engine: String,

    /// Layer times of an engine; devices are then measured only if named
    #[arg(long, value_name = "FILE", value_delimiter = ',', help_heading = "Table")]
    layer_times: Vec<PathBuf>,

    /// Slack table, or file of layer times, to compare with --layer-times
    #[arg(long, value_name = "FILE", requires = "layer_times", help_heading = "Table")]
    against: Option<PathBuf>,

    /// Measure software controllers at the speed of drives, in virtual time
    #[arg(long, help_heading = "Table")]
    pace: bool,

    /// Read and write bandwidth, latency, mixing factor [default: as for pace]
    #[arg(long, value_name = "R,W,TIME,PART", value_parser = timing::medium, requires = "pace",
        help_heading = "Table")]
    medium: Option<Medium>,

    /// Write nothing: drives are read as they are, software controllers filled before
    #[arg(long, help_heading = "Table", conflicts_with_all = ["pace", "overwrite"])]
    reads_only: bool,

    #[command(flatten)]
    pub(crate) replay: ReplayFlags,
}

/// Results. Field names are the JSON keys.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    setting: Setting,
    #[serde(flatten)]
    devices: Option<Batches>,
    #[serde(skip_serializing_if = "Option::is_none")]
    layers: Option<Layers>,
    /// The file that was written.
    out: Option<PathBuf>,
}

/// Measurements of devices.
#[derive(Debug, Serialize)]
struct Batches {
    /// True when measured in virtual time.
    simulated: bool,
    /// Size of the objects that were moved.
    object_bytes: u32,
    /// Without writes and mixtures if the devices were only read.
    #[serde(flatten)]
    found: Found,
    /// Bandwidth of a mixture, relative to the mean of reads alone and writes alone.
    mixed: Option<f64>,
    /// Batches that took less time than smaller ones.
    not_rising: Vec<String>,
}

/// Returns the names of batches that took less time than smaller ones.
fn not_rising(name: &str, points: &[Point]) -> Vec<String> {
    let falling = points.windows(2).filter(|pair| pair[1].us < pair[0].us);
    falling.map(|pair| format!("{name} of {}", Size(pair[1].bytes))).collect()
}

/// Measures, writes the table, and reports. Returns the exit code.
pub(crate) fn run(flags: &TableFlags) -> anyhow::Result<u8> {
    let mut interrupt = Interrupt::listen()?;
    session::check(&flags.replay, "bench table")?;
    if let Some(path) = &flags.out {
        file::check_output("--out", path)?;
    }
    let steps = match &flags.layer_times[..] {
        [] => None,
        paths => Some(Steps::read(paths)?),
    };
    let against = match (&flags.against, &steps) {
        (Some(path), Some(steps)) => Some((&**path, layer_times::against(path, steps)?)),
        _ => None,
    };
    let args = StoreArgs::check(flags.replay.clone(), flags.pace)?;
    let (mut table, devices) = match &steps {
        Some(steps) if !(flags.pace || flags.replay.names_devices()) => {
            (flags.without_devices(steps)?, None)
        }
        _ => {
            let measured = flags.measured(&args, steps.as_ref(), &mut interrupt)?;
            (measured.0, Some(measured.1))
        }
    };
    if let Some(steps) = &steps {
        steps.teach(&mut table);
    }
    if let Some(path) = &flags.out {
        file::write("--out", path, &table.to_json())?;
    }
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        setting: table.setting().clone(),
        devices,
        layers: steps.map(|steps| steps.report(against.as_ref().map(|(path, of)| (*path, of)))),
        out: flags.out.clone(),
    };
    terminal::report(&report, args.common.output.json, Report::text)?;
    Ok(0)
}

impl TableFlags {
    /// Returns the table for layer times alone: that of `--out`, whose costs are kept.
    fn without_devices(&self, steps: &Steps) -> Result<SlackTable, Problem> {
        let setting = |drives| steps.setting(drives);
        match &self.out {
            None => Ok(layer_times::empty(setting(Vec::new()))),
            Some(path) if is_there(path) => known_table(path, setting, true),
            Some(path) => {
                let path = path.display();
                let what = format!("--out {path}: there is no such file, and no device is named");
                let hint = "name devices to measure (--devices), or a table that has them";
                Err(Problem::new(what, hint))
            }
        }
    }

    /// Measures the devices, and returns a table with their costs: that of `--out`, if it is there.
    fn measured(
        &self,
        args: &StoreArgs,
        steps: Option<&Steps>,
        interrupt: &mut Interrupt,
    ) -> anyhow::Result<(SlackTable, Batches)> {
        let setting = |drives| match steps {
            Some(steps) => steps.setting(drives),
            None => Setting {
                model: args.shape.model.to_owned(),
                gpu: self.for_gpu.clone(),
                engine: self.for_engine.clone(),
                drives,
            },
        };
        let path = self.out.as_deref().filter(|path| is_there(path));
        let known = path.map(|path| known_table(path, setting, false)).transpose()?;
        let measured = self.measure(args, known.is_some(), interrupt)?;
        let (found, drives) = measured.ok_or_else(|| Interrupted(interrupt.exit_code()))?;
        if let Some(wrong) = found.wrong.first() {
            bail!("the table is not written, because {wrong}");
        }
        let costs = costs(&found, known.as_ref().map(|table| &table.costs));
        let costs = costs.context("the measured times make no curve")?;
        let mixed = costs.as_ref().filter(|_| !found.mix.is_empty()).map(|costs| costs.mixed);
        let table = match (costs, known) {
            (Some(costs), Some(mut table)) => {
                path.map_or(Ok(()), |path| out(path).check(&table, &setting(drives)))?;
                table.costs = costs;
                table
            }
            (Some(costs), None) => SlackTable::new(setting(drives), costs),
            (None, _) => layer_times::empty(setting(drives)),
        };
        let (simulated, object_bytes) = (args.is_virtual, args.shape.object_bytes);
        let not_rising =
            [not_rising("read", &found.read), not_rising("write", &found.write)].concat();
        Ok((table, Batches { simulated, object_bytes, found, mixed, not_rising }))
    }

    /// Measures the devices. Returns the figures and the devices' models; `None` if interrupted.
    fn measure(
        &self,
        args: &StoreArgs,
        has_costs: bool,
        interrupt: &mut Interrupt,
    ) -> anyhow::Result<Option<(Found, Vec<String>)>> {
        let is_drive = matches!(args.devices, Devices::Drives(_));
        if !self.reads_only
            && (!is_drive || args.config.overwrite.is_some_and(|it| it > Overwrite::Nothing))
        {
            let all = |it: &mut Measure<'_, '_>, entries| it.all(entries);
            let done = Measure::with(args, self.medium, interrupt, all)?;
            return Ok(done.value.map(|found| (found, done.models)));
        }
        if let (Some(path), false) = (&self.out, has_costs) {
            let what = format!("--out {}: a new table needs the costs of writes", path.display());
            let hint =
                "leave --out away; or if nothing on the drives is needed, say --overwrite anything";
            return Err(Problem::new(what, hint).into());
        }
        reads::measure(args, interrupt)
    }
}

fn out(path: &Path) -> TableFile<'_> {
    TableFile("--out", path, "name another file to profile this setting, or remove this one")
}

/// Returns the table of a file, to which measurements are added; rejects one of another setting.
/// `setting` returns theirs, with the drives that the file names. With `any_costs`, a table of
/// costs alone fits any setting.
fn known_table(
    path: &Path,
    setting: impl Fn(Vec<String>) -> Setting,
    any_costs: bool,
) -> Result<SlackTable, Problem> {
    let table = out(path).read()?;
    let wanted = setting(table.setting().drives.clone());
    if any_costs && table.is_empty() {
        return Ok(SlackTable::new(wanted, table.costs));
    }
    out(path).check(&table, &wanted)?;
    Ok(table)
}

/// Returns the costs, those of writes from `known` if none were measured; `None` without either.
fn costs(found: &Found, known: Option<&IoCosts>) -> anyhow::Result<Option<IoCosts>> {
    let curve = |points: &[Point]| {
        let mut longest = Duration::ZERO;
        let points: Vec<(u64, Duration)> = points
            .iter()
            .map(|point| {
                // Larger batches must not take less time; those that do are named.
                longest = longest.max(Duration::from_secs_f64(point.us * 1e-6));
                (point.bytes, longest)
            })
            .collect();
        Curve::new(&points)
    };
    let read = curve(&found.read)?;
    if found.write.is_empty() {
        return Ok(known.map(|known| IoCosts { read, ..known.clone() }));
    }
    let alone = |reads: f64| found.mix.iter().find(|mix| mix.reads == reads);
    let rate = |reads: f64| alone(reads).map_or(0.0, |mix| mix.bytes_s);
    let mean = f64::midpoint(rate(1.0), rate(0.0));
    let mixed = if mean > 0.0 { (rate(0.5) / mean).clamp(0.01, 2.0) } else { 1.0 };
    Ok(Some(IoCosts { read, write: curve(&found.write)?, mixed }))
}

impl Report {
    fn text(&self) -> String {
        let Setting { model, gpu, engine, drives } = &self.setting;
        let mut text = format!("ripieno {} bench table: model {model}", self.version);
        if let Some(devices) = &self.devices {
            let drive = drives.first().map_or("drive", String::as_str);
            text += &format!(", {} x {drive}{}", drives.len(), devices.text());
        }
        if let Some(layers) = &self.layers {
            text += &format!("\n\nLayers on {gpu}, with {engine}:\n\n{}", layers.text());
        }
        if let Some(path) = &self.out {
            text += &format!("\nWritten to {}, for {gpu} and {engine}.", path.display());
        }
        text
    }
}

impl Batches {
    fn text(&self) -> String {
        let rate = |bytes_s: f64| format!("{}/s", Size(bytes_s as u64));
        let point = |point: &Point| {
            format!("{:.0} us, {}", point.us, rate(point.bytes as f64 / point.us * 1e6))
        };
        let mut rows = vec![row("batch", "read", "write")];
        for (at, read) in self.found.read.iter().enumerate() {
            let write = self.found.write.get(at).map_or_else(String::new, point);
            rows.push(row(&Size(read.bytes).to_string(), point(read), write));
        }
        let mut mixes = vec![row("reads", "together", "of that read, and written; factor")];
        for mix in &self.found.mix {
            let [read, written] = [mix.read_bytes_s, mix.write_bytes_s].map(rate);
            let parts = format!("{read}, {written}; {:.2}", mix.factor);
            mixes.push(row(&format!("{:.0} %", 100.0 * mix.reads), rate(mix.bytes_s), parts));
        }
        let mixed = match self.mixed {
            Some(mixed) => format!(
                "{}\n\nReads and writes together have {mixed:.2} of the mean of each alone.",
                table(&mixes)
            ),
            None => "Only reads: nothing was written to the devices.".to_owned(),
        };
        format!(
            "{}, objects of {}\n\n{}\n\n{mixed}{}",
            if self.simulated { ", in virtual time" } else { "" },
            Size(self.object_bytes.into()),
            table(&rows),
            match &self.not_rising[..] {
                [] => String::new(),
                names => format!(
                    "\nnoisy: faster than a smaller batch, although measured again: {}. The table \
                     has the time of the smaller one.",
                    names.join(", ")
                ),
            }
        )
    }
}
