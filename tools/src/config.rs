//! Flags of the commands that run a store, and of `ripieno doctor`. The values in [`StoreArgs`] are
//! validated.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use nvme_driver::{ControllerOptions, DescriptorPreference};
use objstore::StoreOptions;
use ripieno_stack::{CudaChoice, Executor, MemoryPlace, PoolMemory, StackConfig, StoreDir};

use crate::devices::{self, Devices};
use crate::model::{self, Model, Shape};
use crate::options::{StoreFlags, Takes};
use crate::problem::{Problem, none_of};
use crate::size::{self, Size};

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

/// Returns the flag value that stands for this variant.
pub(crate) fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
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

/// Flags of the memory and the I/O kernel, of the commands that run in real time.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct PathFlags {
    /// Memory of queues and KV pool: host, or a BAR: peer:0000:00:05.0/2
    #[arg(long, value_name = "PLACE", default_value = "host", help_heading = "Devices",
        value_parser = devices::memory)]
    pub(crate) memory: MemoryPlace,

    /// Launch of the I/O kernel: for each layer, or once [default: per-batch]
    #[arg(long, value_name = "WHEN", value_enum, help_heading = "I/O")]
    launch: Option<Launch>,
}

/// Flags of the workload, the store and the report, of all commands that run a store.
#[derive(Debug, Clone, Args)]
pub(crate) struct CommonFlags {
    /// Trace of requests, as Mooncake's, Bailian's, aiperf's or Azure's; - is stdin [default:
    /// synthetic conversations]
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

    /// Blocks of the KV pool [default: the longest request's, 64 to 256 MiB]
    #[arg(long, value_name = "N", help_heading = "Store",
        value_parser = size::count::<u32>(1..=u64::from(u32::MAX)))]
    pub(crate) pool_blocks: Option<u32>,

    /// Keep no checksums of objects
    #[arg(long, help_heading = "Store")]
    pub(crate) no_checksums: bool,

    /// MDTS of software controllers, 8KiB to 64MiB [default: 512KiB]
    #[arg(long, value_name = "SIZE", value_parser = devices::mdts, help_heading = "Devices")]
    pub(crate) mdts: Option<u32>,

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

    /// Keep the store for the next replay, in --path or on drives; without, files are temporary
    #[arg(long, help_heading = "Store")]
    pub(crate) keep: bool,

    #[command(flatten)]
    pub(crate) path: PathFlags,
}

/// Flags of `ripieno replay`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReplayFlags {
    #[command(flatten)]
    pub(crate) common: CommonFlags,

    #[command(flatten)]
    pub(crate) devices: DeviceFlags,

    #[command(flatten)]
    pub(crate) options: StoreFlags<Self>,
}

impl Takes for ReplayFlags {
    const OPTIONS: &'static [(&'static str, &'static str)] = &[
        ("path", "media in memory"),
        ("devices", "2"),
        ("capacity", "enough for the whole workload; of a trace, half of what is free at most"),
        ("lba", "4096; mini, tiny: 512"),
        ("overwrite", ""),
        ("executor", "host; with --path file"),
        ("gpu", "0"),
        ("io_sms", ""),
        ("route", ""),
        ("queues", ""),
        ("depth", ""),
        ("dram", ""),
        ("dram_mode", ""),
        ("metrics", ""),
    ];
}

/// Validated arguments of a command that runs a store.
#[derive(Debug, Clone)]
pub(crate) struct StoreArgs {
    pub(crate) common: CommonFlags,
    pub(crate) flags: DeviceFlags,
    /// Options of the store.
    pub(crate) config: StackConfig,
    /// Shape of the stored KV blocks.
    pub(crate) shape: Shape,
    /// Devices that the objects are striped over.
    pub(crate) devices: Devices,
    /// Where the I/O kernel runs.
    pub(crate) executor: Executor,
    /// True if it runs in virtual time.
    pub(crate) is_virtual: bool,
    /// Factor by which the model's objects are smaller than those of a real one.
    pub(crate) scale: u32,
}

impl StoreArgs {
    /// Validates all that does not depend on the workload.
    pub(crate) fn check(flags: ReplayFlags, is_virtual: bool) -> Result<Self, Problem> {
        let ReplayFlags { common, devices: flags, options } = flags;
        let config = options.config;
        let default = if is_virtual { "mini" } else { model::DEFAULT };
        let model = one("--model", &common.model)?;
        let model = model.map_or_else(|| model::named(default), Ok).expect("it is there");
        let tokens = one("--block-tokens", &common.block_tokens)?.unwrap_or(model.block_tokens);
        let shape = Shape::new(model, tokens)?;
        let executor = flags.path.executor(&config)?;
        let devices = Devices::new(&config, common.mdts, model.lba_bytes)?;
        flags.check(&devices, executor)?;
        if is_virtual {
            check_virtual(&config)?;
        }
        // Flags about commands need commands.
        let any = common.descriptors == Descriptors::Auto && common.mdts.is_none();
        let executor = match &devices {
            // Virtual time advances on one thread.
            _ if is_virtual => Executor::Inline,
            Devices::Emu(emu) if emu.dir().is_some() && config.executor.is_none() && any => {
                Executor::File
            }
            _ => executor,
        };
        let scale = model.scale;
        let args = Self { common, flags, config, shape, devices, executor, is_virtual, scale };
        args.check_sizes()?;
        if let Devices::Emu(emu) = &args.devices {
            args.check_prp(emu.lba_bytes)?;
        }
        Ok(args)
    }

    /// Rejects sizes that are too small for their purpose.
    fn check_sizes(&self) -> Result<(), Problem> {
        let (dram, block) = (self.dram(), self.shape.block_bytes());
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
    pub(crate) fn from_line(line: &str) -> anyhow::Result<Self> {
        Ok(Self::check(flags(line)?, false)?)
    }

    /// Rejects PRPs if objects need padding: PRPs cannot skip bytes at the end of a slot.
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
    pub(crate) fn in_store_dir(&self, store_dir: &StoreDir) -> Result<Self, Problem> {
        let mut args = self.clone();
        let Devices::Emu(emu) = &mut args.devices else { return Ok(args) };
        let (count, lba_bytes) = (store_dir.devices().len() as u32, store_dir.lba_bytes());
        let checked = self.config.check_dir(store_dir);
        checked.map_err(|error| Problem::new(error.to_string(), ""))?;
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
        self.config.queues.unwrap_or_else(|| self.executor.queues())
    }

    /// Returns the entries of a queue.
    pub(crate) fn depth(&self) -> u32 {
        self.config.depth.unwrap_or(StoreOptions::default().depth)
    }

    /// Returns the bytes of the DRAM cache.
    pub(crate) fn dram(&self) -> u64 {
        self.config.dram.unwrap_or(0)
    }

    /// Returns true if a progress bar is shown when stderr is a terminal.
    pub(crate) fn shows_progress(&self) -> bool {
        self.common.output.shows_progress()
    }

    /// Returns the options with which the driver attaches to controllers.
    pub(crate) fn controller_options(&self) -> ControllerOptions {
        ControllerOptions {
            io_queues: self.queues(),
            io_depth: self.depth(),
            descriptors: self.common.descriptors.preference(),
            ..ControllerOptions::default()
        }
    }
}

/// Parses the flags of a command line without the names of program and command.
pub(crate) fn flags<T: Args>(line: &str) -> Result<T, clap::Error> {
    let command = T::augment_args(clap::Command::new("ripieno").no_binary_name(true));
    T::from_arg_matches(&command.try_get_matches_from(line.split_whitespace())?)
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
        let StackConfig { path, devices, .. } = &self.options.config;
        path.is_some() || devices.is_some()
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
    /// Rejects flags that these devices do not have.
    fn check(&self, devices: &Devices, executor: Executor) -> Result<(), Problem> {
        let Devices::Emu(emu) = devices else { return Ok(()) };
        none_of(
            &[("--keep", self.keep && emu.dir().is_none())],
            "media in memory cannot be kept",
            "say where, with --path DIR, or name drives with --devices ng:... or vfio:...",
        )?;
        self.path.check_emulated(executor)
    }
}

impl PathFlags {
    /// Returns the executor of the I/O kernel.
    pub(crate) fn executor(&self, config: &StackConfig) -> Result<Executor, Problem> {
        let executor = config.check(&PoolMemory::Own { blocks: 0 });
        match executor.map_err(|error| Problem::new(error.to_string(), ""))? {
            Executor::Cuda(choice) => {
                none_of(
                    &[("--memory peer", self.memory != MemoryPlace::Host)],
                    "with --executor cuda, queues and KV pool are in the GPU's memory, or in \
                     pinned host memory",
                    "leave it out; --route chooses the route of the data",
                )?;
                let is_resident = self.launch == Some(Launch::Resident);
                Ok(Executor::Cuda(CudaChoice { is_resident, ..choice }))
            }
            executor => {
                none_of(
                    &[("--launch", self.launch.is_some())],
                    "no GPU runs the I/O kernel",
                    "leave it out, or use --executor cuda",
                )?;
                Ok(executor)
            }
        }
    }

    /// Rejects memory that software controllers do not reach.
    pub(crate) fn check_emulated(&self, executor: Executor) -> Result<(), Problem> {
        let wrong = matches!(self.memory, MemoryPlace::Peer { .. });
        none_of(
            &[("--memory peer", wrong && !matches!(executor, Executor::Cuda(_)))],
            "software controllers reach host memory only",
            "leave it out, or name drives with --devices vfio:...",
        )
    }
}

/// Rejects options that do not support virtual time.
fn check_virtual(config: &StackConfig) -> Result<(), Problem> {
    none_of(
        &[
            ("--devices ng or vfio", !config.drives().is_empty()),
            ("--path", config.path.is_some()),
            ("--executor cuda", matches!(config.executor, Some(Executor::Cuda(_)))),
        ],
        "it does not support virtual time, which --pace needs",
        "leave it out; --pace takes software controllers with media in memory",
    )
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
    #[command(flatten)]
    pub(crate) options: StoreFlags<Self>,

    /// Print one JSON object on stdout instead of the table
    #[arg(long)]
    pub(crate) json: bool,

    /// Print more log messages; repeat for even more
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl Takes for DoctorFlags {
    const OPTIONS: &'static [(&'static str, &'static str)] =
        &[("devices", "1"), ("gpu", "0"), ("io_sms", ""), ("route", "any")];
}

#[cfg(test)]
mod tests;
