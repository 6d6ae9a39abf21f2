//! What can go wrong between the caller and the rings.

use crate::{executor::ExecutorError, iocb_id::IocbId};

/// A ring could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The number of IOCBs is unusable.
    #[error(
        "a ring of {asked} IOCBs was asked for; the number must be a power of two from 1 to {max}"
    )]
    Depth {
        /// What was asked for.
        asked: u32,
        /// The most there can be.
        max: u32,
    },
    /// An option is unusable.
    #[error("option {option} is {found}; {hint}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        found: u64,
        /// What it may be.
        hint: &'static str,
    },
    /// A granted queue is unusable.
    #[error("device {device} queue {qid}: {problem}")]
    Grant {
        /// Index of the device.
        device: u32,
        /// The queue.
        qid: u16,
        /// What was found and what is needed.
        problem: String,
    },
    /// The set of granted queues is unusable.
    #[error("{problem}")]
    Grants {
        /// What was found and what is needed.
        problem: String,
    },
    /// Every IOCB is in flight.
    #[error("all {depth} IOCBs are in flight; wait for a completion first")]
    Busy {
        /// How many there are.
        depth: u32,
    },
    /// The IOCB is not in the state that the call needs.
    #[error("IOCB {index} is {found}, it must be {needed}")]
    Id {
        /// Its index.
        index: u32,
        /// What it is.
        found: &'static str,
        /// What the call needs.
        needed: &'static str,
    },
    /// A map, pool or event that belongs to another ring.
    #[error("the {what} belongs to another ring; make one with this ring")]
    Foreign {
        /// Which thing.
        what: &'static str,
    },
    /// The number of devices differs.
    #[error("{what} has {found} devices, the ring has {devices}")]
    Devices {
        /// Which thing.
        what: &'static str,
        /// How many it has.
        found: u64,
        /// How many there are.
        devices: u32,
    },
    /// An explicit context is unusable.
    #[error("I/O context {index}: {problem}")]
    IoCtx {
        /// Its index in the caller's order.
        index: usize,
        /// What was found and what is needed.
        problem: String,
    },
    /// The number of contexts is unusable.
    #[error("{what} has {found} I/O contexts; it must have 1 to {max}")]
    Count {
        /// Which thing.
        what: &'static str,
        /// How many it has.
        found: usize,
        /// The most it may have.
        max: u32,
    },
    /// The rows are not rows of the pool.
    #[error(
        "rows {first}..{end} were asked for, the pool has {rows}; ask for at least one of them"
    )]
    Rows {
        /// First row.
        first: u32,
        /// The row after the last one.
        end: u32,
        /// How many there are.
        rows: u32,
    },
    /// A pool cannot be registered.
    #[error("the KV pool cannot be registered: {problem}")]
    Pool {
        /// What was found and what is needed.
        problem: String,
    },
    /// An operation's checksums do not belong to it.
    #[error("checksums were asked for, but {problem}")]
    Checksums {
        /// What was found and what is needed.
        problem: String,
    },
    /// No completion before the deadline. The IOCB stays issued.
    #[error(
        "IOCB {index} did not complete before the deadline; wait again, or stop the ring and \
         recover its controllers"
    )]
    Timeout {
        /// Its index.
        index: u32,
    },
    /// The ring is not running.
    #[error("the ring is {found}, it must be {needed}")]
    State {
        /// What it is.
        found: &'static str,
        /// What the call needs.
        needed: &'static str,
    },
    /// The completion ring held something that no kernel writes.
    #[error("the kernel completed IOCB {index}, which is not in flight; stop the ring")]
    Ring {
        /// What it said.
        index: u32,
    },
    /// The operation was published, but the executor failed: it completes when the ring is stopped.
    #[error("IOCB {} was submitted, but its kernel will not run it: {source}", .iocb.index())]
    Submitted {
        /// The operation.
        iocb: IocbId,
        /// Why.
        source: ExecutorError,
    },
    /// The executor failed.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
}
