//! The handles a caller holds.
//!
//! A handle is a name and a promise to give back what it stands for when it is dropped, on any
//! thread and at any time: everything that a device might still use belongs to the plane.

use std::{fmt, sync::Arc};

use kv_catalog::{FileId, Reference, ReferenceId, WriteId};

use super::Inner;
use crate::plane::JobId;

/// The stored blocks a lookup found: the leading ones of what it was asked for. They stay stored
/// until this is dropped.
#[must_use = "dropping it gives the blocks back"]
pub struct Prefix {
    pub(super) store: Arc<Inner>,
    pub(super) reference: Reference,
}

impl Prefix {
    /// Blocks found.
    #[must_use]
    pub fn len(&self) -> usize {
        self.reference.files.len()
    }

    /// Whether not even the first block was found.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.reference.files.is_empty()
    }

    /// The files, in the order of the request.
    #[must_use]
    pub fn files(&self) -> &[FileId] {
        &self.reference.files
    }
}

impl fmt::Debug for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Prefix").field(&self.reference).finish()
    }
}

impl Drop for Prefix {
    fn drop(&mut self) {
        let released = self.store.keys().catalog.release(self.reference.id);
        debug_assert!(released.is_ok(), "{released:?}");
    }
}

/// The part that transfers and writings share.
pub(super) struct Handle {
    pub(super) store: Arc<Inner>,
    pub(super) job: JobId,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Handle").field(&self.job).finish()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.store.abandon(self.job);
    }
}

/// A request whose blocks are being retrieved.
///
/// Dropping it stops nothing that is in flight: the engine's blocks may be reused only after every
/// ticket was waited for, or after [`crate::Store::drain`].
#[derive(Debug)]
#[must_use = "dropping it ends the request"]
pub struct Transfer {
    pub(super) handle: Handle,
    pub(super) blocks: usize,
}

impl Transfer {
    /// Blocks it moves.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
    }
}

/// A request whose blocks are being stored. Nothing of it is visible before
/// [`crate::Store::commit`]; dropping it gives the files back.
///
/// As for a [`Transfer`], blocks may be changed only after the tickets were waited for.
#[derive(Debug)]
#[must_use = "dropping it gives the files back"]
pub struct Writing {
    pub(super) handle: Handle,
    pub(super) accepted: usize,
    pub(super) written: usize,
}

impl Writing {
    /// How many leading blocks of the request will be found after the commit: those that this
    /// writing stores, and those that were stored or on their way already.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.accepted
    }

    /// How many of them this writing stores itself.
    #[must_use]
    pub fn written(&self) -> usize {
        self.written
    }
}

/// What a commit made visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// Leading blocks of the request that lookups now find, unless another writing they rely on
    /// has not been committed.
    pub accepted: usize,
    /// Blocks that this writing added.
    pub written: usize,
}

/// What the store has to give back when a job has ended.
#[derive(Debug, Clone, Copy)]
pub(super) enum Held {
    /// Blocks that were being retrieved.
    Read(ReferenceId),
    /// Files that were being written.
    Write(WriteId),
}
