//! Why a command did not do what was asked, and the exit code that goes with it.

use std::fmt::Display;
use std::io;

use serde::Serialize;

/// Kinds of failure; each has an exit code that scripts can tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// The machine said no; whatever was begun has been undone.
    Failed,
    /// The command line names something that does not exist or makes no sense.
    Usage,
    /// The drive is in use.
    InUse,
    /// VFIO cannot take the drive as things are: no IOMMU, no module, or the group.
    NotViable,
    /// A drive is between two drivers, and `restore` is needed.
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

/// What was asked and found; the hint says what to do about it and may be empty.
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

    /// An operation of the system on `what` that failed.
    pub(crate) fn io(what: impl Display, error: &io::Error) -> Self {
        let hint = match error.kind() {
            io::ErrorKind::PermissionDenied => "run it as root",
            _ => "",
        };
        Self::new(Kind::Failed, format!("{what}: {error}"), hint)
    }
}
