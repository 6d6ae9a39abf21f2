//! Commits: data first, then the catalog, then the journal.
//!
//! A commit waits for the request's layers, and queues. The thread that gets the lock next does
//! the work for all commits queued by then: one flush of each device, one group in the journal.
//! Neither lookups nor transfers wait for that.

use std::collections::HashMap;

use kv_catalog::{BlockIo as _, NotDurable, PlantedBug, WriteId, planted};

use super::{Inner, block_device::BlockDevice, handles::Held, lock};
use crate::{error::StoreError, ids::JobId, plane::JobDone};

/// A request whose data is on the devices, perhaps in their volatile caches.
#[derive(Debug)]
pub(super) struct Ready {
    job: JobId,
    write: WriteId,
    recoveries: u64,
    checksums: Vec<u32>,
}

/// State of the commit path.
#[derive(Debug)]
pub(super) struct Commits {
    /// Devices with volatile caches.
    pub(super) volatile: Vec<BlockDevice>,
    /// Results of requests that another thread committed.
    results: HashMap<JobId, Result<(), StoreError>>,
}

impl Commits {
    pub(super) fn new(volatile: Vec<BlockDevice>) -> Self {
        Self { volatile, results: HashMap::new() }
    }
}

impl Inner {
    pub(super) fn commit(&self, job: JobId) -> Result<(), StoreError> {
        // This ends the job: dropping the handle does nothing from here on.
        let done = self.plane.with(|plane| plane.end(job))?;
        let Some(Held::Write(write)) = self.jobs().held.remove(&job) else {
            return Err(StoreError::NoSuchJob { job });
        };
        let JobDone { failure, recoveries, checksums, .. } = done;
        if let Some(failure) = failure {
            self.catalog.with(|catalog| catalog.abort(write))?;
            return Err(failure);
        }
        lock(&self.ready).push(Ready { job, write, recoveries, checksums });
        let mut commits = lock(&self.commits);
        if !commits.results.contains_key(&job) {
            self.commit_ready(&mut commits);
        }
        let result = commits.results.remove(&job);
        drop(commits);
        result.ok_or(StoreError::NoSuchJob { job })??;
        self.deallocate();
        Ok(())
    }

    /// Commits all that is ready; on a store that takes no writes any more, none of it. Adds the
    /// results to those of `commits`.
    fn commit_ready(&self, commits: &mut Commits) {
        let ready = std::mem::take(&mut *lock(&self.ready));
        let flushed = self.flush_devices(commits);
        let recoveries = self.plane.with(|plane| Ok(plane.recoveries()));
        let is_safe = |ready: &Ready| {
            // Without a volatile cache no data is lost by a reset.
            let same = commits.volatile.is_empty()
                || planted(PlantedBug::RecoveryIgnored)
                || recoveries.as_ref().is_ok_and(|now| *now == ready.recoveries);
            flushed.is_ok() && same
        };
        let safe: Vec<bool> = ready.iter().map(is_safe).collect();
        let mut files = Vec::new();
        self.catalog.with(|catalog| {
            for (Ready { write, checksums, .. }, safe) in ready.iter().zip(&safe) {
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
        });
        let permanent = flushed.and_then(|()| match planted(PlantedBug::AcknowledgeBeforeRecord) {
            true => Ok(()),
            false => self.sync(),
        });
        if permanent.is_err() {
            // A caller whose commit failed must not find its blocks.
            self.catalog.with(|catalog| files.into_iter().for_each(|file| catalog.lost(file)));
        }
        for (Ready { job, .. }, safe) in ready.into_iter().zip(safe) {
            let result = match (&permanent, safe) {
                (Err(refused), _) => Err(refused.clone().into()),
                (Ok(()), false) => Err(StoreError::Forgotten),
                (Ok(()), true) => Ok(()),
            };
            commits.results.insert(job, result);
        }
    }

    /// Flushes the data of everything that is ready.
    fn flush_devices(&self, commits: &mut Commits) -> Result<(), NotDurable> {
        self.catalog.check()?;
        if planted(PlantedBug::CommitBeforeFlush) {
            return Ok(());
        }
        for (at, device) in commits.volatile.iter_mut().enumerate() {
            if at > 0 && planted(PlantedBug::FirstDeviceFlushed) {
                continue;
            }
            let flushed = device.flush();
            if let (Err(error), false) = (flushed, planted(PlantedBug::FlushErrorIgnored)) {
                return Err(self.catalog.fail(error.to_string()));
            }
        }
        Ok(())
    }

    /// Writes the queued records.
    pub(super) fn sync(&self) -> Result<(), NotDurable> {
        if planted(PlantedBug::DeallocateBeforeEvictRecord) {
            self.deallocate();
        }
        self.catalog.sync()
    }
}
