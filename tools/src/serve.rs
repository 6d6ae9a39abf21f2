//! `ripieno serve`: a store for the processes of this machine.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use objstore::KvShape;
use ripieno_serve::{PinLimits, Reload, ServeError, Server, ServerOptions, Settings, UserLimits};
use ripieno_stack::{
    Builder, Executor, PoolMemory, Size, StackConfig, StackError, expand_home, read_file,
};
use serde::Deserialize;

use crate::interrupt::Interrupt;
use crate::problem::{Problem, user_error};
use crate::terminal::say;

/// Bytes of a configuration file, at most.
const CONFIG_BYTES_MAX: u64 = 64 << 10;

/// Bytes of a token: fewer can be guessed.
const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=1024;

/// Flags of `ripieno serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeFlags {
    /// The configuration, in TOML: see docs/start/serve.md
    #[arg(long, value_name = "FILE")]
    config: PathBuf,

    /// Check the configuration, and end
    #[arg(long)]
    check: bool,

    /// Log more: -v info (clients that come and go), -vv debug, -vvv trace
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
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
    pool_max: String,
    #[serde(default = "hold_max")]
    hold_max: u64,
    #[serde(default)]
    limit: Vec<LimitConfig>,
    #[serde(default)]
    pins: PinConfig,
    http: Option<HttpConfig>,
    store: StackConfig,
    shape: ShapeConfig,
}

/// Parameters that cannot change while the server runs.
#[derive(Debug, PartialEq)]
struct Fixed {
    socket: PathBuf,
    http: Option<SocketAddr>,
    store: StackConfig,
    shape: ShapeConfig,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct PinConfig {
    bytes: Option<String>,
    ttl_max: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpConfig {
    address: SocketAddr,
    token_file: PathBuf,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitConfig {
    user: u32,
    clients: Option<u32>,
    namespaces: Option<u32>,
    stored: Option<String>,
    held: Option<String>,
    pins: Option<String>,
    memory: Option<String>,
    bandwidth: Option<String>,
}

impl LimitConfig {
    fn check(self) -> Result<(u32, UserLimits), String> {
        let Self { user, clients, namespaces, stored, held, pins, memory, bandwidth } = self;
        let bytes = |name: &str, text: Option<String>| {
            let name = format!("{name} of user {user}");
            text.map(|text| size(&name, &text)).transpose()
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

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShapeConfig {
    layers: u32,
    segments: u32,
    object_bytes: u32,
    block_tokens: u32,
}

fn clients() -> u32 {
    64
}

/// Seconds.
fn hold_max() -> u64 {
    600
}

fn pool_max() -> String {
    "64GiB".to_owned()
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
        let wrong =
            |why: String| Problem::new(format!("in {at}: {why}"), "see docs/start/serve.md");
        let bytes = read_file(path, CONFIG_BYTES_MAX).map_err(|error| wrong(error.to_string()))?;
        let config: Config =
            basic_toml::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        Self::check(config).map_err(wrong)
    }

    fn check(config: Config) -> Result<Self, String> {
        let Config { socket, users, clients, pool_max, hold_max, limit, pins, http, store, shape } =
            config;
        if clients == 0 {
            return Err("clients: at least one is needed".to_owned());
        }
        let pool_bytes_max = size("pool_max", &pool_max)?;
        if hold_max == 0 {
            return Err("hold_max: at least one second is needed".to_owned());
        }
        let mut limits = BTreeMap::new();
        for limit in limit {
            let (user, limit) = limit.check()?;
            if limits.insert(user, limit).is_some() {
                return Err(format!("limit: user {user} has two"));
            }
        }
        let PinLimits { ttl, .. } = PinLimits::default();
        let pins = PinLimits {
            bytes: pins.bytes.map(|text| size("pins.bytes", &text)).transpose()?,
            ttl: pins.ttl_max.map_or(ttl, Duration::from_secs),
        };
        if pins.ttl.is_zero() {
            return Err("pins.ttl_max: at least one second is needed".to_owned());
        }
        let socket = expand_home(&socket).into_owned();
        let token = http.as_ref().map(|http| read_token(&http.token_file)).transpose()?;
        let http = http.map(|http| http.address);
        let (sessions_max, hold_max) = (clients, Duration::from_secs(hold_max));
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
        let ShapeConfig { layers, segments, object_bytes, block_tokens } = *shape;
        let shape = KvShape { layers, segments, object_bytes, block_tokens };
        shape.validate().map_err(|error| format!("shape: {error}"))?;
        // Opening a store proves the path with blocks of its own.
        Ok(Builder::new(store.clone(), shape).pool(PoolMemory::Own { blocks: 2 }))
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

fn size(name: &str, text: &str) -> Result<u64, String> {
    text.parse::<Size>().map(|Size(bytes)| bytes).map_err(|why| format!("{name}: {why}"))
}

/// Reads a token, which others than its owner and group must not be able to read.
pub(crate) fn read_token(path: &Path) -> Result<String, String> {
    let path = &*expand_home(path);
    let wrong = |why: String| format!("token_file {}: {why}", path.display());
    let bytes = read_file(path, 4096).map_err(|error| wrong(error.to_string()))?;
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
        let why = format!("a line of {least} to {most} ASCII characters without blanks is needed");
        return Err(wrong(why));
    }
    Ok(token.to_owned())
}

/// Serves until a signal comes. Returns the exit code.
pub(crate) fn run(flags: &ServeFlags) -> anyhow::Result<u8> {
    let Plan { fixed, settings } = Plan::read(&flags.config)?;
    let builder = fixed.builder().map_err(|why| Problem::new(why, ""))?;
    if flags.check {
        builder.check_memory(1).map_err(in_config)?;
        return Ok(0);
    }
    let mut interrupt = Interrupt::listen()?;
    let stack = builder.open().map_err(in_config)?;
    interrupt.orderly();
    let (socket, http, config) = (fixed.socket.clone(), fixed.http, flags.config.clone());
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
            Problem::new(format!("store.{field}: {problem}"), "see docs/start/serve.md").into()
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
