//! Errors of the ring's interface.

use crate::{executor::ExecutorError, iocb_id::IocbId};

/// The ring could not carry out a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The number of IOCBs is unusable.
    #[error(
        "a ring of {asked} IOCBs was asked for; the number must be a power of two from 1 to {max}"
    )]
    Depth {
        /// Requested number.
        asked: u32,
        /// Largest allowed number.
        max: u32,
    },
    /// An option is unusable.
    #[error("option {option} is {found}; {hint}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        found: u64,
        /// Allowed values.
        hint: &'static str,
    },
    /// A granted queue is unusable.
    #[error("device {device} queue {qid}: {problem}")]
    Grant {
        /// Index of the device.
        device: u32,
        /// The queue.
        qid: u16,
        /// Found and required values.
        problem: String,
    },
    /// The set of granted queues is unusable.
    #[error("{problem}")]
    Grants {
        /// Found and required values.
        problem: String,
    },
    /// Every IOCB is in flight.
    #[error("all {depth} IOCBs are in flight; wait for a completion first")]
    Busy {
        /// Number of IOCBs.
        depth: u32,
    },
    /// The IOCB is not in the state the call requires.
    #[error("IOCB {index} is {found}, it must be {needed}")]
    Id {
        /// Its index.
        index: u32,
        /// Its current state.
        found: &'static str,
        /// The required state.
        needed: &'static str,
    },
    /// A map, pool or event belongs to another ring.
    #[error("the {what} belongs to another ring; make one with this ring")]
    Foreign {
        /// Kind of object.
        what: &'static str,
    },
    /// The number of devices does not match.
    #[error("{what} has {found} devices, the ring has {devices}")]
    Devices {
        /// Kind of object.
        what: &'static str,
        /// Its number of devices.
        found: u64,
        /// Number of devices of the ring.
        devices: u32,
    },
    /// An explicit context is unusable.
    #[error("I/O context {index}: {problem}")]
    IoCtx {
        /// Its index in the caller's order.
        index: usize,
        /// Found and required values.
        problem: String,
    },
    /// The number of contexts is unusable.
    #[error("{what} has {found} I/O contexts; it must have 1 to {max}")]
    Count {
        /// Kind of object.
        what: &'static str,
        /// Its number of contexts.
        found: usize,
        /// Largest allowed number.
        max: u32,
    },
    /// The rows are outside the pool.
    #[error(
        "rows {first}..{end} were asked for, the pool has {rows}; ask for at least one of them"
    )]
    Rows {
        /// First row.
        first: u32,
        /// One past the last row.
        end: u32,
        /// Number of rows in the pool.
        rows: u32,
    },
    /// A pool cannot be registered.
    #[error("the KV pool cannot be registered: {problem}")]
    Pool {
        /// Found and required values.
        problem: String,
    },
    /// The checksums do not match the operation.
    #[error("checksums were asked for, but {problem}")]
    Checksums {
        /// Found and required values.
        problem: String,
    },
    /// The operation did not complete before the deadline. The IOCB stays issued.
    #[error(
        "IOCB {index} did not complete before the deadline; wait again, or stop the ring and \
         recover its controllers"
    )]
    Timeout {
        /// Its index.
        index: u32,
    },
    /// The ring is in the wrong state.
    #[error("the ring is {found}, it must be {needed}")]
    State {
        /// Current state.
        found: &'static str,
        /// Required state.
        needed: &'static str,
    },
    /// The completion ring held an entry that no correct kernel writes.
    #[error("the kernel completed IOCB {index}, which is not in flight; stop the ring")]
    Ring {
        /// IOCB index in the entry.
        index: u32,
    },
    /// The operation was published, but the executor failed: it completes when the ring is stopped.
    #[error("IOCB {} was submitted, but its kernel will not run it: {source}", .iocb.index())]
    Submitted {
        /// The operation.
        iocb: IocbId,
        /// Cause.
        source: ExecutorError,
    },
    /// The executor failed.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
}
