//! Messages between client and server, and their transport.
//!
//! A message is a length (u32, little-endian) and that many bytes of JSON. Each call has one
//! answer, in order. The memory of a client's pool goes with its first call, as a file descriptor.
//! Every field is untrusted: bounds are checked here, meaning in `session.rs`.

use std::{
    io::{self, IoSlice, IoSliceMut, Read as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Duration,
};

use kv_catalog::{BlockKey, CatalogCounts, KvShape, Namespace, PinAnswer, Usage};
use ripieno_stack::PoolLayout;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::error::RefusalKind;

/// Version of the messages. Client and server must have the same.
pub const VERSION: u32 = 6;
/// Bytes of a message, at most: about 60,000 keys.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;

/// Connections of a client, at most, besides its first one.
pub const CONNECTIONS_MAX: usize = 16;

/// A call of a client.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Call {
    /// Begins a session. Answer: [`Answer::Welcome`].
    Hello {
        /// [`VERSION`].
        version: u32,
        /// Layout of the pool, whose memory comes with this message; `None`: a scheduler's.
        pool: Option<PoolLayout>,
        /// The client's earlier session, which ends first, if it has not.
        after: Option<Bytes>,
        /// The part of an engine that the client is, if the engine has several processes.
        member: Option<Member>,
    },
    /// Adds a connection to a session, for calls of other threads. Answer: [`Answer::Done`].
    Attach {
        /// The session of [`Answer::Welcome`].
        session: Bytes,
    },
    /// Registers a namespace. Answer: [`Answer::Number`], its number in this session.
    Namespace(Space),
    /// Counts leading keys that are stored. Answer: [`Answer::Number`].
    Peek {
        /// The namespace.
        namespace: u32,
        /// The keys.
        keys: Keys,
    },
    /// Finds the longest stored prefix, and holds it. Answer: [`Answer::Prefix`].
    Lookup {
        /// The namespace.
        namespace: u32,
        /// The keys.
        keys: Keys,
    },
    /// Prepares to read a part of a prefix into blocks. The prefix is the client's, or of another
    /// client of its engine. Answer: [`Answer::Request`].
    Load {
        /// The prefix.
        prefix: u64,
        /// Positions of the prefix.
        positions: Vec<u32>,
        /// A block for each position.
        blocks: Vec<u32>,
    },
    /// Prepares to store blocks. Answer: [`Answer::Request`].
    Store {
        /// The namespace.
        namespace: u32,
        /// A key for each block.
        keys: Keys,
        /// The blocks.
        blocks: Vec<u32>,
    },
    /// Starts a layer of a request. Answer: [`Answer::Done`].
    Start {
        /// The request.
        request: u64,
        /// The layer.
        layer: u32,
    },
    /// Waits for a layer. Answer: [`Answer::Done`].
    Wait {
        /// The request.
        request: u64,
        /// The layer.
        layer: u32,
    },
    /// Starts the layers of a request that wait for their turn, and later ones at once. Answer:
    /// [`Answer::Done`].
    Hurry {
        /// The request.
        request: u64,
    },
    /// Makes a stored request durable, and ends it. Answer: [`Answer::Committed`].
    Commit {
        /// The request.
        request: u64,
    },
    /// Ends a request, after its layers in flight, or a prefix. Answer: [`Answer::Done`].
    Release {
        /// Request or prefix.
        handle: u64,
    },
    /// Asks if a layer has ended. Answer: [`Answer::Number`], 1 if it has.
    Poll {
        /// The request.
        request: u64,
        /// The layer.
        layer: u32,
    },
    /// Says of each key if it is stored. Answer: [`Answer::Flags`].
    AreStored {
        /// The namespace.
        namespace: u32,
        /// The keys.
        keys: Keys,
    },
    /// Reserves files for new blocks, which all ranks of the engine fill. Answer:
    /// [`Answer::Reserved`].
    Reserve {
        /// The namespace.
        namespace: u32,
        /// The keys.
        keys: Keys,
    },
    /// Prepares to store blocks in a reservation of the client's engine. Answer:
    /// [`Answer::Request`].
    Fill {
        /// The reservation.
        reservation: u64,
        /// Positions of the reservation, each of which a rank fills once.
        positions: Vec<u32>,
        /// A block for each position.
        blocks: Vec<u32>,
    },
    /// Ends requests that load or fill: waits for their layers, and makes what they stored durable.
    /// Answer: [`Answer::Ended`].
    End {
        /// The requests.
        requests: Vec<u64>,
    },
    /// Says that a rank has filled its part of a reservation, or failed to. Answer:
    /// [`Answer::Reported`].
    Report {
        /// The reservation.
        reservation: u64,
        /// The rank.
        rank: u32,
        /// False if it failed.
        is_filled: bool,
    },
    /// Makes the blocks of a filled reservation visible, and ends it. Answer: [`Answer::Done`].
    Publish {
        /// The reservation.
        reservation: u64,
    },
    /// Makes everything so far durable. Answer: [`Answer::Done`].
    Sync,
    /// Permanently drops all blocks of a namespace, including those being written. Answer:
    /// [`Answer::Done`].
    Renew {
        /// The namespace.
        namespace: u32,
    },
    /// Drops keys, including pinned ones and those in use. Answer: [`Answer::Number`], those that
    /// were stored.
    Remove {
        /// The namespace.
        namespace: u32,
        /// The keys.
        keys: Keys,
    },
    /// Pins blocks on all ranks, until the session ends at the latest. Answer: [`Answer::Pinned`].
    Pin {
        /// The namespace.
        namespace: u32,
        /// Keys, of which the leading ones that are stored are pinned.
        keys: Keys,
        /// Seconds until the pin ends.
        ttl_s: u64,
        /// Bytes on the devices, at most.
        bytes_max: Option<u64>,
        /// True if keys that are not stored yet are to be pinned when they are.
        wait: bool,
    },
    /// Ends pins of the client. Answer: [`Answer::Number`], 1 if there was one.
    Unpin {
        /// The pin; `None`: all of them.
        pin: Option<u64>,
    },
    /// Asks for the counts of a namespace. Answer: [`Answer::Usage`].
    Usage {
        /// The namespace.
        namespace: u32,
    },
    /// Asks for the counts of the store's files. Answer: [`Answer::Counts`].
    Counts,
}

/// An answer of the server.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Answer {
    /// The session has begun.
    Welcome {
        /// Names the session in [`Call::Attach`].
        session: Bytes,
        /// Shape of the store's blocks.
        shape: KvShape,
        /// True if layers wait for their turn.
        is_paced: bool,
    },
    /// Nothing more to say.
    Done,
    /// A number.
    Number(u32),
    /// A prefix.
    Prefix {
        /// Names it.
        prefix: u64,
        /// Blocks found.
        blocks: u32,
    },
    /// A request.
    Request {
        /// Names it.
        request: u64,
        /// Leading blocks that will be found after the commit, or are loaded.
        accepted: u32,
        /// Blocks that it moves.
        moved: u32,
    },
    /// A request was committed.
    Committed {
        /// Leading blocks that lookups find.
        accepted: u32,
        /// Blocks that were added.
        written: u32,
    },
    /// A byte for each key: 1 if it is stored.
    Flags(Bytes),
    /// A reservation.
    Reserved {
        /// Names it.
        reservation: u64,
        /// Leading blocks that will be found after the commit.
        accepted: u32,
        /// Positions, among these, of the blocks that are to be stored.
        positions: Vec<u32>,
    },
    /// The requests have ended.
    Ended(Vec<Ended>),
    /// State of a reservation: `None` while ranks have not reported, true if it can be published,
    /// false if it has ended because a rank failed.
    Reported(Option<bool>),
    /// A pin, or why there is none.
    Pinned(PinAnswer),
    /// The counts of a namespace.
    Usage(Usage),
    /// The counts of the store's files.
    Counts(CatalogCounts),
    /// The call was refused.
    Refused {
        /// Kind of the reason.
        kind: RefusalKind,
        /// The reason.
        message: String,
    },
}

/// A part of an engine of several processes: clients of one user and engine share what was found
/// and reserved by one of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// Name of the engine.
    pub engine: String,
    /// Its ranks, each of which has a part of every block.
    pub ranks: u32,
    /// The client's rank; `None`: the engine's scheduler, which has no pool.
    pub rank: Option<u32>,
}

/// Result of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ended {
    /// The reason if not all data arrived.
    pub error: Option<String>,
    /// True if the data read is not the data stored.
    pub is_mismatch: bool,
    /// A position that could not be read; its block is a miss from now on.
    pub lost: Option<u32>,
}

/// A namespace: [`Namespace`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Space {
    weights: Bytes,
    layout: String,
    dtype: String,
    block_tokens: u32,
    adapter: String,
    tenant_salt: Bytes,
    label: String,
}

impl From<&Namespace> for Space {
    fn from(space: &Namespace) -> Self {
        Self {
            weights: Bytes(space.weights.to_vec()),
            layout: space.layout.clone(),
            dtype: space.dtype.clone(),
            block_tokens: space.block_tokens,
            adapter: space.adapter.clone(),
            tenant_salt: Bytes(space.tenant_salt.clone()),
            label: space.label.clone(),
        }
    }
}

impl Space {
    /// Returns the namespace; `None` if the digest of the weights has another length.
    pub(crate) fn namespace(self) -> Option<Namespace> {
        let Self { weights, layout, dtype, block_tokens, adapter, tenant_salt, label } = self;
        let (weights, tenant_salt) = (weights.0.try_into().ok()?, tenant_salt.0);
        Some(Namespace { weights, layout, dtype, block_tokens, adapter, tenant_salt, label })
    }
}

/// Bytes, in hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bytes(pub Vec<u8>);

/// Keys, in hexadecimal digits without separators.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Keys(pub Vec<BlockKey>);

impl From<Bytes> for String {
    fn from(Bytes(bytes): Bytes) -> Self {
        hex(&bytes)
    }
}

impl TryFrom<String> for Bytes {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        unhex(&text).map(Self).ok_or_else(|| "hexadecimal digits were expected".to_owned())
    }
}

impl From<Keys> for String {
    fn from(Keys(keys): Keys) -> Self {
        hex(keys.iter().flat_map(|key| &key.0))
    }
}

impl TryFrom<String> for Keys {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let bytes = unhex(&text);
        let (keys, rest) = bytes.as_deref().map(<[u8]>::as_chunks).unwrap_or((&[], &[0]));
        match rest {
            [] => Ok(Self(keys.iter().map(|key| BlockKey(*key)).collect())),
            _ => Err("keys of 64 hexadecimal digits each were expected".to_owned()),
        }
    }
}

pub(crate) fn hex<'a>(bytes: impl IntoIterator<Item = &'a u8>) -> String {
    let digit = |half: u8| char::from(b"0123456789abcdef"[usize::from(half)]);
    bytes.into_iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

pub(crate) fn unhex(text: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let byte = |[high, low]: &[u8; 2]| Some((digit(*high)? << 4 | digit(*low)?) as u8);
    rest.is_empty().then(|| pairs.iter().map(byte).collect()).flatten()
}

/// Connects to the socket of a server, which hangs if it has no room for a connection for the time
/// `within`. That is the time of each read and write afterwards, too.
pub(crate) fn connect(path: &Path, within: Duration) -> io::Result<UnixStream> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    let (stream, address) = (UnixStream::from(socket), SocketAddrUnix::new(path)?);
    stream.set_read_timeout(Some(within))?;
    // On Linux it is that of a connect as well.
    stream.set_write_timeout(Some(within))?;
    match rustix::io::retry_on_intr(|| rustix::net::connect(&stream, &address)) {
        Err(rustix::io::Errno::AGAIN) => {
            let why =
                format!("no connection was taken for {within:.1?}: restart a server that hangs");
            Err(io::Error::new(io::ErrorKind::TimedOut, why))
        }
        connected => Ok(connected.map(|()| stream)?),
    }
}

/// Sends a message, with a file if one is given.
pub(crate) fn send(
    stream: &UnixStream,
    message: &impl Serialize,
    file: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message)?;
    let len = bytes.len() - 4;
    if len > MESSAGE_BYTES_MAX {
        let why = format!("a message of {len} bytes; {MESSAGE_BYTES_MAX} are possible: use parts");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    bytes[..4].copy_from_slice(&(len as u32).to_le_bytes());
    let mut sent = 0;
    // A program in C is killed by the signal of a closed connection.
    let flags = SendFlags::NOSIGNAL;
    if let Some(file) = file {
        let files = [file];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
        let parts = [IoSlice::new(&bytes)];
        let send = || rustix::net::sendmsg(stream, &parts, &mut ancillary, flags);
        sent = rustix::io::retry_on_intr(send)?;
    }
    while sent < bytes.len() {
        sent += rustix::io::retry_on_intr(|| rustix::net::send(stream, &bytes[sent..], flags))?;
    }
    Ok(())
}

/// Result of [`receive`].
pub(crate) enum Received<T> {
    /// A message, and the file that came with it.
    Message(T, Option<OwnedFd>),
    /// Nothing within the stream's timeout.
    Nothing,
    /// The other end has closed the connection.
    End,
    /// Something that is no message: its reason.
    Malformed(String),
}

/// Receives a message. A pause inside one, for longer than the stream's timeout, is an error.
pub(crate) fn receive<T: DeserializeOwned>(mut stream: &UnixStream) -> io::Result<Received<T>> {
    let mut header = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [IoSliceMut::new(&mut header)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    // With a timeout, a signal ends the call, also those of io_uring and of a stopped process.
    let receive = || rustix::net::recvmsg(stream.as_fd(), parts, &mut ancillary, flags);
    let got = match rustix::io::retry_on_intr(receive) {
        Ok(received) => received.bytes,
        Err(rustix::io::Errno::AGAIN) => return Ok(Received::Nothing),
        Err(error) => return Err(error.into()),
    };
    // Others are closed.
    let file = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    if got == 0 {
        return Ok(Received::End);
    }
    stream.read_exact(&mut header[got..])?;
    let len = u32::from_le_bytes(header) as usize;
    if len > MESSAGE_BYTES_MAX {
        let why = format!("a message of {len} bytes; {MESSAGE_BYTES_MAX} are possible");
        return Ok(Received::Malformed(why));
    }
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes)?;
    match serde_json::from_slice(&bytes) {
        Ok(message) => Ok(Received::Message(message, file)),
        Err(error) => Ok(Received::Malformed(error.to_string())),
    }
}

/// Returns the message that these bytes are, if they are one.
pub(crate) fn receive_from<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let (len, text) = bytes.split_first_chunk()?;
    (u32::from_le_bytes(*len) as usize == text.len()).then(|| serde_json::from_slice(text).ok())?
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn keys_survive_and_other_text_does_not() {
        let keys = Keys(vec![BlockKey([0xA5; 32]), BlockKey([7; 32])]);
        let text = serde_json::to_string(&keys).unwrap();
        assert_eq!(text.len(), 2 + 128);
        assert_eq!(serde_json::from_str::<Keys>(&text).unwrap(), keys);
        for wrong in ["\"a\"", "\"a5\"", "\"xx\"", "7"] {
            assert!(serde_json::from_str::<Keys>(wrong).is_err(), "{wrong}");
        }
        assert_eq!(serde_json::from_str::<Keys>("\"\"").unwrap().0, []);
    }

    #[test]
    fn what_is_no_message_is_said_to_be_none() {
        let (one, other) = UnixStream::pair().unwrap();
        send(&one, &Call::Counts, None).unwrap();
        assert!(matches!(receive::<Call>(&other), Ok(Received::Message(Call::Counts, None))));
        for text in ["{}", "\"state\"", "{\"start\":{\"request\":1,\"layer\":1,\"more\":2}}", "["] {
            (&one).write_all(&(text.len() as u32).to_le_bytes()).unwrap();
            (&one).write_all(text.as_bytes()).unwrap();
            assert!(matches!(receive::<Call>(&other), Ok(Received::Malformed(_))), "{text}");
        }
        (&one).write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(matches!(receive::<Call>(&other), Ok(Received::Malformed(_))));
        drop(one);
        assert!(matches!(receive::<Call>(&other), Ok(Received::End)));
    }
}
