//! Errors of the journal.

use crate::{block_io::BlockError, superblock::Half};

/// Evidence that a damaged group is not the end of the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DamageProof {
    /// A group that was written later.
    Later {
        /// Offset at which it was found, from the start of the half.
        found: u64,
        /// Offset stored in its header.
        says: u64,
    },
    /// The superblock recorded a greater length.
    Superblock {
        /// Recorded length in bytes.
        certain: u64,
    },
}

impl std::fmt::Display for DamageProof {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Later { found, says } => {
                write!(f, "a later group is at byte {found} (and belongs at byte {says})")
            }
            Self::Superblock { certain } => {
                write!(f, "the superblock knows of {certain} bytes")
            }
        }
    }
}

/// Advice for a damaged journal.
const FSCK: &str = "hint: `ripieno fsck --salvage` says which blocks can be kept";

/// Why a journal cannot be read, or accepts no more writes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The device failed.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The device carries no journal.
    #[error("{device}: this device carries no journal; the first device of rank 0 does")]
    None {
        /// The device.
        device: String,
    },
    /// A durable group is missing or damaged.
    #[error(
        "{device}: the group at byte {end} of half {half} of the journal is missing or damaged, \
         though {proof}: the device lost or misdirected a write, or corrupted it; nothing can be \
         trusted from there on. {FSCK}"
    )]
    Damaged {
        /// The device.
        device: String,
        /// The half.
        half: Half,
        /// Offset of the damage, from the start of the half.
        end: u64,
        /// The evidence.
        proof: DamageProof,
    },
    /// A whole group contains something that is no record, or a record that is invalid in this
    /// store.
    #[error(
        "{device}: the group at byte {position} of half {half} of the journal: {reason}. {FSCK}"
    )]
    Record {
        /// The device.
        device: String,
        /// The half.
        half: Half,
        /// Offset of the group, from the start of the half.
        position: u64,
        /// The problem.
        reason: String,
    },
    /// The half is full. Nothing was written, and the journal continues after a compaction.
    #[error(
        "{device}: {needed} bytes do not fit into the {room} bytes that half {half} of the journal \
         has left; complete a compaction first"
    )]
    Full {
        /// The device.
        device: String,
        /// The half.
        half: Half,
        /// Bytes to write.
        needed: u64,
        /// Bytes left.
        room: u64,
    },
    /// The other half has no room for the state.
    #[error(
        "{device}: the state does not fit into the {half_bytes} bytes of a half of the journal: \
         there are more files, checksums or namespaces than the store was formatted for"
    )]
    Outgrown {
        /// The device.
        device: String,
        /// Length of a half.
        half_bytes: u64,
    },
    /// An earlier write failed.
    #[error("the journal takes no more writes since this happened: {reason}")]
    Failed {
        /// The error of that write.
        reason: String,
    },
}
