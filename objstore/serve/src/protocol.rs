//! Messages between client and server, and their transport.
//!
//! A message is a length (u32, little-endian) and that many bytes in the format of `postcard`. Each
//! call has one answer, in order. The memory of a client's pool goes with its first call, as a file
//! descriptor. Every field is untrusted: bounds are checked here, meaning in `session.rs`.

use std::{
    fmt,
    io::{self, IoSlice, IoSliceMut, Read as _},
    mem::MaybeUninit,
    ops::Range,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use kv_catalog::{BlockKey, CatalogCounts, KvShape, Namespace, PinAnswer, Usage};
use ripieno_stack::PoolLayout;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{DeserializeOwned, Error, Visitor},
};

use crate::error::RefusalKind;

/// Version of the messages. Client and server must have the same.
pub const VERSION: u32 = 10;
/// Bytes of a message, at most: fewer keys than a place has positions.
pub const MESSAGE_BYTES_MAX: usize = 2 << 20;

/// Connections of a client, at most, besides its first one.
pub const CONNECTIONS_MAX: usize = 16;

/// The memory of a client's blocks. A file comes with it: shared memory that has the blocks, or, if
/// they are on a GPU, the words of [`Mark`]s.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClientPool {
    /// The blocks' offsets in the memory.
    pub layout: PoolLayout,
    /// The GPU memory that has the blocks; `None`: the file has them.
    pub gpu: Option<GpuRange>,
}

/// A range of a client's GPU memory: the fields of [`ripieno_stack::GpuHandle`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GpuRange {
    /// PCI address of the GPU.
    pub gpu: String,
    /// CUDA's handle of an allocation.
    pub handle: Bytes,
    /// Offset of the range in it, in bytes.
    pub offset: u64,
    /// Bytes of the range.
    pub bytes: u64,
}

/// A point of a stream: it is reached when a word of the client's file has a value, or has passed
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The number of the word.
    pub word: u32,
    /// The value.
    pub value: u32,
}

/// A call of a client.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Call {
    /// Begins a session. Answer: [`Answer::Welcome`].
    Hello {
        /// [`VERSION`].
        version: u32,
        /// The client's pool, with whose file this message comes; `None`: a scheduler's.
        pool: Option<ClientPool>,
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
    Namespace(Namespace),
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
        /// Leading layers to start at once.
        layers: u32,
    },
    /// Starts layers of a request, in this order. Answer: [`Answer::Number`], the layers that were
    /// started: at least one, unless none was named. The next call starts the rest, or is refused.
    Start {
        /// The request.
        request: u64,
        /// The layers.
        layers: Range<u32>,
        /// The point of a stream of the client that they come after, if its pool is on a GPU.
        after: Option<Mark>,
    },
    /// Waits for layers, in this order. Answer: [`Answer::Number`], the layers that have ended:
    /// same as for [`Call::Start`].
    Wait {
        /// The request.
        request: u64,
        /// The layers.
        layers: Range<u32>,
    },
    /// Starts the layers of a request that wait for their turn, and later ones at once. Answer:
    /// [`Answer::Done`].
    Hurry {
        /// The request.
        request: u64,
    },
    /// Ends requests, after their layers in flight, prefixes, and reservations. Answer:
    /// [`Answer::Done`].
    Release {
        /// Their numbers.
        handles: Vec<u64>,
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
        /// Leading layers to start at once.
        layers: u32,
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
        /// Requests that fill it, and end first.
        requests: Vec<u64>,
        /// True if the blocks are to be durable before the answer. Lookups do not find them if that
        /// fails.
        is_durable: bool,
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
        /// Layers that were started: [`Call::Start`] starts the rest, or is refused.
        started: u32,
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
    /// Number of the client among those of its rank, which load the same blocks.
    pub copy: u32,
}

/// Result of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// The reason if not all data arrived.
    pub error: Option<String>,
    /// True if the data read is not the data stored.
    pub is_mismatch: bool,
    /// A position that could not be read.
    pub lost: Option<u32>,
}

/// Bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Bytes(pub Vec<u8>);

/// Keys: their bytes, one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys(pub Vec<BlockKey>);

impl Serialize for Keys {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(&self.0.iter().flat_map(|key| key.0).collect::<Vec<u8>>())
    }
}

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Whole;
        impl Visitor<'_> for Whole {
            type Value = Keys;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("keys of 32 bytes each")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Keys, E> {
                match bytes.as_chunks() {
                    (keys, []) => Ok(Keys(keys.iter().copied().map(BlockKey).collect())),
                    _ => Err(E::invalid_length(bytes.len(), &self)),
                }
            }
        }
        from.deserialize_bytes(Whole)
    }
}

/// Sends a message, with a file if one is given.
pub(crate) fn send(
    stream: &UnixStream,
    message: &impl Serialize,
    file: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut bytes = postcard::to_extend(message, vec![0; 4]).map_err(io::Error::other)?;
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
    Ok(match parse(&bytes) {
        Ok(message) => Received::Message(message, file),
        Err(why) => Received::Malformed(why),
    })
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(format!("{} bytes follow the message", rest.len())),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns the message that these bytes are, if they are one.
pub(crate) fn receive_from<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let (len, message) = bytes.split_first_chunk()?;
    (u32::from_le_bytes(*len) as usize == message.len()).then(|| parse(message).ok())?
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn keys_are_their_bytes_and_no_part_of_one() {
        let keys = Keys(vec![BlockKey([0xA5; 32]), BlockKey([7; 32])]);
        let mut bytes = postcard::to_stdvec(&keys).unwrap();
        assert_eq!(bytes.len(), 1 + 64);
        assert_eq!(parse::<Keys>(&bytes).unwrap(), keys);
        bytes[0] = 63;
        assert!(parse::<Keys>(&bytes[..64]).is_err());
        assert_eq!(parse::<Keys>(&[0]).unwrap().0, []);
    }

    #[test]
    fn what_is_no_message_is_said_to_be_none() {
        let (one, other) = UnixStream::pair().unwrap();
        send(&one, &Call::Counts, None).unwrap();
        assert!(matches!(receive::<Call>(&other), Ok(Received::Message(Call::Counts, None))));
        let counts = postcard::to_stdvec(&Call::Counts).unwrap();
        // Of no call; too short; too long; a list that is longer than its message.
        for bytes in [&[0xFF][..], &[], &[&counts[..], &[0]].concat(), &[4, 0, 0xFF, 0xFF, 0x7F]] {
            (&one).write_all(&(bytes.len() as u32).to_le_bytes()).unwrap();
            (&one).write_all(bytes).unwrap();
            assert!(matches!(receive::<Call>(&other), Ok(Received::Malformed(_))), "{bytes:?}");
        }
        (&one).write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(matches!(receive::<Call>(&other), Ok(Received::Malformed(_))));
        drop(one);
        assert!(matches!(receive::<Call>(&other), Ok(Received::End)));
    }
}
