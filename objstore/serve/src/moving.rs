//! Requests that move blocks, and what they have taken.

use std::sync::{Arc, Mutex};

use kv_catalog::lock;
use objstore::{BlockId, Direction, Layer, StoreError};
use ripieno_stack::Request;

use crate::account::{Charge, Held};

/// A request, and the blocks that it moves.
#[derive(Debug)]
pub(crate) struct Moving {
    pub(crate) request: Request,
    /// Blocks on a GPU, and how far each layer is.
    pub(crate) on_gpu: OnGpu,
    pub(crate) blocks: u32,
    /// Last: given back when the request has ended.
    pub(crate) taken: Taken,
}

/// The files that a request holds, those of its prefix or reservation, and memory for its tables.
pub(crate) type Taken = (Arc<Held>, Charge);

/// The blocks of a request on a GPU, and how far it is. Of one in host memory, nothing uses it.
#[derive(Debug)]
pub(crate) struct OnGpu {
    pub(crate) direction: Direction,
    pub(crate) blocks: Vec<BlockId>,
    layers: Mutex<Vec<CopyState>>,
    /// Set for good when layers that wait for a stream are not to be moved any more.
    is_left: Mutex<bool>,
}

/// How far a layer is.
#[derive(Debug, Clone)]
pub(crate) enum CopyState {
    Idle,
    InFlight,
    Ended,
    Failed(String),
}

impl OnGpu {
    pub(crate) fn new(direction: Direction, blocks: Vec<BlockId>, layers: u32) -> Self {
        let layers = Mutex::new(vec![CopyState::Idle; layers as usize]);
        Self { direction, blocks, layers, is_left: Mutex::default() }
    }

    /// Returns why a layer was not copied, if that is so.
    pub(crate) fn failure(&self) -> Option<StoreError> {
        lock(&self.layers).iter().find_map(|layer| match layer {
            CopyState::Failed(why) => Some(StoreError::Stream { cause: why.clone() }),
            _ => None,
        })
    }

    pub(crate) fn leave(&self) {
        *lock(&self.is_left) = true;
    }

    pub(crate) fn is_left(&self) -> bool {
        *lock(&self.is_left)
    }

    /// Returns true if a layer has begun, and not ended.
    pub(crate) fn is_in_flight(&self) -> bool {
        lock(&self.layers).iter().any(|layer| matches!(layer, CopyState::InFlight))
    }

    /// Returns the progress of a layer; `None` if there is no such one.
    pub(crate) fn get(&self, Layer(layer): Layer) -> Option<CopyState> {
        lock(&self.layers).get(layer as usize).cloned()
    }

    pub(crate) fn set(&self, Layer(layer): Layer, progress: CopyState) {
        if let Some(of) = lock(&self.layers).get_mut(layer as usize) {
            *of = progress;
        }
    }
}
