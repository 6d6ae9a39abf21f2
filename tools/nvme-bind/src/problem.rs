//! Errors of commands, and their exit codes.

use std::fmt::Display;
use std::io;

use serde::Serialize;

/// Kinds of failure; each has an exit code for scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// An operation failed; any completed changes were undone.
    Failed,
    /// The command line names something nonexistent or is invalid.
    Usage,
    /// The drive is in use.
    InUse,
    /// VFIO cannot take the drive: no IOMMU, no module, or the group.
    NotViable,
    /// A drive is left between two drivers, and `restore` is needed.
    HalfDone,
}

impl Kind {
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Kind::Failed => 1,
            Kind::Usage => 2,
            Kind::InUse => 3,
            Kind::NotViable => 4,
            Kind::HalfDone => 5,
        }
    }
}

/// A request and its failure; the hint suggests a remedy and may be empty.
#[derive(Debug, thiserror::Error, Serialize)]
#[error("{message}")]
pub(crate) struct Problem {
    pub(crate) kind: Kind,
    pub(crate) message: String,
    pub(crate) hint: String,
}

pub(crate) type Result<T, E = Problem> = std::result::Result<T, E>;

impl Problem {
    pub(crate) fn new(kind: Kind, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hint: hint.into() }
    }

    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(Kind::Usage, message, hint)
    }

    /// Creates a problem from a failed system call on `what`.
    pub(crate) fn io(what: impl Display, error: &io::Error) -> Self {
        let hint = match error.kind() {
            io::ErrorKind::PermissionDenied => "run it as root",
            _ => "",
        };
        Self::new(Kind::Failed, format!("{what}: {error}"), hint)
    }
}
