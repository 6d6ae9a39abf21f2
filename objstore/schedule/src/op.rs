//! Operations and decisions of the scheduler.

use std::time::Duration;

/// Id of an operation, chosen by the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

/// Id of an engine's step; later ones have larger numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepId(pub u64);

/// Owner of an operation. Operations of one request are done in order; requests of a tenant share
/// the tenant's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Flow {
    /// The tenant.
    pub tenant: u32,
    /// The tenant's request.
    pub request: u64,
}

/// A batch of objects that moves as a whole: a layer of a request's blocks, or a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Op {
    /// Its id.
    pub id: OpId,
    /// Its owner.
    pub flow: Flow,
    /// Bytes that move.
    pub bytes: u64,
    /// Its purpose.
    pub kind: Kind,
}

/// Purpose of an operation, which determines its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Read for a layer of a step: due before the layer computes.
    Layer {
        /// An announced step.
        step: StepId,
        /// The layer.
        layer: u32,
    },
    /// Read for a request that waits outside of steps: due as soon as is fair.
    Soon,
    /// Read ahead of a request: useful only by its deadline.
    Prefetch {
        /// The deadline.
        by: Duration,
    },
    /// Write without a deadline, for slack time.
    Write,
}

/// The scheduler's next action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Start the operation; the caller reports its end.
    Start(OpId),
    /// Forget this prefetch: it cannot be done in time any more.
    Drop(OpId),
    /// Nothing to do before the next event or this time.
    Wait(Option<Duration>),
}

/// Result of a cancellation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancelled {
    /// The operation waited and is removed.
    Pending,
    /// The operation is in flight: it must end first.
    InFlight,
    /// No such operation.
    Unknown,
}

/// A write refused because too many bytes wait, in memory that the engine wants back. Only a cache
/// entry is lost, no data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{waiting} bytes wait to be written, and {bytes} more would be beyond {limit}; not stored")]
pub struct BacklogFull {
    /// Bytes waiting or being written.
    pub waiting: u64,
    /// Bytes of the write.
    pub bytes: u64,
    /// The limit.
    pub limit: u64,
}
