//! Errors of the driver, and the causes of a controller's failure.

use std::sync::Arc;

use nvme_spec::{
    ids::{Cid, Lba, Nsid, QueueId},
    status::Status,
};

use crate::{
    bus::InterruptError,
    clock::Nanos,
    descriptor::DescriptorError,
    dma::DmaError,
    namespace::NamespaceError,
    queue::{DeviceError, QueueError},
};

/// Causes for which a controller is no longer used. [`crate::Controller::reset`] may revive it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FailCause {
    /// The controller no longer answers on its bus.
    #[error("it no longer answers on its bus (removed, powered off or link lost)")]
    Gone,
    /// The controller reported a fatal error (CSTS.CFS).
    #[error("it reports a fatal error (CSTS.CFS)")]
    Fatal,
    /// CSTS.RDY did not follow CC.EN in time.
    #[error("CSTS.RDY did not become {ready} within {} ms (CAP.TO)", waited.0 / 1_000_000)]
    NotReady {
        /// The expected value of CSTS.RDY.
        ready: u8,
        /// The time limit that passed.
        waited: Nanos,
    },
    /// A completion was invalid.
    #[error("it misbehaved: {0}")]
    Misbehaved(DeviceError),
    /// An admin command was not answered.
    #[error("admin command {what} was not answered in time")]
    AdminTimeout {
        /// The command.
        what: &'static str,
    },
    /// Set-up failed after CSTS.RDY, with the error that was returned then.
    #[error("it could not be set up; the first error said why")]
    SetUp,
    /// A queue could not be deleted, and others are still granted.
    #[error("queue {qid} could not be deleted; recover() with all executors stopped resets it")]
    QueueStuck {
        /// The queue.
        qid: QueueId,
    },
}

/// Recovery after the timeout of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TimeoutOutcome {
    /// An Abort ended the command, or it completed in the meantime.
    Aborted,
    /// The admin command was abandoned; the controller is healthy and may still execute it.
    Abandoned,
    /// The queue was deleted and recreated.
    QueueRecreated,
    /// The controller was reset and is ready again.
    ControllerReset,
    /// The reset failed. The controller is failed, and memory it may still write is kept.
    ControllerFailed,
}

impl std::fmt::Display for TimeoutOutcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Aborted => "it was aborted",
            Self::Abandoned => "it was left behind, and may still be carried out",
            Self::QueueRecreated => "its queue was deleted and created anew",
            Self::ControllerReset => "the controller was reset and is ready again",
            Self::ControllerFailed => {
                "the controller could not be reset; memory it may still write stays allocated"
            }
        })
    }
}

/// Identity of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandId {
    /// The controller.
    pub ctrl: Arc<str>,
    /// The command's name.
    pub what: &'static str,
    /// The namespace; 0 if the command has none.
    pub nsid: Nsid,
    /// The queue.
    pub qid: QueueId,
    /// The identifier.
    pub cid: Cid,
    /// First LBA and number of LBAs, for commands that have them.
    pub range: Option<(Lba, u64)>,
}

impl std::fmt::Display for CommandId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.ctrl, self.what)?;
        if let Some((lba, nlb)) = self.range {
            write!(f, " of {nlb} LBAs at LBA {lba}")?;
        }
        write!(f, " (nsid {}, qid {}, cid {:#06x})", self.nsid, self.qid, self.cid.0)
    }
}

/// Returns what helps against an error of the operating system that says nothing about the call:
/// something has run out, or the file system takes no writes. Advice about the call would mislead.
#[must_use]
pub fn remedy(error: &std::io::Error) -> Option<&'static str> {
    use rustix::io::Errno;
    match Errno::from_io_error(error)? {
        Errno::MFILE | Errno::NFILE => Some("allow more open files (ulimit -n)"),
        Errno::NOMEM => Some("free memory, or allow more of it (ulimit -v, ulimit -l)"),
        Errno::ROFS => Some("the file system is read-only: mount it for writing"),
        Errno::NOSPC | Errno::DQUOT => Some("make room on the disk"),
        Errno::FBIG => Some("allow larger files (ulimit -f)"),
        Errno::IO => Some("check the disk; the kernel's log (dmesg) may say more"),
        _ => None,
    }
}

/// Returns the status that a drive would have for an error of the operating system in a read or a
/// write of a file or a disk. Only a medium that fails loses data; what has run out, or is late,
/// may be tried again.
#[must_use]
pub fn status_of(error: &std::io::Error, is_read: bool) -> Status {
    use rustix::io::Errno;
    match Errno::from_io_error(error) {
        Some(Errno::NOSPC | Errno::DQUOT) => Status::CAPACITY_EXCEEDED.with_dnr(),
        Some(
            Errno::AGAIN
            | Errno::BUSY
            | Errno::INTR
            | Errno::NOMEM
            | Errno::NOBUFS
            | Errno::TIMEDOUT
            | Errno::NOLINK,
        ) => Status::COMMAND_INTERRUPTED,
        _ if !is_read => Status::WRITE_FAULT.with_dnr(),
        // The kernel has tried again already. The file systems have the last two for metadata and
        // data that differ from their checksums. No number: the file ends before the data.
        Some(Errno::IO | Errno::NODATA | Errno::ILSEQ | Errno::UCLEAN | Errno::BADMSG) | None => {
            Status::UNRECOVERED_READ_ERROR.with_dnr()
        }
        Some(_) => Status::INTERNAL_ERROR.with_dnr(),
    }
}

/// Any error of the driver.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The controller no longer answers.
    #[error("{ctrl}: the controller no longer answers on its bus; it was removed or lost power")]
    Gone {
        /// The controller.
        ctrl: Arc<str>,
    },
    /// CSTS.CFS is set.
    #[error("{ctrl}: the controller reports a fatal error (CSTS {csts:#x}); reset() may help")]
    Fatal {
        /// The controller.
        ctrl: Arc<str>,
        /// The register.
        csts: u32,
    },
    /// CSTS.RDY did not follow CC.EN in time.
    #[error(
        "{ctrl}: CSTS.RDY should have become {ready} within {} ms (CAP.TO) and did not \
         (CSTS {csts:#x}); power cycle the drive", waited.0 / 1_000_000
    )]
    NotReady {
        /// The controller.
        ctrl: Arc<str>,
        /// The expected value of CSTS.RDY.
        ready: u8,
        /// The time limit that passed.
        waited: Nanos,
        /// The register.
        csts: u32,
    },
    /// A shutdown was not completed in time.
    #[error(
        "{ctrl}: the shutdown was not complete after {} ms (CSTS {csts:#x}); the drive may count \
         it as an unsafe one", waited.0 / 1_000_000
    )]
    Shutdown {
        /// The controller.
        ctrl: Arc<str>,
        /// The time limit that passed.
        waited: Nanos,
        /// The register.
        csts: u32,
    },
    /// A completion was invalid; the controller is now failed.
    #[error("{ctrl}: the controller misbehaved: {source}")]
    Misbehaved {
        /// The controller.
        ctrl: Arc<str>,
        /// The violation.
        source: DeviceError,
    },
    /// The controller failed earlier.
    #[error("{ctrl}: the controller has failed: {cause}; reset() or recover() may bring it back")]
    Failed {
        /// The controller.
        ctrl: Arc<str>,
        /// The cause.
        cause: FailCause,
    },
    /// The controller was shut down.
    #[error("{ctrl}: the controller was shut down; attach to it again")]
    Closed {
        /// The controller.
        ctrl: Arc<str>,
    },
    /// The controller reports an implausible property.
    #[error("{ctrl}: the controller reports something implausible: {what}")]
    Implausible {
        /// The controller.
        ctrl: Arc<str>,
        /// The report.
        what: String,
    },
    /// The controller lacks a feature.
    #[error("{ctrl}: {what} is not supported by this controller; {hint}")]
    Unsupported {
        /// The controller.
        ctrl: Arc<str>,
        /// The missing feature.
        what: String,
        /// Suggested remedy.
        hint: &'static str,
    },
    /// The namespace does not exist or cannot be used.
    #[error("{ctrl}: namespace {nsid}: {source}")]
    Namespace {
        /// The controller.
        ctrl: Arc<str>,
        /// The namespace.
        nsid: Nsid,
        /// The cause.
        source: NamespaceError,
    },
    /// The arguments of an I/O do not fit the namespace; nothing was sent.
    #[error("{ctrl}: namespace {nsid}: {what}; nothing was sent")]
    Range {
        /// The controller.
        ctrl: Arc<str>,
        /// The namespace.
        nsid: Nsid,
        /// The mismatch.
        what: String,
    },
    /// A command ended with an error status.
    #[error("{command} failed: {status}")]
    Command {
        /// The command.
        command: Box<CommandId>,
        /// Its completion status.
        status: Status,
    },
    /// A command was not answered in time.
    #[error("{command} was not answered within {} ms; {outcome}", waited.0 / 1_000_000)]
    Timeout {
        /// The command.
        command: Box<CommandId>,
        /// The time limit that passed.
        waited: Nanos,
        /// The recovery that followed.
        outcome: TimeoutOutcome,
    },
    /// The data of a command cannot be described.
    #[error("{ctrl}: {source}")]
    Descriptor {
        /// The controller.
        ctrl: Arc<str>,
        /// The cause.
        source: DescriptorError,
    },
    /// The queue cannot be created.
    #[error("{ctrl}: {source}")]
    Queue {
        /// The controller.
        ctrl: Arc<str>,
        /// The cause.
        source: QueueError,
    },
    /// The queue is not in the state that the call needs.
    #[error("{ctrl}: queue {qid}: {what}")]
    QueueState {
        /// The controller.
        ctrl: Arc<str>,
        /// The queue.
        qid: QueueId,
        /// The problem and the remedy.
        what: String,
    },
    /// Memory could not be allocated or addressed.
    #[error("{ctrl}: {source}")]
    Dma {
        /// The controller.
        ctrl: Arc<str>,
        /// The cause.
        source: DmaError,
    },
    /// An interrupt could not be set up.
    #[error("{ctrl}: {source}; use polling instead")]
    Interrupt {
        /// The controller.
        ctrl: Arc<str>,
        /// The cause.
        source: InterruptError,
    },
}

impl Error {
    /// Returns the completion status, if the controller returned one.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Command { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// Returns the command that the error is about, if any.
    #[must_use]
    pub fn command(&self) -> Option<&CommandId> {
        match self {
            Self::Command { command, .. } | Self::Timeout { command, .. } => Some(command),
            _ => None,
        }
    }

    /// Returns whether a reset may help: the controller misbehaved, or its link may come back.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Gone { .. }
                | Self::Fatal { .. }
                | Self::NotReady { .. }
                | Self::Misbehaved { .. }
                | Self::Command { .. }
                | Self::Timeout { .. }
        )
    }

    /// Returns the cause of failure that this error amounts to during set-up.
    pub(crate) fn cause(&self) -> FailCause {
        match *self {
            Self::Gone { .. } => FailCause::Gone,
            Self::Fatal { .. } => FailCause::Fatal,
            Self::NotReady { ready, waited, .. } => FailCause::NotReady { ready, waited },
            Self::Misbehaved { source, .. } => FailCause::Misbehaved(source),
            Self::Failed { cause, .. } => cause,
            Self::Timeout { ref command, .. } => FailCause::AdminTimeout { what: command.what },
            _ => FailCause::SetUp,
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn only_a_medium_that_fails_loses_data() {
        let of = |errno: Errno| status_of(&errno.into(), true);
        for lost in [Errno::IO, Errno::NODATA, Errno::BADMSG] {
            assert!(of(lost).is_loss() && !of(lost).may_retry(), "{lost}");
        }
        for late in [Errno::AGAIN, Errno::NOMEM, Errno::TIMEDOUT] {
            assert!(!of(late).is_loss() && of(late).may_retry(), "{late}");
        }
        for wrong in [Errno::INVAL, Errno::BADF, Errno::NXIO] {
            assert!(!of(wrong).is_loss() && !of(wrong).may_retry(), "{wrong}");
        }
        let short = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        assert!(status_of(&short, true).is_loss());
        assert_eq!(status_of(&Errno::NOSPC.into(), false).code(), Status::CAPACITY_EXCEEDED);
        assert_eq!(status_of(&Errno::IO.into(), false).code(), Status::WRITE_FAULT);
    }
}
