//! Errors of the ring's interface.

use crate::{executor::ExecutorError, iocb_id::IocbId};

/// The ring could not carry out a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
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
    /// A granted queue, or the set of all, is unusable.
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
    /// A number of IOCBs, a map, a pool, its rows or an explicit context is unusable. Has found and
    /// required values.
    #[error("{0}")]
    Argument(String),
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

impl Error {
    /// `what` has another number of devices than the ring.
    pub(crate) fn devices(what: &str, found: usize, devices: usize) -> Self {
        Self::Argument(format!("{what} has {found} devices, the ring has {devices}"))
    }

    /// `what` has no I/O contexts, or too many.
    pub(crate) fn count(what: &str, found: usize, max: u32) -> Self {
        Self::Argument(format!("{what} has {found} I/O contexts; it must have 1 to {max}"))
    }
}
