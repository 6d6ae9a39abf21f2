//! What can go wrong, and what a controller failed of.

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

/// Why a controller is not used any more. [`crate::Controller::reset`] may bring it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FailCause {
    /// It no longer answers on its bus.
    #[error("it no longer answers on its bus (removed, powered off or link lost)")]
    Gone,
    /// It reported a fatal error (CSTS.CFS).
    #[error("it reports a fatal error (CSTS.CFS)")]
    Fatal,
    /// CSTS.RDY did not follow CC.EN in time.
    #[error("CSTS.RDY did not become {ready} within {} ms (CAP.TO)", waited.0 / 1_000_000)]
    NotReady {
        /// What CSTS.RDY should have become.
        ready: u8,
        /// How long it was given.
        waited: Nanos,
    },
    /// A completion that cannot be right.
    #[error("it misbehaved: {0}")]
    Misbehaved(DeviceError),
    /// An admin command was not answered.
    #[error("admin command {what} was not answered in time")]
    AdminTimeout {
        /// The command.
        what: &'static str,
    },
    /// It could not be set up after CSTS.RDY, for the reason that was returned then.
    #[error("it could not be set up; the first error said why")]
    SetUp,
    /// A queue could not be deleted, and others are still granted.
    #[error("queue {qid} could not be deleted; recover() with all executors stopped resets it")]
    QueueStuck {
        /// The queue.
        qid: QueueId,
    },
}

/// What became of a command that was not answered in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TimeoutOutcome {
    /// An Abort ended it, or it completed meanwhile.
    Aborted,
    /// An admin command was left behind; the controller is well, and may still carry it out.
    Abandoned,
    /// Its queue was deleted and created anew.
    QueueRecreated,
    /// The controller was reset and is ready again.
    ControllerReset,
    /// The controller could not be reset. It is failed, and memory it may still write is kept.
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

/// Which command it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandId {
    /// The controller.
    pub ctrl: Arc<str>,
    /// The command's name.
    pub what: &'static str,
    /// The namespace; 0 when it concerns none.
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

/// Anything the driver reports.
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
        /// What CSTS.RDY should have become.
        ready: u8,
        /// How long it was given.
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
        /// How long it was given.
        waited: Nanos,
        /// The register.
        csts: u32,
    },
    /// A command that cannot be passed through; nothing was sent.
    #[error("{ctrl}: passthrough of opcode {opcode:#04x}: {what}; nothing was sent")]
    Passthrough {
        /// The controller.
        ctrl: Arc<str>,
        /// The command.
        opcode: u8,
        /// Why not, and what to do instead.
        what: String,
    },
    /// A completion that cannot be right; the controller is now failed.
    #[error("{ctrl}: the controller misbehaved: {source}")]
    Misbehaved {
        /// The controller.
        ctrl: Arc<str>,
        /// What it did.
        source: DeviceError,
    },
    /// The controller failed earlier.
    #[error("{ctrl}: the controller has failed: {cause}; reset() or recover() may bring it back")]
    Failed {
        /// The controller.
        ctrl: Arc<str>,
        /// Of what.
        cause: FailCause,
    },
    /// The controller was shut down.
    #[error("{ctrl}: the controller was shut down; attach to it again")]
    Closed {
        /// The controller.
        ctrl: Arc<str>,
    },
    /// The controller says something about itself that cannot be.
    #[error("{ctrl}: the controller reports something implausible: {what}")]
    Implausible {
        /// The controller.
        ctrl: Arc<str>,
        /// What it says.
        what: String,
    },
    /// The controller lacks something.
    #[error("{ctrl}: {what} is not supported by this controller; {hint}")]
    Unsupported {
        /// The controller.
        ctrl: Arc<str>,
        /// What is missing.
        what: String,
        /// What to do.
        hint: &'static str,
    },
    /// A namespace that does not exist or cannot be used.
    #[error("{ctrl}: namespace {nsid}: {source}")]
    Namespace {
        /// The controller.
        ctrl: Arc<str>,
        /// The namespace.
        nsid: Nsid,
        /// Why.
        source: NamespaceError,
    },
    /// The arguments of an I/O do not fit the namespace; nothing was sent.
    #[error("{ctrl}: namespace {nsid}: {what}; nothing was sent")]
    Range {
        /// The controller.
        ctrl: Arc<str>,
        /// The namespace.
        nsid: Nsid,
        /// What does not fit.
        what: String,
    },
    /// A command ended with an error status.
    #[error("{command} failed: {status}")]
    Command {
        /// Which.
        command: Box<CommandId>,
        /// How it ended.
        status: Status,
    },
    /// A command was not answered in time.
    #[error("{command} was not answered within {} ms; {outcome}", waited.0 / 1_000_000)]
    Timeout {
        /// Which.
        command: Box<CommandId>,
        /// How long it was given.
        waited: Nanos,
        /// What was done about it.
        outcome: TimeoutOutcome,
    },
    /// The data of a command cannot be described.
    #[error("{ctrl}: {source}")]
    Descriptor {
        /// The controller.
        ctrl: Arc<str>,
        /// Why.
        source: DescriptorError,
    },
    /// A queue cannot be made.
    #[error("{ctrl}: {source}")]
    Queue {
        /// The controller.
        ctrl: Arc<str>,
        /// Why.
        source: QueueError,
    },
    /// A queue is not in the state that the call needs.
    #[error("{ctrl}: queue {qid}: {what}")]
    QueueState {
        /// The controller.
        ctrl: Arc<str>,
        /// The queue.
        qid: QueueId,
        /// What is wrong and what to do.
        what: String,
    },
    /// Memory could not be had or addressed.
    #[error("{ctrl}: {source}")]
    Dma {
        /// The controller.
        ctrl: Arc<str>,
        /// Why.
        source: DmaError,
    },
    /// An interrupt could not be had.
    #[error("{ctrl}: {source}; use polling instead")]
    Interrupt {
        /// The controller.
        ctrl: Arc<str>,
        /// Why.
        source: InterruptError,
    },
}

impl Error {
    /// The controller's status, if it answered with one.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Command { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// Which command it was, if it was one.
    #[must_use]
    pub fn command(&self) -> Option<&CommandId> {
        match self {
            Self::Command { command, .. } | Self::Timeout { command, .. } => Some(command),
            _ => None,
        }
    }

    /// Whether a reset may help: the controller did something wrong, and is there.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Fatal { .. }
                | Self::NotReady { .. }
                | Self::Misbehaved { .. }
                | Self::Command { .. }
                | Self::Timeout { .. }
        )
    }

    /// What the controller is failed of when this error ends its set-up.
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
