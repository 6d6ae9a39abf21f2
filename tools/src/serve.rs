//! `ripieno serve`: a store for the processes of this machine.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use clap::Args;
use objstore::KvShape;
use ripieno_serve::{ServeError, Server, ServerOptions};
use ripieno_stack::{Builder, PoolMemory, Size, read_file};
use serde::Deserialize;

use crate::interrupt::Interrupt;
use crate::problem::{Problem, user_error};
use crate::terminal::say;

/// Bytes of a configuration file, at most.
const CONFIG_BYTES_MAX: u64 = 64 << 10;

/// Flags of `ripieno serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeFlags {
    /// The configuration, in TOML: see docs/start/serve.md
    #[arg(long, value_name = "FILE")]
    config: PathBuf,

    /// Check the configuration, and end
    #[arg(long)]
    check: bool,

    /// Log more: -v debug, -vv trace
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
    #[serde(default)]
    limit: Vec<LimitConfig>,
    store: StoreConfig,
    shape: ShapeConfig,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoreConfig {
    path: PathBuf,
    capacity: Option<String>,
    #[serde(default = "devices")]
    devices: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitConfig {
    user: u32,
    bandwidth: String,
}

#[derive(Debug, Deserialize)]
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

fn pool_max() -> String {
    "64GiB".to_owned()
}

fn devices() -> u32 {
    1
}

/// Validated parameters of a server.
#[derive(Debug)]
struct Plan {
    builder: Builder,
    options: ServerOptions,
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
        let Config { socket, users, clients, pool_max, limit, store, shape } = config;
        let size = |name: &str, text: &str| {
            text.parse::<Size>().map(|Size(bytes)| bytes).map_err(|why| format!("{name}: {why}"))
        };
        let ShapeConfig { layers, segments, object_bytes, block_tokens } = shape;
        let shape = KvShape { layers, segments, object_bytes, block_tokens };
        shape.validate().map_err(|error| format!("shape: {error}"))?;
        if clients == 0 {
            return Err("clients: at least one is needed".to_owned());
        }
        // Opening a store proves the path with blocks of its own.
        let mut builder = Builder::new(store.path, shape).pool(PoolMemory::Own { blocks: 2 });
        if let Some(capacity) = store.capacity {
            builder = builder.capacity(size("capacity", &capacity)?).devices(store.devices);
        }
        let pool_bytes_max = size("pool_max", &pool_max)?;
        let mut bandwidth = BTreeMap::new();
        for LimitConfig { user, bandwidth: text } in limit {
            let none =
                || format!("bandwidth of user {user}: more than 0 bytes a second are needed");
            let bytes_s = NonZeroU64::new(size("bandwidth", &text)?).ok_or_else(none)?;
            if bandwidth.insert(user, bytes_s).is_some() {
                return Err(format!("limit: user {user} has two"));
            }
        }
        let sessions_max = clients;
        let options = ServerOptions { socket, users, sessions_max, pool_bytes_max, bandwidth };
        Ok(Self { builder, options })
    }
}

/// Serves until a signal comes. Returns the exit code.
///
/// # Errors
/// Returns a [`Problem`] for a wrong configuration, and an error if the store fails.
pub(crate) fn run(flags: &ServeFlags) -> anyhow::Result<u8> {
    let Plan { builder, options } = Plan::read(&flags.config)?;
    if flags.check {
        return Ok(0);
    }
    let mut interrupt = Interrupt::listen()?;
    let stack = builder.open().map_err(user_error)?;
    interrupt.orderly();
    let socket = options.socket.clone();
    let server = Server::bind(stack, options).map_err(problem)?;
    say(format_args!("serving at {}", socket.display()));
    server.run(|| interrupt.asked()).map_err(problem)?;
    say(format_args!("the store is closed"));
    Ok(0)
}

/// Converts what the user can do something about.
fn problem(error: ServeError) -> anyhow::Error {
    match error {
        ServeError::Stack(error) => user_error(error),
        ServeError::Socket { .. } | ServeError::InUse { .. } => {
            Problem::new(error.to_string(), "").into()
        }
        error => error.into(),
    }
}

#[cfg(test)]
mod tests;
