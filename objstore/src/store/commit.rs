//! Commits: data first, then the catalog, then the journal.
//!
//! A commit waits for the writing's layers, and queues. Whoever gets the lock next does the work
//! for all that have queued by then: one flush of each device, one group in the journal. Neither
//! lookups nor transfers wait for that.

use std::collections::HashMap;

use kv_catalog::{BlockIo as _, PlantedBug, WriteId, planted};

use super::{
    Inner, Store,
    behind::Published,
    block_device::BlockDevice,
    handles::{Committed, Held, Writing},
    lock,
    writer::JournalWriter,
};
use crate::{
    error::StoreError,
    plane::{JobDone, JobFailure, JobId},
};

/// A writing whose data is on the devices, perhaps in their volatile caches.
#[derive(Debug)]
pub(super) struct Ready {
    job: JobId,
    write: WriteId,
    recoveries: u64,
    checksums: Vec<u32>,
    /// It was published, and tried so often to be written: nobody waits for its result.
    tries: Option<u32>,
}

impl Ready {
    /// What was written to the devices behind the engine's back.
    pub(super) fn behind(published: Published, recoveries: u64) -> Self {
        let Published { job, write, checksums, tries, .. } = published;
        Self { job, write, recoveries, checksums, tries: Some(tries) }
    }
}

/// Why a writing was not committed.
#[derive(Debug)]
enum Refused {
    /// Something was not made permanent.
    Journal(String),
    /// A device was recovered before it was flushed.
    Forgotten,
}

/// What makes commits permanent.
#[derive(Debug)]
pub(super) struct Commits {
    pub(super) journal: JournalWriter,
    /// Devices with volatile caches.
    pub(super) volatile: Vec<BlockDevice>,
    /// What became of writings that another thread committed.
    results: HashMap<JobId, Result<(), Refused>>,
    /// What was published, and is being made permanent.
    pub(super) behind: Vec<Published>,
    /// Why some of these were given up, unless that was said.
    pub(super) gave_up: Option<StoreError>,
    /// Bytes of these that are written at a time, or a block.
    pub(super) write_depth_bytes: u64,
}

impl Commits {
    pub(super) fn new(journal: JournalWriter, volatile: Vec<BlockDevice>) -> Self {
        Self {
            journal,
            volatile,
            results: HashMap::new(),
            behind: Vec::new(),
            gave_up: None,
            write_depth_bytes: kv_schedule::Config::default().write_depth_bytes,
        }
    }
}

impl Store {
    /// Waits for the layers in flight and, if all of all layers was stored, makes the blocks
    /// permanent and visible: they are found by lookups, also after a crash or loss of power.
    /// Otherwise nothing of it is found, and the files are free again; but a record that a device
    /// did not acknowledge may have got there all the same, and then the blocks, all of them whole,
    /// are found when the store is opened again.
    ///
    /// With [`crate::DramMode::WriteBack`] what was copied to memory of this process becomes
    /// visible alone. It is permanent when the next [`Store::sync_journal`] has returned, or
    /// earlier. A crash before leaves all, some or none of these blocks, each of them whole. Blocks
    /// that cannot be written are misses from then on: [`StoreError::Stale`] for who holds them.
    ///
    /// # Errors
    /// [`StoreError::Transfer`] when a layer failed, [`StoreError::Incomplete`] when one was never
    /// started, [`StoreError::Forgotten`] when a device may have lost the data again,
    /// [`StoreError::JournalFailed`] when a device did not take the data or the record for good,
    /// now or before: nothing is committed after that until the store is opened again.
    /// [`StoreError::Foreign`], [`StoreError::Failed`].
    pub fn commit(&self, writing: Writing) -> Result<Committed, StoreError> {
        self.own(&writing.handle, "writing")?;
        let Writing { handle, accepted, written } = writing;
        let job = handle.job;
        while let Some(ticket) = self.inner.with_plane(|plane| Ok(plane.in_flight(job)))? {
            // What became of it is in the job.
            let _ = self.wait(ticket);
        }
        self.inner.commit(job)?;
        Ok(Committed { accepted, written })
    }

    /// Makes everything permanent that was evicted, pinned, cleared or registered so far, and what
    /// is only in memory of this process ([`crate::DramMode::WriteBack`]). Other commits are
    /// permanent when they return.
    ///
    /// # Errors
    /// [`StoreError::JournalFailed`], [`StoreError::Failed`]. For blocks that could not be written
    /// from memory, and are misses now, [`StoreError::Transfer`] or [`StoreError::ReadOnly`] of the
    /// first; the rest is permanent all the same.
    pub fn sync_journal(&self) -> Result<(), StoreError> {
        self.inner.keys().check_writable()?;
        let mut commits = lock(&self.inner.commits);
        let behind = self.inner.write_back(&mut commits);
        let written = self.inner.write_group(&mut commits);
        drop(commits);
        written.map_err(|cause| StoreError::JournalFailed { cause })?;
        self.inner.deallocate();
        behind
    }
}

impl Inner {
    fn commit(&self, job: JobId) -> Result<(), StoreError> {
        // The job is the catalog's from here on: dropping the handle finds it gone.
        let done = self.with_plane(|plane| plane.end(job))?;
        let Some(Held::Write(write)) = self.keys().held.remove(&job) else {
            return Err(StoreError::NoSuchJob { job });
        };
        let JobDone { failure, recoveries, checksums, is_dirty, .. } = done;
        if let Some(failure) = failure {
            self.keys().catalog.abort(write)?;
            return Err(match failure {
                JobFailure::Transfer(failure) => StoreError::Transfer { failure },
                JobFailure::Incomplete(layer) => StoreError::Incomplete { layer },
            });
        }
        if is_dirty {
            // What could not become permanent is not published.
            let writable = self.keys().check_writable();
            return match writable {
                Ok(()) => self.publish(Published { job, write, checksums, tries: 0, ticket: None }),
                Err(error) => {
                    self.give_up(job, write);
                    Err(error)
                }
            };
        }
        lock(&self.ready).push(Ready { job, write, recoveries, checksums, tries: None });
        let mut commits = lock(&self.commits);
        if !commits.results.contains_key(&job) {
            // The result is among the others.
            let _ = self.commit_ready(&mut commits);
        }
        let result = commits.results.remove(&job);
        drop(commits);
        self.tend();
        match result {
            Some(Ok(())) => {
                self.deallocate();
                Ok(())
            }
            Some(Err(Refused::Journal(cause))) => Err(StoreError::JournalFailed { cause }),
            Some(Err(Refused::Forgotten)) => Err(StoreError::Forgotten),
            None => Err(StoreError::NoSuchJob { job }),
        }
    }

    /// Commits all that is ready; on a store that takes no writes any more, nothing of it.
    pub(super) fn commit_ready(&self, commits: &mut Commits) -> Result<(), StoreError> {
        let ready = std::mem::take(&mut *lock(&self.ready));
        let flushed = self.flush_devices(commits);
        let recoveries = self.with_plane(|plane| Ok(plane.recoveries()));
        let is_safe = |ready: &Ready| {
            // Without a volatile cache nothing is forgotten.
            let same = commits.volatile.is_empty()
                || planted(PlantedBug::RecoveryIgnored)
                || recoveries.as_ref().is_ok_and(|now| *now == ready.recoveries);
            flushed.is_ok() && same
        };
        let (ready, again): (Vec<Ready>, Vec<Ready>) =
            ready.into_iter().partition(|ready| ready.tries.is_none() || is_safe(ready));
        let safe: Vec<bool> = ready.iter().map(is_safe).collect();
        // What a device has forgotten is in memory yet.
        for Ready { job, write, checksums, tries, .. } in again {
            let tries = tries.unwrap_or_default();
            let mut one = Published { job, write, checksums, tries, ticket: None };
            match flushed.is_ok() && self.again(&mut one) {
                true => commits.behind.push(one),
                false => self.give_up(job, write),
            }
        }
        let mut files = Vec::new();
        {
            let mut keys = self.keys();
            for (Ready { write, checksums, .. }, safe) in ready.iter().zip(&safe) {
                let catalog = &mut keys.catalog;
                if *safe {
                    files.extend(catalog.own_files(*write));
                }
                let ended = match safe {
                    true => catalog
                        .written(*write, 0, checksums)
                        .and_then(|_| catalog.commit(*write))
                        .map(|_| ()),
                    false => catalog.abort(*write),
                };
                debug_assert!(ended.is_ok(), "{ended:?}");
            }
        }
        let permanent = flushed.and_then(|()| match planted(PlantedBug::AcknowledgeBeforeRecord) {
            true => Ok(()),
            false => self.write_group(commits),
        });
        if permanent.is_err() {
            // Whoever is told that a commit failed must not find its blocks.
            let mut keys = self.keys();
            files.into_iter().for_each(|file| keys.catalog.lost(file));
        }
        let cause = permanent.err();
        for (Ready { job, tries, .. }, safe) in ready.into_iter().zip(safe) {
            if tries.is_some() {
                // A store that has failed has nothing left to give back.
                let _ = self.with_plane(|plane| {
                    plane.clean(job);
                    Ok(())
                });
                continue;
            }
            let result = match (&cause, safe) {
                (Some(cause), _) => Err(Refused::Journal(cause.clone())),
                (None, false) => Err(Refused::Forgotten),
                (None, true) => Ok(()),
            };
            commits.results.insert(job, result);
        }
        cause.map_or(Ok(()), |cause| Err(StoreError::JournalFailed { cause }))
    }

    /// Refuses to make anything permanent after something could not be. A device that failed to
    /// flush its cache may have dropped from it what was written, and say of the next flush that it
    /// succeeded.
    fn check_permanent(&self) -> Result<(), String> {
        self.keys().read_only.clone().map_or(Ok(()), Err)
    }

    /// Makes the data of everything that is ready permanent.
    fn flush_devices(&self, commits: &mut Commits) -> Result<(), String> {
        self.check_permanent()?;
        if planted(PlantedBug::CommitBeforeFlush) {
            return Ok(());
        }
        for (at, device) in commits.volatile.iter_mut().enumerate() {
            if at > 0 && planted(PlantedBug::FirstDeviceFlushed) {
                continue;
            }
            let flushed = device.flush();
            if let (Err(error), false) = (flushed, planted(PlantedBug::FlushErrorIgnored)) {
                return Err(self.read_only(error.to_string()));
            }
        }
        Ok(())
    }

    /// Writes the records that have queued. Files that only waited for their records are free
    /// afterwards.
    fn write_group(&self, commits: &mut Commits) -> Result<(), String> {
        self.check_permanent()?;
        {
            let mut keys = self.keys();
            let ahead = if keys.is_crowded { keys.catalog.wants_space() } else { 0 };
            let evicted = keys.catalog.evict(None, ahead);
            debug_assert!(evicted.is_ok(), "{evicted:?}");
        }
        if planted(PlantedBug::DeallocateBeforeEvictRecord) {
            self.deallocate();
        }
        let written = commits.journal.write(|act| act(&mut self.keys().catalog));
        written.map_err(|error| self.read_only(error.to_string()))
    }

    pub(super) fn journal_bytes(&self) -> u64 {
        lock(&self.commits).journal.written_bytes()
    }

    /// From now on nothing is stored.
    pub(super) fn read_only(&self, cause: String) -> String {
        tracing::error!(cause, "the store takes no writes any more");
        self.keys().read_only.get_or_insert(cause).clone()
    }
}
