//! Calls that the server refuses.

use objstore::{CatalogError, StoreError};
use ripieno_stack::StackError;

use crate::error::RefusalKind;

/// A refused call.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) kind: RefusalKind,
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn new(kind: RefusalKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(RefusalKind::Argument, message)
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        let kind = match &error {
            StoreError::Catalog(CatalogError::OwnNamespaces { .. }) => RefusalKind::Limit,
            StoreError::Argument { .. }
            | StoreError::NotStarted { .. }
            | StoreError::InFlight { .. }
            | StoreError::Ended { .. }
            | StoreError::Incomplete { .. }
            | StoreError::Config { .. }
            | StoreError::Catalog { .. } => RefusalKind::Argument,
            StoreError::Busy { .. } | StoreError::StagingBusy { .. } | StoreError::Ring { .. } => {
                RefusalKind::Limit
            }
            StoreError::JournalFailed { .. } | StoreError::ReadOnly { .. } => RefusalKind::ReadOnly,
            StoreError::Failed { .. } => RefusalKind::Failed,
            _ => RefusalKind::Transfer,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<StackError> for Refusal {
    fn from(error: StackError) -> Self {
        match error {
            StackError::Store(error) => error.into(),
            error => Self::argument(error.to_string()),
        }
    }
}

/// Refuses a number that stands for nothing.
pub(crate) fn unknown(what: &str, number: u64) -> Refusal {
    Refusal::argument(format!("{what} {number} is not, or no longer, one of this client"))
}
