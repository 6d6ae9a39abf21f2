//! The command line: the commands and their exit codes.

use std::io::{self, ErrorKind, IsTerminal as _};
use std::process::ExitCode;
use std::sync::LazyLock;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgMatches, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use nvme_bind::VERSION;
use nvme_driver::platform::vfio::PciAddress;
use ripieno_stack::former_option;
use serde_json::json;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::bench::{self, BenchCommand};
use crate::config::{DoctorFlags, OutputFlags, ReplayFlags, StoreArgs};
use crate::ctl::{self, CtlFlags};
use crate::format::{self, FormatFlags};
use crate::identify::{self, IdentifyFlags};
use crate::inspect::{self, FsckFlags, InspectFlags};
use crate::manual::{self, CompletionsFlags, ManFlags};
use crate::options::{self, OptionsFlags};
use crate::pace::{self, PaceFlags};
use crate::problem::{
    EXIT_FAILED, EXIT_UNREAD, EXIT_USAGE, Interrupted, Problem, one_line, shortage,
};
use crate::scrub::{self, ScrubFlags};
use crate::serve::{self, ServeFlags};
use crate::sim::{self, SimFlags};
use crate::terminal::{self, say};
use crate::top::{self, TopFlags};
use crate::{doctor, fio, replay};

const ENVIRONMENT: &str = "\
Exit codes:
  0    done
  1    what was looked for is wrong, I/O failed, or stdout could not be written to
  2    bad input: the command line, a file, or something that this machine does not have
  129, 130, 143
       interrupted by SIGHUP, SIGINT (Ctrl-C), SIGTERM
Each command's --help has its own. A reader of stdout that goes away early, such as head, changes
none of them, but that of doctor: 141, because the checks ended there.

With --json, an error is an object on stdout, too: {\"error\": {\"kind\", \"message\",
\"hint\"}}, of the kind usage (exit code 2), failed or interrupted; unless a result is there.

-h shows of each command what is needed most, --help all.

RUST_LOG chooses log messages and goes before -v and -q: a level (off, error, warn, info, debug,
trace), or levels of modules: RUST_LOG=warn,nvme_driver=debug.";

const REPLAY_HELP: &str = "\
For each request, the longest stored prefix is looked up and retrieved layer by layer into scattered
blocks of a KV pool. The missing blocks are filled, stored layer by layer, and committed. This needs
no GPU and no spare SSD: the defaults are software NVMe controllers, and the I/O kernel compiled for
the host. The default workload has the KV cache of Llama-3-8B, and 1 GiB of it.

Examples:
  ripieno replay
  ripieno replay --trace conversation_trace.jsonl --model tiny --verify full
  ripieno replay --capacity 1GiB                           # blocks are evicted
  ripieno replay --keep --path /mnt/scratch/store    # the next replay finds the blocks
  ripieno replay --devices vfio:0000:65:00.0,vfio:0000:66:00.0 --verify full
  ripieno replay --executor cuda --io-sms 4 --launch resident --verify full

Sizes have a unit: 4K, 1.5MiB, 2GiB (powers of 1024), 500GB (of 1000). Digits may be separated:
4_000. The report goes to stdout, everything else to stderr. retrieve and store are bytes per time
with transfers in flight; memcpy is one thread that copies objects of the same size.

Exit codes:
  0    everything was replayed and every checked byte was right
  1    wrong bytes were found, I/O failed, or stdout could not be written to
  2    bad input: the command line, the trace, or something that this machine does not have
  130  interrupted by Ctrl-C (143 by SIGTERM, 129 by SIGHUP); reports what was done until then";

const PACE_HELP: &str = "\
An engine with continuous batching computes layer by layer, waits for layers that are loaded, and
stores what it computed. Its requests, transfers and bytes go through the whole stack. The report
shows how long the GPU waited.

Examples:
  ripieno pace
  ripieno pace --requests 1000 --speed 4
  ripieno pace --trace conversation_trace.jsonl --dram 64MiB --json
  ripieno pace --hit-rates 90,93.75,96.9
  ripieno pace --slack slack.json --schedule slack

Software controllers run at the speed of drives (--medium), and layers take the time of a GPU:
by default Llama-3-8B on an H100 with two drives of the Tutti paper. The bytes of mini are 1024
times fewer, and its devices 1024 times slower. Data is moved and not checked. The same arguments
give the same numbers.

Exit codes:
  0    all requests were served
  1    I/O failed
  2    bad input: the command line, the trace, or something that this machine does not have
  130  interrupted by Ctrl-C (143 by SIGTERM, 129 by SIGHUP); reports what was done until then";

const DOCTOR_HELP: &str = "\
Checks the machine as nvme-bind doctor does (IOMMU, VFIO, groups, ACS, limits, GPU), then the
NVIDIA driver, the GPU, the I/O kernel on it, and GDRCopy; then tests each route between device and
KV pool. Software controllers are tested with a small replay that checks every byte. Drives are only
read.

Examples:
  ripieno doctor
  ripieno doctor --devices vfio:0000:65:00.0,vfio:0000:66:00.0
  ripieno doctor --route direct --json

What --json prints: {\"checks\": [{\"id\", \"title\", \"route\", \"looked_at\",
\"verdict\", \"found\", \"fix\"}], \"works\": [routes]}. A verdict is ok, warn, fail or skip.
Each check is printed before the next one begins.

Exit codes:
  0  a route works (with --route: this route works)
  1  no route works (with --route: this route does not), or a device did not answer
  2  bad input: the command line";

const IDENTIFY_HELP: &str = "\
Attaches the driver, reads, and shuts the device down again. Nothing is written to it.

Examples:
  ripieno identify
  ripieno identify --devices vfio:0000:65:00.0 --json

Exit codes:
  0  every device answered
  1  one did not
  2  bad input: the command line, or a device that cannot be opened on this machine";

const FORMAT_HELP: &str = "\
Examples:
  A store directory of two files, for a model's KV cache:
    ripieno format --path /var/tmp/store --model llama-3-8b --capacity 10GiB
  A store directory over two block devices, and drives bound to vfio-pci; first only shown:
    ripieno format --path /var/lib/ripieno --block /dev/disk/by-id/nvme-A --dry-run
    ripieno format --devices vfio:0000:65:00.0,vfio:0000:66:00.0 --dry-run
  A store in place of what is there; then what was there again:
    ripieno format --devices vfio:0000:65:00.0 --overwrite anything --undo-file before
    ripieno format --devices vfio:0000:65:00.0 --undo before

Devices that hold a filesystem, a partition table, a member of a RAID, a volume group or a pool, or
data of an unknown kind are refused; so are those that hold a store, and those in use. All that
formatting overwrites is looked at: the first 1,088 KiB and the last MiB. --overwrite says what is
not needed. What formatting overwrites is saved first, so that --undo brings it back
byte for byte until the new store is opened. Opening it overwrites more, and ends that.

With --json: {\"store\", \"dry_run\", \"files\", \"checksums_a_file\", \"journal_offset\",
\"journal_bytes\", \"data_offset\", \"data_bytes\", \"undo_file\", \"devices\": [{\"device\",
\"identity\", \"region_bytes\", \"held\"}]}; with --undo: {\"undo_file\", \"bytes_put_back\"}.

Exit codes:
  0  formatted, put back, or with --dry-run: it would be
  1  a device failed; format it again, or undo it
  2  nothing was written: bad input, or something that is there is in the way";

const INSPECT_HELP: &str = "\
Examples:
  ripieno inspect --path /var/tmp/store
  ripieno inspect --devices vfio:0000:65:00.0 --json

Nothing is written, and no other process may have the store open meanwhile.

Exit codes:
  0  there is a store, whole or damaged
  1  a device is gone, too short or could not be read
  2  bad input: the command line, no store, or a store in use";

const FSCK_HELP: &str = "\
Examples:
  ripieno fsck --path /var/tmp/store
  ripieno fsck --path /var/tmp/store --repair

What is checked: both copies of each superblock; that the devices are those of one store, and agree;
every record of the journal, and that no key is in two files. The data is not read.

Exit codes:
  0  clean, or everything was repaired
  1  damaged, or a device is gone, too short or could not be read
  2  bad input: the command line, no store, or a store in use";

const SCRUB_HELP: &str = "\
The I/O kernel compares the checksum of each object, as for any read. Damaged files are dropped
from the catalog, so that they become misses instead of errors.

Examples:
  ripieno scrub --path /var/tmp/store
  ripieno scrub --path /var/tmp/store --report-only --rate 100MB --json

What --json prints: {\"store\", \"files\", \"files_read\", \"bytes_read\", \"seconds\", \"dropped\",
\"interrupted\", \"damaged\": [{\"file\", \"namespace\", \"label\", \"key\", \"layer\", \"what\"}]}.
A store that keeps no checksums is refused. Ctrl-C ends it and reports what was read until then.

Exit codes:
  0    every file that was read is what was stored
  1    damaged files or a damaged journal were found, or a device failed
  2    bad input: the command line, no store, one without checksums, or one in use
  130  interrupted by Ctrl-C (143 by SIGTERM, 129 by SIGHUP), and nothing damaged was found";

const TOP_HELP: &str = "\
Examples:
  ripieno replay --path /var/tmp/media --metrics 9400 &
  ripieno top 9400
  ripieno top /run/ripieno/kv.sock --once --json

Rates are of the last second, all else is since the store was opened. waits has the seconds that
callers waited in the last second: for layers of loads and saves, for a slot to start a layer, and
for flushes. worth compares the time of loads with that of computing, which a replay models. If
stdout is no terminal, each second is printed as lines.";

const SERVE_HELP: &str = "\
Examples:
  ripieno serve --config /etc/ripieno.toml
  ripieno serve --print-config > ripieno.toml
  ripieno serve --config ripieno.toml --check

Owns a store in a directory or on drives; processes of the users in the configuration share it over
a Unix socket. SIGTERM or Ctrl-C ends it: sessions end, and the store is closed. --print-config
prints a configuration to start from.

Exit codes:
  0    it was ended by a signal, and the store is closed
  1    the store failed
  2    bad input: the command line, the configuration, or a store or socket that is in use";

const CTL_HELP: &str = "\
Examples:
  ripieno ctl status
  ripieno ctl quota --namespace 1 --bytes 10GiB --socket ./ripieno.sock
  ripieno ctl pin --namespace 1 --ttl 10m KEY... --json
  ripieno ctl metrics --address 10.0.0.7:9500 --token-file /etc/ripieno/token

For the server's own user, and root; over TCP, for all who have the token. Flags may also stand
before the verb. The requests are JSON over HTTP: other programs can make them, too.

Exit codes:
  0  done; a pin or hint may have been clipped, deferred, rejected or missing
  1  checksums --verify found damage, or stdout could not be written to
  2  bad input: the command line, no server at the address, or a request that it refused";

const SIM_HELP: &str = "\
Examples:
  ripieno sim
  ripieno sim tutti-13
  ripieno sim all --html report.html
  ripieno sim conversation_trace.jsonl --rate 0.5 --gpus 2 --drives 4 --dram 512GiB
  ripieno sim loogle --rate 0.4 --json
  ripieno sim plan conversation_trace.jsonl --rate 0.5 --ttft-p99 12
  ripieno sim cluster chat --rate 8 --engines 4 --link 15,100

Nothing is measured: a model of GPU and devices says how long each thing takes, and the store's own
index and scheduler decide what happens. Each scenario says where its parameters are from, and
which of a paper's numbers were used for them. The same scenario gives the same numbers everywhere.

With --json: [{\"name\", \"title\", \"setting\", \"tables\": [{\"title\", \"columns\", \"rows\"}],
\"comparisons\": [{\"what\", \"unit\", \"paper\", \"ours\", \"basis\", \"note\"}],
\"plots\", \"notes\"}].";

const OPTIONS_HELP: &str = "\
Examples:
  ripieno options
  ripieno options --json

They are the same for servers, engines, Python and C.

What --json prints: [{\"name\", \"value\", \"default\", \"help\"}].";

const COMPLETIONS_HELP: &str = "\
Examples:
  ripieno completions bash > ~/.local/share/bash-completion/completions/ripieno
  ripieno completions zsh nvme-bind > ~/.zfunc/_nvme-bind";

const MAN_HELP: &str = "\
Examples:
  ripieno man | man -l -
  ripieno man ~/.local/share/man/man1";

/// NVMe SSDs as a memory tier for GPUs.
#[derive(Debug, Parser)]
#[command(name = "ripieno", version = VERSION, long_version = long_version())]
#[command(after_help = ENVIRONMENT, arg_required_else_help = true)]
struct Raw {
    #[command(subcommand)]
    command: Command,
}

/// Commands.
#[derive(Debug, Subcommand)]
enum Command {
    /// Replay serving traffic through the whole stack and verify the data
    #[command(after_help = REPLAY_HELP)]
    Replay(Box<ReplayFlags>),

    /// Serve requests at their arrival times, in virtual time
    #[command(after_help = PACE_HELP)]
    Pace(Box<PaceFlags>),

    /// Measure devices: transfers alone, or batches of a store's objects
    #[command(subcommand)]
    Bench(BenchCommand),

    /// Make a store in a directory or on drives, or undo that
    #[command(after_help = FORMAT_HELP)]
    Format(Box<FormatFlags>),

    /// Show what is on a store's devices: layout, journal, damage
    #[command(after_help = INSPECT_HELP)]
    Inspect(InspectFlags),

    /// Check a store's superblocks and journal; repair them if asked to
    #[command(after_help = FSCK_HELP)]
    Fsck(FsckFlags),

    /// Read every file of a store and find corrupted ones
    #[command(after_help = SCRUB_HELP)]
    Scrub(ScrubFlags),

    /// Simulate serving with a tiered KV cache; compare with papers
    #[command(after_help = SIM_HELP)]
    Sim(Box<SimFlags>),

    /// Watch a running store: bandwidth, errors, hits, waits
    #[command(after_help = TOP_HELP)]
    Top(TopFlags),

    /// Own a store, and share it over a Unix socket
    #[command(after_help = SERVE_HELP)]
    Serve(ServeFlags),

    /// Ask and control a server
    #[command(after_help = CTL_HELP)]
    Ctl(CtlFlags),

    /// Show devices: model, sizes, limits, formats, health
    #[command(after_help = IDENTIFY_HELP)]
    Identify(IdentifyFlags),

    /// Show which data paths work here, and how to enable the others
    #[command(after_help = DOCTOR_HELP)]
    Doctor(DoctorFlags),

    /// Show the options of a store and their defaults
    #[command(after_help = OPTIONS_HELP)]
    Options(OptionsFlags),

    /// Print the completion script of a shell
    #[command(after_help = COMPLETIONS_HELP)]
    Completions(CompletionsFlags),

    /// Print the manual page, or write those of all commands
    #[command(after_help = MAN_HELP)]
    Man(ManFlags),
}

/// Returns the version and the optional parts that were compiled in.
fn long_version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| format!("{VERSION}\nfeatures: cuda, vfio"));
    &TEXT
}

/// Value names of numeric flags. Negative numbers are passed to their parsers, which reject them.
const NUMBERS: [&str; 13] = [
    "N", "COUNT", "SIZE", "SIZE|off", "BYTES", "RATE", "SEED", "PERCENT", "TIME", "FACTOR",
    "DOLLARS", "N|DRIVES", "512|4096",
];

/// Returns the complete command line definition.
#[must_use]
pub fn command() -> clap::Command {
    fn with_negative(command: clap::Command) -> clap::Command {
        let is_number = |arg: &Arg| {
            let mut names = arg.get_value_names().into_iter().flatten();
            names.any(|name| NUMBERS.contains(&&**name))
        };
        let arg = |arg: Arg| if is_number(&arg) { arg.allow_hyphen_values(true) } else { arg };
        command.mut_args(arg).mut_subcommands(with_negative)
    }
    // Refused there, or without effect.
    let without = |arg: Arg| match arg.get_id().as_str() {
        "trace" | "requests" | "capacity" | "keep" | "verify" => arg.hide(true),
        _ => arg,
    };
    with_negative(Raw::command())
        .mut_subcommand("bench", |bench| bench.mut_subcommands(|it| it.mut_args(without)))
}

/// Lines of a small terminal.
const SCREEN: usize = 24;
/// More flags and commands than these are not all shown by `-h`.
const FEW: usize = 14;
/// Flags and arguments that it shows then.
const BASIC: &str = "block bs capacity devices dram drives engines executor gpu gpus html iodepth \
                     json keep layer_times link model names out overwrite path rate runtime rw \
                     schedule shape size socket tokens trace ttft_p99 verify";
/// Their texts, where the first clause of the help says too little.
const TEXTS: [(&str, &str); 9] = [
    ("capacity", "Size of the store, if it is made"),
    ("devices", "Number of files, or drives: ng:/dev/ng0n1,... or vfio:0000:65:00.0,..."),
    ("executor", "Where the I/O kernel runs: host, inline or cuda"),
    ("model", "Model of the KV cache"),
    ("names", "Scenarios, workloads or traces"),
    ("overwrite", "What may be lost: nothing, store or anything"),
    ("rw", "read, write, rw, randread, randwrite or randrw"),
    ("schedule", "slack, naive or both"),
    ("verify", "full, sampled or off"),
];

/// Returns a command line whose help fits a small terminal: `-h` shows what most users need.
fn brief(mut command: clap::Command) -> clap::Command {
    let count = command.get_arguments().count() + command.get_subcommands().count();
    command = command
        .disable_help_subcommand(true)
        .help_template("{about-with-newline}{usage-heading} {usage}\n\n{all-args}{after-help}");
    if count > FEW {
        command = command.mut_args(brief_arg).mut_subcommands(|it| {
            let is_rare = ["pace", "completions", "man"].contains(&it.get_name());
            it.hide(is_rare)
        });
    }
    if let Some(all) = command.get_after_help().map(ToString::to_string) {
        command = command.after_help("--help shows all flags, examples and exit codes");
        let left = SCREEN.saturating_sub(command.render_help().to_string().lines().count() + 1);
        let at = all.find("Examples:").map_or(all.len(), |at| at + "Examples:\n".len());
        let lines = all[at..].lines().take_while(|line| !line.is_empty());
        let fitting: Vec<&str> = lines.filter(|line| line.len() <= 80).take(left).collect();
        if !fitting.is_empty() {
            let head = "Examples (--help shows more, all flags, and exit codes):";
            command = command.after_help(format!("{head}\n{}", fitting.join("\n")));
        }
    }
    command.mut_subcommands(brief)
}

fn brief_arg(arg: Arg) -> Arg {
    let name = arg.get_id().as_str();
    if !BASIC.split(' ').any(|basic| basic == name) {
        return arg.hide(true);
    }
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let clause = help.split(['[', ';', ',', ':']).next().unwrap_or_default().split(". ").next();
    let text = TEXTS.iter().find(|it| it.0 == name).map(|it| it.1).or(clause).unwrap_or_default();
    let has_values = arg.get_action().takes_values();
    let arg = arg.help(text.trim().to_owned()).help_heading(None::<&str>);
    if has_values { arg.hide_possible_values(true) } else { arg }
}

/// Runs the command line of this process and returns its exit code.
#[must_use]
pub fn run() -> ExitCode {
    let given =
        |flag: &str| std::env::args_os().take_while(|arg| arg != "--").any(|arg| arg == flag);
    let is_json = given("--json");
    let matches = if given("-h") { brief(command()) } else { command() }.try_get_matches();
    let raw = matches.and_then(|matches| {
        let path = Path::of(&matches);
        Raw::from_arg_matches(&matches).map(|raw| (raw.command, matches, path))
    });
    let (command, matches, path) = match raw {
        Ok(raw) => raw,
        Err(error) => return ExitCode::from(misread(error, is_json)),
    };
    match run_command(command, &matches) {
        Ok(code) => ExitCode::from(code),
        Err(error) => ExitCode::from(complain(&error, &path, is_json)),
    }
}

/// The names of a command and its parents.
struct Path(Vec<String>);

impl Path {
    fn of(mut matches: &ArgMatches) -> Self {
        let mut names = Vec::new();
        while let Some((name, inner)) = matches.subcommand() {
            names.push(name.to_owned());
            matches = inner;
        }
        Self(names)
    }

    /// The words and values of a line that cannot be read.
    fn unread(line: impl Iterator<Item = String>) -> Self {
        let word = |word: String| match word.strip_prefix('-') {
            Some(flag) => flag.split_once('=').map(|(_, value)| value.to_owned()),
            None => Some(word),
        };
        Self(line.filter_map(word).collect())
    }

    /// Returns true if the command has this flag.
    fn has(&self, flag: &str) -> bool {
        self.command(|it| has(it, flag))
    }

    /// Says where a flag belongs that stands before the command that has it, or that a command
    /// below this one has, or else another one.
    fn elsewhere(&self, flag: &str) -> Option<String> {
        let is_it = |arg: &Arg| match flag.strip_prefix("--") {
            Some(long) => arg.get_long() == Some(long),
            None => arg.get_short().is_some_and(|short| flag == format!("-{short}")),
        };
        let root = command();
        let mut at = &root;
        for name in &self.0 {
            at = at.find_subcommand(name).unwrap_or(at);
            if at.get_arguments().any(is_it) {
                // clap itself says so of a long one.
                let is_short = !flag.starts_with("--");
                return is_short.then(|| format!("{flag} comes after the name of the command"));
            }
        }
        let flag = flag.strip_prefix("--")?;
        let of = |it: &clap::Command| {
            let found = it.get_subcommands().find(|it| has(it, flag))?.get_name();
            let above = Some(it.get_name()).filter(|name| *name != "ripieno");
            let names: Vec<&str> = above.into_iter().chain([found]).collect();
            Some(format!("it is a flag of ripieno {}", names.join(" ")))
        };
        of(at).or_else(|| of(&root))
    }

    fn command<T>(&self, of: impl FnOnce(&clap::Command) -> T) -> T {
        let mut command = &command();
        for name in &self.0 {
            command = command.find_subcommand(name).unwrap_or(command);
        }
        of(command)
    }
}

fn has(command: &clap::Command, flag: &str) -> bool {
    command.get_arguments().any(|arg| arg.get_long() == Some(flag))
}

fn run_command(command: Command, matches: &ArgMatches) -> anyhow::Result<u8> {
    let of = |output: &OutputFlags| (output.verbose, output.quiet);
    let (verbose, quiet) = match &command {
        Command::Replay(flags) => of(&flags.common.output),
        Command::Pace(flags) => of(&flags.common.output),
        Command::Bench(command) => of(command.output()),
        Command::Serve(flags) => (flags.verbose, flags.quiet),
        Command::Identify(flags) => (flags.verbose, false),
        Command::Doctor(flags) => (flags.verbose, flags.verbose == 0),
        _ => (0, false),
    };
    log(verbose, quiet);
    match command {
        Command::Replay(flags) => replay::run(&StoreArgs::check(*flags, false)?),
        Command::Pace(flags) => pace::run(*flags),
        Command::Bench(command) => bench::run(&command),
        Command::Format(flags) => format::run(&flags),
        Command::Inspect(flags) => inspect::run(&flags),
        Command::Fsck(flags) => inspect::check(&flags),
        Command::Scrub(flags) => scrub::run(&flags),
        Command::Sim(flags) => sim::run(&flags, matches.subcommand().expect("it is sim").1),
        Command::Top(flags) => top::run(&flags),
        Command::Serve(flags) => serve::run(&flags),
        Command::Ctl(flags) => ctl::run(flags),
        Command::Identify(flags) => identify::run(&flags),
        Command::Doctor(flags) => doctor::run(&flags),
        Command::Options(flags) => options::run(&flags),
        Command::Completions(flags) => manual::complete(&flags, self::command()),
        Command::Man(flags) => manual::write(&flags, self::command()),
    }
}

/// Prints help or the parse error. Returns the exit code.
fn misread(mut error: clap::Error, is_json: bool) -> u8 {
    let line = || std::env::args().skip(1);
    let path = Path::unread(line());
    // All that a line of fio has: one after the other would be as many attempts.
    let mut hints: Vec<String> = line().filter_map(|word| fio_tip(&word, &path)).collect();
    if hints.len() < 2 {
        hints = tip(&error, &path).into_iter().collect();
    }
    if !hints.is_empty() {
        // In place of one that is spelled similarly.
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::SuggestedSubcommand);
        error.remove(ContextKind::Usage);
        error.insert(
            ContextKind::Suggested,
            ContextValue::StyledStrs(hints.iter().map(Into::into).collect()),
        );
    }
    let is_help = !error.use_stderr();
    match error.print() {
        Err(error) if is_help && error.kind() != ErrorKind::BrokenPipe => {
            say(format_args!("error: cannot write to stdout: {error}"));
            return EXIT_FAILED;
        }
        _ => {}
    }
    if is_json && !is_help {
        let text = error.render().to_string();
        let text = text.strip_prefix("error: ").unwrap_or(&text);
        // The usage follows the message.
        let message = text.split("\n\n").next().unwrap_or_default();
        let tips = text.lines().filter_map(|line| line.trim().strip_prefix("tip: "));
        let tips = tips.collect::<Vec<_>>().join("; ");
        let hint = if tips.is_empty() { "--help shows what can be given" } else { &tips };
        print_error("usage", message, hint);
    }
    u8::try_from(error.exit_code()).unwrap_or(EXIT_USAGE)
}

/// Says what is meant by a flag of former versions or of fio, or by a place without a flag.
fn tip(error: &clap::Error, path: &Path) -> Option<String> {
    let of = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    if let Some(given) = of(ContextKind::InvalidSubcommand) {
        return program(given).map(|it| format!("it is {it} here"));
    }
    let given = of(ContextKind::InvalidArg)?;
    let (name, words) = match (given.strip_prefix("--"), of(ContextKind::InvalidValue)) {
        (None, _) => return place(given, path).or_else(|| path.elsewhere(given)),
        (Some(flag), Some(value)) => {
            let flag = flag.split(' ').next();
            return match (flag, value) {
                (Some("executor"), "gpu") => Some("a GPU is --executor cuda".to_owned()),
                (Some("devices"), _) => place(value, path),
                _ => None,
            };
        }
        (Some(name), None) => (name.replace('-', "_"), path.0.iter()),
    };
    let now = former_option(&name).filter(|now| path.has(now));
    let is_place = matches!(now, Some("path" | "devices")) || name == "filename";
    let mut places = words.filter(|_| is_place).flat_map(|word| place(word, path));
    match (places.next(), now) {
        (Some(found), _) => Some(found),
        (None, Some(now)) => Some(format!("its name is --{now}; ripieno options explains it")),
        (None, None) if path.has("iodepth") => fio::word(&name).map(str::to_owned),
        (None, None) => path.elsewhere(given),
    }
}

/// Returns the command for a verb of fio, nvme-cli or smartmontools, or that of another command.
fn program(given: &str) -> Option<String> {
    let of = |it: &clap::Command| {
        it.find_subcommand(given).map(|_| format!("ripieno {} {given}", it.get_name()))
    };
    match given {
        "fio" | "perf" => Some("ripieno bench raw".to_owned()),
        "id-ctrl" | "id-ns" | "smart-log" => Some("ripieno identify".to_owned()),
        "list" | "bind" | "unbind" | "restore" => Some(format!("nvme-bind {given}")),
        _ => command().get_subcommands().find_map(of),
    }
}

/// Returns the tip for a flag of fio that the command does not have.
fn fio_tip(word: &str, path: &Path) -> Option<String> {
    let name = word.strip_prefix("--")?.split('=').next()?;
    let is_other = path.has("iodepth") && !path.has(name);
    is_other.then(|| Some(format!("--{name}: {}", fio::word(&name.replace('-', "_"))?)))?
}

/// Returns the flag of a command for a device or a directory.
fn place(text: &str, path: &Path) -> Option<String> {
    if text.ends_with(".fio") && path.has("iodepth") {
        return Some("job files of fio are not read: give their parameters as flags".to_owned());
    }
    if text.ends_with(".toml") && path.has("config") {
        return Some(format!("it is --config {text} here"));
    }
    let at = text.strip_prefix("file:").unwrap_or(text);
    let is_drive = at.parse::<PciAddress>().is_ok();
    let (flag, value) = match at.starts_with("/dev/") {
        true if path.has("block") && !at.starts_with("/dev/ng") => {
            ("block", format!("{at}, or --devices vfio:0000:65:00.0"))
        }
        true if at.starts_with("/dev/ng") => ("devices", format!("ng:{at}")),
        true => ("devices", "ng:/dev/ng0n1, the namespace beside /dev/nvme0n1".to_owned()),
        false if is_drive => ("devices", format!("vfio:{at}")),
        false if at.contains('/') || text != at || std::path::Path::new(at).is_dir() => {
            // fio names a file, and here it is the directory for scratch files.
            let parent = std::path::Path::new(at).parent().filter(|dir| dir.is_dir());
            let is_file = path.has("iodepth") && !std::path::Path::new(at).is_dir();
            let parent = parent.filter(|_| is_file);
            ("path", parent.map_or(at.to_owned(), |dir| dir.display().to_string()))
        }
        false => return None,
    };
    path.has(flag).then(|| format!("it is --{flag} {value} here"))
}

/// Reports an error in one line plus a hint, and chooses the exit code.
fn complain(error: &anyhow::Error, path: &Path, is_json: bool) -> u8 {
    // Only `doctor` returns this error: its reader closed stdout, and the checks stopped there.
    let closed = |error: &io::Error| error.kind() == ErrorKind::BrokenPipe;
    if error.downcast_ref().is_some_and(closed) {
        return EXIT_UNREAD;
    }
    let message = one_line(error);
    say(format_args!("error: {message}"));
    let problem = error.downcast_ref::<Problem>();
    let (kind, code, hint) = match (error.downcast_ref::<Interrupted>(), problem) {
        (Some(Interrupted(code)), _) => ("interrupted", *code, String::new()),
        (None, Some(problem)) => ("usage", EXIT_USAGE, problem.hint().to_owned()),
        (None, None) => match shortage(error, &|flag| path.has(flag)) {
            Some(hint) => ("usage", EXIT_USAGE, hint),
            None => ("failed", EXIT_FAILED, String::new()),
        },
    };
    if !hint.is_empty() {
        say(format_args!(" hint: {hint}"));
    }
    if is_json && !terminal::has_printed() {
        print_error(kind, &message, &hint);
    }
    code
}

/// Prints an error as JSON on stdout.
fn print_error(kind: &str, message: &str, hint: &str) {
    let error = json!({ "error": { "kind": kind, "message": message, "hint": hint } });
    // The error is on stderr already.
    let _ = terminal::print(error);
}

/// Sends the logs of all crates to stderr. `RUST_LOG` overrides -v and -q.
fn log(verbose: u8, quiet: bool) {
    let level = match (quiet, verbose) {
        (true, _) => LevelFilter::ERROR,
        (false, 0) => LevelFilter::WARN,
        (false, 1) => LevelFilter::INFO,
        (false, 2) => LevelFilter::DEBUG,
        (false, _) => LevelFilter::TRACE,
    };
    let asked = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty());
    let targets = asked.and_then(|text| match targets(&text) {
        Ok(targets) => Some(targets),
        Err(why) => {
            say(format_args!("warning: RUST_LOG={text} is ignored: {why}"));
            say(
                " hint: write a level, such as debug, or levels of modules: warn,nvme_driver=debug",
            );
            None
        }
    });
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        // It would report on stderr, and panic, when stderr cannot be written to.
        .log_internal_errors(false)
        .finish()
        .with(targets.unwrap_or_else(|| Targets::new().with_default(level)))
        .init();
}

/// Crates that log.
const LOGS: [&str; 10] = [
    "gio_kernels",
    "gio_uring",
    "kv_catalog",
    "kv_schedule",
    "kv_tier",
    "nvme_driver",
    "nvme_emu",
    "nvme_pci",
    "objstore",
    "ripieno",
];

/// Parses `RUST_LOG`. A word that is no level would name a module, and no such module logs.
fn targets(text: &str) -> Result<Targets, String> {
    let targets: Targets = text.parse().map_err(|error| format!("{error}"))?;
    let is_known = |name: &str| LOGS.iter().any(|known| name.starts_with(known));
    match targets.iter().find(|(name, _)| !is_known(name)) {
        Some((name, _)) => Err(format!("`{name}` is no level, and no module of this program")),
        None => Ok(targets),
    }
}

#[cfg(test)]
mod tests;
