//! Why a store cannot be built.

use std::io;

use gio_kernels::cuda::CudaError;
use kv_catalog::{FormatError, LayoutError};
use nvme_driver::{DmaError, platform::vfio::VfioError};
use nvme_emu::EmuError;
use objstore::{Layer, RegistrationError, StoreError};

use crate::{
    drives::MemoryPlace,
    home::HomeError,
    route::{NotTaken, Route},
};

/// What is in the way. The message says what was asked, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StackError {
    /// The home.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A software controller.
    #[error("making a software controller: {0}")]
    Emu(#[from] EmuError),
    /// The threads of the software controllers.
    #[error(
        "starting the software controllers' threads: {0}; allow more threads (ulimit -u), or use \
         fewer devices"
    )]
    Threads(io::Error),
    /// The thread that watches the devices.
    #[error("starting a thread that watches the devices: {0}; allow more threads (ulimit -u)")]
    Watch(io::Error),
    /// The driver does not get on with a controller.
    #[error("attaching to {device}: {source}")]
    Attach {
        /// The device.
        device: String,
        /// Why not.
        source: nvme_driver::Error,
    },
    /// A controller does not shut down.
    #[error("shutting {device} down: {source}")]
    Shutdown {
        /// The device.
        device: String,
        /// Why not.
        source: nvme_driver::Error,
    },
    /// The memory of the KV pool cannot be mapped for the devices.
    #[error("mapping the KV pool: {0}")]
    Memory(#[from] DmaError),
    /// The KV pool's layout is not one.
    #[error("registering the KV pool: {0}")]
    Pool(#[from] RegistrationError),
    /// The part of the pool that requests are copied through is in use.
    #[error(
        "{wanted} blocks are to be copied through bounce buffers, and {free} of {all} are free; \
         end a request first, or ask for fewer blocks at a time"
    )]
    Bounce {
        /// Blocks of the request.
        wanted: usize,
        /// Blocks of bounce buffers that no request uses.
        free: usize,
        /// Blocks of bounce buffers there are.
        all: usize,
    },
    /// VFIO does not open, or not for this function.
    #[error("opening {what}: {source}")]
    Vfio {
        /// What was to be opened.
        what: String,
        /// Why not, and what to do.
        source: VfioError,
    },
    /// A drive cannot hold a store.
    #[error("vfio:{drive}: {why}; {hint}")]
    Drive {
        /// Its address.
        drive: String,
        /// Why not.
        why: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// Formatting would destroy what a drive holds.
    #[error(
        "vfio:{drive}: the drive is not empty ({found}), and formatting would destroy that; name \
         another drive, or, if nothing on it is needed, allow it to be overwritten"
    )]
    NotEmpty {
        /// Its address.
        drive: String,
        /// What it holds.
        found: String,
    },
    /// A drive fails.
    #[error("{what}: {source}")]
    DriveIo {
        /// What was done.
        what: &'static str,
        /// How it failed.
        source: nvme_driver::Error,
    },
    /// The memory of another function is used up.
    #[error("{place}: {wanted} more bytes are needed, {left} of its {all} are left")]
    PeerFull {
        /// The memory.
        place: MemoryPlace,
        /// Bytes asked for.
        wanted: usize,
        /// Bytes that are left.
        left: usize,
        /// Bytes of it.
        all: usize,
    },
    /// A drive does not reach memory that it was to use.
    #[error("vfio:{drive} does not reach {place}: {why}")]
    Unreached {
        /// Its address.
        drive: String,
        /// The memory.
        place: String,
        /// What was tried, and what came of it.
        why: String,
    },
    /// The GPU.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Something of this machine cannot be used; another route may do without.
    #[error("{why}{}{fix}", if fix.is_empty() { "" } else { "; " })]
    Unfit {
        /// Why not.
        why: String,
        /// What would make it usable; may be empty.
        fix: String,
    },
    /// No way of the data that was wanted works.
    #[error(
        "no route of the data works: {}; ripieno doctor shows what this machine can do",
        listed(tried)
    )]
    NoRoute {
        /// What was tried.
        tried: Vec<NotTaken>,
    },
    /// What was asked for does not go together.
    #[error("{field}: {problem}")]
    Config {
        /// The option.
        field: &'static str,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// A layer that was not started, or that was waited for.
    #[error("layer {layer} of this request is not in flight; start it before you wait for it")]
    NotStarted {
        /// The layer.
        layer: Layer,
    },
    /// A request of the other direction.
    #[error("this request retrieves blocks, and only one that stores them can be committed")]
    NotWriting,
}

/// What a caller can do about an error, for interfaces in other languages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// An argument makes no sense: out of range, or of another store.
    Invalid,
    /// There is no home in this directory, or one that was not completed.
    NotFound,
    /// The directory or a device holds something else, which would be lost.
    Occupied,
    /// Another process uses the home.
    Locked,
    /// There is not enough space on the disk.
    NoSpace,
    /// Home, devices or journal are not what they were.
    Damaged,
    /// The operating system or a device refused something.
    System,
    /// All that may be in flight at a time is in flight.
    Busy,
    /// Data did not get where it was to go.
    Io,
    /// A block was dropped after the lookup.
    Stale,
    /// Nothing can be stored any more.
    ReadOnly,
    /// The store does nothing any more.
    Failed,
}

fn listed(tried: &[NotTaken]) -> String {
    tried.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl StackError {
    pub(crate) fn unfit(why: impl ToString, fix: impl Into<String>) -> Self {
        Self::Unfit { why: why.to_string(), fix: fix.into() }
    }

    /// Why this route is not taken.
    ///
    /// # Errors
    /// The error itself, if it is about more than a route.
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

    /// What does not fit is not damaged: too little was asked for.
    pub(crate) fn of_format(error: StoreError) -> Self {
        match error {
            StoreError::Format(FormatError::Layout(LayoutError::TooSmall { .. })) => {
                let problem = format!("{error}; give more");
                Self::Config { field: "capacity", problem }
            }
            error => error.into(),
        }
    }

    /// What a caller can do about it.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Home(error) => of_home(error),
            Self::Store(error) => of_store(error),
            Self::Memory(_)
            | Self::Pool(_)
            | Self::Config { .. }
            | Self::NotStarted { .. }
            | Self::NotWriting => ErrorKind::Invalid,
            Self::NotEmpty { .. } => ErrorKind::Occupied,
            Self::Bounce { .. } => ErrorKind::Busy,
            _ => ErrorKind::System,
        }
    }
}

fn of_home(error: &HomeError) -> ErrorKind {
    match error {
        HomeError::Missing { .. } | HomeError::HalfMade { .. } => ErrorKind::NotFound,
        HomeError::Exists { .. } | HomeError::NotEmpty { .. } => ErrorKind::Occupied,
        HomeError::Locked { .. } => ErrorKind::Locked,
        HomeError::Damaged { .. } | HomeError::Device { .. } => ErrorKind::Damaged,
        HomeError::DiskFull { .. } => ErrorKind::NoSpace,
        HomeError::Options { .. } | HomeError::Resized { .. } => ErrorKind::Invalid,
        _ => ErrorKind::System,
    }
}

fn of_store(error: &StoreError) -> ErrorKind {
    match error {
        StoreError::Occupied { .. } => ErrorKind::Occupied,
        StoreError::Format(_) | StoreError::Journal(_) => ErrorKind::Damaged,
        StoreError::Driver { .. }
        | StoreError::Ring(_)
        | StoreError::Executor(_)
        | StoreError::Route { .. }
        | StoreError::SelfTest { .. } => ErrorKind::System,
        StoreError::Busy { .. } | StoreError::StagingBusy { .. } => ErrorKind::Busy,
        StoreError::Transfer { .. } | StoreError::RequestFailed { .. } | StoreError::Forgotten => {
            ErrorKind::Io
        }
        StoreError::Stale { .. } => ErrorKind::Stale,
        StoreError::JournalFailed { .. } | StoreError::ReadOnly { .. } => ErrorKind::ReadOnly,
        StoreError::Failed { .. } => ErrorKind::Failed,
        _ => ErrorKind::Invalid,
    }
}
