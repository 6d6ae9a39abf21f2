//! `ripieno ctl`: asks and controls a server.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use objstore::BlockKey;
use ripieno_serve::{
    Control,
    protocol::{Answer, Call, Keys, Member, Named, NamespaceStatus, SessionStatus, Status},
};

use crate::problem::Problem;
use crate::size::Size;
use crate::terminal;

/// Flags of `ripieno ctl`.
#[derive(Debug, Args)]
pub(crate) struct CtlFlags {
    /// The server's socket
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,

    /// Print a JSON object on stdout
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Show the store, its namespaces, and the clients
    Status,
    /// Count leading keys that are stored
    Lookup(KeyFlags),
    /// Protect keys from eviction; prints how many are stored
    Pin(KeyFlags),
    /// Undo pin
    Unpin(KeyFlags),
    /// Remove all blocks of a namespace
    Clear(NamespaceFlag),
    /// Limit the bytes of a namespace; without --bytes, there is no limit
    Quota {
        #[command(flatten)]
        namespace: NamespaceFlag,

        /// Bytes on the devices, such as 10GiB; whole files are counted
        #[arg(long, value_name = "SIZE")]
        bytes: Option<Size>,
    },
}

#[derive(Debug, Clone, Copy, Args)]
struct NamespaceFlag {
    /// The namespace's number, as status shows it
    #[arg(long, value_name = "NUMBER")]
    namespace: u32,
}

#[derive(Debug, Args)]
struct KeyFlags {
    #[command(flatten)]
    namespace: NamespaceFlag,

    /// Keys, of 64 hexadecimal digits each
    #[arg(value_name = "KEY", required = true, value_parser = key)]
    keys: Vec<BlockKey>,
}

fn key(text: &str) -> Result<BlockKey, String> {
    match Keys::try_from(text.to_owned())?.0[..] {
        [key] => Ok(key),
        _ => Err("a key has 64 hexadecimal digits".to_owned()),
    }
}

/// Asks a server. Returns the exit code.
///
/// # Errors
/// Returns a [`Problem`] if no server is there, or it refuses.
pub(crate) fn run(flags: CtlFlags) -> anyhow::Result<u8> {
    let CtlFlags { socket, json, verb } = flags;
    let named =
        |KeyFlags { namespace, keys }| Named { namespace: namespace.namespace, keys: Keys(keys) };
    let call = match verb {
        Verb::Status => Call::Status,
        Verb::Lookup(flags) => Call::Find(named(flags)),
        Verb::Pin(flags) => Call::Pin(named(flags)),
        Verb::Unpin(flags) => Call::Unpin(named(flags)),
        Verb::Clear(NamespaceFlag { namespace }) => Call::Clear { namespace },
        Verb::Quota { namespace: NamespaceFlag { namespace }, bytes } => {
            Call::Quota { namespace, bytes: bytes.map(|Size(bytes)| bytes) }
        }
    };
    let answer = Control::connect(&socket).and_then(|control| control.call(&call));
    let answer = answer.map_err(|error| Problem::new(error.to_string(), ""))?;
    if json {
        terminal::print(serde_json::to_string(&answer).context("writing the answer")?)?;
    } else {
        terminal::print(text(&answer))?;
    }
    Ok(0)
}

fn text(answer: &Answer) -> String {
    match answer {
        Answer::Status(status) => status_text(status),
        Answer::Number(number) => number.to_string(),
        _ => "done".to_owned(),
    }
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
    for NamespaceStatus { namespace, label, files, quota_files } in &status.namespaces {
        let quota = quota_files.map_or(String::new(), |quota| format!(" of {}", size(quota)));
        lines.push(format!("namespace {namespace} ({label}): {}{quota}", size(*files)));
    }
    for session in &status.sessions {
        let SessionStatus { uid, pid, pool_bytes, requests, prefixes, reservations, member } =
            session;
        let pool = Size(*pool_bytes);
        let part = match member {
            None => String::new(),
            Some(Member { engine, rank: None, .. }) => format!(", scheduler of {engine}"),
            Some(Member { engine, rank: Some(rank), .. }) => format!(", rank {rank} of {engine}"),
        };
        lines.push(format!(
            "client {pid} of user {uid}{part}: pool of {pool}, {requests} requests, {prefixes} \
             prefixes, {reservations} reservations"
        ));
    }
    lines.push(format!(
        "refused: {} connections by user, {} messages, {} calls",
        status.refused_users, status.refused_messages, status.refused_calls
    ));
    lines.join("\n")
}
