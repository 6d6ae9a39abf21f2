//! What is scheduled.

use std::time::Duration;

/// Names an operation, by its caller's choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

/// Names a step of the engine; later ones have larger numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepId(pub u64);

/// Whose operation it is. Those of one request are done in the order in which they came; requests
/// of a tenant share what the tenant gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Flow {
    /// The tenant.
    pub tenant: u32,
    /// A request of it.
    pub request: u64,
}

/// A batch of objects that moves as a whole: a layer of a request's blocks, or a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Op {
    /// Its name.
    pub id: OpId,
    /// Whose it is.
    pub flow: Flow,
    /// Bytes that move.
    pub bytes: u64,
    /// What for.
    pub kind: Kind,
}

/// What an operation is for, and so when it has to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Read for a layer of a step: before the layer computes.
    Layer {
        /// A step that was announced.
        step: StepId,
        /// The layer.
        layer: u32,
    },
    /// Read for a request that waits outside of steps: as soon as is fair.
    Soon,
    /// Read ahead of a request: by then, or not at all.
    Prefetch {
        /// When it is of use.
        by: Duration,
    },
    /// Written when nobody waits.
    Write,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Start it, and say when it has ended.
    Start(OpId),
    /// It cannot be done in time any more, and is forgotten: a prefetch.
    Drop(OpId),
    /// Nothing, before something happens or this time has come.
    Wait(Option<Duration>),
}

/// What became of an operation that is not wanted any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancelled {
    /// It is forgotten.
    Pending,
    /// It moves: it has to end first.
    InFlight,
    /// There is none of this name.
    Unknown,
}

/// Why a write was not taken: more wait than may wait, in memory that the engine wants back. It is
/// a cache entry that is dropped, and no data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{waiting} bytes wait to be written, and {bytes} more would be beyond {limit}; not stored")]
pub struct BacklogFull {
    /// Bytes that wait or are being written.
    pub waiting: u64,
    /// Bytes of the write.
    pub bytes: u64,
    /// The limit.
    pub limit: u64,
}
