//! Handles of a store.
//!
//! Dropping a handle, on any thread and at any time, releases what it refers to: everything that a
//! device might still use belongs to the plane.

use std::{fmt, ops::Deref, sync::Arc};

use kv_catalog::{FileId, Layer, Reference, ReferenceId, WriteId};

use super::{Inner, reservation::Reservation};
use crate::ids::{JobId, Ticket};

/// The stored blocks found by a lookup: the leading ones of its keys. They stay stored until this
/// is dropped.
#[must_use = "dropping it gives the blocks back"]
pub struct Prefix {
    pub(super) store: Arc<Inner>,
    pub(super) reference: Reference,
}

impl Prefix {
    /// Returns the number of blocks found.
    #[must_use]
    pub fn len(&self) -> usize {
        self.reference.files.len()
    }

    /// Returns true if not even the first block was found.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.reference.files.is_empty()
    }

    /// Returns the files, in the order of the request.
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
        self.store.give_back(Held::Read(self.reference.id));
    }
}

/// The common part of a [`LoadRequest`] and a [`StoreRequest`]: layers that are moved.
///
/// Dropping it stops nothing that is in flight: the engine's blocks may be reused only after every
/// ticket was waited for, or after [`crate::Plane::drain`].
pub struct Transfer {
    pub(super) store: Arc<Inner>,
    pub(super) job: JobId,
}

impl Transfer {
    /// Returns the name of a layer's operation.
    #[must_use]
    pub fn ticket(&self, layer: Layer) -> Ticket {
        Ticket { job: self.job, layer }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Transfer").field(&self.job).finish()
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.store.plane.abandon(self.job);
    }
}

/// A request whose blocks are being retrieved.
#[derive(Debug)]
#[must_use = "dropping it ends the request"]
pub struct LoadRequest {
    pub(super) transfer: Transfer,
    pub(super) blocks: usize,
}

impl LoadRequest {
    /// Returns the number of blocks it moves.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
    }
}

impl Deref for LoadRequest {
    type Target = Transfer;

    fn deref(&self) -> &Transfer {
        &self.transfer
    }
}

/// A request whose blocks are being stored. Nothing of it is visible before
/// [`crate::Store::commit`]; dropping it frees the files. Blocks may be changed only after the
/// tickets were waited for.
#[derive(Debug)]
#[must_use = "dropping it gives the files back"]
pub struct StoreRequest {
    pub(super) transfer: Transfer,
    pub(super) accepted: usize,
    pub(super) written: usize,
}

impl StoreRequest {
    /// Returns how many leading blocks of the request will be found after the commit: those that
    /// this request stores, and those already stored or being stored.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.accepted
    }

    /// Returns how many of them this request stores itself.
    #[must_use]
    pub fn written(&self) -> usize {
        self.written
    }
}

impl Deref for StoreRequest {
    type Target = Transfer;

    fn deref(&self) -> &Transfer {
        &self.transfer
    }
}

/// Result of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// Leading blocks of the request that lookups now find, unless another request that they rely
    /// on has not been committed.
    pub accepted: usize,
    /// Blocks that this request added.
    pub written: usize,
}

/// A resource to release when a job ends.
#[derive(Debug)]
pub(super) enum Held {
    /// Reference to blocks that were being retrieved.
    Read(ReferenceId),
    /// Files that were being written.
    Write(WriteId),
    /// Positions of a reservation that were being written.
    Part(Arc<Reservation>, Vec<u32>),
}
