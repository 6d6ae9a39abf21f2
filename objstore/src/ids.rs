//! Plain data about jobs and their layers.

use kv_catalog::{BlockId, FileId, Layer};

/// Identifier of a job: of all planes of this process, no two jobs have the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

/// Identifier of a pool of a plane: of all planes of this process, no two pools that were added
/// have the same one. The default is a plane's own pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PoolId(pub u64);

/// Names one layer of a job, for starting it, waiting for it and ordering streams with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// The job.
    pub job: JobId,
    /// The layer.
    pub layer: Layer,
}

/// One block of a job. Plain data, so that a catalog in another process can provide it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// The file.
    pub file: FileId,
    /// The block of the registered pool.
    pub block: BlockId,
    /// The block's position in the engine's request, for error messages.
    pub position: u32,
}

/// Result of a layer whose data was moved completely.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerDone {
    /// The layer.
    pub layer: Layer,
    /// Objects moved.
    pub objects: u64,
    /// Bytes moved, without padding.
    pub bytes: u64,
    /// Bytes that the devices moved. The rest was copied from or to the DRAM cache.
    pub device_bytes: u64,
}
