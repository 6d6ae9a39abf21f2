//! Errors of the catalog.

use super::{ReferenceId, WriteId};
use crate::{
    ids::{FileId, NamespaceId},
    key::BlockKey,
};

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
    /// A namespace's label is too long.
    #[error("a namespace's label has {bytes} bytes; give at most {max}")]
    Label {
        /// Bytes given.
        bytes: usize,
        /// Bytes allowed.
        max: usize,
    },
    /// The store has as many namespaces as it was formatted for, and all are used.
    #[error(
        "namespace {label:?} is new, and each of the {max} that the store was formatted for has \
         blocks, users, pins, a quota or a weight; clear one and end its use, or format the store \
         for more"
    )]
    Namespaces {
        /// Label of the new one.
        label: String,
        /// Namespaces allowed.
        max: u32,
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
    /// A weight of zero would never receive space.
    #[error("a namespace's weight is zero; give at least 1")]
    Weight,
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
    /// Positions beyond the end of a reference.
    #[error("positions up to {end} were asked for, but the reference has {there_are} files")]
    Positions {
        /// End of the range asked for.
        end: usize,
        /// Files of the reference.
        there_are: usize,
    },
    /// A file lost its key after it was acquired.
    #[error("block {position} (file {file}) was dropped after it was acquired; look up again")]
    Dropped {
        /// Position in the reference.
        position: usize,
        /// The file.
        file: FileId,
    },
    /// A rank out of range.
    #[error("rank {rank} reported, but the catalog has {ranks}")]
    Rank {
        /// The rank.
        rank: u32,
        /// Ranks of the catalog.
        ranks: u32,
    },
    /// A rank reported twice.
    #[error("rank {rank} has reported on this write before")]
    ReportedBefore {
        /// The rank.
        rank: u32,
    },
    /// Not all ranks have reported.
    #[error("{missing} of {ranks} ranks have not reported that they wrote this; wait for them")]
    Unreported {
        /// Ranks that have not reported.
        missing: u32,
        /// Ranks of the catalog.
        ranks: u32,
    },
    /// A rank could not write its part.
    #[error("a rank failed to write its part; abort the write")]
    RankFailed,
    /// The number of checksums differs from the number of objects.
    #[error("{found} checksums were given for {expected} objects of one rank")]
    Checksums {
        /// Checksums given.
        found: usize,
        /// Objects of the write's own files on one rank; 0 when no checksums are kept.
        expected: usize,
    },
    /// Recovery has not ended.
    #[error("records were applied and the catalog is not in use yet; call `recovered` first")]
    Recovering,
    /// A record contradicts those before it.
    #[error("the journal is damaged: {record} {problem}")]
    Damaged {
        /// The record, in short.
        record: String,
        /// The contradiction.
        problem: &'static str,
    },
    /// A key is in two files.
    #[error("the journal is damaged: files {first} and {second} hold the same key {key}")]
    TwoFiles {
        /// The key.
        key: BlockKey,
        /// The file that had it.
        first: FileId,
        /// The file that claims it.
        second: FileId,
    },
}
