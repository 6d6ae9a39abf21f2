//! Jobs: blocks to move between files and the pool, layer by layer.

use std::sync::Arc;

use gio_uring::{BlockMap, DeviceArray, Wait};
use kv_catalog::{BlockId, FileId, Layer};
use kv_tier::HostBlock;
use nvme_spec::nvm::Direction;

use super::{checksums::JobChecksums, memory::Copies};
use crate::error::Failure;

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

/// Identifier of a job within its plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

/// Result of a job ([`crate::Plane::end`]). Plain data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobDone {
    /// The job.
    pub job: JobId,
    /// Reason why some data was not moved; `None` on success.
    pub failure: Option<JobFailure>,
    /// [`crate::Plane::recoveries`] when the job began. If that has grown once the devices were
    /// flushed, stored data may be lost: a drive that loses power, and is reset, loses the contents
    /// of its volatile cache.
    pub recoveries: u64,
    /// CRC-32C of the stored objects, `[block][row]`, blocks in the order of the job. Empty for a
    /// read, or if the plane keeps no checksums.
    pub checksums: Vec<u32>,
}

/// Reason why a job failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobFailure {
    /// A layer failed.
    Transfer(Failure),
    /// A layer was never started.
    Incomplete(Layer),
}

/// Identity of a plane, for checking tickets.
#[derive(Debug, Clone)]
pub(crate) struct PlaneId(Arc<()>);

impl PlaneId {
    pub(super) fn new() -> Self {
        Self(Arc::new(()))
    }
}

impl PartialEq for PlaneId {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// One layer of one job, in flight or done. Meant to be waited for; the plane handles the end of
/// other operations by itself.
#[derive(Debug)]
#[must_use = "wait for it before the layer's blocks are used"]
pub struct Ticket {
    pub(super) job: JobId,
    pub(super) layer: Layer,
    pub(super) plane: PlaneId,
    /// Events for a stream that must see the layer's data; none if there was nothing to move or the
    /// plane has no streams.
    pub(super) ends: [Option<Wait>; 2],
}

impl Ticket {
    /// Returns the layer.
    #[must_use]
    pub fn layer(&self) -> Layer {
        self.layer
    }
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

/// Progress of a layer of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayerState {
    /// Not started.
    Idle,
    /// In the ring, or on a stream behind it.
    InFlight,
    /// Ended.
    Ended(Result<LayerDone, Failure>),
}

/// State of a job.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) direction: Direction,
    /// Placement handle of a write.
    pub(super) placement: Option<u16>,
    /// The uploaded map; `None` if there is nothing to move.
    pub(super) map: Option<BlockMap>,
    /// On the staged path: the block of each of the map's entries.
    pub(super) blocks: Option<DeviceArray<u32>>,
    pub(super) checksums: Option<JobChecksums>,
    /// Blocks that the devices move.
    pub(super) moves: Vec<Move>,
    /// Cached blocks, which are copied from the DRAM cache.
    pub(super) hits: Vec<(Move, HostBlock)>,
    /// Their checksums, `[block][row]`; empty if there are none.
    pub(super) hit_words: Vec<u32>,
    /// Blocks that are copied to the cache: after the devices read them, or while they write them.
    pub(super) fills: Vec<(Move, HostBlock)>,
    /// Copies of `hits`, if streams do them.
    pub(super) hit_copies: Option<Copies>,
    /// Copies of `fills`, if streams do them.
    pub(super) fill_copies: Option<Copies>,
    /// True for reading ahead: the devices read all rows in one operation, to the cache itself.
    pub(super) is_ahead: bool,
    pub(super) layers: Vec<LayerState>,
    pub(super) in_flight: u32,
    /// [`JobDone::recoveries`].
    pub(super) recoveries: u64,
    /// The first failure.
    pub(super) failure: Option<Failure>,
    /// True when the caller has abandoned it.
    pub(super) abandoned: bool,
}

impl Job {
    pub(super) fn new(direction: Direction, layers: u32, moves: &[Move], recoveries: u64) -> Self {
        Self {
            direction,
            placement: None,
            map: None,
            blocks: None,
            checksums: None,
            moves: moves.to_vec(),
            hits: Vec::new(),
            hit_words: Vec::new(),
            fills: Vec::new(),
            hit_copies: None,
            fill_copies: None,
            is_ahead: false,
            layers: vec![LayerState::Idle; layers as usize],
            in_flight: 0,
            recoveries,
            failure: None,
            abandoned: false,
        }
    }

    /// Returns true if streams do all of it.
    pub(super) fn is_on_streams(&self) -> bool {
        self.map.is_none() && self.hit_copies.is_some()
    }

    /// Returns the reason why the job is incomplete; `None` if it is done.
    pub(super) fn verdict(&self) -> Option<JobFailure> {
        if let Some(failure) = self.failure {
            return Some(JobFailure::Transfer(failure));
        }
        if self.map.is_none() && self.hits.is_empty() {
            return None;
        }
        let done = |state: &LayerState| matches!(state, LayerState::Ended(Ok(_)));
        let missing = self.layers.iter().position(|state| !done(state))?;
        Some(JobFailure::Incomplete(Layer(missing as u32)))
    }
}
