//! `ripieno bench`: how fast devices are, through the rings and the I/O kernel of a store.

/// Returns the help of a command that checks what it measures: this text, and the exit codes.
macro_rules! measurement_help {
    ($text:literal) => {
        concat!(
            $text,
            "\n
Exit codes:
  0    measured, and every check passed
  1    I/O failed, or a measurement did not pass its checks
  2    bad input: the command line, or something that this machine does not have
  130  interrupted by Ctrl-C (143 by SIGTERM, 129 by SIGHUP); reports what was measured until then"
        )
    };
}

mod check;
mod contexts;
mod fio;
mod load;
mod measure;
mod points;
mod reads;
mod report;
mod session;
mod table;

use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use gio_uring::abi;
use nvme_driver::ControllerOptions;
use nvme_emu::{EmuConfig, FileMedia, FileOptions, SimClock};
use objstore::{KvShape, Overwrite, StoreOptions};
use ripieno_stack::{
    Builder, EMU_DEPTH, Executor, Gpu, PoolMemory, Route, StackConfig, file_target,
};

use crate::config::{self, Descriptors, OutputFlags, PathFlags};
use crate::devices::{self, Devices, EmuChoice, Media};
use crate::interrupt::Interrupt;
use crate::options::{StoreFlags, Takes};
use crate::problem::{Problem, user_error};
use crate::progress::Progress;
use crate::size::{self, Size};
use crate::terminal::say;
use crate::{drives, file, gpu, machine, media};

use contexts::ContextFlags;
use load::{Bench, Load};
use report::{Report, Row, Setting};
use table::TableFlags;

/// Default LBA size of software controllers, in bytes.
const LBA_BYTES: u32 = 4096;
/// Default size of a software controller, by its media.
const MEMORY_SIZE: u64 = 256 << 20;
const FILE_SIZE: u64 = 1 << 30;
/// Maximum transfers in flight on a queue: a queue of this many entries holds one fewer.
const DEPTH_MAX: u64 = EMU_DEPTH as u64 - 1;
/// Maximum bytes of a transfer.
const BYTES_MAX: u64 = 16 << 20;

/// Commands of `ripieno bench`.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Bandwidth, IOPS and latency of reads and writes of any size
    #[command(after_help = RAW_HELP)]
    Raw(Box<RawFlags>),

    /// Bandwidth of whole contexts by length, layer by layer, through a store
    #[command(after_help = contexts::LAYERS_HELP)]
    Layers(Box<ContextFlags>),

    /// Cost of batches of reads and writes by size, alone and together: a slack table
    #[command(after_help = table::HELP)]
    Table(Box<TableFlags>),
}

impl BenchCommand {
    /// Returns the flags of the output.
    pub(crate) fn output(&self) -> &OutputFlags {
        match self {
            Self::Raw(flags) => &flags.output,
            Self::Layers(flags) => &flags.replay.common.output,
            Self::Table(flags) => &flags.replay.common.output,
        }
    }
}

const RAW_HELP: &str = measurement_help!(
    "\
Transfers of one size are kept in flight on every queue, by the executor that a store on these
devices has: files and block devices by io_uring, drives and memory by the I/O kernel. One that is
longer than a command may be takes several commands.

Examples:
  ripieno bench raw
  ripieno bench raw --path /var/tmp --rw read,write --bs 4k,128k,1m
  ripieno bench raw --iodepth 1,2,4,8,16,32,64 --bs 4k         # where is the knee?
  ripieno bench raw --iodepth 1,4,16,64 --html raw.html        # the same as plots
  ripieno bench raw --rw randread,randwrite,randrw             # together against one by one
  ripieno bench raw --devices vfio:0000:65:00.0 --bs 4k,128k    # only reads
  ripieno bench raw --devices vfio:0000:65:00.0 --rw randwrite --overwrite anything
  ripieno bench raw --block /dev/nvme1n1 --json
  ripieno bench raw --path /var/tmp --against fio              # the same by fio, in turns

A drive is only read, unless --rw names writes; then it must be blank, or --overwrite names what is
not needed. A block device must not be in use. With --executor inline or host, or --mdts or
--descriptors, files and block devices are behind software controllers.

Every measurement is checked: commands and bytes against the SMART log of each device (except files
and block devices by io_uring), and a sample of the contents, moved after the measured time, against
the driver's own reads. Failed ones report no numbers. The spread is (max - min) / median
bandwidth over ten intervals; above 20 % is noisy.

With --json: {\"version\", \"bench\", \"run\", \"setting\", \"rows\": [{\"rw\", \"bs_bytes\",
\"iodepth\", \"iops\", \"bytes_s\", \"p99_us\", ...}], \"knees\", \"mixed\", \"failed\"}."
);

/// Pattern of the transfers, in fio's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pattern {
    Read,
    Write,
    #[value(alias = "readwrite")]
    Rw,
    Randread,
    Randwrite,
    Randrw,
}

/// Program to compare with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Against {
    Fio,
}

/// Pattern, with the part of reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rw {
    pattern: Pattern,
    /// Percentage of reads in a mixture.
    mix: u32,
}

impl Rw {
    const WRITE: Self = Self { pattern: Pattern::Write, mix: 0 };

    pub(crate) fn is_random(self) -> bool {
        matches!(self.pattern, Pattern::Randread | Pattern::Randwrite | Pattern::Randrw)
    }

    /// Returns the percentage of reads.
    pub(crate) fn read_percent(self) -> u32 {
        match self.pattern {
            Pattern::Read | Pattern::Randread => 100,
            Pattern::Write | Pattern::Randwrite => 0,
            Pattern::Rw | Pattern::Randrw => self.mix,
        }
    }

    fn writes(self) -> bool {
        self.read_percent() < 100
    }

    fn name(self) -> String {
        config::name(self.pattern)
    }
}

/// Flags of `ripieno bench raw`.
#[derive(Debug, Clone, Args)]
pub(crate) struct RawFlags {
    /// Patterns: read, write, rw, randread, randwrite, randrw [default: randread, and on media of
    /// software controllers randwrite]
    #[arg(
        long,
        value_name = "PATTERN",
        value_enum,
        value_delimiter = ',',
        hide_possible_values = true,
        help_heading = "Load"
    )]
    rw: Vec<Pattern>,

    /// Percentage of reads in rw and randrw
    #[arg(long, value_name = "PERCENT", default_value_t = 50, help_heading = "Load",
        value_parser = size::count::<u32>(1..=99))]
    rwmixread: u32,

    /// Sizes of a transfer
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "4k,128k",
        value_parser = bytes, help_heading = "Load")]
    bs: Vec<u32>,

    /// Transfers in flight on each queue
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "32",
        value_parser = size::count::<u32>(1..=DEPTH_MAX), help_heading = "Load")]
    iodepth: Vec<u32>,

    /// Time that each measurement takes: 2, 500ms, 1m
    #[arg(long, value_name = "TIME", default_value = "2", value_parser = some_time,
        help_heading = "Load")]
    runtime: Duration,

    /// Time before it, which is not measured
    #[arg(long, value_name = "TIME", default_value = "0.5", value_parser = time,
        help_heading = "Load")]
    ramp: Duration,

    /// Bytes of each device that are used [default: all; software controllers have 256MiB of
    /// memory, or files of 1GiB]
    #[arg(long, value_name = "SIZE", value_parser = size::above_zero, help_heading = "Load")]
    size: Option<u64>,

    /// Seed of random places and contents
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Load",
        value_parser = size::count::<u64>(0..=u64::MAX))]
    seed: u64,

    /// Measure the same by this program, in turns and on the same files
    #[arg(long, value_name = "PROGRAM", value_enum, help_heading = "Load")]
    against: Option<Against>,

    /// Block devices instead of files
    #[arg(long, value_name = "PATH", help_heading = "Devices", value_delimiter = ',',
        conflicts_with_all = ["path", "devices", "mdts"])]
    block: Vec<PathBuf>,

    /// MDTS of software controllers, 8KiB to 64MiB [default: 512KiB]
    #[arg(long, value_name = "SIZE", value_parser = devices::mdts, help_heading = "Devices")]
    mdts: Option<u32>,

    #[command(flatten)]
    options: StoreFlags<Self>,

    /// Data pointers of commands; auto: SGLs where supported
    #[arg(long, value_name = "KIND", value_enum, default_value_t = Descriptors::Auto,
        help_heading = "I/O")]
    descriptors: Descriptors,

    #[command(flatten)]
    path: PathFlags,

    #[command(flatten)]
    page: PageFlags,

    #[command(flatten)]
    output: OutputFlags,
}

impl Takes for RawFlags {
    const OPTIONS: &'static [(&'static str, &'static str)] = &[
        ("path", "media in memory"),
        ("devices", "2"),
        ("lba", ""),
        ("overwrite", ""),
        // One thread, like other tools that measure drives; files as a store has them.
        ("executor", "inline; on files and block devices file"),
        ("gpu", "0"),
        ("io_sms", ""),
        ("route", "host"),
        ("queues", "1"),
    ];
}

impl RawFlags {
    fn queues(&self) -> u16 {
        self.options.config.queues.unwrap_or(1)
    }

    fn devices(&self) -> Result<Devices, Problem> {
        let config = &self.options.config;
        match &self.block[..] {
            [] => Devices::new(config, self.mdts, LBA_BYTES),
            paths => Ok(Devices::Emu(EmuChoice {
                count: paths.len() as u32,
                media: Media::Blocks(paths.to_vec()),
                lba_bytes: config.lba.unwrap_or(LBA_BYTES),
                mdts: devices::MDTS_DEFAULT,
            })),
        }
    }

    fn overwrite(&self) -> Overwrite {
        self.options.config.overwrite.unwrap_or_default()
    }
}

/// Flags of a page with the results.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct PageFlags {
    /// Write a page with the table and plots to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
}

impl PageFlags {
    /// Rejects a page that cannot be written.
    fn check(&self) -> Result<(), Problem> {
        self.html.as_ref().map_or(Ok(()), |page| file::check_output("--html", page))
    }
}

fn bytes(text: &str) -> Result<u32, String> {
    let bytes = size::parse(text)?;
    if (512..=BYTES_MAX).contains(&bytes) && bytes.is_multiple_of(512) {
        return Ok(bytes as u32);
    }
    let powers = match text.to_ascii_lowercase().split_once('b') {
        Some((number, "")) => format!("; powers of 1024 are written {number} or {number}ib"),
        _ => String::new(),
    };
    let most = Size(BYTES_MAX);
    Err(format!("{bytes} bytes; expected a multiple of 512 bytes, up to {most}{powers}"))
}

fn time(text: &str) -> Result<Duration, String> {
    let found = size::duration(text)?;
    if found.as_secs() > 86_400 { Err("expected a day or less".to_owned()) } else { Ok(found) }
}

fn some_time(text: &str) -> Result<Duration, String> {
    let found = time(text)?;
    if found.is_zero() { Err("expected more than 0 seconds".to_owned()) } else { Ok(found) }
}

/// Validated arguments.
struct Raw<'a> {
    flags: &'a RawFlags,
    devices: Devices,
    loads: Vec<Load>,
    executor: Executor,
    route: Route,
    /// Transfers of an operation at most.
    contexts: u32,
    /// Entries of a queue.
    entries: u32,
}

impl<'a> Raw<'a> {
    fn check(flags: &'a RawFlags) -> Result<Self, Problem> {
        flags.page.check()?;
        let config = &flags.options.config;
        // That of a store. Flags about commands need commands.
        let on_files = config.path.is_some() || !flags.block.is_empty();
        let any = flags.descriptors == Descriptors::Auto && flags.mdts.is_none();
        let by_file = config.is_passthrough() || on_files && any;
        let usual = if by_file { Executor::File } else { Executor::Inline };
        let executor = Some(config.executor.unwrap_or(usual));
        let executor = flags.path.executor(&StackConfig { executor, ..config.clone() })?;
        let devices = flags.devices()?;
        if devices.emu().is_some() {
            flags.path.check_emulated(executor)?;
        }
        let has_files = devices.emu().is_some_and(|emu| emu.media != Media::Memory);
        if flags.against.is_some() && !has_files {
            return Err(Problem::new(
                format!("--against fio: fio cannot use {}", devices.name()),
                "name files or block devices, with --path or --block",
            ));
        }
        let route = config.route.unwrap_or(Route::Host);
        if route == Route::Staged {
            return Err(Problem::new(
                "--route staged: bench raw has no pool that objects are staged for",
                "use direct or host; ripieno replay measures the staged route",
            ));
        }
        let mut patterns = flags.rw.clone();
        if patterns.is_empty() {
            patterns.push(Pattern::Randread);
            if is_scratch(&devices) {
                patterns.push(Pattern::Randwrite);
            }
        }
        let rws: Vec<Rw> =
            patterns.iter().map(|pattern| Rw { pattern: *pattern, mix: flags.rwmixread }).collect();
        let writes = rws.iter().any(|rw| rw.writes());
        if writes && !flags.block.is_empty() && flags.overwrite() < Overwrite::Anything {
            return Err(Problem::new(
                format!("--rw: {} would be overwritten", devices.name()),
                "if nothing on it is needed, say --overwrite anything; or name reads only",
            ));
        }
        if !writes && flags.overwrite() > Overwrite::Nothing {
            return Err(Problem::new(
                "--overwrite: --rw names reads only",
                "leave it out, or name writes",
            ));
        }
        let together = flags.iodepth.iter().map(|depth| depth.div_ceil(load::OPERATIONS)).max();
        let contexts = together.unwrap_or(1) * u32::from(flags.queues());
        if contexts > abi::IOCTX_MAX {
            return Err(Problem::new(
                format!(
                    "--iodepth and --queues: an operation would have {contexts} transfers, and {} \
                     is the most",
                    abi::IOCTX_MAX
                ),
                "give a smaller depth, or fewer queues",
            ));
        }
        let mut loads = Vec::new();
        for &rw in &rws {
            for &bytes in &flags.bs {
                loads.extend(flags.iodepth.iter().map(|&depth| Load { rw, bytes, depth }));
            }
        }
        let depth = flags.iodepth.iter().copied().max().unwrap_or(1);
        let entries = (depth + 1).next_power_of_two().max(8);
        Ok(Self { flags, devices, loads, executor, route, contexts, entries })
    }

    fn writes(&self) -> bool {
        self.loads.iter().any(|load| load.rw.writes())
    }

    /// Returns the transfers in flight on all devices at most.
    fn in_flight(&self) -> u64 {
        let depth = self.loads.iter().map(|load| load.depth).max().unwrap_or(1);
        u64::from(depth) * u64::from(self.flags.queues()) * u64::from(self.devices.count())
    }

    /// Returns the bytes of a software controller.
    fn emu_bytes(&self, emu: &EmuChoice) -> u64 {
        let default = if emu.dir().is_some() { FILE_SIZE } else { MEMORY_SIZE };
        let bytes = self.flags.size.unwrap_or(default);
        bytes.next_multiple_of(u64::from(emu.lba_bytes))
    }

    /// Returns the buffers, by pairs of one for reads and one for writes, and the bytes of each.
    fn buffers(&self) -> (u32, u32) {
        let largest = self.loads.iter().map(|load| load.bytes).max().unwrap_or(4096);
        let each = largest.next_multiple_of(4096);
        let to_fill = (8 * load::FILL_BYTES).div_ceil(each);
        (to_fill.max(self.in_flight() as u32), each)
    }

    /// Rejects more memory, or larger scratch files, than this machine has room for.
    fn check_room(&self) -> Result<(), Problem> {
        if let Some((emu, dir)) = self.devices.emu().and_then(|emu| Some((emu, emu.dir()?))) {
            let needed = self.emu_bytes(emu).saturating_mul(emu.count.into());
            let hint = "give a smaller --size, or a directory on a larger file system";
            machine::check_disk(dir, dir, needed, hint)?;
        }
        let (pairs, each) = self.buffers();
        let buffers = u64::from(pairs) * 2 * u64::from(each);
        let in_memory = self.devices.emu().filter(|emu| emu.media == Media::Memory);
        let media = in_memory.map_or(0, |emu| self.emu_bytes(emu) * u64::from(emu.count));
        let [buffer, medium] = [buffers, media].map(Size);
        let what = || format!("the buffers need {buffer} of memory and the media {medium}");
        machine::check_memory(buffers + media, what, "give a smaller --bs, --iodepth or --size")
    }

    fn controller_options(&self) -> ControllerOptions {
        ControllerOptions {
            io_queues: self.flags.queues(),
            io_depth: self.entries,
            descriptors: self.flags.descriptors.preference(),
            ..ControllerOptions::default()
        }
    }

    /// Returns the devices, and the paths of the files that they are; drives are attached and
    /// claimed.
    fn devices(&self) -> anyhow::Result<(ripieno_stack::Devices, Vec<String>)> {
        match &self.devices {
            Devices::Emu(EmuChoice { media: Media::Blocks(paths), lba_bytes, .. }) => {
                let config = |(index, path): (usize, &PathBuf)| {
                    let media = block_media(path)?;
                    let config = EmuConfig::new(format!("block{index}"));
                    let file = file_target(&media);
                    Ok((config.namespace(media, *lba_bytes), file))
                };
                let opened = paths.iter().enumerate().map(config);
                let opened = opened.collect::<anyhow::Result<(Vec<_>, Vec<_>)>>()?;
                let names = paths.iter().map(|path| path.display().to_string());
                Ok((opened.into(), names.collect()))
            }
            Devices::Emu(emu) => {
                let bytes = self.emu_bytes(emu);
                let one = |index| media::scratch(emu, bytes, true, index);
                let all = (0..emu.count).map(one).collect::<anyhow::Result<Vec<_>>>()?;
                let (configs, files): (Vec<_>, Vec<_>) = all.into_iter().unzip();
                // They have no names. The media keep them open.
                let path = |number| format!("/proc/{}/fd/{number}", std::process::id());
                let files: Vec<_> = files.into_iter().flatten().collect();
                let paths = files.iter().map(|it| path(it.file.as_raw_fd())).collect();
                Ok(((configs, files).into(), paths))
            }
            Devices::Drives(addresses) => {
                let drives = ripieno_stack::Devices::drives(addresses);
                Ok((drives.memory(self.flags.path.memory), Vec::new()))
            }
        }
    }

    /// Claims drives. Reads would be slow because of an owner, and slow it down.
    fn claim(&self, drives: &mut ripieno_stack::Devices) -> anyhow::Result<()> {
        match self.writes() {
            true => drives::claim(drives, 0, self.flags.overwrite()),
            false => drives::check_unowned(drives.attached()),
        }
    }

    /// Builds everything. With the I/O kernel in the calling thread, that thread also runs the
    /// software controllers.
    fn open(&self, gpu: Option<&Arc<Gpu>>) -> anyhow::Result<Bench> {
        let (mut devices, files) = self.devices()?;
        if self.executor == Executor::Inline {
            devices = devices.simulated(SimClock::real());
        }
        if self.devices.emu().is_none() {
            devices
                .attach(&self.controller_options(), gpu.map(|gpu| &**gpu))
                .map_err(user_error)?;
            self.claim(&mut devices)?;
        }
        let (pairs, object_bytes) = self.buffers();
        let shape = KvShape { layers: 1, segments: 1, object_bytes, block_tokens: 1 };
        let iocbs = (self.in_flight() as u32).next_power_of_two().max(64);
        let config = StackConfig {
            executor: Some(self.executor),
            route: Some(self.route),
            queues: Some(self.flags.queues()),
            depth: Some(self.entries),
            ..StackConfig::default()
        };
        let builder = Builder::new(config, shape)
            .on(devices)
            .pool(PoolMemory::Own { blocks: pairs * 2 })
            .controller(self.controller_options())
            .options(StoreOptions { iocbs, ..StoreOptions::default() })
            .gpu(gpu.cloned());
        let stack = builder.open_raw(self.contexts).map_err(user_error)?;
        let queues = u32::from(self.flags.queues());
        let mut bench = Bench::new(stack, self.flags.size, queues, self.flags.seed)?;
        bench.is_logged = check::is_logged(self.executor, self.devices.emu().is_none());
        bench.files = files;
        let largest = u64::from(self.loads.iter().map(|load| load.bytes).max().unwrap_or(0));
        for (area, (controller, _)) in bench.areas.iter().zip(bench.stack.ring.controllers()) {
            let name = controller.lock().id().to_owned();
            if area.bytes < largest {
                let found = Size(area.bytes);
                let flag = if self.flags.size.is_some() { "--size" } else { "--bs" };
                let problem = format!(
                    "{flag}: {found} of {name} are used, for transfers of {}",
                    Size(largest)
                );
                return Err(
                    Problem::new(problem, "give a larger --size, or smaller transfers").into()
                );
            }
            let lba_bytes = 1_u32 << area.lba_shift;
            if let Some(load) = self.loads.iter().find(|load| load.bytes % lba_bytes != 0) {
                let problem = format!("--bs {}: {name} has LBAs of {lba_bytes} bytes", load.bytes);
                return Err(Problem::new(problem, "give multiples of that").into());
            }
        }
        Ok(bench)
    }

    /// Writes scratch media once, so that reads find data; files and memory are allocated then.
    fn fill(&self, bench: &mut Bench, interrupt: &mut Interrupt) -> anyhow::Result<()> {
        if !is_scratch(&self.devices) {
            return Ok(());
        }
        let all = bench.areas.iter().map(|area| area.bytes).sum();
        let progress = Progress::bytes("written before it is measured", all, self.shows_progress());
        let filled = bench.fill(interrupt, &mut |done| progress.read(done, all));
        progress.finish();
        filled.context("filling the media")
    }

    fn shows_progress(&self) -> bool {
        self.flags.output.shows_progress()
    }

    /// Measures all loads. The second value is set if the user ended it.
    fn measure(
        &self,
        bench: &mut Bench,
        interrupt: &mut Interrupt,
    ) -> anyhow::Result<(Vec<Row>, bool)> {
        let progress = Progress::new("measurements", self.loads.len(), self.shows_progress());
        let mut rows = Vec::new();
        for (at, load) in self.loads.iter().enumerate() {
            let name =
                format!("{} {} depth {}", load.rw.name(), Size(load.bytes.into()), load.depth);
            let mut tick = |seconds: f64, transfers: u64| {
                let bytes_s = transfers as f64 * f64::from(load.bytes) / seconds.max(1e-3);
                progress.shows(at, || format!("{name}: {}/s", Size(bytes_s as u64)));
            };
            let wanted = self.flags.against.map_or(1, |_| fio::TURNS);
            let turns = (0..wanted)
                .map_while(|_| self.turn(bench, load, interrupt, &mut tick).transpose())
                .collect::<anyhow::Result<Vec<_>>>()?;
            if turns.len() < wanted {
                progress.finish();
                return Ok((rows, true));
            }
            rows.extend(fio::median(turns));
        }
        progress.finish();
        Ok((rows, false))
    }

    /// Measures a load, then by the other program. Returns `None` if the user ended it.
    fn turn(
        &self,
        bench: &mut Bench,
        load: &Load,
        interrupt: &mut Interrupt,
        tick: &mut dyn FnMut(f64, u64),
    ) -> anyhow::Result<Option<Row>> {
        let times = (self.flags.ramp, self.flags.runtime);
        let before = check::counted(bench)?;
        let Some(found) = bench.run(load, times, interrupt, tick)? else { return Ok(None) };
        let Some(sample) = bench.sample(load, interrupt)? else { return Ok(None) };
        let checks = check::check(bench, load, &before, &sample)?;
        let mut row = points::row(load, &found, checks);
        if self.flags.against.is_some() {
            let command = fio::command(&bench.files, load, self.flags);
            if !fio::measure(&command, self.flags, &mut row, interrupt)? {
                return Ok(None);
            }
        }
        Ok(Some(row))
    }
}

/// Measures and reports. Returns the exit code.
pub(crate) fn run(command: &BenchCommand) -> anyhow::Result<u8> {
    match command {
        BenchCommand::Raw(flags) => raw(flags),
        BenchCommand::Layers(flags) => contexts::layers(flags),
        BenchCommand::Table(flags) => table::run(flags),
    }
}

fn raw(flags: &RawFlags) -> anyhow::Result<u8> {
    let raw = Raw::check(flags)?;
    let fio = flags.against.map(|Against::Fio| fio::version()).transpose()?;
    if matches!(raw.executor, Executor::Cuda(_)) {
        gpu::set_environment();
    }
    let mut interrupt = Interrupt::listen()?;
    raw.check_room()?;
    let gpu = raw.executor.gpu().map_err(user_error)?;
    interrupt.orderly();
    let mut bench = raw.open(gpu.as_ref())?;
    let filled = raw.fill(&mut bench, &mut interrupt);
    let measured = filled.and_then(|()| raw.measure(&mut bench, &mut interrupt));
    let mut report = Report::new("raw");
    (report.rows, report.interrupted) = match measured {
        Ok(measured) => measured,
        Err(error) => {
            let _ = bench.close();
            return Err(error);
        }
    };
    report.setting = Some(raw.setting(&bench));
    if raw.devices.emu().is_some_and(|emu| emu.media == Media::Memory) {
        report.head = ": of this machine's memory, not of a drive (see --path, --block, --devices)";
    }
    report.more.insert("load", raw.load());
    points::summarise(&mut report);
    let command = || fio::command(&bench.files, &raw.loads[0], flags).join(" ");
    report.notes.extend(fio.map(|version| {
        format!(
            "against {version}: rows are the turns of the median ratio of {}. {}",
            fio::TURNS,
            command()
        )
    }));
    let code = report.finish(&flags.page, &flags.output, &interrupt)?;
    if bench.is_stuck {
        say("waiting for commands that do not complete, for 30 s at most; a second Ctrl-C ends it");
    }
    bench.close()?;
    Ok(code)
}

/// Returns true if nothing on the devices can be lost.
fn is_scratch(devices: &Devices) -> bool {
    devices.emu().is_some_and(|emu| !matches!(emu.media, Media::Blocks(_)))
}

/// Opens a block device that nothing else uses.
fn block_media(path: &Path) -> Result<FileMedia, Problem> {
    let opened = match path.metadata() {
        Ok(meta) if !meta.file_type().is_block_device() => {
            Err(io::Error::other(format!("{}: it is not a block device", path.display())))
        }
        _ => FileMedia::open(path, 0, FileOptions::default()),
    };
    let hint = "name a block device that nothing uses, as a user who may open it; lsblk shows them";
    opened.map_err(|error| Problem::new(format!("--block {error}"), hint))
}

impl Raw<'_> {
    fn setting(&self, bench: &Bench) -> Setting {
        let (Self { flags, devices, .. }, placement) = (self, bench.stack.placement());
        let cpu = match devices {
            Devices::Emu(_) if self.executor != Executor::File => {
                "of the whole process, with the software controllers"
            }
            _ => "of the whole process",
        };
        let (runtime, ramp) = (flags.runtime.as_secs_f64(), flags.ramp.as_secs_f64());
        let depth = "of a queue; 8 operations at a time, above that several transfers each";
        let time = format!("{runtime} s each, after {ramp} s that do not count; CPU: {cpu}");
        Setting {
            lba_bytes: bench.areas.first().map(|area| 1 << area.lba_shift),
            notes: vec![("depth", depth.to_owned()), ("time", time)],
            ..Setting::of(devices, flags.queues(), self.executor, placement)
        }
    }

    /// Returns the parameters of all measurements for the report.
    fn load(&self) -> serde_json::Value {
        let flags = self.flags;
        serde_json::json!({
            "devices": self.devices.count(),
            "descriptors": config::name(flags.descriptors),
            "runtime_s": flags.runtime.as_secs_f64(),
            "ramp_s": flags.ramp.as_secs_f64(),
            "seed": flags.seed,
            "size_bytes": flags.size,
            "is_software": self.devices.emu().is_some(),
        })
    }
}

#[cfg(test)]
mod tests;
