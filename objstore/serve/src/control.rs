//! Requests of `ripieno ctl` and other programs to a server over HTTP, and its answers.
//!
//! `docs/reference/openapi.json` describes the same; a test asks a server for each path and status
//! of it. Every field of a request is untrusted: bounds are checked in `routes.rs`.

use kv_catalog::BlockKey;
use serde::{Deserialize, Serialize};

use crate::{error::RefusalKind, protocol::Member};

pub(crate) mod client;
pub(crate) mod doors;
pub(crate) mod hints;
pub(crate) mod routes;
pub(crate) mod web;

pub use client::{Control, ControlAddress};
pub use kv_catalog::{Outcome, PinAnswer, PinLimits, PinList, PinStatus};

/// A key, in 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Key(pub BlockKey);

impl From<Key> for String {
    fn from(Key(key): Key) -> Self {
        hex(&key.0)
    }
}

impl TryFrom<String> for Key {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let key = unhex(&text).and_then(|bytes| bytes.try_into().ok());
        let key = key.ok_or_else(|| "a key has 64 hexadecimal digits".to_owned())?;
        Ok(Self(BlockKey(key)))
    }
}

fn hex<'a>(bytes: impl IntoIterator<Item = &'a u8>) -> String {
    let digit = |half: u8| char::from(b"0123456789abcdef"[usize::from(half)]);
    bytes.into_iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let byte = |[high, low]: &[u8; 2]| Some((digit(*high)? << 4 | digit(*low)?) as u8);
    rest.is_empty().then(|| pairs.iter().map(byte).collect()).flatten()
}

/// Keys of a namespace: of a lookup, and of blocks to delete.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    /// Number of the namespace in the store: [`NamespaceStatus::namespace`].
    pub namespace: u32,
    /// The keys.
    pub keys: Vec<Key>,
}

/// A namespace, whose blocks are to be deleted.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Whole {
    /// Its number in the store.
    pub namespace: u32,
    /// True to delete nothing if a block is in use, pinned or being stored.
    #[serde(default)]
    pub unused: bool,
}

/// A request to erase files without a block.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EraseAsked {
    /// The file to begin with: 0, or [`ErasedPart::next`] of the answer before.
    pub first: u32,
}

/// Answer to a request to erase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ErasedPart {
    /// The file to go on with; null: all are erased.
    pub next: Option<u32>,
    /// Bytes that were erased.
    pub bytes: u64,
}

/// A request to pin blocks.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinAsked {
    /// Number of the namespace in the store.
    pub namespace: u32,
    /// Keys, of which the leading ones that are stored are pinned.
    pub keys: Vec<Key>,
    /// Seconds until the pin ends.
    pub ttl_s: u64,
    /// Bytes on the devices, at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_max: Option<u64>,
    /// True if keys that are not stored yet are to be pinned when they are.
    #[serde(default)]
    pub wait: bool,
}

/// A number of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blocks {
    /// Blocks that were found, deleted, or are not pinned any more.
    pub blocks: u64,
}

/// A request for the checksums of blocks.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChecksumsAsked {
    /// Number of the namespace in the store.
    pub namespace: u32,
    /// The keys.
    pub keys: Vec<Key>,
    /// True if the blocks are to be read and compared.
    #[serde(default)]
    pub verify: bool,
}

/// State of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockState {
    /// It is not stored.
    Missing,
    /// It is stored, and was not read.
    Stored,
    /// It was read, and is what was stored.
    Intact,
    /// It was read, and is not what was stored: it is a miss from now on.
    Damaged,
}

/// A block's checksums.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockChecksums {
    /// The block's key.
    pub key: Key,
    /// Its state.
    pub state: BlockState,
    /// CRC-32C of each object, in the order of rows; empty without a block or checksums.
    pub checksums: Vec<u32>,
}

/// Answer to a request for checksums.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChecksumList {
    /// An entry for each key.
    pub blocks: Vec<BlockChecksums>,
}

/// A new quota.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuotaAsked {
    /// Bytes on the devices; null: no limit. Whole files are counted.
    #[serde(deserialize_with = "Option::deserialize")]
    pub bytes: Option<u64>,
}

/// Quota of a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuotaStatus {
    /// Its number in the store.
    pub namespace: u32,
    /// Its label.
    pub label: String,
    /// Bytes of its blocks on the devices.
    pub stored_bytes: u64,
    /// The most there may be; null: no limit.
    pub quota_bytes: Option<u64>,
}

/// Hints, in vLLM's form (`KvHintsEnvelope`).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Hints {
    /// Version of the form; any is taken.
    pub protocol_version: String,
    /// Named again in the answer.
    pub message_id: String,
    /// The hints.
    pub actions: Vec<Hint>,
}

/// A hint (`KvHintAction`).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Hint {
    /// Named again in the answer.
    pub action_id: String,
    /// `kv.pin` or `kv.deref`; others are rejected.
    pub action_type: String,
    /// `1` or `1.x`.
    pub action_version: String,
    /// Arguments: a [`PinAsked`], or `{"pin": NUMBER}`.
    pub payload: serde_json::Value,
}

/// Answers to hints, one for each and in their order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HintAnswers {
    /// That of the hints.
    pub message_id: String,
    /// The answers.
    pub answers: Vec<HintAnswer>,
}

/// Answer to a hint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HintAnswer {
    /// That of the hint.
    pub action_id: String,
    /// Result.
    pub outcome: Outcome,
    /// The reason of it, unless all was done.
    pub reason: Option<String>,
    /// The pin that it made.
    pub pin: Option<PinStatus>,
}

/// Answer to a reload.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reloaded {
    /// Names of the settings that have other values now.
    pub changed: Vec<String>,
}

/// State of a server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// False when the store takes no writes any more.
    pub healthy: bool,
    /// Files of the store, and their bytes each.
    pub files: u32,
    /// Bytes of a file on the devices.
    pub file_bytes: u64,
    /// Files that can be written without evicting.
    pub files_free: u32,
    /// Files that lookups find.
    pub files_stored: u32,
    /// Files being written.
    pub files_writing: u32,
    /// Files that a prefix or request refers to.
    pub files_referenced: u32,
    /// The clients with a pool, and the schedulers of engines, oldest first.
    pub sessions: Vec<SessionStatus>,
    /// Sessions that have ended since the server began.
    pub sessions_ended: u64,
    /// Connections of users that are not on the list.
    pub refused_users: u64,
    /// Messages that were malformed, or too early.
    pub refused_messages: u64,
    /// Calls with a wrong argument: a block, a handle or a layer that is not the client's, or
    /// beyond a limit.
    pub refused_calls: u64,
    /// Requests of control that were refused.
    pub refused_requests: u64,
    /// Pins, and their bytes.
    pub pins: u64,
    /// Bytes on the devices that count against the limit of pins.
    pub pinned_bytes: u64,
    /// The namespaces.
    pub namespaces: Vec<NamespaceStatus>,
}

/// State of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionStatus {
    /// User of the client.
    pub uid: u32,
    /// Process of the client.
    pub pid: i32,
    /// Bytes of its pool.
    pub pool_bytes: u64,
    /// Requests that have not ended.
    pub requests: u32,
    /// Prefixes that it holds.
    pub prefixes: u32,
    /// Reservations that it holds.
    pub reservations: u32,
    /// The part of an engine that it is.
    pub member: Option<Member>,
}

/// State of a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamespaceStatus {
    /// Its number in the store.
    pub namespace: u32,
    /// Its label.
    pub label: String,
    /// Files that lookups find.
    pub files: u32,
    /// Files it may have; `None`: no limit.
    pub quota_files: Option<u32>,
}

/// A refusal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refused {
    /// Kind of the reason.
    pub kind: RefusalKind,
    /// The reason.
    pub message: String,
}
