//! Errors of the store.

use std::fmt;

use gio_uring::{ExecutorError, IoStatus};
use nvme_driver::DmaError;
use nvme_spec::nvm::Direction;

use kv_catalog::{BlockId, DeviceIndex, FileId, Layer, LayoutError, NotDurable};
use kv_schedule::BacklogFull;

use crate::{
    data_path::Route,
    ids::{JobId, PoolId},
};

/// The engine's memory cannot be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    /// The number of rows is not the shape's.
    #[error("{given} row offsets were given, the shape has {shape} rows (layers * segments)")]
    Rows {
        /// Offsets given.
        given: usize,
        /// Rows of the shape.
        shape: u32,
    },
    /// The number of blocks or the stride is invalid.
    #[error(
        "{blocks} blocks of {object}-byte objects, {block_stride} bytes apart: at least one block \
         is needed, and the stride has to be at least the object's size and within 64 bits"
    )]
    Stride {
        /// Blocks.
        blocks: u32,
        /// Bytes between objects.
        block_stride: u64,
        /// Bytes of an object.
        object: u64,
    },
    /// A row lies outside the memory, or is not contiguous for the device.
    #[error(
        "row {row}, {length} bytes at offset {offset}, cannot be registered: {source}; each row's \
         tensor has to be one contiguous range for the device"
    )]
    Row {
        /// The row.
        row: usize,
        /// Its offset in the memory.
        offset: usize,
        /// Bytes from its first to its last object.
        length: usize,
        /// The cause.
        source: DmaError,
    },
    /// Memory that the GPU must reach has no address on it.
    #[error(
        "{what} has no address on the GPU; give GPU memory, or page-locked memory that is mapped \
         there"
    )]
    NoDeviceAddress {
        /// Name of the memory.
        what: &'static str,
    },
    /// Memory that the CPU must reach has no address in this process.
    #[error("{what} has no address in this process; give page-locked host memory")]
    NoHostAddress {
        /// Name of the memory.
        what: &'static str,
    },
    /// Objects of two rows share bytes.
    #[error("objects of rows {first} and {second} overlap; check the offsets and the stride")]
    Overlap {
        /// One row.
        first: usize,
        /// The other one.
        second: usize,
    },
}

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
    /// Two lists of a request differ in length.
    #[error("{blocks} blocks were given for {positions} {what}; give one for each")]
    Positions {
        /// Blocks given.
        blocks: usize,
        /// Positions they are for.
        positions: usize,
        /// Kind of the positions.
        what: &'static str,
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
    /// A position of a reservation is not its own, or was given to a request before.
    #[error("position {position} of the reservation is not to be written, or was given out before")]
    NotReserved {
        /// The position.
        position: u32,
    },
    /// The block does not exist.
    #[error("block {block} was given, but {blocks} blocks are registered")]
    NoSuchBlock {
        /// The block.
        block: BlockId,
        /// Registered blocks.
        blocks: u32,
    },
    /// The file does not exist.
    #[error("file {file} was given, but the store has {files} files")]
    NoSuchFile {
        /// The file.
        file: FileId,
        /// Files of the store.
        files: u32,
    },
    /// The pool does not exist.
    #[error("pool {} was given, but it was removed or never added", pool.0)]
    NoSuchPool {
        /// The pool.
        pool: PoolId,
    },
    /// The job does not exist.
    #[error("job {} was given, but it has ended or never began", job.0)]
    NoSuchJob {
        /// The job.
        job: JobId,
    },
    /// A block is the destination of two blocks of a request.
    #[error("block {block} is the destination of two blocks of one request")]
    DuplicateBlock {
        /// The block.
        block: BlockId,
    },
    /// The layer does not exist.
    #[error("layer {layer} was asked for, but the model has {layers}")]
    NoSuchLayer {
        /// The layer.
        layer: Layer,
        /// Layers of the model.
        layers: u32,
    },
    /// The layer is already in flight.
    #[error("layer {layer} of this request is in flight already; wait for it first")]
    InFlight {
        /// The layer.
        layer: Layer,
    },
    /// The handle belongs to another store.
    #[error("the {what} belongs to another store")]
    Foreign {
        /// The kind of handle.
        what: &'static str,
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

impl From<NotDurable> for StoreError {
    fn from(NotDurable { cause }: NotDurable) -> Self {
        Self::JournalFailed { cause }
    }
}
