//! Flags of the commands that run a store, and of `ripieno doctor`. The values in [`StoreArgs`] are
//! validated.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, ValueEnum};
use nvme_driver::platform::vfio::PciAddress;
use nvme_driver::{ControllerOptions, DescriptorPreference};
use objstore::DramMode;
use ripieno_stack::{
    CudaChoice, EMU_DEPTH, EMU_QUEUES, MemoryPlace, MetricsAddress, Route, StoreDir,
};

use crate::devices::{self, Devices, EmuChoice, MediaChoice};
use crate::model::{self, Model, Shape};
use crate::problem::Problem;
use crate::size::{self, Size};

/// Maximum number of devices of a store, and the most that the layout is tested with.
const DEVICES_MAX: u64 = 64;

/// Default size in bytes up to which adjacent objects are merged.
const COALESCE_DEFAULT: u32 = 256 << 10;

/// Bytes to verify.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Verify {
    Full,
    #[default]
    Sampled,
    Off,
}

/// Format of the data pointers in commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Descriptors {
    Auto,
    Sgl,
    Prp,
}

/// Executor of the I/O kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Executor {
    #[default]
    Host,
    Inline,
    Cuda,
}

/// Launch mode of the I/O kernel on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Launch {
    PerBatch,
    Resident,
}

/// Visibility of the progress bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProgressBar {
    Auto,
    Never,
}

/// Parses `--require`.
fn route() -> impl TypedValueParser<Value = Route> {
    PossibleValuesParser::new(Route::ALL.map(Route::name)).try_map(|name| name.parse::<Route>())
}

/// Parses `--dram-mode`.
fn dram_mode() -> impl TypedValueParser<Value = DramMode> {
    PossibleValuesParser::new(DramMode::ALL.map(DramMode::name))
        .try_map(|name| name.parse::<DramMode>())
}

/// Returns the flag value that stands for this variant.
pub(crate) fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// GPU selection and the SMs to reserve on it.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct GpuFlags {
    /// The GPU's number in CUDA [default: 0]
    #[arg(long, value_name = "N",
        value_parser = size::count::<u32>(0..=u64::from(u32::MAX)))]
    gpu: Option<u32>,

    /// SMs reserved for the I/O kernel, rounded up to a partition [default: 4]
    #[arg(long, value_name = "N",
        value_parser = size::count::<u32>(1..=u64::from(u32::MAX)))]
    io_sms: Option<u32>,
}

impl GpuFlags {
    fn choice(self, launch: Option<Launch>) -> CudaChoice {
        CudaChoice {
            ordinal: self.gpu.unwrap_or(0),
            io_sms: self.io_sms.unwrap_or(CudaChoice::IO_SMS),
            is_resident: launch == Some(Launch::Resident),
        }
    }
}

/// Flags of software controllers.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct EmuFlags {
    /// Software controllers, 1 to 64 [default: 2]
    #[arg(long, value_name = "N", help_heading = "Devices",
        value_parser = size::count::<u32>(1..=DEVICES_MAX))]
    pub(crate) devices: Option<u32>,

    /// Their LBA size, 512 or 4096 [default: 4096; mini, tiny: 512]
    #[arg(long, value_name = "BYTES", value_parser = devices::lba, help_heading = "Devices")]
    lba: Option<u32>,

    /// Their largest transfer (MDTS), 8KiB to 64MiB [default: 512KiB]
    #[arg(long, value_name = "SIZE", value_parser = devices::mdts, help_heading = "Devices")]
    mdts: Option<u32>,
}

/// Flags of the output.
#[derive(Debug, Clone, Args)]
pub(crate) struct OutputFlags {
    /// Print one JSON object on stdout instead of a table
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,

    /// Progress bar; auto: if stderr is a terminal
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = ProgressBar::Auto,
        help_heading = "Output")]
    progress: ProgressBar,

    /// Print more log messages; repeat for even more
    #[arg(short, long, action = clap::ArgAction::Count, help_heading = "Output")]
    pub(crate) verbose: u8,

    /// Print only errors on stderr: no notes, no warnings
    #[arg(short, long, conflicts_with = "verbose", help_heading = "Output")]
    pub(crate) quiet: bool,
}

/// Flags of the devices, the memory and the I/O kernel, of the commands that run in real time.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct PathFlags {
    /// emu (software controllers), or drives: vfio:0000:65:00.0[,...] [default: emu]
    #[arg(long, value_name = "DEVICE", help_heading = "Devices", display_order = 0)]
    device: Vec<String>,

    /// Media of software controllers: memory or file:DIR [default: memory]
    #[arg(long, value_name = "memory|file:DIR", help_heading = "Devices",
        value_parser = devices::media)]
    media: Option<MediaChoice>,

    /// Use drives that contain data. The data is lost
    #[arg(long, help_heading = "Devices")]
    pub(crate) overwrite: bool,

    /// Memory of queues and KV pool: host, or a BAR: peer:0000:00:05.0/2
    #[arg(long, value_name = "PLACE", default_value = "host", help_heading = "Devices",
        value_parser = devices::memory)]
    pub(crate) memory: MemoryPlace,

    /// Where the I/O kernel runs: threads, the calling thread, or a GPU
    #[arg(long, value_name = "WHERE", value_enum, default_value_t, help_heading = "I/O")]
    pub(crate) executor: Executor,

    /// Launch of the I/O kernel: for each layer, or once [default: per-batch]
    #[arg(long, value_name = "WHEN", value_enum, help_heading = "I/O")]
    launch: Option<Launch>,

    /// Fail unless the data path is this: direct, staged or host
    #[arg(long, value_parser = route(), value_name = "ROUTE", hide_possible_values = true,
        help_heading = "I/O")]
    pub(crate) require: Option<Route>,

    #[command(flatten, next_help_heading = "I/O")]
    gpu: GpuFlags,
}

/// Flags of the workload, the store and the report, of all commands that run a store.
#[derive(Debug, Clone, Args)]
pub(crate) struct CommonFlags {
    /// Trace in the format of Mooncake; - is stdin [default: synthetic conversations]
    #[arg(long, value_name = "FILE", help_heading = "Workload")]
    pub(crate) trace: Option<PathBuf>,

    /// Maximum number of requests [default: all; 500 synthetic ones, or up to 1 GiB]
    #[arg(long, value_name = "N", help_heading = "Workload",
        value_parser = size::count::<usize>(1..=u64::MAX))]
    pub(crate) requests: Option<usize>,

    /// llama-3-8b, qwen3-32b, deepseek-v3-mla, mini or tiny [default: llama-3-8b; pace: mini]
    #[arg(long, value_name = "NAME", help_heading = "Workload", value_parser = model::named,
        value_delimiter = ',')]
    pub(crate) model: Vec<&'static Model>,

    /// Tokens per block, a divisor of 512 [default: 64; mini, tiny: 512]
    #[arg(long, value_name = "N", help_heading = "Workload", value_delimiter = ',',
        value_parser = size::count::<u32>(0..=u64::from(u32::MAX)))]
    pub(crate) block_tokens: Vec<u32>,

    /// Seed of the synthetic workload, the order of pool blocks, and samples
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Workload",
        value_parser = size::count::<u64>(0..=u64::MAX))]
    pub(crate) seed: u64,

    /// Space for objects [default: enough for the whole workload]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, help_heading = "Store")]
    pub(crate) capacity: Option<u64>,

    /// Size of the DRAM cache above the devices
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "0",
        help_heading = "Store")]
    pub(crate) dram: u64,

    /// write-through, or read-ahead: prefetched blocks only
    #[arg(long, value_name = "MODE", value_parser = dram_mode(), hide_possible_values = true,
        default_value_t = DramMode::WriteThrough, requires = "dram", help_heading = "Store")]
    pub(crate) dram_mode: DramMode,

    /// Blocks of the KV pool [default: the longest request's, 64 to 256 MiB]
    #[arg(long, value_name = "N", help_heading = "Store",
        value_parser = size::count::<u32>(1..=u64::from(u32::MAX)))]
    pub(crate) pool_blocks: Option<u32>,

    /// Keep no checksums of objects
    #[arg(long, help_heading = "Store")]
    pub(crate) no_checksums: bool,

    #[command(flatten)]
    pub(crate) emu: EmuFlags,

    /// Queue pairs per device, up to 64, each with one warp [default: 1, on a GPU 4]
    #[arg(long, value_name = "N", help_heading = "I/O",
        value_parser = size::count::<u16>(1..=u64::from(EMU_QUEUES)))]
    queues: Option<u16>,

    /// Entries per queue, a power of two from 2 to 1024
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = depth,
        help_heading = "I/O")]
    pub(crate) depth: u32,

    /// Maximum size of merged commands; off: one per object [default: 256KiB]
    #[arg(long, value_name = "SIZE|off", value_parser = coalesce, help_heading = "I/O")]
    pub(crate) coalesce: Option<u32>,

    /// Data pointers of commands; auto: SGLs where supported
    #[arg(long, value_name = "KIND", value_enum, default_value_t = Descriptors::Auto,
        help_heading = "I/O")]
    pub(crate) descriptors: Descriptors,

    #[command(flatten)]
    pub(crate) output: OutputFlags,
}

/// Flags of a store on the devices, of the commands that run in real time.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct DeviceFlags {
    /// Bytes to verify; full: all, and at the end all that is stored
    #[arg(long, value_name = "KIND", value_enum, default_value_t, help_heading = "Workload")]
    pub(crate) verify: Verify,

    /// Keep the store for the next replay: in --media file:DIR, or on drives
    #[arg(long, help_heading = "Store")]
    pub(crate) keep: bool,

    #[command(flatten)]
    pub(crate) path: PathFlags,

    /// Serve metrics for Prometheus and `ripieno top`: a port, IP:PORT, or a Unix socket's path
    #[arg(long, value_name = "ADDR", help_heading = "Output")]
    pub(crate) metrics: Option<MetricsAddress>,
}

/// Flags of `ripieno replay`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReplayFlags {
    #[command(flatten)]
    pub(crate) common: CommonFlags,

    #[command(flatten)]
    pub(crate) devices: DeviceFlags,
}

/// Validated arguments of a command that runs a store.
#[derive(Debug, Clone)]
pub(crate) struct StoreArgs {
    pub(crate) common: CommonFlags,
    pub(crate) flags: DeviceFlags,
    /// Shape of the stored KV blocks.
    pub(crate) shape: Shape,
    /// Devices that the objects are striped over.
    pub(crate) devices: Devices,
    /// The GPU that runs the I/O kernel.
    pub(crate) gpu: Option<CudaChoice>,
    /// True if it runs in virtual time.
    pub(crate) is_virtual: bool,
    /// Factor by which the model's objects are smaller than those of a real one.
    pub(crate) scale: u32,
}

impl StoreArgs {
    /// Validates all that does not depend on the workload.
    ///
    /// # Errors
    /// Returns a [`Problem`] for the first flag that contradicts another.
    pub(crate) fn check(flags: ReplayFlags, is_virtual: bool) -> Result<Self, Problem> {
        let ReplayFlags { common, devices: flags } = flags;
        let default = if is_virtual { "mini" } else { model::DEFAULT };
        let model = one("--model", &common.model)?;
        let model = model.map_or_else(|| model::named(default), Ok).expect("it is there");
        let tokens = one("--block-tokens", &common.block_tokens)?.unwrap_or(model.block_tokens);
        let shape = Shape::new(model, tokens)?;
        let devices = flags.path.devices(&common.emu, model.lba_bytes)?;
        flags.check_keep(&devices)?;
        if is_virtual {
            flags.path.check_virtual(&devices)?;
        }
        let (gpu, scale) = (flags.path.gpu()?, model.scale);
        let args = Self { common, flags, shape, devices, gpu, is_virtual, scale };
        args.check_sizes()?;
        if let Devices::Emu(emu) = &args.devices {
            args.check_prp(emu.lba_bytes)?;
        }
        Ok(args)
    }

    /// Rejects sizes that are too small for their purpose.
    fn check_sizes(&self) -> Result<(), Problem> {
        let (dram, block) = (self.common.dram, self.shape.block_bytes());
        if dram > 0 && dram < block {
            let [found, needed] = [dram, block].map(Size);
            return Err(Problem::new(
                format!("--dram {found}: a block of model {} has {needed}", self.shape.model),
                format!("give {needed} or more, or leave it out"),
            ));
        }
        let object = self.shape.object_bytes;
        match self.common.coalesce {
            Some(bytes @ 1..) if bytes < object => Err(Problem::new(
                format!(
                    "--coalesce {}: one object has {}",
                    Size(bytes.into()),
                    Size(object.into())
                ),
                "give at least twice that, or off for one command for each object",
            )),
            _ => Ok(()),
        }
    }

    /// Parses a command line without the program name and `replay`.
    ///
    /// # Errors
    /// Returns an error for the first invalid flag.
    pub(crate) fn from_line(line: &str) -> anyhow::Result<Self> {
        #[derive(Parser)]
        #[command(no_binary_name = true)]
        struct Line {
            #[command(flatten)]
            flags: ReplayFlags,
        }
        Ok(Self::check(Line::try_parse_from(line.split_whitespace())?.flags, false)?)
    }

    /// Rejects PRPs if objects need padding: PRPs cannot skip bytes at the end of a slot.
    ///
    /// # Errors
    /// Returns a [`Problem`] if devices with LBAs of `lba_bytes` need padding.
    pub(crate) fn check_prp(&self, lba_bytes: u32) -> Result<(), Problem> {
        let object = self.shape.object_bytes;
        if self.common.descriptors == Descriptors::Prp && !object.is_multiple_of(lba_bytes) {
            return Err(Problem::new(
                format!(
                    "--descriptors prp: an object has {object} bytes, which is not a multiple of \
                     the LBA size of {lba_bytes} bytes, and PRPs cannot pad"
                ),
                "use --descriptors auto or sgl, a smaller --lba, or more --block-tokens",
            ));
        }
        Ok(())
    }

    /// Returns these arguments with the software controllers of an existing store directory.
    ///
    /// # Errors
    /// Returns a [`Problem`] if the flags ask for different controllers.
    pub(crate) fn in_store_dir(&self, store_dir: &StoreDir) -> Result<Self, Problem> {
        let mut args = self.clone();
        let Devices::Emu(emu) = &mut args.devices else { return Ok(args) };
        let (count, lba_bytes) = (store_dir.devices().len() as u32, store_dir.lba_bytes());
        let (devices, lba) = (self.common.emu.devices, self.common.emu.lba);
        let wrong = [
            ("--devices", devices.filter(|asked| *asked != count), count),
            ("--lba", lba.filter(|asked| *asked != lba_bytes), lba_bytes),
        ];
        for (flag, asked, found) in wrong {
            if let Some(asked) = asked {
                let dir = store_dir.dir().display();
                return Err(Problem::new(
                    format!("{flag} {asked}: the store in {dir} was made with {found}"),
                    "leave it out, or name another directory for another store",
                ));
            }
        }
        (emu.count, emu.lba_bytes) = (count, lba_bytes);
        args.check_prp(lba_bytes)?;
        Ok(args)
    }

    /// Returns the size in bytes up to which adjacent objects are merged.
    pub(crate) fn coalesce(&self) -> u32 {
        match self.common.coalesce.unwrap_or(COALESCE_DEFAULT) {
            0 => self.shape.object_bytes,
            bytes => bytes,
        }
    }

    /// Returns the queue pairs per device.
    pub(crate) fn queues(&self) -> u16 {
        self.common.queues.unwrap_or_else(|| self.executor().queues())
    }

    /// Returns the executor of the I/O kernel.
    pub(crate) fn executor(&self) -> ripieno_stack::Executor {
        match self.is_virtual {
            // Virtual time advances on one thread.
            true => ripieno_stack::Executor::Inline,
            false => self.flags.path.executor(self.gpu),
        }
    }

    /// Returns true if a progress bar is shown when stderr is a terminal.
    pub(crate) fn shows_progress(&self) -> bool {
        self.common.output.shows_progress()
    }

    /// Returns the options with which the driver attaches to controllers.
    pub(crate) fn controller_options(&self) -> ControllerOptions {
        ControllerOptions {
            io_queues: self.queues(),
            io_depth: self.common.depth,
            descriptors: self.common.descriptors.preference(),
            ..ControllerOptions::default()
        }
    }
}

/// Returns the value of a flag that takes a list elsewhere.
fn one<T: Copy>(flag: &str, values: &[T]) -> Result<Option<T>, Problem> {
    match values {
        [] => Ok(None),
        [value] => Ok(Some(*value)),
        _ => Err(Problem::new(
            format!("{flag}: {} values were given", values.len()),
            "name one here; ripieno bench layers takes several",
        )),
    }
}

/// Rejects the first of these flags that was given.
pub(crate) fn none_of(flags: &[(&str, bool)], why: &str, hint: &str) -> Result<(), Problem> {
    match flags.iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(Problem::new(format!("{flag}: {why}"), hint)),
        None => Ok(()),
    }
}

impl ReplayFlags {
    /// Returns these flags once for each model, and for each of its sizes of blocks. `tokens` are
    /// the sizes if none is given.
    pub(crate) fn each_shape(&self, tokens: &[u32]) -> Vec<Self> {
        let CommonFlags { model, block_tokens, .. } = &self.common;
        let models = if model.is_empty() {
            vec![Vec::new()]
        } else {
            model.iter().map(|model| vec![*model]).collect()
        };
        let tokens = if block_tokens.is_empty() { tokens } else { block_tokens };
        let mut all = Vec::new();
        for model in models {
            for tokens in tokens {
                let (mut flags, model) = (self.clone(), model.clone());
                (flags.common.model, flags.common.block_tokens) = (model, vec![*tokens]);
                all.push(flags);
            }
        }
        all
    }

    /// Returns true if any flag selects devices to measure.
    pub(crate) fn names_devices(&self) -> bool {
        let Self { common, devices } = self;
        let path = &devices.path;
        common.emu.devices.is_some() || path.media.is_some() || !path.device.is_empty()
    }
}

impl OutputFlags {
    /// Returns true if a progress bar is shown when stderr is a terminal.
    pub(crate) fn shows_progress(&self) -> bool {
        self.progress == ProgressBar::Auto && !self.json && !self.quiet
    }
}

impl Descriptors {
    /// Returns the driver's option.
    pub(crate) fn preference(self) -> DescriptorPreference {
        match self {
            Self::Auto => DescriptorPreference::Auto,
            Self::Sgl => DescriptorPreference::Sgl,
            Self::Prp => DescriptorPreference::Prp,
        }
    }
}

impl DeviceFlags {
    /// Rejects `--keep` for media that cannot be kept.
    fn check_keep(&self, devices: &Devices) -> Result<(), Problem> {
        let is_memory = devices.media() == Some(&MediaChoice::Memory);
        none_of(
            &[("--keep", self.keep && is_memory)],
            "media in memory cannot be kept",
            "say where, with --media file:DIR, or name drives with --device vfio:...",
        )
    }
}

impl PathFlags {
    /// Validates `--device` together with the flags that apply to one kind of device.
    ///
    /// # Errors
    /// Returns a [`Problem`] for the first flag that contradicts another.
    pub(crate) fn devices(&self, emu: &EmuFlags, lba_bytes: u32) -> Result<Devices, Problem> {
        let drives = devices::drives(&self.device)?;
        if drives.is_empty() {
            none_of(
                &[("--overwrite", self.overwrite)],
                "software controllers start empty",
                "leave it out; it is for drives, --device vfio:...",
            )?;
            let wrong = matches!(self.memory, MemoryPlace::Peer { .. });
            none_of(
                &[("--memory peer", wrong && self.executor != Executor::Cuda)],
                "software controllers reach host memory only",
                "leave it out, or name drives with --device vfio:...",
            )?;
            return Ok(Devices::Emu(EmuChoice {
                count: emu.devices.unwrap_or(devices::EMU_DEFAULT),
                media: self.media.clone().unwrap_or(MediaChoice::Memory),
                lba_bytes: emu.lba.unwrap_or(lba_bytes),
                mdts: emu.mdts.unwrap_or(devices::MDTS_DEFAULT),
            }));
        }
        none_of(
            &[
                ("--devices", emu.devices.is_some()),
                ("--media", self.media.is_some()),
                ("--lba", emu.lba.is_some()),
                ("--mdts", emu.mdts.is_some()),
            ],
            "only software controllers take this; a drive has its own",
            "leave it out, or use --device emu; ripieno identify shows what a drive has",
        )?;
        if drives.len() as u64 > DEVICES_MAX {
            let found = format!("--device: {} drives; expected 1 to {DEVICES_MAX}", drives.len());
            return Err(Problem::new(found, "name fewer drives"));
        }
        Ok(Devices::Vfio(drives))
    }

    /// Returns the block devices that `--device` names; none if it names others.
    ///
    /// # Errors
    /// Returns a [`Problem`] if it names both.
    pub(crate) fn block_devices(&self) -> Result<Vec<PathBuf>, Problem> {
        let mut found = Vec::new();
        let mut others = None;
        for value in &self.device {
            let mut is_block = false;
            for word in value.split(',').map(str::trim) {
                let next = (is_block && word.starts_with('/')).then_some(word);
                let path = word.strip_prefix("block:").or(next);
                is_block = path.is_some();
                match path {
                    Some(path) => found.push(PathBuf::from(path)),
                    None => others = Some(word),
                }
            }
        }
        match others {
            Some(other) if !found.is_empty() => Err(Problem::new(
                format!("--device: block devices and {other} are measured apart"),
                "name one kind; run the command twice to compare them",
            )),
            _ => Ok(found),
        }
    }

    /// Returns the LBA size of software controllers over block devices.
    ///
    /// # Errors
    /// Returns a [`Problem`] for flags that do not apply to them.
    pub(crate) fn block_lba(&self, emu: &EmuFlags, default: u32) -> Result<u32, Problem> {
        none_of(
            &[
                ("--devices", emu.devices.is_some()),
                ("--media", self.media.is_some()),
                ("--mdts", emu.mdts.is_some()),
                ("--memory peer", self.memory != MemoryPlace::Host),
            ],
            "a block device has a software controller of its own",
            "leave it out",
        )?;
        Ok(emu.lba.unwrap_or(default))
    }

    /// Rejects flags that do not support virtual time.
    fn check_virtual(&self, devices: &Devices) -> Result<(), Problem> {
        let is_memory = devices.media() == Some(&MediaChoice::Memory);
        none_of(
            &[
                ("--device vfio", matches!(devices, Devices::Vfio(_))),
                ("--media file", !is_memory),
                ("--executor cuda", self.executor == Executor::Cuda),
            ],
            "it does not support virtual time, which --pace needs",
            "leave it out; --pace takes software controllers with media in memory",
        )
    }

    /// Returns the executor of the I/O kernel; `gpu` is the result of [`PathFlags::gpu`].
    pub(crate) fn executor(&self, gpu: Option<CudaChoice>) -> ripieno_stack::Executor {
        match (gpu, self.executor) {
            (Some(choice), _) => ripieno_stack::Executor::Cuda(choice),
            (None, Executor::Inline) => ripieno_stack::Executor::Inline,
            (None, _) => ripieno_stack::Executor::Host,
        }
    }

    /// Validates `--executor` together with the flags that apply only to a GPU.
    ///
    /// # Errors
    /// Returns a [`Problem`] for flags that contradict the executor.
    pub(crate) fn gpu(&self) -> Result<Option<CudaChoice>, Problem> {
        let executor = name(self.executor);
        if self.executor == Executor::Cuda {
            none_of(
                &[("--memory peer", self.memory != MemoryPlace::Host)],
                "with --executor cuda, queues and KV pool are in the GPU's memory, or in pinned \
                 host memory",
                "leave it out; --require chooses the route of the data",
            )?;
            return Ok(Some(self.gpu.choice(self.launch)));
        }
        none_of(
            &[
                ("--gpu", self.gpu.gpu.is_some()),
                ("--io-sms", self.gpu.io_sms.is_some()),
                ("--launch", self.launch.is_some()),
            ],
            &format!("with --executor {executor}, no GPU runs the I/O kernel"),
            "leave it out, or use --executor cuda",
        )?;
        match self.require {
            None | Some(Route::Host) => Ok(None),
            Some(route) => Err(Problem::new(
                format!(
                    "--require {route}: with --executor {executor}, the KV pool is in host memory"
                ),
                "use --executor cuda; ripieno doctor shows what this machine can do",
            )),
        }
    }
}

fn depth(text: &str) -> Result<u32, String> {
    let depth = text.parse().ok().filter(|depth: &u32| depth.is_power_of_two());
    depth
        .filter(|depth| (2..=EMU_DEPTH).contains(depth))
        .ok_or_else(|| format!("expected a power of two from 2 to {EMU_DEPTH}"))
}

/// Parses `--coalesce`; 0 means off.
fn coalesce(text: &str) -> Result<u32, String> {
    if text == "off" {
        return Ok(0);
    }
    match size::parse(text)? {
        0 => Err("a command moves at least one object; off stands for exactly one".to_owned()),
        bytes => Ok(u32::try_from(bytes).unwrap_or(u32::MAX)),
    }
}

/// Flags of `ripieno doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorFlags {
    /// Devices to test: emu (a software controller), or drives, vfio:0000:65:00.0[,vfio:...]. May
    /// be repeated
    #[arg(long, value_name = "DEVICE", default_value = "emu")]
    device: Vec<String>,

    #[command(flatten)]
    gpu: GpuFlags,

    /// Exit with 1 unless this route works: direct, staged or host
    #[arg(long, value_parser = route(), value_name = "ROUTE")]
    pub(crate) require: Option<Route>,

    /// Print one JSON object on stdout instead of the table
    #[arg(long)]
    pub(crate) json: bool,

    /// Print more log messages; repeat for even more
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl DoctorFlags {
    /// Returns the drives to test; software controllers if there are none.
    ///
    /// # Errors
    /// Returns a [`Problem`] for a device that does not exist, or is named twice.
    pub(crate) fn drives(&self) -> Result<Vec<PciAddress>, Problem> {
        devices::drives(&self.device)
    }

    /// Returns the GPU selection.
    pub(crate) fn gpu(&self) -> CudaChoice {
        self.gpu.choice(None)
    }
}

#[cfg(test)]
mod tests;
