//! Errors of the catalog.

use super::{ReferenceId, WriteId};
use crate::ids::{FileId, NamespaceId};

/// A call that the catalog refused. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogError {
    /// A namespace that was never registered, or was replaced by another one.
    #[error("namespace {namespace} is unknown; register its descriptor first")]
    Namespace {
        /// The namespace.
        namespace: NamespaceId,
    },
    /// A user has as many namespaces as he may, and all are used.
    #[error(
        "namespace {label:?} is new, and each of the {max} namespaces that user {user} may have is \
         in use, or has pins, a quota or a weight; end their use, or raise the limit of the user"
    )]
    OwnNamespaces {
        /// Label of the new one.
        label: String,
        /// The user.
        user: u32,
        /// Namespaces allowed.
        max: u32,
    },
    /// A reference that was released, or never existed.
    #[error("reference {:#x} is unknown: it was given back before, or is another catalog's", id.0)]
    Reference {
        /// The reference.
        id: ReferenceId,
    },
    /// A write that ended, or never existed.
    #[error("write {:#x} is unknown: it ended before, or is another catalog's", id.0)]
    Write {
        /// The write.
        id: WriteId,
    },
    /// A file lost its key after it was acquired.
    #[error("block {position} (file {file}) was dropped after it was acquired; look up again")]
    Dropped {
        /// Position in the reference.
        position: usize,
        /// The file.
        file: FileId,
    },
    /// Not all ranks have reported.
    #[error("{missing} of {ranks} ranks have not reported that they wrote this; wait for them")]
    Unreported {
        /// Ranks that have not reported.
        missing: u32,
        /// Ranks of the catalog.
        ranks: u32,
    },
    /// An argument is out of its range, or does not match what it is for; or there is no room for a
    /// namespace. The message names both.
    #[error("{0}")]
    Refused(String),
    /// Recovery has not ended.
    #[error("records were applied and the catalog is not in use yet; call `recovered` first")]
    Recovering,
    /// A record contradicts those before it.
    #[error("the journal is damaged: {0}")]
    Damaged(String),
}
