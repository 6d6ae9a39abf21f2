//! Storing in two steps, for an engine of several owners: its scheduler reserves files, its workers
//! fill them out of their own pools, and the scheduler commits when all is written.

use std::sync::{Arc, Mutex, Weak};

use kv_catalog::{CatalogError, FileId, NamespaceId, Write};

use super::{Inner, lock};
use crate::{error::StoreError, plane::JobDone};

/// Files for new blocks ([`crate::Store::reserve`]). Nothing of it is visible before
/// [`crate::Store::commit_reservation`]. The files are free again when the last clone is dropped
/// and no request writes to them any more.
#[derive(Debug)]
#[must_use = "dropping it gives the files back"]
pub struct Reservation {
    store: Weak<Inner>,
    pub(super) namespace: Arc<NamespaceId>,
    pub(super) write: Write,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// By position.
    parts: Vec<Part>,
    /// Set when the write has ended.
    is_over: bool,
}

/// State of a position.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    /// Stored or being written by others.
    Others,
    /// To be written.
    Empty,
    /// Given to a request, which may have failed.
    Given,
    /// Written and flushed, with the checksums of its objects.
    Written(Vec<u32>),
}

impl Reservation {
    pub(super) fn new(store: &Arc<Inner>, namespace: Arc<NamespaceId>, write: Write) -> Arc<Self> {
        let part = |own| if own { Part::Empty } else { Part::Others };
        let parts = write.positions.iter().map(|position| part(position.own)).collect();
        let state = Mutex::new(State { parts, is_over: false });
        Arc::new(Self { store: Arc::downgrade(store), namespace, write, state })
    }

    /// Refuses a reservation of another store.
    pub(super) fn check(&self, store: &Arc<Inner>) -> Result<(), StoreError> {
        match std::ptr::eq(self.store.as_ptr(), Arc::as_ptr(store)) {
            true => Ok(()),
            false => Err(StoreError::foreign("reservation")),
        }
    }

    /// Returns how many leading blocks lookups will find after the commit.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.write.positions.len()
    }

    /// Returns the file of each of these blocks.
    pub fn files(&self) -> impl Iterator<Item = FileId> {
        self.write.positions.iter().map(|position| position.file)
    }

    /// Returns the files that are written for this reservation.
    pub(super) fn own_files(&self) -> impl Iterator<Item = FileId> {
        self.write.positions.iter().filter(|position| position.own).map(|position| position.file)
    }

    /// Returns true if the block at this position is to be written for this reservation.
    #[must_use]
    pub fn has(&self, position: usize) -> bool {
        self.write.positions.get(position).is_some_and(|position| position.own)
    }

    /// Returns true if all that is to be written for this reservation was written.
    #[must_use]
    pub fn is_filled(&self) -> bool {
        !lock(&self.state).parts.iter().any(|part| matches!(part, Part::Empty | Part::Given))
    }

    /// Gives positions to a request, each once.
    pub(super) fn give(&self, positions: &[u32]) -> Result<(), StoreError> {
        let mut state = lock(&self.state);
        let is_over = state.is_over;
        for (done, position) in positions.iter().enumerate() {
            let part = state.parts.get_mut(*position as usize).filter(|part| **part == Part::Empty);
            match part {
                Some(part) if !is_over => *part = Part::Given,
                _ => {
                    for position in &positions[..done] {
                        state.parts[*position as usize] = Part::Empty;
                    }
                    return Err(StoreError::argument(format!(
                        "position {position} of the reservation is not to be written, or was \
                         given out before"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Ends the write with `commit`, which gets the checksums of all that was written.
    pub(super) fn commit(
        &self,
        commit: impl FnOnce(&[u32]) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let mut state = lock(&self.state);
        let mut words = Vec::new();
        for part in &state.parts {
            match part {
                Part::Others => {}
                Part::Written(checksums) => words.extend_from_slice(checksums),
                Part::Empty | Part::Given => {
                    return Err(CatalogError::Unreported { missing: 1, ranks: 1 }.into());
                }
            }
        }
        if state.is_over {
            return Err(CatalogError::Write { id: self.write.id }.into());
        }
        commit(&words)?;
        state.is_over = true;
        Ok(())
    }

    /// Records what a request has written.
    pub(super) fn written(&self, positions: &[u32], done: &JobDone) {
        if done.failure.is_none() {
            let mut state = lock(&self.state);
            let words = done.checksums.len() / positions.len().max(1);
            for (at, position) in positions.iter().enumerate() {
                let checksums = done.checksums[at * words..][..words].to_vec();
                state.parts[*position as usize] = Part::Written(checksums);
            }
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let is_over = lock(&self.state).is_over;
        if let Some(store) = self.store.upgrade().filter(|_| !is_over) {
            let aborted = store.catalog.with(|catalog| catalog.abort(self.write.id));
            assert!(aborted.is_ok(), "{aborted:?}");
        }
    }
}
