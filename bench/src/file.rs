//! `bench file`: a store in files, against fio's io_uring engine.

mod fio;
mod ours;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use ripieno::fio::version;
use ripieno_stack::Executor;
use tempfile::TempDir;

use self::ours::Ours;
use crate::{
    report::{Aim, Ratio, Report},
    sample::{Samples, Sides},
};

const LAYERS: u32 = 4;
const SIDES: [&str; 5] = ["ours", "without checksums", "by controllers", "fio plain", "fio tuned"];

/// Arguments of `file`.
#[derive(clap::Args, Debug)]
pub struct FileArgs {
    /// Directory of the files, on the file system to measure; all sides together take nine times
    /// --mib
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    dir: PathBuf,
    /// Sizes of an object, and of fio's blocks
    #[arg(long, value_delimiter = ',', default_value = "4096,32768,131072,1048576")]
    sizes: Vec<u32>,
    /// Commands in flight per device
    #[arg(long, default_value_t = 32)]
    depth: u32,
    /// Number of devices, and of fio's jobs
    #[arg(long, default_value_t = 1)]
    devices: u32,
    /// MiB that a round moves
    #[arg(long, default_value_t = 256)]
    mib: u32,
    /// Rounds; the sides alternate
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(3..=1000))]
    rounds: u32,
    /// Measure only reads, or only writes
    #[arg(long, value_enum)]
    only: Option<Direction>,
}

/// Direction of the data.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    /// Retrieve, against reads
    Read,
    /// Store, against writes
    Write,
}

/// The load of both sides.
struct Load<'a> {
    args: &'a FileArgs,
    object_bytes: u32,
}

impl Load<'_> {
    fn blocks(&self) -> u32 {
        let blocks =
            (u64::from(self.args.mib) << 20) / u64::from(LAYERS) / u64::from(self.object_bytes);
        blocks as u32
    }

    fn bytes(&self) -> u64 {
        u64::from(self.blocks()) * u64::from(LAYERS) * u64::from(self.object_bytes)
    }
}

/// One round of one side.
struct Pass {
    bytes: u64,
    seconds: f64,
    cpu_seconds: f64,
}

impl Pass {
    fn bytes_s(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }
}

#[derive(Default)]
struct Side {
    mib_s: Samples,
    cpu_s_gib: Samples,
}

impl Side {
    fn push(&mut self, pass: &Pass) {
        self.mib_s.push(pass.bytes_s() / f64::from(1 << 20));
        self.cpu_s_gib.push(pass.cpu_seconds / pass.bytes as f64 * f64::from(1 << 30));
    }
}

/// Measures everything.
///
/// # Errors
/// Returns [`ripieno::fio::Missing`] without fio, and an error if a part of the stack fails.
pub fn run(args: &FileArgs) -> Result<Report> {
    let mut report = Report::new("file");
    report.notes.push(format!("against {}, io_uring, O_DIRECT", version()?));
    report.notes.push(format!(
        "depth {}, devices and jobs: {}, {} MiB a turn, {} turns of each side, in {}",
        args.depth,
        args.devices,
        args.mib,
        args.rounds,
        args.dir.display()
    ));
    for (direction, name) in [(Direction::Read, "retrieve"), (Direction::Write, "store")] {
        if args.only.is_some_and(|only| only != direction) {
            continue;
        }
        for &object_bytes in &args.sizes {
            let sides = measure(args, object_bytes, direction)?;
            let kib = f64::from(object_bytes) / 1024.0;
            compare(&mut report, &format!("{name}, {kib} KiB"), &sides);
        }
    }
    Ok(report)
}

/// Adds the ratios of the [`SIDES`].
fn compare(report: &mut Report, name: &str, sides: &[Side; SIDES.len()]) {
    for (us, against) in [(0, 3), (0, 4), (1, 4), (0, 2), (0, 1)] {
        let name = format!("{name}: {} against {}", SIDES[us], SIDES[against]);
        let pair = |of: fn(&Side) -> &Samples| {
            let [ours, theirs] = [us, against].map(|side| of(&sides[side]).clone());
            Sides { ours, theirs }
        };
        let ratio = Ratio::rounds(&name, "MiB/s", &pair(|it| &it.mib_s));
        report.progress(&format!("{name}: {:.2}", ratio.ratio));
        report.ratios.push(ratio.aim(Aim::AtLeast(0.9, 0.9)));
        let cpu = pair(|it| &it.cpu_s_gib);
        report.ratios.push(Ratio::rounds(format!("{name}, CPU"), "s/GiB", &cpu));
    }
}

/// Measures all sides alternately, in the order of [`SIDES`].
fn measure(
    args: &FileArgs,
    object_bytes: u32,
    direction: Direction,
) -> Result<[Side; SIDES.len()]> {
    let folder = folder(&args.dir)?;
    let folder = folder.path();
    let load = Load { args, object_bytes };
    let store = |name, checksums, executor| {
        Ours::new(folder, name, &load, checksums, executor).context("a store over files")
    };
    let mut with = store("ours", true, Executor::File)?;
    let mut without = store("without", false, Executor::File)?;
    let mut by_controllers = store("controllers", true, Executor::Host)?;
    // The first pass creates the files and writes all of them.
    fio::pass(folder, &load, Direction::Write, true)?;
    let mut sides = <[Side; SIDES.len()]>::default();
    for round in 0..=args.rounds {
        let passes = [
            with.pass(direction)?,
            without.pass(direction)?,
            by_controllers.pass(direction)?,
            fio::pass(folder, &load, direction, false)?,
            fio::pass(folder, &load, direction, true)?,
        ];
        if round > 0 {
            sides.iter_mut().zip(&passes).for_each(|(side, pass)| side.push(pass));
        }
    }
    Ok(sides)
}

/// Creates a directory in `parent`, removed on drop.
pub fn folder(parent: &Path) -> Result<TempDir> {
    let made = tempfile::Builder::new().prefix("ripieno-bench-").tempdir_in(parent);
    made.with_context(|| format!("making a folder in {}", parent.display()))
}
