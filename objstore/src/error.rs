//! Errors of the store.

use std::fmt;

use gio_uring::{ExecutorError, IoStatus};
use nvme_spec::nvm::Direction;

use kv_catalog::{DeviceIndex, FileId, Layer, LayoutError, NotDurable};
use kv_schedule::BacklogFull;

use crate::{
    data_path::Route,
    ids::{JobId, PoolId},
};

/// The engine's memory cannot be registered. The message says what is wrong with it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct RegistrationError(pub(crate) String);

/// A failed transfer: its layer, block, file and status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// Direction of the transfer.
    pub direction: Direction,
    /// The layer.
    pub layer: Layer,
    /// Position of the block in the request.
    pub position: u32,
    /// The file.
    pub file: FileId,
    /// Status of the failed command or object.
    pub status: IoStatus,
    /// Commands and objects of the layer that failed; this is one of them.
    pub errors: u32,
}

impl Failure {
    pub(crate) fn verb(&self) -> &'static str {
        match self.direction {
            Direction::Read => "retrieving",
            Direction::Write => "storing",
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layer, position, file, status, errors, .. } = self;
        write!(
            f,
            "{} layer {layer}: {errors} failures, one of them block {position} of the request \
             (file {file}): {status}",
            self.verb()
        )
    }
}

/// An error of a store or plane.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The layout is invalid or does not fit the devices.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The configuration contradicts itself or the devices.
    #[error("{field}: {problem}")]
    Config {
        /// The field.
        field: &'static str,
        /// The problem, and a remedy.
        problem: String,
    },
    /// The backlog of writes is full ([`crate::Plane::pace`]).
    #[error(transparent)]
    Backlog(#[from] BacklogFull),
    /// An argument is wrong: it names something that is not there, or is another store's.
    #[error("{why}")]
    Argument {
        /// The argument, and what there is.
        why: String,
    },
    /// A controller returned an error.
    #[error("device {device}: {source}")]
    Driver {
        /// The device.
        device: DeviceIndex,
        /// The cause.
        source: nvme_driver::Error,
    },
    /// The ring returned an error.
    #[error(transparent)]
    Ring(#[from] gio_uring::Error),
    /// The executor could not be created.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// Data does not get from a device to the pool and back on the path that the pool was
    /// registered for.
    #[error(
        "the {path} path does not work: {why}; nothing was opened. Register the pool for another \
         path"
    )]
    Route {
        /// The path.
        path: Route,
        /// The test that failed, and its result.
        why: String,
    },
    /// A pattern did not come back from the devices as it was stored, or the memory could not be
    /// accessed.
    #[error(
        "the self-test failed at layer {layer}, segment {segment}, offset {offset}: {why}; nothing \
         was opened. Check the offsets and the stride that the pool was registered with"
    )]
    SelfTest {
        /// The layer.
        layer: Layer,
        /// The segment of the layer.
        segment: u32,
        /// Offset in the object, in bytes.
        offset: u64,
        /// The mismatch found.
        why: String,
    },
    /// A device failed to make data or journal durable. The store takes no more writes; stored
    /// blocks can still be retrieved.
    #[error(
        "nothing can be stored any more: {cause}; what is stored can still be retrieved. Check the \
         device, then open the store again"
    )]
    JournalFailed {
        /// The cause.
        cause: String,
    },
    /// A controller was recovered between the write of data and the flush of its volatile cache.
    #[error(
        "a controller was reset before what was stored was permanent, and may have forgotten it; \
         nothing of the request is visible, its files are free: store it again"
    )]
    Forgotten,
    /// The catalog returned an error.
    #[error(transparent)]
    Catalog(#[from] kv_catalog::CatalogError),
    /// Formatting would destroy data.
    #[error(
        "{device} holds {what}, which formatting would destroy; nothing was written. Name another \
         device, or allow it to be overwritten"
    )]
    Occupied {
        /// The device.
        device: String,
        /// Contents of the device.
        what: String,
    },
    /// Another process has a device open, through another controller.
    #[error(
        "{device}: another process has the store on it open, and is alive: {owner}; stop it first"
    )]
    Owned {
        /// The device.
        device: String,
        /// That process.
        owner: kv_catalog::Owner,
    },
    /// The devices do not hold the requested store.
    #[error(transparent)]
    Format(#[from] kv_catalog::FormatError),
    /// The journal is not usable.
    #[error(transparent)]
    Journal(#[from] kv_catalog::JournalError),
    /// A stream was given, but the store has no GPU.
    #[error("a stream was given, but the store was opened without a GPU; set StoreConfig::gpu")]
    NoStreams,
    /// A stream refused an operation. Nothing of the layer is in flight.
    #[error(
        "a stream did not take an operation: {cause}; give a stream of the store's GPU that still \
         exists, or wait for the layer on the host"
    )]
    Stream {
        /// The driver's message.
        cause: String,
    },
    /// The request does not fit into a staging buffer.
    #[error(
        "{blocks} blocks are to be moved, but a staging buffer has room for {slots}; ask for them \
         in parts, or give the store more staging memory or fewer staging buffers"
    )]
    Staging {
        /// Blocks to be moved.
        blocks: usize,
        /// Blocks that fit into a buffer.
        slots: u32,
    },
    /// Too few bounce buffers are free.
    #[error(
        "{wanted} blocks are to be copied through bounce buffers, and {free} of {all} are free; \
         end a request first, or ask for fewer blocks at a time"
    )]
    Bounce {
        /// Blocks to be moved.
        wanted: usize,
        /// Bounce buffers free, in blocks.
        free: usize,
        /// Bounce buffers in total, in blocks.
        all: usize,
    },
    /// Every staging buffer is in use.
    #[error("all {buffers} staging buffers are in use; wait for a layer")]
    StagingBusy {
        /// Number of staging buffers.
        buffers: u32,
    },
    /// The media of a device has become read-only.
    #[error(
        "device {device} reports that its media is read-only; what is stored can still be \
         retrieved, but nothing can be stored: replace the drive"
    )]
    ReadOnly {
        /// The device.
        device: DeviceIndex,
    },
    /// The store was opened to be read.
    #[error(
        "the store was opened with read_only, so nothing can be stored; open it again without that"
    )]
    OpenedToRead,
    /// All IOCBs are in flight.
    #[error("{in_flight} layer operations are in flight, which is all there may be; wait for one")]
    Busy {
        /// Operations in flight.
        in_flight: u32,
    },
    /// The store has no room for all copies of some clusters.
    #[error(
        "{asked} files were asked for the copies of the clusters, {found} were found; remove \
         blocks, raise the quota, or build clusters with fewer copies"
    )]
    NoRoom {
        /// Files asked for.
        asked: usize,
        /// Files found.
        found: usize,
    },
    /// The layer is already in flight.
    #[error("layer {layer} of this request is in flight already; wait for it first")]
    InFlight {
        /// The layer.
        layer: Layer,
    },
    /// The job of a layer has ended.
    #[error("layer {layer} was named, but its request has ended")]
    Ended {
        /// The layer.
        layer: Layer,
    },
    /// The layer was not started.
    #[error("layer {layer} of this request is not in flight; start it before you wait for it")]
    NotStarted {
        /// The layer.
        layer: Layer,
    },
    /// A file of the prefix was dropped from the index after the lookup.
    #[error("block {position} (file {file}) was dropped after this lookup; look up again")]
    Stale {
        /// Position in the prefix.
        position: usize,
        /// The file.
        file: FileId,
    },
    /// A transfer failed. The devices work, or have been recovered: nothing accesses the request's
    /// blocks any more.
    #[error("{failure}")]
    Transfer {
        /// The failure.
        failure: Failure,
    },
    /// An earlier layer of the request failed, so no more layers are started.
    #[error("the request failed before: {failure}")]
    RequestFailed {
        /// The first failure.
        failure: Failure,
    },
    /// A layer of the request was never stored, so it cannot be committed.
    #[error("layer {layer} was not stored; nothing of the request is visible, its files are free")]
    Incomplete {
        /// The first such layer.
        layer: Layer,
    },
    /// The store has failed and refuses every call.
    #[error(
        "the store has failed and has to be opened anew: {cause}; memory the devices might still \
         reach was leaked"
    )]
    Failed {
        /// The cause.
        cause: String,
    },
}

impl StoreError {
    pub(crate) fn argument(why: String) -> Self {
        Self::Argument { why }
    }

    /// Refuses a handle that another store has made.
    #[must_use]
    pub fn foreign(what: &str) -> Self {
        Self::argument(format!("the {what} belongs to another store"))
    }

    /// Refuses a layer that the model does not have.
    #[must_use]
    pub fn no_such_layer(layer: Layer, layers: u32) -> Self {
        Self::argument(format!("layer {layer} was asked for, but the model has {layers}"))
    }

    /// Says that another number of blocks was given than that of the positions they are for.
    #[must_use]
    pub fn positions(blocks: usize, positions: usize, what: &str) -> Self {
        Self::argument(format!(
            "{blocks} blocks were given for {positions} {what}; give one for each"
        ))
    }

    pub(crate) fn no_such_file(file: FileId, files: u32) -> Self {
        Self::argument(format!("file {file} was given, but the store has {files} files"))
    }

    pub(crate) fn no_such_pool(PoolId(pool): PoolId) -> Self {
        Self::argument(format!("pool {pool} was given, but it was removed or never added"))
    }

    pub(crate) fn no_such_job(JobId(job): JobId) -> Self {
        Self::argument(format!("job {job} was given, but it has ended or never began"))
    }
}

impl From<NotDurable> for StoreError {
    fn from(NotDurable { cause }: NotDurable) -> Self {
        Self::JournalFailed { cause }
    }
}
