//! `ripieno serve`: a store for the processes of this machine.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use kv_catalog::{Expected, Member, Superblock, check_set};
use objstore::{KvShape, Store};
use ripieno_serve::{PinLimits, Reload, ServeError, Server, ServerOptions, Settings, UserLimits};
use ripieno_stack::{
    Builder, DriveAddress, Executor, PoolMemory, StackConfig, StackError, StoreDir, StoreDirError,
    expand_home, read_file,
};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use crate::file::read_text;
use crate::interrupt::Interrupt;
use crate::offline;
use crate::problem::{Problem, nearest, user_error};
use crate::size::{self, Size};
use crate::terminal::{self, say};
use crate::top::socket_address;

/// Bytes of a configuration file, at most.
const CONFIG_BYTES_MAX: u64 = 64 << 10;

/// Bytes of a token: fewer can be guessed.
const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=1024;

/// A configuration with all keys.
const EXAMPLE: &str = include_str!("../../objstore/serve/systemd/ripieno.toml");

/// Hint for a configuration that cannot be read.
const HINT: &str = "ripieno serve --print-config prints one, with the form of all values";

/// Flags of `ripieno serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeFlags {
    /// The configuration, in TOML
    #[arg(long, value_name = "FILE", required_unless_present = "print_config")]
    config: Option<PathBuf>,

    /// Check the configuration, and the paths, room and memory that it needs, and end
    #[arg(long)]
    check: bool,

    /// Print a configuration with all keys, and end
    #[arg(long, conflicts_with_all = ["config", "check"])]
    print_config: bool,

    /// Log more: -v info (clients that come and go), -vv debug, -vvv trace
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,

    /// Log errors only
    #[arg(short, long, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
}

/// A configuration file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    socket: PathBuf,
    #[serde(default)]
    users: Vec<u32>,
    #[serde(default = "clients")]
    clients: u32,
    #[serde(default = "pool_max")]
    pool_max: Given,
    #[serde(default = "hold_max")]
    hold_max: Given,
    #[serde(default)]
    limit: Vec<LimitConfig>,
    #[serde(default)]
    pins: PinConfig,
    http: Option<HttpConfig>,
    store: StackConfig,
    shape: KvShape,
}

/// Parameters that cannot change while the server runs.
#[derive(Debug, PartialEq)]
struct Fixed {
    socket: PathBuf,
    http: Option<SocketAddr>,
    store: StackConfig,
    shape: KvShape,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct PinConfig {
    bytes: Option<Given>,
    ttl_max: Option<Given>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpConfig {
    #[serde(deserialize_with = "address")]
    address: SocketAddr,
    token_file: PathBuf,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitConfig {
    user: u32,
    clients: Option<u32>,
    namespaces: Option<u32>,
    stored: Option<Given>,
    held: Option<Given>,
    pins: Option<Given>,
    memory: Option<Given>,
    bandwidth: Option<Given>,
}

fn address<'de, D: Deserializer<'de>>(from: D) -> Result<SocketAddr, D::Error> {
    socket_address(&String::deserialize(from)?).map_err(D::Error::custom)
}

impl LimitConfig {
    fn check(self) -> Result<(u32, UserLimits), String> {
        let Self { user, clients, namespaces, stored, held, pins, memory, bandwidth } = self;
        let bytes = |name: &str, given: Option<Given>| {
            let name = format!("{name} of user {user}");
            given.map(|given| given.bytes(&name)).transpose()
        };
        let bytes_s = bytes("bandwidth", bandwidth)?;
        if bytes_s == Some(0) {
            return Err(format!("bandwidth of user {user}: more than 0 bytes a second are needed"));
        }
        let limits = UserLimits {
            clients,
            namespaces,
            stored_bytes: bytes("stored", stored)?,
            held_bytes: bytes("held", held)?,
            pinned_bytes: bytes("pins", pins)?,
            memory_bytes: bytes("memory", memory)?,
            bandwidth: bytes_s.and_then(NonZeroU64::new),
        };
        if limits == UserLimits::default() {
            return Err(format!("limit: user {user} has none; name one, or leave the table out"));
        }
        Ok((user, limits))
    }
}

fn clients() -> u32 {
    64
}

fn hold_max() -> Given {
    Given::Number(600)
}

fn pool_max() -> Given {
    Given::Text("64GiB".to_owned())
}

/// A size or a time: a number of bytes or seconds, or a text with a unit.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a number, or a text with a unit, such as \"10m\" or \"1GiB\"")]
enum Given {
    Number(u64),
    Text(String),
}

impl Given {
    fn read<T>(&self, name: &str, read: fn(&str) -> Result<T, String>) -> Result<T, String> {
        let found = match self {
            Self::Number(number) => read(&number.to_string()),
            Self::Text(text) => read(text),
        };
        found.map_err(|why| format!("{name}: {why}"))
    }

    fn bytes(&self, name: &str) -> Result<u64, String> {
        self.read(name, size::parse)
    }

    fn time(&self, name: &str) -> Result<Duration, String> {
        match self.read(name, size::duration)? {
            time if time.as_secs() == 0 => Err(format!("{name}: at least one second is needed")),
            time => Ok(time),
        }
    }
}

/// Validated parameters of a server.
#[derive(Debug)]
struct Plan {
    fixed: Fixed,
    settings: Settings,
}

impl Plan {
    fn read(path: &Path) -> Result<Self, Problem> {
        let at = path.display();
        let text = read_text(path, CONFIG_BYTES_MAX).map_err(|error| {
            let hint = "name a file that this user may read; ripieno serve --print-config prints \
                        one to begin with";
            Problem::new(format!("--config {at}: {error}"), hint)
        })?;
        let config: Config = basic_toml::from_str(&text).map_err(|error| {
            let (why, hint) = in_words(&error, &text);
            Problem::new(format!("in {at}: {why}"), hint)
        })?;
        Self::check(config).map_err(|why| Problem::new(format!("in {at}: {why}"), ""))
    }

    fn check(config: Config) -> Result<Self, String> {
        let Config { socket, users, clients, pool_max, hold_max, limit, pins, http, store, shape } =
            config;
        if clients == 0 {
            return Err("clients: at least one is needed".to_owned());
        }
        let pool_bytes_max = pool_max.bytes("pool_max")?;
        let hold_max = hold_max.time("hold_max")?;
        let mut limits = BTreeMap::new();
        for limit in limit {
            let (user, limit) = limit.check()?;
            if limits.insert(user, limit).is_some() {
                return Err(format!("limit: user {user} has two; give all in one"));
            }
        }
        let PinLimits { ttl, .. } = PinLimits::default();
        let pins = PinLimits {
            bytes: pins.bytes.map(|given| given.bytes("pins.bytes")).transpose()?,
            ttl: pins.ttl_max.map_or(Ok(ttl), |given| given.time("pins.ttl_max"))?,
        };
        let socket = expand_home(&socket).into_owned();
        let token = http.as_ref().map(|http| read_token(&http.token_file)).transpose()?;
        let http = http.map(|http| http.address);
        let sessions_max = clients;
        let settings =
            Settings { users, sessions_max, pool_bytes_max, limits, hold_max, pins, token };
        if !matches!(store.executor, None | Some(Executor::File | Executor::Host)) {
            return Err("store.executor: a server has threads: file, or host".to_owned());
        }
        let plan = Self { fixed: Fixed { socket, http, store, shape }, settings };
        plan.fixed.builder()?.check().map_err(|error| format!("store.{error}"))?;
        Ok(plan)
    }
}

impl Fixed {
    /// Returns the store that is to be opened.
    fn builder(&self) -> Result<Builder, String> {
        let Self { store, shape, .. } = self;
        shape.validate().map_err(|error| format!("shape: {error}"))?;
        // Opening a store proves the path with blocks of its own.
        Ok(Builder::new(store.clone(), *shape).pool(PoolMemory::Own { blocks: 2 }))
    }

    /// Looks at the places of a server, and at room and limits of a new store; with `check` also at
    /// a store that is there, and another server may run. Returns what it found.
    fn look(&self, builder: &Builder, settings: &Settings, check: bool) -> anyhow::Result<String> {
        match Server::try_bind(&self.socket, self.http) {
            // Its port is its own.
            Err(ServeError::InUse { .. }) if check => {}
            tried => tried.map_err(problem)?,
        }
        let drives = self.store.drives();
        for drive in drives {
            let (there, what) = match drive {
                DriveAddress::Vfio(at) => {
                    (format!("/sys/bus/pci/drivers/vfio-pci/{at}").into(), "not bound to vfio-pci")
                }
                DriveAddress::Ng(path) => (path.clone(), "not there"),
            };
            if !there.exists() {
                let why = format!("store.devices: {drive} is {what}");
                return Err(Problem::new(why, "nvme-bind list shows the drives").into());
            }
        }
        let Some(dir) = self.store.path.as_deref().map(expand_home) else {
            return Ok(format!("{} drives are there", drives.len()));
        };
        let at = dir.display();
        let wrong = |error: StackError| Problem::new(format!("store: {error}"), "");
        self.store.check_files().map_err(wrong)?;
        let (block_bytes, found) = if !StoreDir::exists(&dir) {
            let Some(block_bytes) = builder.new_block_bytes().map_err(in_config)? else {
                let why = format!("store.capacity: there is no store in {at}, and no size for one");
                return Err(Problem::new(why, "give a capacity, or the path of a store").into());
            };
            (block_bytes, format!("{at} will get {}", Size(self.store.capacity.unwrap_or(0))))
        } else if check {
            let found = match StoreDir::open(&dir) {
                Err(StoreDirError::Locked { holder, .. }) => {
                    let found = format!("the store in {at} is in use by {holder}");
                    return Ok(found + ": its shape was not read");
                }
                found => found.map_err(|error| wrong(error.into()))?,
            };
            self.store.check_dir(&found).map_err(wrong)?;
            let checked = self.check_shape(found);
            let wrong = |error: anyhow::Error| Problem::new(format!("store: {error}"), "");
            (checked.map_err(wrong)?, format!("there is a store in {at}"))
        } else {
            return Ok(String::new());
        };
        settings.check(&self.shape, block_bytes).map_err(user_error)?;
        Ok(found)
    }

    /// Refuses a store with blocks of another shape. Returns the bytes of one on the devices.
    fn check_shape(&self, found: StoreDir) -> anyhow::Result<u64> {
        let devices = offline::attach(found)?;
        let members = Store::media(devices.attached())?.into_iter().map(|mut medium| {
            let found = Superblock::read(&mut *medium.io)?;
            let name = medium.io.name().to_owned();
            Ok(Member { found, name, identity: medium.identity, region: medium.region })
        });
        let members = members.collect::<anyhow::Result<Vec<_>>>()?;
        let (shape, codec) = (Some(self.shape), self.store.codec);
        let superblocks = check_set(&members, &Expected { shape, codec, ..Expected::default() })?;
        let block_bytes = superblocks[0].geometry().map_or(0, |geometry| geometry.file_bytes());
        devices.shut_down().map_err(user_error)?;
        Ok(block_bytes)
    }

    /// Returns the settings of the configuration as it is now, unless it changes something else.
    fn read_again(&self, path: &Path) -> Result<Settings, String> {
        let Plan { fixed, settings } = Plan::read(path).map_err(|problem| problem.to_string())?;
        let differing = [
            ("socket", self.socket != fixed.socket),
            ("http.address", self.http != fixed.http),
            ("store", self.store != fixed.store),
            ("shape", self.shape != fixed.shape),
        ];
        let names: Vec<&str> =
            differing.iter().filter(|(_, is_other)| *is_other).map(|(name, _)| *name).collect();
        match names[..] {
            [] => Ok(settings),
            _ => Err(format!(
                "in {}: {} cannot change while the server runs; restart it, or undo the change",
                path.display(),
                names.join(", ")
            )),
        }
    }
}

/// Puts an error of a configuration in a person's words, with its line and the nearest name.
/// Returns a hint, too.
fn in_words(error: &basic_toml::Error, text: &str) -> (String, &'static str) {
    let said = error.to_string();
    let (said, place) = said.rsplit_once(" at line ").unwrap_or((&said, ""));
    let keyed = said.strip_suffix('`').and_then(|it| it.rsplit_once(" for key `"));
    let (why, key) = keyed.unwrap_or((said, ""));
    // serde lists all names in backticks; an option of the store has its own at the beginning.
    let mut names = why.split('`').skip(1).step_by(2);
    let unknown = names.next().filter(|_| why.starts_with("unknown field"));
    let option = why.split_once(": ").map(|it| it.0);
    let option = option.filter(|it| key == "store" && !it.contains(' '));
    let (table, name) = match unknown.or(option) {
        Some(name) => (key, name),
        None => key.rsplit_once('.').unwrap_or(("", key)),
    };
    // Of a line that it does not know, the library says that of the last table.
    let (line, column) = place.split_once(" column ").unwrap_or((place, ""));
    let is_guessed = column == "1" && !why.starts_with("duplicate");
    let line = match line_of(text, table, name).filter(|_| is_guessed) {
        Some((line, given)) => {
            let brackets = if key == "limit" { "[[limit]]".to_owned() } else { format!("[{key}]") };
            if why.starts_with("invalid type") && given.starts_with('[') && given != brackets {
                return (format!("line {line}: {given}: write {brackets}"), "");
            }
            format!("line {line}: ")
        }
        None if why.starts_with("missing field") => String::new(),
        None => format!("line {line}: "),
    };
    let dot = if option.is_some() { "." } else { ": " };
    let key = if key.is_empty() { String::new() } else { format!("{key}{dot}") };
    let why = why.replace("expected u32", "expected a whole number from 0 to 4294967295");
    let why = why.replace("expected a sequence", "expected a list");
    let nearest = unknown.map_or(String::new(), |given| nearest(given, names));
    let hint = if option.is_some() || why.contains(": give ") { "" } else { HINT };
    (format!("{line}{key}{why}{nearest}"), hint)
}

/// Returns the number and the text of the line with a name in a table, or with that of a table.
fn line_of<'a>(text: &'a str, table: &str, name: &str) -> Option<(usize, &'a str)> {
    let mut at = "";
    (1..).zip(text.lines().map(str::trim)).find(|(_, line)| {
        let inside = line.trim_start_matches('[');
        let (is_header, was_at) = (inside.len() < line.len(), at);
        let word = inside.split(['=', ']', ' ', '\t']).next().unwrap_or_default();
        if is_header {
            at = word;
        }
        word == name && !word.is_empty() && table == if is_header { "" } else { was_at }
    })
}

/// Reads a token, which others than its owner and group must not be able to read.
pub(crate) fn read_token(path: &Path) -> Result<String, String> {
    let path = &*expand_home(path);
    let wrong = |why: String| format!("token_file {}: {why}", path.display());
    let make = "make one that only this user may read: umask 077; head -c 24 /dev/urandom | base64";
    let bytes = read_file(path, 4096).map_err(|error| wrong(format!("{error}; {make}")))?;
    let mode = path.metadata().map_err(|error| wrong(error.to_string()))?.mode();
    if mode & 0o007 != 0 {
        return Err(wrong(format!(
            "everybody has access (mode {:o}); use chmod 600",
            mode & 0o777
        )));
    }
    let text = String::from_utf8_lossy(&bytes);
    let token = text.trim();
    let is_plain = token.bytes().all(|byte| byte.is_ascii_graphic());
    if !is_plain || !TOKEN_BYTES.contains(&token.len()) {
        let (least, most) = (TOKEN_BYTES.start(), TOKEN_BYTES.end());
        return Err(wrong(format!(
            "a line of {least} to {most} ASCII characters without blanks is needed; {make}"
        )));
    }
    Ok(token.to_owned())
}

/// Serves until a signal comes. Returns the exit code.
pub(crate) fn run(flags: &ServeFlags) -> anyhow::Result<u8> {
    let Some(config) = &flags.config else {
        terminal::print(EXAMPLE.trim_end())?;
        return Ok(0);
    };
    let Plan { fixed, settings } = Plan::read(config)?;
    let builder = fixed.builder().map_err(|why| Problem::new(why, ""))?;
    builder.check_memory(1).map_err(in_config)?;
    // Also before a start, which is not to leave a new store that nobody serves.
    let found = fixed.look(&builder, &settings, flags.check)?;
    if flags.check {
        terminal::print(format_args!("ok: {}: {found}", config.display()))?;
        return Ok(0);
    }
    let mut interrupt = Interrupt::listen()?;
    let stack = builder.open().map_err(in_config)?;
    interrupt.orderly();
    let (socket, http, config) = (fixed.socket.clone(), fixed.http, config.clone());
    let reload = Some(Reload(Arc::new(move || fixed.read_again(&config))));
    let options = ServerOptions { socket: socket.clone(), http, settings, reload };
    let server = Server::bind(stack, options).map_err(problem)?;
    let web = server.http().map(|address| format!(" and http://{address}")).unwrap_or_default();
    say(format_args!("serving at {}{web}", socket.display()));
    server.run(|| interrupt.asked()).map_err(problem)?;
    say(format_args!("the store is closed"));
    Ok(0)
}

/// Says that an option is one of the table `store`.
fn in_config(error: StackError) -> anyhow::Error {
    match error {
        StackError::Config { field, problem } => {
            Problem::new(format!("store.{field}: {problem}"), "").into()
        }
        error => user_error(error),
    }
}

/// Converts what the user can do something about.
fn problem(error: ServeError) -> anyhow::Error {
    match error {
        ServeError::Stack(error) => user_error(error),
        ServeError::Socket { .. } | ServeError::InUse { .. } | ServeError::Control { .. } => {
            Problem::new(error.to_string(), "").into()
        }
        error => error.into(),
    }
}

#[cfg(test)]
mod tests;
