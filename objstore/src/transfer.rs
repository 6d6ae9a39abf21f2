//! The handles a caller holds, and what the store keeps about the requests behind them.
//!
//! A handle is a name and a promise to say when it is dropped; everything that a device might still
//! use belongs to the store. So a handle may be dropped at any time: the store learns of it through
//! a channel, and gives references and maps back once the ring says that nothing is in flight.

use std::sync::{
    Arc,
    mpsc::{Receiver, Sender},
};

use gio_uring::{BlockMap, DeviceArray, Wait};
use nvme_spec::nvm::Direction;

use kv_catalog::{FileId, Layer, Position};

use crate::error::Failure;

/// What a dropped handle leaves to be done.
#[derive(Debug)]
pub(crate) enum Message {
    /// A prefix was dropped.
    Release(Vec<FileId>),
    /// A transfer or writing was dropped.
    End(RequestId),
}

/// The name of a request within its store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RequestId(pub(crate) u64);

/// Which store a handle belongs to.
#[derive(Debug, Clone)]
pub(crate) struct StoreId(Arc<()>);

impl PartialEq for StoreId {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A handle's way to report that it was dropped.
#[derive(Debug, Clone)]
pub(crate) struct ReleaseSender {
    pub(crate) store: StoreId,
    messages: Sender<Message>,
}

impl ReleaseSender {
    pub(crate) fn new() -> (Self, Receiver<Message>) {
        let (messages, receiver) = std::sync::mpsc::channel();
        (Self { store: StoreId(Arc::new(())), messages }, receiver)
    }

    fn send(&self, message: Message) {
        // A store that was dropped has nothing left to release.
        let _ = self.messages.send(message);
    }
}

/// The stored blocks a lookup found: the leading ones of what it was asked for. They stay stored
/// until this is dropped.
#[derive(Debug)]
#[must_use = "dropping it gives the blocks back"]
pub struct Prefix {
    pub(crate) files: Vec<FileId>,
    pub(crate) releases: ReleaseSender,
}

impl Prefix {
    /// Blocks found.
    #[must_use]
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether not even the first block was found.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The files, in the order of the request.
    #[must_use]
    pub fn files(&self) -> &[FileId] {
        &self.files
    }
}

impl Drop for Prefix {
    fn drop(&mut self) {
        if !self.files.is_empty() {
            self.releases.send(Message::Release(std::mem::take(&mut self.files)));
        }
    }
}

/// The part that transfers and writings share.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) id: RequestId,
    pub(crate) releases: ReleaseSender,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.releases.send(Message::End(self.id));
    }
}

/// A request whose blocks are being retrieved.
///
/// Dropping it stops nothing that is in flight: the engine's blocks may be reused only after every
/// ticket was waited for, or after [`crate::Store::drain`].
#[derive(Debug)]
#[must_use = "dropping it ends the request"]
pub struct Transfer {
    pub(crate) handle: Handle,
    pub(crate) blocks: usize,
}

impl Transfer {
    /// Blocks it moves.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
    }
}

/// A request whose blocks are being stored. Nothing of it is visible before
/// [`crate::Store::commit`]; dropping it gives the files back.
///
/// As for a [`Transfer`], blocks may be changed only after the tickets were waited for.
#[derive(Debug)]
#[must_use = "dropping it gives the files back"]
pub struct Writing {
    pub(crate) handle: Handle,
    pub(crate) accepted: usize,
    pub(crate) written: usize,
}

impl Writing {
    /// How many leading blocks of the request will be found after the commit: those that this
    /// writing stores, and those that were stored or on their way already.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.accepted
    }

    /// How many of them this writing stores itself.
    #[must_use]
    pub fn written(&self) -> usize {
        self.written
    }
}

/// One layer of one request, in flight or done. To be given to [`crate::Store::wait`]; the store
/// notices the end of other operations by itself.
#[derive(Debug)]
#[must_use = "wait for it before the layer's blocks are used"]
pub struct Ticket {
    pub(crate) request: RequestId,
    pub(crate) layer: Layer,
    pub(crate) store: StoreId,
    /// What a stream waits for that is to see the layer; `None` when there was nothing to move or
    /// the store has no streams.
    pub(crate) end: Option<Wait>,
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
}

/// What a commit made visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// Leading blocks of the request that lookups now find, unless another writing they rely on
    /// has not been committed.
    pub accepted: usize,
    /// Blocks that this writing added.
    pub written: usize,
}

/// How far a layer of a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerState {
    /// Not started.
    Idle,
    /// In the ring, or on a stream behind it.
    InFlight,
    /// It ended.
    Ended(Result<LayerDone, Failure>),
}

/// What the store keeps about a transfer or writing.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) direction: Direction,
    /// The uploaded map; `None` when there is nothing to move.
    pub(crate) map: Option<BlockMap>,
    /// Staged: the block of each of the map's entries.
    pub(crate) blocks: Option<DeviceArray<u32>>,
    /// What the map's entries are, in the caller's order: position in the request, and file.
    pub(crate) entries: Vec<(u32, FileId)>,
    /// Every position of the request: what is to be settled or released at the end.
    pub(crate) positions: Vec<Position>,
    pub(crate) layers: Vec<LayerState>,
    pub(crate) in_flight: u32,
    /// The first failure.
    pub(crate) failure: Option<Failure>,
    /// The handle was dropped.
    pub(crate) dropped: bool,
}

impl Request {
    pub(crate) fn new(direction: Direction, layers: u32) -> Self {
        Self {
            direction,
            map: None,
            blocks: None,
            entries: Vec::new(),
            positions: Vec::new(),
            layers: vec![LayerState::Idle; layers as usize],
            in_flight: 0,
            failure: None,
            dropped: false,
        }
    }
}
