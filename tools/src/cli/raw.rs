//! The flags as they are typed.

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

use crate::size;

const EXIT_CODES: &str = "\
Exit codes:
  0    everything was replayed and every checked byte was right
  1    wrong bytes were found, or I/O failed
  2    bad input: the command line, the trace, or more than this machine has (memory, a GPU, the
       route that --require names)
  130  interrupted by Ctrl-C; what was done until then is reported";

const REPLAY_EXAMPLES: &str = "\
Examples:
  A made workload, on two software controllers with their media in memory:
    ripieno replay
  A recorded one, with every retrieved byte checked:
    ripieno replay --trace conversation_trace.jsonl --verify full
  Real shapes with too little room, so that files are evicted:
    ripieno replay --model llama-3-8b --capacity 1GiB
  Media in files, through io_uring and O_DIRECT, numbers as JSON:
    ripieno replay --media file:/mnt/scratch --json
  Two real drives (bind them first: nvme-bind bind 65:00.0 66:00.0):
    ripieno replay --device vfio:0000:65:00.0,vfio:0000:66:00.0 --verify full
  The I/O kernel on 4 SMs of a GPU, objects made and checked there (ripieno doctor says whether):
    ripieno replay --executor cuda --io-sms 4 --launch resident --verify full

Sizes are whole numbers with a unit: 512, 4K, 64MiB, 2GiB (powers of 1024), 500GB (of 1000).

Data goes to stdout: a table, or with --json exactly one JSON object. Progress (only on a
terminal), notes, warnings and logs go to stderr.

What is measured:
  retrieve, store  bytes over the time in which at least one transfer of that direction was
                   issued and not yet seen complete. The engine makes and checks bytes of
                   other layers meanwhile, and looks for completions every 256 KiB of that;
                   it competes for the same processors. `--verify off` has the least of it.
                   Media in memory are allocated as they are first written, which is part of
                   the time of storing. With --executor cuda, what the GPU has to do in its
                   stream before a transfer is part of it, too.
  memcpy           one thread copying objects of the same size between scattered places of
                   two buffers, measured before the replay in the same run

Ctrl-C finishes the current transfers, shuts the devices down and reports what was done; a
second Ctrl-C ends at once. Media files are nameless from the start (unlinked once they are
open), so that nothing is left in the directory however the replay ends.

";

/// NVMe SSDs as a memory tier for GPUs.
#[derive(Debug, Parser)]
#[command(name = "ripieno", version, after_help = EXIT_CODES, arg_required_else_help = true)]
pub(crate) struct Raw {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Replay LLM serving traffic through the whole stack, and check the bytes
    ///
    /// For each request, the longest stored prefix is looked up and retrieved layer by layer into
    /// scattered blocks of a KV pool; the missing blocks are made, stored layer by layer, and
    /// committed. No GPU and no spare SSD are needed: by default, software NVMe controllers and
    /// the I/O kernel compiled for the host stand in.
    #[command(after_help = format!("{REPLAY_EXAMPLES}{EXIT_CODES}"))]
    Replay(Box<ReplayFlags>),

    /// Show what devices are: model, sizes, limits, formats, health
    ///
    /// Attaches the driver, reads, and shuts the device down again. Nothing is written to it.
    #[command(after_help = IDENTIFY_HELP)]
    Identify(IdentifyFlags),

    /// Show which routes of the data work here, why the others do not, and what would open them
    ///
    /// Checks the machine as `nvme-bind doctor` does (IOMMU, VFIO, groups, ACS, limits, GPU), then
    /// the NVIDIA driver, the GPU, the I/O kernel on it, and GDRCopy; then tries each route between
    /// device and KV pool. Software controllers are tried with a small replay, in which every byte
    /// is checked. Real drives are only read: what is on them stays.
    #[command(after_help = DOCTOR_HELP)]
    Doctor(DoctorFlags),
}

const DOCTOR_HELP: &str = "\
Examples:
  ripieno doctor
  ripieno doctor --device vfio:0000:65:00.0,vfio:0000:66:00.0
  ripieno doctor --require direct --json

What --json prints: {\"checks\": [{\"id\", \"title\", \"route\", \"looked_at\", \"verdict\", \"found\",
\"fix\"}], \"works\": [routes]}, where a verdict is ok, warn, fail or skip. Each check is printed
before the next one begins.

Exit codes:
  0  a route works (with --require: this route works)
  1  no route works (with --require: this route does not), or a device did not answer
  2  bad input: the command line";

/// Flags of `ripieno doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorFlags {
    /// What data is to go to and from: emu (a software controller), or
    /// vfio:0000:65:00.0[,vfio:...]. May be repeated
    #[arg(long, value_name = "DEVICE", default_value = "emu")]
    pub(crate) device: Vec<String>,

    #[command(flatten)]
    pub(crate) gpu: GpuFlags,

    /// End with 1 unless this route works: direct, staged or host
    #[arg(long, value_enum, value_name = "ROUTE")]
    pub(crate) require: Option<RequireFlag>,

    /// Print one JSON object on stdout in place of the table
    #[arg(long)]
    pub(crate) json: bool,

    /// More logs; repeat for more
    #[arg(short, long, action = ArgAction::Count)]
    pub(crate) verbose: u8,
}

const IDENTIFY_HELP: &str = "\
Examples:
  ripieno identify
  ripieno identify --device vfio:0000:65:00.0 --json

Exit codes:
  0  every device answered
  1  one did not
  2  bad input: the command line";

/// Flags of `ripieno identify`.
#[derive(Debug, Args)]
pub(crate) struct IdentifyFlags {
    /// Which: emu (a software controller as `replay` uses it), or vfio:0000:65:00.0[,vfio:...]. May
    /// be repeated
    #[arg(long, value_name = "DEVICE", default_value = "emu")]
    pub(crate) device: Vec<String>,

    /// Print one JSON object on stdout in place of tables
    #[arg(long)]
    pub(crate) json: bool,

    /// More logs; repeat for more
    #[arg(short, long, action = ArgAction::Count)]
    pub(crate) verbose: u8,
}

/// Flags of `ripieno replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayFlags {
    /// Trace in Mooncake's format: a JSON object a line with timestamp, input_length,
    /// output_length and hash_ids (blocks of 512 tokens). Other fields are ignored, and so is
    /// the pace: requests follow each other at once. [default: a made workload of conversations]
    #[arg(long, value_name = "FILE", help_heading = "Workload")]
    pub(crate) trace: Option<PathBuf>,

    /// Stop after this many requests [default: all of the trace; of the made workload 4000, or
    /// as many as 2 GiB hold]
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub(crate) requests: Option<usize>,

    /// Seed of the made workload, of the order of pool blocks, and of what is sampled
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Workload")]
    pub(crate) seed: u64,

    /// Whose KV cache it is: tiny (1 KiB objects, for long traces on small machines),
    /// llama-3-8b, qwen3-32b or deepseek-v3-mla
    #[arg(long, value_name = "NAME", default_value = "tiny", help_heading = "Workload")]
    pub(crate) model: String,

    /// Tokens of a block, a divisor of 512 [default: 512 for tiny, else 64]
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub(crate) block_tokens: Option<u32>,

    /// Blocks in the KV pool; longer requests go through it in windows [default: what the
    /// longest request needs, but 64 to 256 MiB]
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub(crate) pool_blocks: Option<u32>,

    /// Which bytes to check. full: every retrieved byte, and at the end everything that is still
    /// stored. sampled: the first and last 64 bytes of every retrieved object, and 1 object in
    /// 16 as a whole. off: none
    #[arg(long, value_enum, default_value_t = VerifyFlag::Sampled, help_heading = "Workload")]
    pub(crate) verify: VerifyFlag,

    /// What the objects are spread over: emu (software controllers), or real drives bound to
    /// vfio-pci, vfio:0000:65:00.0[,vfio:0000:66:00.0...]. May be repeated
    #[arg(long, value_name = "DEVICE", default_value = "emu", help_heading = "Devices")]
    pub(crate) device: Vec<String>,

    /// How many software controllers, 1 to 64 [default: 2]
    #[arg(long, value_name = "N", help_heading = "Devices")]
    pub(crate) devices: Option<u32>,

    /// Where the software controllers keep their bytes: memory, or file:DIR (io_uring, O_DIRECT)
    /// [default: memory]
    #[arg(long, value_name = "KIND", help_heading = "Devices")]
    pub(crate) media: Option<String>,

    /// Use real drives although they hold data, which is lost then
    #[arg(long, help_heading = "Devices")]
    pub(crate) overwrite: bool,

    /// Where queues, descriptors and the KV pool live: host, or peer:0000:00:05.0/2, which is BAR 2
    /// of another function bound to vfio-pci. A peer's memory is used only after every drive
    /// proved that it reaches it
    #[arg(long, value_name = "PLACE", default_value = "host", help_heading = "Devices")]
    pub(crate) memory: String,

    /// Room for objects, over all devices [default: what the whole workload needs]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, help_heading = "Devices")]
    pub(crate) capacity: Option<u64>,

    /// Bytes of a software controller's logical block, 512 or 4096 [default: 512 for tiny, else
    /// 4096]
    #[arg(long, value_name = "BYTES", value_parser = size::parse, help_heading = "Devices")]
    pub(crate) lba: Option<u64>,

    /// Largest transfer of one command of a software controller (MDTS), a power of two from 8KiB to
    /// 64MiB [default: 512KiB]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, help_heading = "Devices")]
    pub(crate) mdts: Option<u64>,

    /// Queue pairs of each device; each is driven by a warp of its own
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "I/O")]
    pub(crate) queues: u16,

    /// Entries of each queue, a power of two from 2 to 1024
    #[arg(long, value_name = "N", default_value_t = 256, help_heading = "I/O")]
    pub(crate) depth: u32,

    /// Who runs the I/O kernel: host (threads), inline (the calling thread), or cuda (a GPU, by way
    /// of the NVIDIA driver)
    #[arg(long, value_name = "KIND", default_value = "host", help_heading = "I/O")]
    pub(crate) executor: String,

    /// When the GPU's I/O kernel is launched: per-batch (for each layer), or resident (once; it
    /// then watches a ring) [default: per-batch]
    #[arg(long, value_enum, help_heading = "GPU")]
    pub(crate) launch: Option<LaunchFlag>,

    /// Fail unless data takes this route: direct (drive to GPU memory), staged (through pinned host
    /// memory), or host (the KV pool is in host memory) [default: the first of them that works
    /// with the executor chosen; stderr and the report say which, and why none before it]
    #[arg(long, value_enum, value_name = "ROUTE", help_heading = "GPU")]
    pub(crate) require: Option<RequireFlag>,

    #[command(flatten)]
    pub(crate) gpu: GpuFlags,

    /// Merge objects that are neighbours on the device into commands of up to this many bytes (and
    /// MDTS), or off: a command for each object. Drives reach their bandwidth at about 128KiB; more
    /// leaves them fewer commands to work on at once
    #[arg(long, value_name = "SIZE|off", default_value = "128KiB", help_heading = "I/O")]
    pub(crate) coalesce: String,

    /// How commands describe memory; auto takes SGLs where the device has them
    #[arg(long, value_enum, default_value_t = DescriptorsFlag::Auto, help_heading = "I/O")]
    pub(crate) descriptors: DescriptorsFlag,

    /// Print one JSON object on stdout in place of the table
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,

    /// Whether to show progress: auto (when stderr is a terminal) or never
    #[arg(long, value_enum, default_value_t = ProgressFlag::Auto, help_heading = "Output")]
    pub(crate) progress: ProgressFlag,

    /// More logs; repeat for more
    #[arg(short, long, action = ArgAction::Count, help_heading = "Output")]
    pub(crate) verbose: u8,

    /// Only errors on stderr: no notes, no warnings
    #[arg(short, long, conflicts_with = "verbose", help_heading = "Output")]
    pub(crate) quiet: bool,
}

/// Which GPU, and how much of it.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct GpuFlags {
    /// Which GPU, from 0 on, as CUDA counts them [default: 0]
    #[arg(long, value_name = "N", help_heading = "GPU")]
    pub(crate) gpu: Option<u32>,

    /// SMs that the I/O kernel has to itself, rounded up to what the GPU can divide; the report
    /// says what it got [default: 4]
    #[arg(long, value_name = "N", help_heading = "GPU")]
    pub(crate) io_sms: Option<u32>,
}

/// `--verify`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum VerifyFlag {
    Full,
    Sampled,
    Off,
}

/// `--launch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LaunchFlag {
    PerBatch,
    Resident,
}

/// `--require`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RequireFlag {
    Direct,
    Staged,
    Host,
}

/// `--descriptors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DescriptorsFlag {
    Auto,
    Sgl,
    Prp,
}

/// `--progress`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProgressFlag {
    Auto,
    Never,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn flags_are_consistent() {
        super::Raw::command().debug_assert();
    }
}
