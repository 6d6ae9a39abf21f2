//! A catalog whose changes become durable: it owns the device's journal.
//!
//! Changes are made under a short lock and never wait for I/O. [`DurableCatalog::sync`] writes the
//! records of all threads as one group; other threads may change the catalog meanwhile. After a
//! failure nothing becomes durable any more, so nothing may be changed; lookups go on.

mod writer;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use self::writer::JournalWriter;
use crate::{
    block_io::BlockIo,
    catalog::{Catalog, CatalogConfig, CatalogError, NewPin, PinAnswer, PinLimits, WriteBudget},
    journal::{Journal, JournalError},
    policy::PolicyKind,
    record::Record,
    superblock::{StoreLayout, Superblock},
};

/// Files kept free ahead of time, so that storing does not wait for the journal.
const FILES_AHEAD: u32 = 1024;

/// Nothing becomes durable any more: a device failed to make data or journal durable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("nothing can be stored any more: {cause}")]
pub struct NotDurable {
    /// The first cause.
    pub cause: String,
}

/// Broken, for good, when a device first fails to make data or journal durable: it may have dropped
/// what it did not write, and still succeed at the next flush. Catalog and plane of a store share
/// it: neither asks a device again, and nothing is acknowledged any more.
#[derive(Debug, Clone, Default)]
pub struct Seal(Arc<OnceLock<NotDurable>>);

impl Seal {
    /// Refuses to store once the seal is broken.
    ///
    /// # Errors
    /// Returns [`NotDurable`] with the first cause.
    pub fn check(&self) -> Result<(), NotDurable> {
        self.0.get().cloned().map_or(Ok(()), Err)
    }

    /// Breaks the seal. Returns the first cause.
    pub fn fail(&self, cause: String) -> NotDurable {
        let broken = || {
            tracing::error!(cause, "the store takes no writes any more");
            NotDurable { cause }
        };
        self.0.get_or_init(broken).clone()
    }

    fn close(&self) {
        self.0.get_or_init(|| NotDurable { cause: "the store was closed".to_owned() });
    }
}

/// Returns the time of a monotonic clock, in nanoseconds.
pub struct Time(pub Box<dyn Fn() -> u64 + Send + Sync>);

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Time").finish_non_exhaustive()
    }
}

/// Parameters of an opening catalog that are not in its superblock.
#[derive(Debug)]
pub struct DurableConfig {
    /// Eviction policy.
    pub policy: PolicyKind,
    /// Limit on writes; `None` for no limit.
    pub write_budget: Option<WriteBudget>,
    /// A random number, for [`Superblock::skip_sequence`].
    pub chance: u64,
    /// Passes for the catalog ([`Catalog::advance`]).
    pub time: Time,
    /// Broken by a failure to make anything durable, here or elsewhere.
    pub seal: Seal,
}

/// State of lookups and changes. Never locked during I/O.
#[derive(Debug)]
struct State {
    catalog: Catalog,
    evicts_ahead: bool,
}

/// A catalog with its journal.
#[derive(Debug)]
pub struct DurableCatalog {
    superblock: Superblock,
    seal: Seal,
    /// Locked before the state.
    journal: Mutex<JournalWriter>,
    state: Mutex<State>,
    time: Time,
}

/// Locks state that a thread which panicked leaves whole.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DurableCatalog {
    /// Opens the catalog that `superblock`, read from `io`, names. Calls `progress` with the bytes
    /// of the journal read so far, and their maximum.
    ///
    /// # Errors
    /// Same as [`Journal::open`].
    pub fn open(
        io: Box<dyn BlockIo>,
        superblock: Superblock,
        config: DurableConfig,
        progress: impl FnMut(u64, u64),
    ) -> Result<Self, JournalError> {
        let StoreLayout { files, words_per_file, namespaces_max, .. } = superblock.layout;
        let file_bytes = superblock.geometry().map_or_else(
            || superblock.layout.stored().block_bytes() * u64::from(superblock.ranks),
            |geometry| geometry.file_bytes(),
        );
        let mut catalog = Catalog::new(CatalogConfig {
            files,
            file_bytes,
            ranks: superblock.ranks,
            words_per_file,
            namespaces_max,
            journal: true,
            files_ahead: FILES_AHEAD,
            policy: config.policy,
            write_budget: config.write_budget,
            seed: u64::from_le_bytes(superblock.store.0[..8].try_into().expect("8 of 16 bytes")),
        });
        let apply = |record: Record<'_>| catalog.apply(&record);
        let mut own = superblock.clone();
        own.skip_sequence(config.chance);
        let journal = Journal::open(io, own, apply, progress)?;
        catalog.recovered();
        catalog.limit_pending(journal.append_bytes_max());
        Ok(Self {
            superblock,
            seal: config.seal,
            journal: Mutex::new(JournalWriter::new(journal)),
            state: Mutex::new(State { catalog, evicts_ahead: false }),
            time: config.time,
        })
    }

    /// Returns the superblock of the device, as it was found.
    #[must_use]
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Returns the state at the present time: pins whose time is over hinder nothing.
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        if state.catalog.needs_time() {
            state.catalog.advance((self.time.0)());
        }
        state
    }

    /// Same as [`Catalog::pin_for`], from the present time on.
    ///
    /// # Errors
    /// Same as [`Catalog::pin_for`].
    pub fn pin_for(&self, new: &NewPin<'_>, limits: &PinLimits) -> Result<PinAnswer, CatalogError> {
        let mut state = lock(&self.state);
        state.catalog.advance((self.time.0)());
        state.catalog.pin_for(new, limits)
    }

    /// Calls `act` with the catalog locked, at the present time. Only [`DurableCatalog::sync`] may
    /// take the records that the catalog makes.
    pub fn with<T>(&self, act: impl FnOnce(&mut Catalog) -> T) -> T {
        act(&mut self.state().catalog)
    }

    /// Same as [`DurableCatalog::with`], for a change that is to become durable.
    ///
    /// # Errors
    /// Returns [`NotDurable`] after a failure, and the errors of `act`.
    pub fn change<T, E: From<NotDurable>>(
        &self,
        act: impl FnOnce(&mut Catalog) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut state = self.state();
        self.seal.check()?;
        act(&mut state.catalog)
    }

    /// Returns the seal, for those that make the data durable that records name. The catalog
    /// refuses all changes once it is broken.
    #[must_use]
    pub fn seal(&self) -> &Seal {
        &self.seal
    }

    /// From now on each [`DurableCatalog::sync`] evicts some files ahead, so that the next write
    /// need not wait for the journal.
    pub fn evict_ahead(&self) {
        lock(&self.state).evicts_ahead = true;
    }

    /// Makes all commits, evictions, removals and registrations so far durable, including
    /// those of other threads. Lookups do not wait for it. Files that only waited for their records
    /// are free afterwards.
    ///
    /// # Errors
    /// Returns [`NotDurable`]: from then on nothing becomes durable, so nothing should be stored.
    /// Blocks that lookups find can be retrieved.
    pub fn sync(&self) -> Result<(), NotDurable> {
        self.write(&mut lock(&self.journal))
    }

    fn write(&self, journal: &mut JournalWriter) -> Result<(), NotDurable> {
        {
            let state = &mut *self.state();
            self.seal.check()?;
            let ahead = if state.evicts_ahead { state.catalog.wants_space() } else { 0 };
            let evicted = state.catalog.evict(None, ahead);
            evicted.map_err(|error| NotDurable { cause: error.to_string() })?;
        }
        let written = journal.write(|act| self.with(|catalog| act(catalog)));
        written.map_err(|error| self.seal.fail(error.to_string()))
    }

    /// Reads the journal again to find bytes that the device has changed since it was opened, at
    /// which the next opening would stop. Returns the damage; `None` if there is none. If there is
    /// and `repair` is set, the whole state is written into the other half of the journal, so that
    /// it opens again. [`DurableCatalog::sync`] waits meanwhile.
    ///
    /// # Errors
    /// Returns [`NotDurable`] if the repair fails, or nothing may be written any more.
    pub fn verify(&self, repair: bool) -> Result<Option<JournalError>, NotDurable> {
        let mut journal = lock(&self.journal);
        let Err(damage) = journal.verify() else { return Ok(None) };
        tracing::error!(%damage, repair, "the journal is damaged");
        if repair {
            self.seal.check()?;
            let renewed = journal.renew(|act| self.with(|catalog| act(catalog)));
            renewed.map_err(|error| self.seal.fail(error.to_string()))?;
        }
        Ok(Some(damage))
    }

    /// Returns the bytes written to the device since it was opened.
    #[must_use]
    pub fn written_bytes(&self) -> u64 {
        lock(&self.journal).written_bytes()
    }

    /// Makes everything durable, records the journal's length, and gives the device back. Nothing
    /// is written from now on.
    ///
    /// # Errors
    /// Same as [`DurableCatalog::sync`]: the device is given back all the same.
    pub fn close(&self) -> Result<(), NotDurable> {
        let mut journal = lock(&self.journal);
        let written = self.write(&mut journal);
        // A device that has failed is not asked again.
        let noted = journal.close(written.is_ok());
        // A commit in another thread must not succeed without its record.
        self.seal.close();
        written.and(noted.map_err(|error| NotDurable { cause: error.to_string() }))
    }
}
