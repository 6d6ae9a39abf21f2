//! Requests: retrieving a prefix, storing new blocks.

use std::sync::Arc;

use kv_catalog::{BlockId, BlockKey, Catalog, CatalogError, FileId, Write, lock};
use kv_tier::{RequestId, When};
use nvme_driver::Nanos;
use nvme_spec::nvm::Direction;

use super::{
    Store,
    handles::{Committed, Held, LoadRequest, Prefix, StoreRequest, Transfer},
    reservation::Reservation,
};
use crate::{
    error::StoreError,
    ids::{JobId, Move},
    plane::JobDone,
};

/// Maximum waits for free files: other threads may take freed ones first. In a store of 126 files,
/// where one is kept free ahead, 1 of 5,000 requests beside 15 others had none after 8 waits.
const ATTEMPTS_MAX: u32 = 32;

/// Refuses blocks of another number than the positions that they are for.
pub(super) fn one_for_each(blocks: usize, positions: usize, what: &str) -> Result<(), StoreError> {
    if blocks == positions { Ok(()) } else { Err(StoreError::positions(blocks, positions, what)) }
}

impl Store {
    /// Prepares to read the prefix into `blocks`, one for each of its positions. This is the only
    /// step whose cost grows with the number of blocks.
    ///
    /// # Errors
    /// Returns [`StoreError::Argument`], [`StoreError::Stale`] if a file was lost since the
    /// lookup, and the errors of [`crate::Plane::begin`].
    pub fn retrieve(&self, prefix: &Prefix, blocks: &[BlockId]) -> Result<LoadRequest, StoreError> {
        self.retrieve_at(prefix, &(0..prefix.len()).collect::<Vec<_>>(), blocks)
    }

    /// Same as [`Store::retrieve`], for only the `blocks.len()` positions from `first` on: for an
    /// engine that has the others already, or retrieves in parts.
    ///
    /// # Errors
    /// Same as [`Store::retrieve`].
    pub fn retrieve_from(
        &self,
        prefix: &Prefix,
        first: usize,
        blocks: &[BlockId],
    ) -> Result<LoadRequest, StoreError> {
        let end = first.saturating_add(blocks.len());
        if end > prefix.len() {
            let (blocks, positions) = (blocks.len(), prefix.len().saturating_sub(first));
            return Err(StoreError::positions(blocks, positions, "blocks of the prefix"));
        }
        self.retrieve_at(prefix, &(first..end).collect::<Vec<_>>(), blocks)
    }

    /// Same as [`Store::retrieve`], for these positions only, one for each of `blocks`.
    ///
    /// # Errors
    /// Same as [`Store::retrieve`], and [`StoreError::Catalog`] for a position that the prefix does
    /// not have.
    pub fn retrieve_at(
        &self,
        prefix: &Prefix,
        positions: &[usize],
        blocks: &[BlockId],
    ) -> Result<LoadRequest, StoreError> {
        if !Arc::ptr_eq(&prefix.store, &self.inner) {
            return Err(StoreError::foreign("prefix"));
        }
        one_for_each(blocks.len(), positions.len(), "blocks of the prefix")?;
        // A reference of its own: the request may outlive the prefix.
        let shared = self.look(|catalog| {
            let shared = catalog.share(prefix.reference.id, positions);
            shared.map_err(|error| match error {
                CatalogError::Dropped { position, file } => StoreError::Stale { position, file },
                error => error.into(),
            })
        })?;
        let files = positions.iter().map(|at| *at as u32).zip(&shared.files).zip(blocks);
        let moves: Vec<Move> = files
            .map(|((position, file), block)| Move { file: *file, block: *block, position })
            .collect();
        let expected = self.expected(&shared.files);
        let transfer = self.begin(Direction::Read, &moves, &expected, Held::Read(shared.id))?;
        Ok(LoadRequest { transfer, blocks: blocks.len() })
    }

    /// Allocates files for the blocks with these keys, evicting as the policy chooses, and accepts
    /// as many leading ones as possible: [`StoreRequest::accepted`] returns how many, possibly
    /// none.
    ///
    /// A key that is stored already, is being stored by another request, or occurs earlier in
    /// `keys` is not stored again: it is accepted, and its block is not read. (If that other
    /// request fails, the key stays a miss.)
    ///
    /// # Errors
    /// Returns [`StoreError::Argument`], [`StoreError::ReadOnly`], [`StoreError::JournalFailed`],
    /// and the errors of [`crate::Plane::begin`].
    pub fn allocate(
        &self,
        keys: &[BlockKey],
        blocks: &[BlockId],
    ) -> Result<StoreRequest, StoreError> {
        one_for_each(blocks.len(), keys.len(), "keys")?;
        // Before blocks are evicted for a call that is refused.
        self.inner.plane.with(|plane| plane.check_blocks(self.pool, blocks.iter().copied()))?;
        let write = self.take_files(keys)?;
        let accepted = write.positions.len();
        let own = (0..).zip(&write.positions).filter(|(_, position)| position.own);
        let moves: Vec<Move> = own
            .map(|(position, own)| Move {
                file: own.file,
                block: blocks[position as usize],
                position,
            })
            .collect();
        let transfer = self.begin(Direction::Write, &moves, &[], Held::Write(write.id))?;
        Ok(StoreRequest { transfer, accepted, written: moves.len() })
    }

    /// Takes files for as many leading keys as possible. Writes the journal if files only wait for
    /// that.
    pub(super) fn take_files(&self, keys: &[BlockKey]) -> Result<Write, StoreError> {
        for attempt in 0.. {
            let write = self.change(|catalog| {
                let write = catalog.begin(*self.namespace, keys)?;
                let is_short = write.is_short && catalog.counts().limbo > 0;
                if is_short && attempt < ATTEMPTS_MAX {
                    catalog.abort(write.id)?;
                    return Ok(None);
                }
                Ok(Some(write))
            })?;
            if let Some(write) = write {
                return Ok(write);
            }
            self.inner.catalog.evict_ahead();
            self.sync_journal()?;
        }
        unreachable!("the last attempt takes what there is")
    }

    /// Allocates files as [`Store::allocate`] does, for blocks that [`Store::fill`] writes.
    ///
    /// # Errors
    /// Same as [`Store::remove`].
    pub fn reserve(&self, keys: &[BlockKey]) -> Result<Arc<Reservation>, StoreError> {
        let write = self.take_files(keys)?;
        Ok(Reservation::new(&self.inner, self.namespace.clone(), write))
    }

    /// Prepares to write blocks of this handle's pool to positions of a reservation. Each position
    /// is written once, by one request, which [`Store::end`] ends.
    ///
    /// # Errors
    /// Returns [`StoreError::Argument`], and the errors of [`crate::Plane::begin`].
    pub fn fill(
        &self,
        reservation: &Arc<Reservation>,
        positions: &[u32],
        blocks: &[BlockId],
    ) -> Result<StoreRequest, StoreError> {
        reservation.check(&self.inner)?;
        one_for_each(blocks.len(), positions.len(), "positions")?;
        self.inner.plane.with(|plane| plane.check_blocks(self.pool, blocks.iter().copied()))?;
        reservation.give(positions)?;
        let files = &reservation.write.positions;
        let moves = positions.iter().zip(blocks).map(|(position, block)| Move {
            file: files[*position as usize].file,
            block: *block,
            position: *position,
        });
        let moves: Vec<Move> = moves.collect();
        let held = Held::Part(reservation.clone(), positions.to_vec());
        let within = Self { namespace: reservation.namespace.clone(), ..self.clone() };
        let transfer = within.begin(Direction::Write, &moves, &[], held)?;
        Ok(StoreRequest { transfer, accepted: moves.len(), written: moves.len() })
    }

    /// Ends requests of [`Store::retrieve`] and [`Store::fill`]: waits for their layers in flight,
    /// and makes what they wrote permanent, with one flush for all. Their handles have no further
    /// use. After a failed flush nothing is stored any more, by this call or any other.
    ///
    /// # Errors
    /// Same as [`crate::Plane::end`].
    pub fn end(&self, jobs: &[JobId]) -> Result<Vec<JobDone>, StoreError> {
        let ended = self.inner.plane.end(jobs)?;
        for done in &ended {
            let held = lock(&self.inner.jobs).held.remove(&done.job);
            if let Some(Held::Part(reservation, positions)) = &held {
                reservation.written(positions, done);
            }
            if let Some(held) = held {
                self.inner.give_back(held);
            }
        }
        Ok(ended)
    }

    /// Makes the blocks of a reservation visible to lookups. They are permanent when the next
    /// [`Store::sync_journal`] has returned.
    ///
    /// # Errors
    /// Returns [`StoreError::Catalog`] if something of it was not written, or was committed before;
    /// [`StoreError::JournalFailed`], [`StoreError::Argument`] or [`StoreError::Failed`].
    pub fn commit_reservation(&self, reservation: &Reservation) -> Result<(), StoreError> {
        reservation.check(&self.inner)?;
        let write = reservation.write.id;
        reservation.commit(|checksums| {
            self.change(|catalog| {
                catalog.written(write, 0, checksums)?;
                Ok(catalog.commit(write).map(|_| ())?)
            })
        })
    }

    /// Same as [`Store::commit_reservation`] for several, whose blocks are permanent when this
    /// returns. Otherwise lookups do not find them.
    ///
    /// # Errors
    /// Same as [`Store::commit_reservation`].
    pub fn commit_reservations(&self, all: &[Arc<Reservation>]) -> Result<(), StoreError> {
        all.iter().try_for_each(|one| self.commit_reservation(one))?;
        self.inner.make_permanent(all.iter().flat_map(|one| one.own_files()).collect())?;
        self.inner.deallocate();
        Ok(())
    }

    /// Waits for the layers in flight and, if every layer was stored, makes the blocks permanent
    /// and visible: lookups find them, even after a crash or loss of power. Otherwise no block of
    /// the request is found, and the files are free again; but a record that a device did not
    /// acknowledge may have been written, and then the blocks, all of them whole, are found when
    /// the store is reopened.
    ///
    /// # Errors
    /// Returns [`StoreError::Transfer`] if a layer failed, [`StoreError::Incomplete`] if one was
    /// never started, [`StoreError::Forgotten`] if a device may have lost the data again, or
    /// [`StoreError::JournalFailed`] if a device failed to make data or record durable, now or
    /// before: nothing is committed after that until the store is reopened. Also
    /// [`StoreError::Argument`] and [`StoreError::Failed`].
    pub fn commit(&self, save: StoreRequest) -> Result<Committed, StoreError> {
        self.own(&save)?;
        let StoreRequest { transfer, accepted, written } = save;
        self.inner.commit(transfer.job)?;
        Ok(Committed { accepted, written })
    }

    /// Makes all evictions, removals and registrations so far permanent. Commits are permanent when
    /// they return.
    ///
    /// # Errors
    /// Returns [`StoreError::JournalFailed`].
    pub fn sync_journal(&self) -> Result<(), StoreError> {
        self.inner.catalog.sync()?;
        self.inner.deallocate();
        Ok(())
    }

    /// Starts reading the longest stored run of leading `keys` into the DRAM cache
    /// ([`crate::StoreOptions::dram`]), except blocks that it has: a retrieval that follows
    /// soon copies them. They are protected from eviction for the time `within`. Returns how many
    /// leading blocks are cached or being read; 0 without a cache, and no more are started while
    /// half of all IOCBs are in flight. It counts neither as a use of the blocks nor as a lookup.
    ///
    /// Reads in flight delay everything started later: prefetch for the requests that run next.
    /// [`Store::announce`] reads ahead without delaying other transfers.
    ///
    /// # Errors
    /// Same as [`crate::Plane::prefetch`].
    pub fn prefetch(&self, keys: &[BlockKey], within: Nanos) -> Result<usize, StoreError> {
        let until = self.inner.clock.now() + within;
        let shared = self.look(|catalog| Ok(catalog.hold_prefix(*self.namespace, keys)?))?;
        let expected = self.expected(&shared.files);
        let begun = self.inner.plane.with(|plane| {
            let (there, job) = plane.prefetch(&shared.files, &expected, until)?;
            if let Some(job) = job {
                lock(&self.inner.jobs).held.insert(job, Held::Read(shared.id));
            }
            Ok((there, job))
        });
        // A job that has begun releases it when it ends.
        if !matches!(begun, Ok((_, Some(_)))) {
            self.inner.give_back(Held::Read(shared.id));
        }
        begun.map(|(there, _)| there)
    }

    /// Returns the longest stored run of leading `keys`, without counting a use or a lookup: for
    /// [`Store::announce`].
    ///
    /// # Errors
    /// Same as [`Store::lookup`].
    pub fn hold_prefix(&self, keys: &[BlockKey]) -> Result<Prefix, StoreError> {
        let reference = self.look(|catalog| Ok(catalog.hold_prefix(*self.namespace, keys)?))?;
        Ok(Prefix { store: self.inner.clone(), reference })
    }

    /// Returns the checksums that were stored with a prefix, as many for each block; empty if the
    /// store keeps none.
    #[must_use]
    pub fn checksums(&self, prefix: &Prefix) -> Vec<u32> {
        self.expected(prefix.files())
    }

    /// Announces a request that will load these blocks: see [`crate::Plane::announce`]. They stay
    /// stored as long as the prefix lives.
    ///
    /// # Errors
    /// Returns [`StoreError::Argument`] or [`StoreError::Failed`].
    pub fn announce(
        &self,
        request: RequestId,
        prefix: &Prefix,
        when: When,
    ) -> Result<(), StoreError> {
        if !Arc::ptr_eq(&prefix.store, &self.inner) {
            return Err(StoreError::foreign("prefix"));
        }
        let files = prefix.files();
        self.inner.plane.announce(request, files, &self.expected(files), when)
    }

    /// Returns the checksums of files that are referenced.
    pub(super) fn expected(&self, files: &[FileId]) -> Vec<u32> {
        self.inner.catalog.with(|catalog| {
            files.iter().flat_map(|file| catalog.checksums(*file)).copied().collect()
        })
    }

    /// Begins a job that owns `held`, or releases it on failure.
    pub(super) fn begin(
        &self,
        direction: Direction,
        moves: &[Move],
        expected: &[u32],
        held: Held,
    ) -> Result<Transfer, StoreError> {
        let inner = &self.inner;
        let mut held = Some(held);
        let begun = inner.plane.with(|plane| {
            if plane.keeps_blocks() {
                plane.forget(&inner.catalog.with(Catalog::take_freed));
            }
            // A write must drop what is cached of its files.
            let is_cached = self.is_cached || direction == Direction::Write;
            let job = plane.begin(self.pool, direction, moves.to_vec(), expected, is_cached)?;
            // Blocks of a namespace expire together, and turn over at their own rate.
            plane.place(job, self.namespace.0)?;
            lock(&inner.jobs).held.extend(held.take().map(|held| (job, held)));
            Ok(job)
        });
        if let Some(held) = held {
            inner.give_back(held);
        }
        Ok(Transfer { store: inner.clone(), job: begun? })
    }
}
