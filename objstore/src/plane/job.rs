//! Jobs: blocks to move between files and the pool, layer by layer.

use std::sync::Arc;

use gio_uring::{BlockMap, DeviceArray, Wait};
use kv_catalog::{BlockId, FileId, Layer};
use kv_tier::HostBlock;
use nvme_spec::nvm::Direction;

use super::{checksums::JobChecksums, memory::Copies};
use crate::error::Failure;

/// One block of a job. Plain data: a catalog in another process says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// The file.
    pub file: FileId,
    /// The block of the registered pool.
    pub block: BlockId,
    /// What failures call it: its position in the engine's request.
    pub position: u32,
}

/// The name of a job within its plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

/// What became of a job ([`crate::Plane::end`]). Plain data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobDone {
    /// The job.
    pub job: JobId,
    /// Why not everything is where it was to go; `None` when it is.
    pub failure: Option<JobFailure>,
    /// [`crate::Plane::recoveries`] when the job began. If that has grown once the devices were
    /// flushed, what was stored may be lost: a drive that loses power, and is reset, forgets what
    /// was in its volatile cache.
    pub recoveries: u64,
    /// Of what was stored: CRC-32C of the objects, `[block][row]`, blocks in the order of the job.
    /// Empty when the plane keeps no checksums.
    pub checksums: Vec<u32>,
    /// What was stored is in memory of this process only
    /// ([`crate::DramMode::WriteBack`]): the store writes it to the devices later.
    pub is_dirty: bool,
}

/// Why a job is not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobFailure {
    /// A layer failed.
    Transfer(Failure),
    /// A layer was never started.
    Incomplete(Layer),
}

/// Which plane something belongs to.
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

/// One layer of one job, in flight or done. To be waited for; the plane notices the end of other
/// operations by itself.
#[derive(Debug)]
#[must_use = "wait for it before the layer's blocks are used"]
pub struct Ticket {
    pub(super) job: JobId,
    pub(super) layer: Layer,
    pub(super) plane: PlaneId,
    /// What a stream waits for that is to see the layer; nothing when there was nothing to move or
    /// the plane has no streams.
    pub(super) ends: [Option<Wait>; 2],
}

impl Ticket {
    /// The layer.
    #[must_use]
    pub fn layer(&self) -> Layer {
        self.layer
    }
}

/// A layer whose data is where it was to go, all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerDone {
    /// The layer.
    pub layer: Layer,
    /// Objects moved.
    pub objects: u64,
    /// Bytes moved, without padding.
    pub bytes: u64,
    /// Of those: what the devices moved. The rest came from host memory, or went there.
    pub device_bytes: u64,
}

/// How far a layer of a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayerState {
    /// Not started.
    Idle,
    /// In the ring, or on a stream behind it.
    InFlight,
    /// It ended.
    Ended(Result<LayerDone, Failure>),
}

/// What the plane keeps about a job.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) direction: Direction,
    /// Writes: the placement handle of their data.
    pub(super) placement: Option<u16>,
    /// The uploaded map; `None` when there is nothing to move.
    pub(super) map: Option<BlockMap>,
    /// Staged: the block of each of the map's entries.
    pub(super) blocks: Option<DeviceArray<u32>>,
    pub(super) checksums: Option<JobChecksums>,
    /// What the devices move.
    pub(super) moves: Vec<Move>,
    /// What is in memory of this process, and is copied from there.
    pub(super) hits: Vec<(Move, HostBlock)>,
    /// Their checksums, `[block][row]`; empty if there are none.
    pub(super) hit_words: Vec<u32>,
    /// What is copied there: when the devices have read it, or while they write it.
    pub(super) fills: Vec<(Move, HostBlock)>,
    /// It is copied there, all of it, and the devices get it later.
    pub(super) is_kept: bool,
    /// Both, where streams copy.
    pub(super) hit_copies: Option<Copies>,
    /// See `hit_copies`.
    pub(super) fill_copies: Option<Copies>,
    /// It is read ahead, or written behind: the devices move all rows at once, to or from that
    /// memory itself.
    pub(super) is_ahead: bool,
    pub(super) layers: Vec<LayerState>,
    pub(super) in_flight: u32,
    /// [`JobDone::recoveries`].
    pub(super) recoveries: u64,
    /// The first failure.
    pub(super) failure: Option<Failure>,
    /// Nobody waits for it any more.
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
            is_kept: false,
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

    /// Blocks that are copied, and the devices move nothing of them.
    pub(super) fn copied(&self) -> usize {
        self.hits.len() + if self.is_kept { self.fills.len() } else { 0 }
    }

    /// Whether streams do all of it.
    pub(super) fn is_on_streams(&self) -> bool {
        self.map.is_none() && (self.hit_copies.is_some() || self.fill_copies.is_some())
    }

    /// Why not all of it is done.
    pub(super) fn verdict(&self) -> Option<JobFailure> {
        if let Some(failure) = self.failure {
            return Some(JobFailure::Transfer(failure));
        }
        if self.map.is_none() && self.copied() == 0 {
            return None;
        }
        let done = |state: &LayerState| matches!(state, LayerState::Ended(Ok(_)));
        let missing = self.layers.iter().position(|state| !done(state))?;
        Some(JobFailure::Incomplete(Layer(missing as u32)))
    }
}
