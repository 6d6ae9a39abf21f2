//! The options of a store. Each is declared once, below: its name, type, limits, default and help.
//!
//! A further option needs an entry there, a line in [`StackConfig::tune`] if the store uses it, and
//! the place that uses it. A command has it as a flag once it is among those that it takes
//! (`Takes`, in tools); `-h` shows it if `BASIC` (tools/src/cli.rs) names it. The reference's line
//! is written by `RIPIENO_WRITE_DOCS=1 cargo test -p ripieno-stack --test documents`.
//!
//! The entries are the keys of `[store]` in a server's TOML, of vLLM's, LMCache's, SGLang's and
//! Python's options and of the C interface's text, the flags of the programs with their completions
//! and manual pages, the lines of `ripieno options` and of docs/reference/options.md, and the text
//! of errors.

use std::{
    collections::BTreeMap,
    fmt,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    str::FromStr,
};

use nvme_driver::ControllerOptions;
use objstore::{Codec, DramMode, Overwrite, Route, StoreOptions};
use serde::{Deserialize, Deserializer, de};

use crate::{
    address::MetricsAddress,
    drives::DriveAddress,
    emulation::{EMU_DEPTH, EMU_QUEUES},
    error::StackError,
    executor::Executor,
    gpu::CudaChoice,
    pool::PoolMemory,
    route::routes,
    size::Size,
    store_dir::{StoreDir, StoreDirMedia, StoreDirOptions},
};

/// Most devices of a store, and the most that the layout is tested with.
const DEVICES_MAX: u32 = 64;

/// Declares [`StackConfig`] and [`OPTIONS`]. A field's documentation is the option's help.
macro_rules! options {
    ($(
        $(#[doc = $help:literal])+
        $name:ident: $type:ty, $value:literal, $default:literal, $parse:expr;
    )+) => {
        /// Options of a store. Each has a default, which may depend on the others.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct StackConfig {
            $($(#[doc = $help])+ pub $name: Option<$type>,)+
        }

        /// All options of a store.
        pub const OPTIONS: &[StackOption] = &[$(StackOption {
            name: stringify!($name),
            value: $value,
            default: $default,
            help: concat!($($help),+),
            set: |config, text| {
                config.$name = Some($parse(text)?);
                Ok(())
            },
        }),+];
    };
}

options! {
    /// Directory of the store. Its parent must exist.
    path: PathBuf, "DIR", "none", path;
    /// Files in the directory (1 to 64), or drives: ng:/dev/ng0n1,ng:/dev/ng1n1 that the kernel's
    /// driver has, or vfio:0000:65:00.0,vfio:0000:66:00.0 that are bound to vfio-pci. Fixed when
    /// the store is made.
    devices: DeviceChoice, "N|DRIVES", "1", DeviceChoice::from_str;
    /// Makes the store if there is none, for this many bytes on all devices together. Files are
    /// allocated at once, and never grow.
    capacity: u64, "SIZE", "none", size;
    /// Bytes of a logical block of the files. Fixed when the store is made.
    lba: u32, "512|4096", "4096", lba;
    /// Encodes blocks of bf16 without loss, in three quarters of their bytes, by the CPU; the KV
    /// cache must be in host memory. Fixed when the store is made.
    codec: Codec, "none|exp3", "none", |text| word(text, &CODECS);
    /// Data on drives that may be lost when the store is made.
    overwrite: Overwrite, "nothing|store|anything", "nothing", |text| word(text, &OVERWRITE);
    /// Way to move the data. file: io_uring, on the files of a directory or on drives ng:. The
    /// others run the I/O kernel: on threads, in the thread that calls the store, or on a GPU.
    executor: Executor, "file|host|inline|cuda", "by devices, pool",
        |text| word(text, &EXECUTORS);
    /// The GPU's number in CUDA.
    gpu: u32, "N", "that of the KV pool, or 0", |text| count(text, 0..=u32::MAX);
    /// SMs of the GPU for the I/O kernel, rounded up to a partition (1 or more).
    io_sms: u32, "N", "4", |text| count(text, 1..=u32::MAX);
    /// Required way of the data. direct: between drives and GPU memory. staged: through pinned host
    /// memory. host: the KV pool is in host memory.
    route: Route, "direct|staged|host", "the first that is proven", |text| word(text, &ROUTES);
    /// Queue pairs of each device (1 to 64), each served by one warp.
    queues: u16, "N", "1, with a GPU 4", |text| count(text, 1..=EMU_QUEUES);
    /// Entries of a queue, a power of two (2 to 1024).
    depth: u32, "N", "256", depth;
    /// Host memory that caches blocks, allocated at once, for each worker. Blocks in it are copied
    /// from memory instead of read from the devices.
    dram: u64, "SIZE", "0", size;
    /// Blocks that get into dram. write-through: those stored, loaded or read ahead. read-ahead:
    /// only those read ahead.
    dram_mode: DramMode, "write-through|read-ahead", "write-through", |text| word(text, &MODES);
    /// Starts layers by need instead of in the order of the calls: loads before saves, with fair
    /// shares for requests.
    pacing: bool, "true|false", "false", |text| word(text, &[("true", true), ("false", false)]);
    /// Serves metrics for Prometheus and ripieno top: a port (9400), an IP address and a port, or
    /// the path of a Unix socket with a /. public: before it allows other machines.
    metrics: MetricsAddress, "ADDRESS", "off", MetricsAddress::from_str;
}

/// Names of options that other programs or former versions use, and their names here.
const FORMER: [(&str, &str); 11] = [
    ("capacity_bytes", "capacity"),
    ("dram_bytes", "dram"),
    ("device", "devices"),
    ("drives", "devices"),
    ("home", "path"),
    ("lba_bytes", "lba"),
    ("media", "path"),
    ("queue_depth", "depth"),
    ("queues_per_device", "queues"),
    ("require", "route"),
    ("schedule", "pacing"),
];

const OVERWRITE: [(&str, Overwrite); 3] = [
    ("nothing", Overwrite::Nothing),
    ("store", Overwrite::Store),
    ("anything", Overwrite::Anything),
];
const CODECS: [(&str, Codec); 2] = [("none", Codec::None), ("exp3", Codec::Exp3)];
const EXECUTORS: [(&str, Executor); 4] = [
    ("file", Executor::File),
    ("host", Executor::Host),
    ("inline", Executor::Inline),
    ("cuda", Executor::Cuda(CudaChoice::new(0))),
];
const ROUTES: [(&str, Route); 3] =
    [("direct", Route::Direct), ("staged", Route::Staged), ("host", Route::Host)];
const MODES: [(&str, DramMode); 2] =
    [("write-through", DramMode::WriteThrough), ("read-ahead", DramMode::ReadAhead)];

/// An option of a store.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "has functions")]
pub struct StackOption {
    /// Its name.
    pub name: &'static str,
    /// Its values: words with a | between them, or a kind of value in capitals.
    pub value: &'static str,
    /// Its default, in words.
    pub default: &'static str,
    help: &'static str,
    /// Sets it from its text, or says why that is no value of it.
    pub set: fn(&mut StackConfig, &str) -> Result<(), String>,
}

impl StackOption {
    /// Returns the text that explains it.
    #[must_use]
    pub fn help(&self) -> &'static str {
        self.help.trim_start()
    }
}

/// Devices of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceChoice {
    /// This number of files.
    Files(u32),
    /// Drives of one kind, in the store's order.
    Drives(Vec<DriveAddress>),
}

impl StackConfig {
    /// Returns the options of a store in a directory, with all defaults.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: Some(path.into()), ..Self::default() }
    }

    /// Sets an option from its text.
    ///
    /// # Errors
    /// Returns a text that says why if there is no such option, or it has no such value.
    pub fn set(&mut self, name: &str, text: &str) -> Result<(), String> {
        let option = OPTIONS.iter().find(|option| option.name == name);
        let option = option.ok_or_else(|| unknown_option(name, &[]))?;
        (option.set)(self, text).map_err(|why| format!("{name}: {text:?} was given; {why}"))
    }

    /// Checks that the options do not contradict each other, for a KV pool, and returns the
    /// executor.
    ///
    /// # Errors
    /// Returns [`StackError::Config`] if they do.
    pub fn check(&self, pool: &PoolMemory) -> Result<Executor, StackError> {
        let executor = self.executor(pool);
        let (on_drives, on_gpu) =
            (!self.drives().is_empty(), matches!(executor, Executor::Cuda(_)));
        let no_dram = self.dram_mode.is_some() && self.dram.is_none();
        let either = "a store has a directory or drives; give a number of files, or leave path out";
        let encodes = self.codec.is_some_and(|codec| codec != Codec::None);
        let pool_on_gpu = matches!(pool, PoolMemory::Gpu { .. });
        let no_gpu = "no GPU runs the I/O kernel; leave it out, or give executor cuda";
        for (name, is_wrong, problem) in [
            ("devices", on_drives && self.path.is_some(), either),
            ("lba", on_drives && self.lba.is_some(), "drives have their own; leave it out"),
            ("dram_mode", no_dram, "it is for dram; give dram, too"),
            (
                "codec",
                encodes && (on_gpu || pool_on_gpu),
                "the CPU encodes, and a GPU has the KV cache or runs the I/O kernel; leave it out",
            ),
            ("gpu", !on_gpu && self.gpu.is_some(), no_gpu),
            ("io_sms", !on_gpu && self.io_sms.is_some(), no_gpu),
        ] {
            if is_wrong {
                return Err(StackError::config(name, problem));
            }
        }
        routes(executor, pool, self.route).map(|_| executor)
    }

    /// Returns the drives; none if the devices are files.
    #[must_use]
    pub fn drives(&self) -> &[DriveAddress] {
        match &self.devices {
            Some(DeviceChoice::Drives(addresses)) => addresses,
            _ => &[],
        }
    }

    /// Returns true if the kernel's driver has the drives.
    #[must_use]
    pub fn is_passthrough(&self) -> bool {
        matches!(self.drives(), [DriveAddress::Ng(_), ..])
    }

    /// Returns the number of files, if one was given.
    #[must_use]
    pub fn files(&self) -> Option<u32> {
        match self.devices {
            Some(DeviceChoice::Files(count)) => Some(count),
            _ => None,
        }
    }

    /// Returns the directory of a store that is not on drives.
    ///
    /// # Errors
    /// Returns [`StackError::Config`] if there is none.
    pub fn dir(&self) -> Result<&Path, StackError> {
        let missing = "it is missing; give the directory of the store, or drives as devices";
        self.path.as_deref().ok_or_else(|| StackError::config("path", missing))
    }

    /// Checks the number and LBA size of devices that were given against a store that is there.
    ///
    /// # Errors
    /// Returns [`StackError::Config`] if it has others.
    pub fn check_dir(&self, dir: &StoreDir) -> Result<(), StackError> {
        let (files, lba) = (dir.devices().len() as u32, dir.lba_bytes());
        for (name, given, found) in [("devices", self.files(), files), ("lba", self.lba, lba)] {
            if given.is_some_and(|given| given != found) {
                let problem =
                    format!("the store has {found}; leave it out, or name another directory");
                return Err(StackError::config(name, problem));
            }
        }
        Ok(())
    }

    /// Checks that the directory has the files that are asked for, or can get them: another process
    /// may have it open. Looks at neither the room nor the blocks.
    ///
    /// # Errors
    /// Returns an error of [`StoreDir::open_or_create`].
    pub fn check_files(&self) -> Result<(), StackError> {
        let Some(bytes) = self.capacity else { return Ok(()) };
        Ok(StoreDir::check(self.dir()?, &self.dir_options(bytes, 0))?)
    }

    /// Returns the options of a directory of so many bytes.
    pub(crate) fn dir_options(&self, bytes: u64, id: u64) -> StoreDirOptions {
        let media = StoreDirMedia::Files { count: self.files().unwrap_or(1), bytes };
        StoreDirOptions { id, media, lba_bytes: self.lba.unwrap_or(4096) }
    }

    /// Returns the executor for a KV pool: the one that is asked for, or else a GPU for a pool on
    /// one.
    pub(crate) fn executor(&self, pool: &PoolMemory) -> Executor {
        let on = match pool {
            PoolMemory::Gpu { memory, .. } => Some(memory.ordinal()),
            PoolMemory::Engine { .. } | PoolMemory::Own { .. } => None,
        };
        let by_drives = if self.is_passthrough() { Executor::File } else { Executor::Host };
        let by_pool = on.map_or(by_drives, |ordinal| Executor::Cuda(CudaChoice::new(ordinal)));
        match self.executor.unwrap_or(by_pool) {
            Executor::Cuda(choice) => Executor::Cuda(CudaChoice {
                ordinal: self.gpu.or(on).unwrap_or(choice.ordinal),
                sms: self.io_sms.unwrap_or(choice.sms),
                ..choice
            }),
            executor => executor,
        }
    }

    /// Returns `options` and `controller` with what is given here.
    #[must_use]
    pub fn tune(
        &self,
        executor: Executor,
        mut options: StoreOptions,
        mut controller: ControllerOptions,
    ) -> (StoreOptions, ControllerOptions) {
        if self.queues.is_some() || matches!(executor, Executor::Cuda(_)) {
            options.queues = self.queues.unwrap_or_else(|| executor.queues());
        }
        options.depth = self.depth.unwrap_or(options.depth);
        options.codec = self.codec.or(options.codec);
        options.dram = self.dram.unwrap_or(options.dram);
        options.dram_mode = self.dram_mode.unwrap_or(options.dram_mode);
        controller.io_queues = self.queues.unwrap_or(controller.io_queues);
        controller.io_depth = self.depth.unwrap_or(controller.io_depth);
        (options, controller)
    }
}

/// Returns the name of an option that other programs or former versions have under this one.
#[must_use]
pub fn former_option(name: &str) -> Option<&'static str> {
    FORMER.iter().find(|(former, _)| *former == name).map(|(_, now)| *now)
}

/// Says that there is no such option, and names the one that is meant. `beside` are names that are
/// known where it was given, besides those of [`OPTIONS`].
#[must_use]
pub fn unknown_option(name: &str, beside: &[String]) -> String {
    if let Some(now) = former_option(name) {
        return format!("{name}: there is no such option; its name is {now}");
    }
    let known = OPTIONS.iter().map(|option| option.name);
    let known: Vec<&str> = known.chain(beside.iter().map(String::as_str)).collect();
    match nearest(name, known.iter().copied(), 0.8) {
        Some(nearest) => format!("{name}: there is no such option; {nearest} is the nearest"),
        None => format!("{name}: there is no such option; there are {}", known.join(", ")),
    }
}

/// Returns the name that `given` is most like, if that is more than `least` of 1 (Jaro-Winkler).
#[must_use]
pub fn nearest<'a>(
    given: &str,
    names: impl Iterator<Item = &'a str>,
    least: f64,
) -> Option<&'a str> {
    let likeness = |name: &str| strsim::jaro_winkler(name, given);
    let found = names.max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    found.filter(|name| likeness(name) > least)
}

impl FromStr for DeviceChoice {
    type Err = String;

    /// Parses a number, or drives; vfio: or ng: also applies to the addresses behind the first one.
    fn from_str(text: &str) -> Result<Self, String> {
        const HINT: &str =
            "give a number of files, 1 to 64, or drives: ng:/dev/ng0n1 or vfio:0000:65:00.0";
        let kind = ["vfio:", "ng:"].into_iter().find(|kind| text.trim().starts_with(kind));
        let Some(kind) = kind else {
            return match count(text, 1..=DEVICES_MAX) {
                Ok(count) => Ok(Self::Files(count)),
                Err(_) => Err(HINT.to_owned()),
            };
        };
        let mut addresses = Vec::new();
        for drive in text.split(',').map(str::trim) {
            let drive = drive.strip_prefix(kind).unwrap_or(drive);
            let address = format!("{kind}{drive}").parse();
            let address: DriveAddress = address.map_err(|why| format!("{why}; {HINT}"))?;
            if addresses.contains(&address) {
                return Err(format!("{drive} is named twice; name each drive once"));
            }
            addresses.push(address);
        }
        match addresses.len() <= DEVICES_MAX as usize {
            true => Ok(Self::Drives(addresses)),
            false => Err(format!("these are {} drives; give 1 to 64", addresses.len())),
        }
    }
}

fn path(text: &str) -> Result<PathBuf, String> {
    match text.trim() {
        "" => Err("give the name of a directory".to_owned()),
        _ => Ok(text.into()),
    }
}

fn size(text: &str) -> Result<u64, String> {
    text.parse().map(|Size(bytes)| bytes)
}

fn lba(text: &str) -> Result<u32, String> {
    match size(text)? {
        512 => Ok(512),
        4096 => Ok(4096),
        _ => Err("give 512 or 4096".to_owned()),
    }
}

fn depth(text: &str) -> Result<u32, String> {
    let depth = count(text, 2..=EMU_DEPTH).ok().filter(|depth| depth.is_power_of_two());
    depth.ok_or_else(|| format!("give a power of two from 2 to {EMU_DEPTH}"))
}

fn count<T: FromStr + PartialOrd + fmt::Display>(
    text: &str,
    allowed: RangeInclusive<T>,
) -> Result<T, String> {
    let count = text.trim().parse().ok().filter(|count| allowed.contains(count));
    let (least, most) = (allowed.start(), allowed.end());
    count.ok_or_else(|| format!("give a whole number from {least} to {most}"))
}

fn word<T: Copy>(text: &str, known: &[(&str, T)]) -> Result<T, String> {
    let found = known.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
    let words: Vec<&str> = known.iter().map(|(word, _)| *word).collect();
    let (last, others) = words.split_last().expect("there are words");
    found.ok_or_else(|| format!("give {} or {last}", others.join(", ")))
}

/// Reads the options of TOML or JSON: an option that is null is not given.
impl<'de> Deserialize<'de> for StackConfig {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut config = Self::default();
        for (name, value) in BTreeMap::<String, Option<Value>>::deserialize(from)? {
            let text = match value {
                None => continue,
                Some(Value::Flag(flag)) => flag.to_string(),
                Some(Value::Count(count)) => count.to_string(),
                Some(Value::Real(real)) => real.to_string(),
                Some(Value::Text(text)) => text,
                Some(Value::List(texts)) => texts.join(","),
            };
            config.set(&name, &text).map_err(de::Error::custom)?;
        }
        Ok(config)
    }
}

/// A value in TOML or JSON.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected text, a number, true, false, or a list of texts")]
enum Value {
    Flag(bool),
    Count(u64),
    Real(f64),
    Text(String),
    List(Vec<String>),
}

#[cfg(test)]
mod tests;
