//! Errors of building and using a store.

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
};

use gio_kernels::cuda::CudaError;
use kv_catalog::{FormatError, JournalError, LayoutError};
use nvme_driver::{DmaError, platform::vfio::VfioError, remedy};
use nvme_emu::EmuError;
use objstore::{RegistrationError, Route, StoreError};

use crate::{chosen::NotTaken, size::Size};

/// An error, whose message says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StackError {
    /// An error of the store directory.
    #[error(transparent)]
    StoreDir(#[from] StoreDirError),
    /// An error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Making a software controller failed.
    #[error("making a software controller: {0}")]
    Emu(#[from] EmuError),
    /// The metrics cannot be served at this address.
    #[error(
        "serving metrics on {address}: {source}; {}",
        remedy(source).unwrap_or("choose another address")
    )]
    Metrics {
        /// The address.
        address: String,
        /// The cause.
        source: io::Error,
    },
    /// A device, or the operating system, failed.
    #[error("{what}: {source}")]
    Failed {
        /// Action, such as "starting a store's threads".
        what: String,
        /// The cause.
        source: Box<dyn Error + Send + Sync>,
    },
    /// Mapping the KV pool for the devices failed.
    #[error("mapping the KV pool: {0}")]
    Memory(#[from] DmaError),
    /// The KV pool's layout is invalid.
    #[error("registering the KV pool: {0}")]
    Pool(#[from] RegistrationError),
    /// VFIO, or this function, cannot be opened.
    #[error("opening {what}: {source}")]
    Vfio {
        /// The thing to open.
        what: String,
        /// The cause, with advice.
        source: VfioError,
    },
    /// A drive cannot hold a store, or the memory of another function is used up.
    #[error("{drive}: {why}; {hint}")]
    Drive {
        /// Its address.
        drive: String,
        /// The reason.
        why: String,
        /// Advice.
        hint: &'static str,
    },
    /// Formatting would destroy the contents of a drive.
    #[error(
        "{drive}: the drive is not empty ({found}), and formatting would destroy that; name \
         another drive, or, if nothing on it is needed, allow it to be overwritten"
    )]
    NotEmpty {
        /// Its address.
        drive: String,
        /// Its contents.
        found: String,
    },
    /// An error of the GPU.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A facility of this machine cannot be used; another route may do without it.
    #[error("{why}{}{fix}", if fix.is_empty() { "" } else { "; " })]
    Unfit {
        /// The reason.
        why: String,
        /// Advice to make it usable; may be empty.
        fix: String,
    },
    /// No requested route works.
    #[error(
        "no route of the data works: {}; ripieno doctor shows what this machine can do",
        listed(tried)
    )]
    NoRoute {
        /// The routes tried.
        tried: Vec<NotTaken>,
    },
    /// The options contradict each other.
    #[error("{field}: {problem}")]
    Config {
        /// The option.
        field: &'static str,
        /// The problem, with advice.
        problem: String,
    },
    /// A process that was forked used what the other one had opened.
    #[error(
        "it was opened in process {process}, of which this one is a fork: a fork has none of the \
         threads that it needs; open it again here, or start processes without a fork (spawn)"
    )]
    Forked {
        /// The process that opened it.
        process: u32,
    },
    /// The store was closed.
    #[error("the store was closed; open it again")]
    Closed,
    /// An error of a server, or of the connection to it.
    #[error("{message}")]
    Served {
        /// Its class.
        kind: ErrorKind,
        /// The reason.
        message: String,
    },
    /// A request of the other direction was committed.
    #[error("this request retrieves blocks, and only one that stores them can be committed")]
    NotWriting,
}

/// An error of a store directory, whose message says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreDirError {
    /// Another process uses the store directory.
    #[error(
        "{}: the store is in use by {holder}; it belongs to one process at a time: close it there, \
         or name another directory",
        dir.display()
    )]
    Locked {
        /// The directory.
        dir: PathBuf,
        /// The process that has it, with its PID, in its own PID namespace, if that is known.
        holder: String,
    },
    /// The operating system refused an operation.
    #[error("{}: {action} failed: {source}; {hint}", path.display())]
    Os {
        /// The file or directory.
        path: PathBuf,
        /// The operation.
        action: &'static str,
        /// The cause.
        source: io::Error,
        /// Advice.
        hint: &'static str,
    },
    /// A medium could not be opened. The message names it and gives advice.
    #[error("{0}")]
    Media(io::Error),
    /// The directory is not what was asked for.
    #[error("{message}")]
    Wrong {
        /// Its class.
        kind: ErrorKind,
        /// The reason, with advice.
        message: String,
    },
}

impl StoreDirError {
    fn at(kind: ErrorKind, path: &Path, why: &str) -> Self {
        Self::Wrong { kind, message: format!("{}: {why}", path.display()) }
    }

    pub(crate) fn missing(dir: &Path, found: &str) -> Self {
        let why = format!("there is no store here{found}; create one, or name another directory");
        Self::at(ErrorKind::NotFound, dir, &why)
    }

    /// The process that was making the directory ended before it was complete.
    pub(crate) fn half_made(dir: &Path) -> Self {
        let why = "the store directory is incomplete, because the process that was creating it \
                   ended; it holds no data: create it again";
        Self::at(ErrorKind::NotFound, dir, why)
    }

    pub(crate) fn occupied(dir: &Path, why: &str) -> Self {
        Self::at(ErrorKind::Occupied, dir, why)
    }

    /// The parameters in `path` cannot be read.
    pub(crate) fn damaged(path: &Path, why: &str) -> Self {
        let why = format!(
            "it does not describe a store directory: {why}; one made by a newer version needs that \
             version, a damaged one has to be removed and created again"
        );
        Self::at(ErrorKind::Damaged, path, &why)
    }

    /// A device is not the original.
    pub(crate) fn device(path: &Path, index: usize, why: &str) -> Self {
        let why = format!(
            "device {index} of the store {why}; restore the original, or remove the directory and \
             create it again"
        );
        Self::at(ErrorKind::Damaged, path, &why)
    }

    pub(crate) fn disk_full(dir: &Path, wanted: u64, free: u64) -> Self {
        let (wanted, free) = (Size(wanted), Size(free));
        let why = format!(
            "{wanted} of files are asked for, and {free} are free on this file system; ask for \
             less, or name a directory on a larger one"
        );
        Self::at(ErrorKind::NoSpace, dir, &why)
    }

    /// The options are invalid; `why` names the valid ones.
    pub(crate) fn options(why: &str) -> Self {
        Self::Wrong { kind: ErrorKind::Invalid, message: format!("a store directory {why}") }
    }

    /// Returns the class of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Locked { .. } => ErrorKind::Locked,
            Self::Os { .. } | Self::Media(_) => ErrorKind::System,
            Self::Wrong { kind, .. } => *kind,
        }
    }
}

/// Classes of errors by possible reaction, for interfaces in other languages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// An argument is invalid: out of range, or of another store.
    Invalid,
    /// The directory holds no store, or an incomplete one.
    NotFound,
    /// The directory or a device holds other data, which would be lost.
    Occupied,
    /// Another process uses the store directory.
    Locked,
    /// The disk or the store has too little space.
    NoSpace,
    /// Directory, devices or journal are damaged or changed.
    Damaged,
    /// The operating system or a device refused a request.
    System,
    /// The limit of operations in flight is reached.
    Busy,
    /// A transfer failed.
    Io,
    /// A block was dropped after the lookup.
    Stale,
    /// The store accepts no more writes.
    ReadOnly,
    /// The store has failed, or is that of another process, and does nothing any more.
    Failed,
    /// The connection to the server is lost.
    Lost,
    /// A server does not do this for its clients.
    Unsupported,
}

fn listed(tried: &[NotTaken]) -> String {
    tried.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl StackError {
    pub(crate) fn config(field: &'static str, problem: impl Into<String>) -> Self {
        Self::Config { field, problem: problem.into() }
    }

    pub(crate) fn unfit(why: impl ToString, fix: impl Into<String>) -> Self {
        Self::Unfit { why: why.to_string(), fix: fix.into() }
    }

    pub(crate) fn failed(
        what: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::Failed { what: what.into(), source: source.into() }
    }

    /// Says that threads could not be started.
    pub(crate) fn of_threads(error: &io::Error) -> Self {
        let hint = remedy(error).unwrap_or("allow more threads (ulimit -u)");
        Self::failed("starting a store's threads", format!("{error}; {hint}"))
    }

    /// Converts the error into the reason why `route` is not taken.
    ///
    /// # Errors
    /// Returns the error itself if it is not only about a route.
    pub(crate) fn of_route(self, route: Route) -> Result<NotTaken, Self> {
        let (why, fix) = match self {
            Self::Unfit { why, fix } => (why, fix),
            Self::Store(StoreError::Route { why, .. }) => {
                (why, "see nvme-bind doctor, for drives".to_owned())
            }
            error => return Err(error),
        };
        Ok(NotTaken { route, why, fix })
    }

    /// Converts an error of formatting, which means options that do not fit, and no damage.
    pub(crate) fn of_format(error: StoreError) -> Self {
        match error {
            StoreError::Format(FormatError::Layout(LayoutError::TooSmall { .. })) => {
                Self::config("capacity", format!("{error}; give more"))
            }
            StoreError::Format(_) => Self::config("format", error.to_string()),
            error => error.into(),
        }
    }

    /// Returns the class of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::StoreDir(error) => error.kind(),
            Self::Store(error) => of_store(error),
            Self::Memory(_) | Self::Pool(_) | Self::Config { .. } | Self::NotWriting => {
                ErrorKind::Invalid
            }
            Self::NotEmpty { .. } => ErrorKind::Occupied,
            Self::Forked { .. } | Self::Closed => ErrorKind::Failed,
            Self::Served { kind, .. } => *kind,
            _ => ErrorKind::System,
        }
    }
}

fn of_store(error: &StoreError) -> ErrorKind {
    match error {
        StoreError::Occupied { .. } => ErrorKind::Occupied,
        StoreError::Owned { .. } => ErrorKind::Locked,
        StoreError::Format(FormatError::Block(_)) | StoreError::Journal(JournalError::Block(_)) => {
            ErrorKind::Io
        }
        StoreError::Format(_) | StoreError::Journal(_) => ErrorKind::Damaged,
        StoreError::Driver { .. }
        | StoreError::Ring(_)
        | StoreError::Executor(_)
        | StoreError::Route { .. }
        | StoreError::SelfTest { .. } => ErrorKind::System,
        StoreError::Busy { .. } | StoreError::StagingBusy { .. } | StoreError::Bounce { .. } => {
            ErrorKind::Busy
        }
        StoreError::Transfer { .. } | StoreError::RequestFailed { .. } | StoreError::Forgotten => {
            ErrorKind::Io
        }
        StoreError::Stale { .. } => ErrorKind::Stale,
        StoreError::NoRoom { .. } => ErrorKind::NoSpace,
        StoreError::JournalFailed { .. }
        | StoreError::ReadOnly { .. }
        | StoreError::OpenedToRead => ErrorKind::ReadOnly,
        StoreError::Failed { .. } => ErrorKind::Failed,
        _ => ErrorKind::Invalid,
    }
}

#[cfg(test)]
mod tests {
    use kv_catalog::{BlockAction, BlockError};
    use objstore::Owner;

    use super::*;

    #[test]
    fn an_owner_elsewhere_is_a_lock_and_a_device_that_fails_is_no_damage() {
        let device = || "path0".to_owned();
        let owned = StoreError::Owned { device: device(), owner: Owner::default() };
        assert_eq!(StackError::from(owned).kind(), ErrorKind::Locked);
        let failed = BlockError {
            device: device(),
            action: BlockAction::Read,
            offset: 0,
            bytes: 512,
            reason: "media error".to_owned(),
        };
        for error in [
            StoreError::from(FormatError::from(failed.clone())),
            StoreError::from(JournalError::from(failed)),
        ] {
            assert_eq!(StackError::from(error).kind(), ErrorKind::Io);
        }
        let other = FormatError::Devices("another store".to_owned());
        assert_eq!(StackError::from(StoreError::from(other)).kind(), ErrorKind::Damaged);
    }
}
