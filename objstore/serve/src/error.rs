//! Errors of server and client.

use std::{io, path::PathBuf};

use nvme_driver::remedy;
use objstore::KvShape;
use ripieno_stack::StackError;
use serde::{Deserialize, Serialize};

/// An error, whose message says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The store failed.
    #[error(transparent)]
    Stack(#[from] StackError),
    /// The socket cannot be used.
    #[error("{action} {}: {source}; {hint}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The action that failed.
        action: &'static str,
        /// The cause.
        source: io::Error,
        /// Advice.
        hint: &'static str,
    },
    /// The address for control cannot be used, or nobody answers there.
    #[error("control at {address}: {source}; {hint}")]
    Control {
        /// Socket, or IP address and port.
        address: String,
        /// The cause.
        source: io::Error,
        /// Advice.
        hint: &'static str,
    },
    /// Another server listens on the socket.
    #[error("a server listens on {} already; end it, or name another socket", path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// Making the memory of a pool failed.
    #[error("making {bytes} bytes of shared memory: {source}; use fewer blocks")]
    Memory {
        /// Bytes of the pool.
        bytes: u64,
        /// The cause.
        source: io::Error,
    },
    /// The memory of a pool cannot be shared.
    #[error("{why}")]
    Unshared {
        /// The reason.
        why: String,
    },
    /// The server refused a call.
    #[error("the server refused: {message}")]
    Refused {
        /// Kind of the reason.
        kind: RefusalKind,
        /// The reason.
        message: String,
    },
    /// The server has ended, or ended this connection. Everything of the session is gone; blocks
    /// that were being loaded have undefined contents.
    #[error("the connection to the server is lost: {why}; treat blocks as misses until it is back")]
    Lost {
        /// The reason.
        why: String,
    },
    /// The server's store has blocks of another shape.
    #[error(
        "the server's store has blocks of another shape ({found}), and this one was given: \
         {asked}; give the server's, or use another server"
    )]
    Shape {
        /// Shape of the store.
        found: KvShape,
        /// Shape of the engine.
        asked: KvShape,
    },
    /// A prefix or request is of an earlier connection.
    #[error("it belongs to a connection that was lost; look the blocks up again")]
    Stale,
    /// The server gave an answer to another question.
    #[error("the server answered {found} to another call; use client and server of one version")]
    Answer {
        /// The answer.
        found: String,
    },
    /// A block of the client's own pool does not exist, or has another size.
    #[error("{what}: {given} was given, and it is {expected}")]
    Argument {
        /// Name of the argument.
        what: &'static str,
        /// The value.
        given: u64,
        /// The limit.
        expected: u64,
    },
}

impl ServeError {
    /// Returns true if a call failed because the server is not there, began anew, or can not serve
    /// it now.
    #[must_use]
    pub fn is_away(&self) -> bool {
        use RefusalKind::{Failed, Limit, Transfer};
        match self {
            Self::Lost { .. } | Self::Stale | Self::Socket { .. } => true,
            Self::Refused { kind, .. } => matches!(kind, Failed | Limit | Transfer),
            _ => false,
        }
    }
}

/// Returns advice for a client that does not reach a server.
pub(crate) fn reach_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "start a server (`ripieno serve`), or name its socket",
        io::ErrorKind::ConnectionRefused => "nobody listens there: start the server",
        io::ErrorKind::PermissionDenied => {
            "list this user in `users` of the server's configuration, and let it enter the \
             socket's directory"
        }
        io::ErrorKind::InvalidFilename => TOO_LONG,
        io::ErrorKind::InvalidInput => "name the socket of a server",
        _ => remedy(error).unwrap_or("see if the server is running"),
    }
}

/// Returns advice for a server that cannot listen.
pub(crate) fn listen_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "make the directory first",
        io::ErrorKind::PermissionDenied => "name one that this user may use",
        io::ErrorKind::AlreadyExists => "remove that file, or name another path",
        io::ErrorKind::AddrInUse => "end the program that listens there, or name another port",
        io::ErrorKind::AddrNotAvailable => "name an address of this machine",
        io::ErrorKind::InvalidFilename | io::ErrorKind::InvalidInput => TOO_LONG,
        _ => remedy(error).unwrap_or("name another one"),
    }
}

const TOO_LONG: &str = "name a shorter path: a socket's has 107 bytes at most";

/// Kind of the reason why a call was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RefusalKind {
    /// The user may not use the server, or not this call.
    Denied,
    /// The message is malformed, too early, or of another version: the connection ends.
    Message,
    /// An argument is wrong.
    Argument,
    /// There is nothing of that name.
    Missing,
    /// The path has other methods.
    Method,
    /// It cannot be done now, or while the server runs.
    Conflict,
    /// This server cannot do it.
    Unsupported,
    /// A limit of the client is reached.
    Limit,
    /// A layer could not be moved: its blocks are misses.
    Transfer,
    /// The store takes no writes any more; what is stored can be read.
    ReadOnly,
    /// The store failed: the server ends.
    Failed,
}
