//! `ripieno ctl`: asks and controls a server, over HTTP.

use std::io::Read as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use ripieno_serve::control::{
    BlockState, Blocks, ChecksumList, ChecksumsAsked, EraseAsked, ErasedPart, HintAnswers, Key,
    Named, NamespaceStatus, PinAnswer, PinAsked, PinList, PinStatus, QuotaAsked, QuotaStatus,
    Reloaded, SessionStatus, Status, Whole,
};
use ripieno_serve::{Control, ControlAddress, protocol::Member};
use ripieno_stack::read_file;
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::problem::{EXIT_FAILED, Problem};
use crate::progress::Progress;
use crate::serve::read_token;
use crate::size::{self, Size};
use crate::table::grid;
use crate::terminal;
use crate::top::socket_address;

/// The socket of the unit for systemd.
const SOCKET: &str = "/run/ripieno/ripieno.sock";
/// Bytes of a file of hints, at most.
const HINTS_BYTES_MAX: u64 = 4 << 20;

/// Flags of `ripieno ctl`.
#[derive(Debug, Args)]
pub(crate) struct CtlFlags {
    #[command(flatten)]
    place: Place,

    /// Print the server's answer, a JSON object, on stdout; metrics stay text
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    verb: Verb,
}

/// The server.
#[derive(Debug, Args)]
struct Place {
    /// The server's socket [default: that of the unit for systemd, /run/ripieno/ripieno.sock]
    #[arg(long, value_name = "PATH", global = true)]
    socket: Option<PathBuf>,

    /// The server's TCP address, with --token-file
    #[arg(long, value_name = "IP:PORT", global = true, value_parser = socket_address)]
    address: Option<SocketAddr>,

    /// The file with the token of the server's configuration
    #[arg(long, value_name = "FILE", global = true)]
    token_file: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Show the store, its namespaces, and the clients
    Status,
    /// Count leading keys that are stored
    Lookup(KeyFlags),
    /// Protect leading keys that are stored from eviction, for a time
    Pin {
        #[command(flatten)]
        keys: KeyFlags,

        /// Time until the pin ends: 600, 10m, 1d
        #[arg(long, value_name = "TIME", value_parser = ttl)]
        ttl: Duration,

        /// Bytes on the devices, at most, such as 10GiB
        #[arg(long, value_name = "SIZE")]
        bytes: Option<Size>,

        /// Pin the other keys when they are stored
        #[arg(long)]
        wait: bool,
    },
    /// End a pin
    Unpin {
        /// Its number, as pins shows it
        #[arg(value_parser = |text: &str| number::<u64>(text, "pins"))]
        pin: u64,
    },
    /// Show the pins
    Pins,
    /// Read blocks into the server's memory; prints how many
    Prefetch(KeyFlags),
    /// Delete all blocks of a namespace; prints how many
    Clear {
        #[command(flatten)]
        namespace: NamespaceFlag,

        /// Then overwrite all room of the store that has no block with zeroes: also what was
        /// deleted or evicted before, of any namespace. Refused while a block of the namespace is
        /// in use or pinned
        #[arg(long)]
        erase: bool,

        /// Only show how much would be deleted and erased
        #[arg(long, requires = "erase")]
        dry_run: bool,
    },
    /// Delete blocks, pinned or not; prints how many
    Delete(KeyFlags),
    /// Show checksums of blocks
    Checksums {
        #[command(flatten)]
        keys: KeyFlags,

        /// Read the blocks, and compare; a damaged one is dropped
        #[arg(long)]
        verify: bool,
    },
    /// Show the bytes of a namespace and their limit, or change that
    Quota {
        #[command(flatten)]
        namespace: NamespaceFlag,

        /// The new limit: bytes on the devices, such as 10GiB; whole files are counted
        #[arg(long, value_name = "SIZE", conflicts_with = "unlimited")]
        bytes: Option<Size>,

        /// Remove the limit
        #[arg(long)]
        unlimited: bool,
    },
    /// Send hints in vLLM's form, and show the answers
    Hints {
        /// A JSON file, or - for stdin
        file: PathBuf,
    },
    /// Print the metrics in the OpenMetrics format
    Metrics,
    /// Have the server read its configuration again
    Reload,
}

#[derive(Debug, Clone, Copy, Args)]
struct NamespaceFlag {
    /// The namespace's number, as status shows it
    #[arg(long, value_name = "NUMBER", value_parser = |text: &str| number::<u32>(text, "status"))]
    namespace: u32,
}

#[derive(Debug, Args)]
struct KeyFlags {
    #[command(flatten)]
    namespace: NamespaceFlag,

    /// Keys, of 64 hexadecimal digits each
    #[arg(value_name = "KEY", required = true, value_parser = key)]
    keys: Vec<Key>,
}

fn number<T: FromStr>(text: &str, verb: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("expected a number, as ripieno ctl {verb} shows it"))
}

fn ttl(text: &str) -> Result<Duration, String> {
    let time = size::duration(text)?;
    if time.as_secs() == 0 { Err("a second is the least".to_owned()) } else { Ok(time) }
}

fn key(text: &str) -> Result<Key, String> {
    Key::try_from(text.to_owned())
}

/// A request, and the function that shows its answer to people.
struct Request {
    method: &'static str,
    path: String,
    body: serde_json::Value,
    show: Show,
}

type Show = fn(&str) -> anyhow::Result<String>;

impl Request {
    fn new(method: &'static str, path: &str, body: serde_json::Value, show: Show) -> Self {
        Self { method, path: path.to_owned(), body, show }
    }
}

/// Asks a server. Returns the exit code.
///
/// # Errors
/// Returns a [`Problem`] if no server is there, or it refuses.
pub(crate) fn run(flags: CtlFlags) -> anyhow::Result<u8> {
    let CtlFlags { place, json, verb } = flags;
    let is_comparing = matches!(verb, Verb::Checksums { verify: true, .. });
    let is_text = matches!(verb, Verb::Metrics);
    let control = Control::new(place.address()?);
    if let Verb::Clear { namespace: NamespaceFlag { namespace }, erase: true, dry_run } = verb {
        return erase(&control, namespace, dry_run, json);
    }
    let Request { method, path, body, show } = verb.request()?;
    let answer = ask(&control, method, &path, &body)?;
    match json || is_text {
        true => terminal::print(answer.trim_end())?,
        false => terminal::print_text(show(&answer)?.trim_end())?,
    }
    let is_damaged =
        |list: &ChecksumList| list.blocks.iter().any(|block| block.state == BlockState::Damaged);
    match is_comparing && is_damaged(&parse(&answer)?) {
        true => Ok(EXIT_FAILED),
        false => Ok(0),
    }
}

fn ask(
    control: &Control,
    method: &str,
    path: &str,
    body: &serde_json::Value,
) -> Result<String, Problem> {
    let answer = control.ask(method, path, Some(body).filter(|body| !body.is_null()));
    answer.map_err(|error| {
        // A message ends with its remedy.
        let text = error.to_string();
        let (what, remedy) = text.rsplit_once("; ").unwrap_or((&text, ""));
        Problem::new(what, remedy)
    })
}

/// Clears a namespace, and erases all files without a block.
fn erase(control: &Control, namespace: u32, dry_run: bool, json: bool) -> anyhow::Result<u8> {
    let status: Status = parse(&ask(control, "GET", "/status", &json!(null))?)?;
    let found = status.namespaces.iter().find(|it| it.namespace == namespace);
    let found = found.ok_or_else(|| {
        let message = format!("--namespace {namespace}: the store has no such namespace");
        Problem::new(message, "ripieno ctl status shows them")
    })?;
    let mut blocks = u64::from(found.files);
    let mut bytes = (u64::from(status.files_free) + blocks) * status.file_bytes;
    if !dry_run {
        let whole = json!(Whole { namespace, unused: true });
        blocks = parse::<Blocks>(&ask(control, "POST", "/cache/clear", &whole)?)?.blocks;
        let progress = Progress::bytes("erased", bytes, !json);
        let erased = erase_all(control, |done| progress.read(done, bytes.max(done)));
        progress.finish();
        bytes = erased?;
    }
    if json {
        terminal::print(json!({ "dry_run": dry_run, "blocks": blocks, "erased_bytes": bytes }))?;
    } else {
        let end = if dry_run { " (nothing was done)" } else { "" };
        terminal::print(format_args!("{blocks} blocks deleted, {} erased{end}", Size(bytes)))?;
    }
    Ok(0)
}

/// Erases all files without a block, and returns their bytes.
fn erase_all(control: &Control, mut tick: impl FnMut(u64)) -> anyhow::Result<u64> {
    let (mut next, mut done) = (Some(0), 0);
    while let Some(first) = next {
        let answer = ask(control, "POST", "/cache/erase", &json!(EraseAsked { first }))?;
        let part: ErasedPart = parse(&answer)?;
        (next, done) = (part.next, done + part.bytes);
        tick(done);
    }
    Ok(done)
}

impl Place {
    fn address(self) -> Result<ControlAddress, Problem> {
        match (self.socket, self.address, self.token_file) {
            (socket, None, None) => Ok(ControlAddress::Unix(socket.unwrap_or(SOCKET.into()))),
            (None, Some(address), Some(file)) => {
                let token = read_token(&file).map_err(|why| Problem::new(why, ""))?;
                Ok(ControlAddress::Tcp(address, token))
            }
            _ => {
                let why = "--address and --token-file: each needs the other, and excludes --socket";
                Err(Problem::new(why, "give both, or --socket PATH"))
            }
        }
    }
}

impl Verb {
    fn request(self) -> anyhow::Result<Request> {
        let get = |path, show| Request::new("GET", path, json!(null), show);
        let post = |path, body, show| Request::new("POST", path, body, show);
        let named =
            |KeyFlags { namespace, keys }| json!(Named { namespace: namespace.namespace, keys });
        let number: Show = |answer| Ok(parse::<Blocks>(answer)?.blocks.to_string());
        Ok(match self {
            Self::Status => get("/status", |answer| Ok(status_text(&parse(answer)?))),
            Self::Pins => get("/cache/pins", |answer| Ok(pins_text(&parse(answer)?))),
            Self::Metrics => get("/metrics", |answer| Ok(answer.to_owned())),
            Self::Lookup(flags) => post("/directory/lookup", named(flags), number),
            Self::Prefetch(flags) => post("/cache/prefetches", named(flags), number),
            Self::Delete(flags) => post("/cache/delete", named(flags), number),
            Self::Clear { namespace: NamespaceFlag { namespace }, .. } => {
                post("/cache/clear", json!(Whole { namespace, unused: false }), number)
            }
            Self::Pin { keys: KeyFlags { namespace, keys }, ttl, bytes, wait } => {
                let namespace = namespace.namespace;
                let bytes_max = bytes.map(|Size(bytes)| bytes);
                let asked = PinAsked { namespace, keys, ttl_s: ttl.as_secs(), bytes_max, wait };
                post("/cache/pins", json!(asked), |answer| Ok(pin_text(&parse(answer)?)))
            }
            Self::Unpin { pin } => {
                Request::new("DELETE", &format!("/cache/pins/{pin}"), json!(null), number)
            }
            Self::Checksums { keys: KeyFlags { namespace, keys }, verify } => {
                let asked = ChecksumsAsked { namespace: namespace.namespace, keys, verify };
                post("/cache/checksums", json!(asked), |answer| Ok(sums_text(&parse(answer)?)))
            }
            Self::Quota { namespace: NamespaceFlag { namespace }, bytes, unlimited } => {
                let bytes = bytes.map(|Size(bytes)| bytes);
                let (method, body) = match bytes.is_some() || unlimited {
                    true => ("PUT", json!(QuotaAsked { bytes })),
                    false => ("GET", json!(null)),
                };
                let path = format!("/quota/{namespace}");
                Request::new(method, &path, body, |answer| Ok(quota_text(&parse(answer)?)))
            }
            Self::Hints { file } => {
                post("/hints", hints(&file)?, |answer| Ok(hints_text(&parse(answer)?)))
            }
            Self::Reload => post("/reload", json!(null), |answer| {
                let Reloaded { changed } = parse(answer)?;
                let none = "nothing has changed".to_owned();
                Ok(if changed.is_empty() { none } else { format!("new: {}", changed.join(", ")) })
            }),
        })
    }
}

fn hints(file: &std::path::Path) -> anyhow::Result<serde_json::Value> {
    let wrong = |why: String| {
        Problem::new(format!("{}: {why}", file.display()), "name a file of JSON that you may read")
    };
    let mut bytes = Vec::new();
    if file.as_os_str() == "-" {
        let mut stdin = std::io::stdin().take(HINTS_BYTES_MAX);
        stdin.read_to_end(&mut bytes).map_err(|error| wrong(error.to_string()))?;
    } else {
        bytes = read_file(file, HINTS_BYTES_MAX).map_err(|error| wrong(error.to_string()))?;
    }
    Ok(serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?)
}

fn parse<T: DeserializeOwned>(answer: &str) -> anyhow::Result<T> {
    serde_json::from_str(answer).context("the answer is that of a server of another version")
}

fn status_text(status: &Status) -> String {
    let Status { files, file_bytes, files_free, files_stored, .. } = status;
    let size = |files: u32| Size(u64::from(files) * file_bytes);
    let mut lines = vec![format!(
        "store: {} of {} used in {files_stored} files, {files_free} free, {} being written",
        size(*files_stored),
        size(*files),
        status.files_writing
    )];
    if !status.healthy {
        lines.push("it takes no writes any more: the log says why; restart the server".to_owned());
    }
    for NamespaceStatus { namespace, label, files, quota_files } in &status.namespaces {
        let quota = quota_files.map_or(String::new(), |quota| format!(" of {}", size(quota)));
        lines.push(format!("{}: {}{quota}", named(*namespace, label), size(*files)));
    }
    for session in &status.sessions {
        let SessionStatus { uid, pid, pool_bytes, requests, prefixes, reservations, member } =
            session;
        let pool = Size(*pool_bytes);
        let part = match member {
            None => String::new(),
            Some(Member { engine, rank: None, .. }) => format!(", scheduler of {engine}"),
            Some(Member { engine, rank: Some(rank), copy: 0, .. }) => {
                format!(", rank {rank} of {engine}")
            }
            Some(Member { engine, rank: Some(rank), copy, .. }) => {
                format!(", copy {copy} of rank {rank} of {engine}")
            }
        };
        lines.push(format!(
            "client {pid} of user {uid}{part}: pool of {pool}, {requests} requests, {prefixes} \
             prefixes, {reservations} reservations"
        ));
    }
    lines.push(format!("pins: {}, {}", status.pins, Size(status.pinned_bytes)));
    lines.push(format!(
        "refused: {} connections by user, {} messages, {} calls, {} requests of control",
        status.refused_users,
        status.refused_messages,
        status.refused_calls,
        status.refused_requests
    ));
    lines.join("\n")
}

fn named(namespace: u32, label: &str) -> String {
    let label = if label.is_empty() { String::new() } else { format!(" ({label})") };
    format!("namespace {namespace}{label}")
}

fn outcome_text(outcome: impl serde::Serialize, reason: Option<&str>) -> String {
    // An outcome is a word.
    let word = serde_json::to_value(outcome).ok();
    let word = word.as_ref().and_then(|word| word.as_str()).unwrap_or_default().to_owned();
    reason.map_or(word.clone(), |reason| format!("{word}: {reason}"))
}

fn pin_text(PinAnswer { outcome, reason, pin }: &PinAnswer) -> String {
    let outcome = outcome_text(outcome, reason.as_deref());
    match pin {
        None => outcome,
        Some(PinStatus { pin, blocks, bytes, ends_in_s, .. }) => {
            let bytes = Size(*bytes);
            format!("pin {pin} of {blocks} blocks, {bytes}, ends in {ends_in_s} s\n{outcome}")
        }
    }
}

fn pins_text(PinList { pins, bytes, bytes_max }: &PinList) -> String {
    let row = |pin: &PinStatus| {
        let PinStatus { pin, namespace, blocks, awaited_blocks, bytes, ends_in_s } = pin;
        let numbers = [*pin, u64::from(*namespace), *blocks, *awaited_blocks];
        let numbers = numbers.iter().map(u64::to_string);
        numbers.chain([Size(*bytes).to_string(), ends_in_s.to_string()]).collect()
    };
    let header = ["pin", "namespace", "blocks", "awaited", "bytes", "ends in s"];
    let all = format!("{} of {}", Size(*bytes), Size(*bytes_max));
    match pins[..] {
        [] => all,
        _ => format!("{}\n{all}", grid(&header, pins.iter().map(row).collect(), 0)),
    }
}

fn sums_text(ChecksumList { blocks }: &ChecksumList) -> String {
    let lines = blocks.iter().map(|block| {
        let sums: Vec<String> = block.checksums.iter().map(|sum| format!("{sum:08x}")).collect();
        let key = String::from(block.key);
        format!("{key} {} {}", outcome_text(block.state, None), sums.join(" "))
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn quota_text(QuotaStatus { namespace, label, stored_bytes, quota_bytes }: &QuotaStatus) -> String {
    let limit = quota_bytes.map_or("no limit".to_owned(), |bytes| Size(bytes).to_string());
    format!("{}: {} of {limit}", named(*namespace, label), Size(*stored_bytes))
}

fn hints_text(HintAnswers { answers, .. }: &HintAnswers) -> String {
    let row = |answer: &ripieno_serve::control::HintAnswer| {
        let pin = answer.pin.as_ref().map_or(String::new(), |pin| pin.pin.to_string());
        let reason = answer.reason.clone().unwrap_or_default();
        vec![answer.action_id.clone(), outcome_text(answer.outcome, None), pin, reason]
    };
    grid(&["hint", "outcome", "pin", "reason"], answers.iter().map(row).collect(), 4)
}
