//! Write-back: writes published requests to the devices in the background.
//!
//! A commit publishes such a request: lookups find its blocks, whose bytes are in host memory only.
//! It becomes permanent in the same order as every commit: data, flush of the devices, record. The
//! thread that holds the lock of commits does that, for everything published by then. Only
//! [`Store::sync_journal`] and its callers wait for it.

use kv_catalog::{PlantedBug, WriteId, planted};
use nvme_driver::Waiter;

use super::{
    Inner,
    commit::{Commits, Ready},
    lock,
};
use crate::{
    error::StoreError,
    plane::{JobId, Plane, Ticket},
};

/// Write attempts before a request is given up.
const TRIES_MAX: u32 = 3;

/// A request that lookups find and that is not permanent yet.
#[derive(Debug)]
pub(super) struct Published {
    pub(super) job: JobId,
    pub(super) write: WriteId,
    pub(super) checksums: Vec<u32>,
    /// Failed attempts to make it permanent.
    pub(super) tries: u32,
    /// Set while it is being written to the devices.
    pub(super) ticket: Option<Ticket>,
}

impl Inner {
    /// Makes the blocks of a request in host memory visible to lookups.
    pub(super) fn publish(&self, published: Published) -> Result<(), StoreError> {
        self.keys().catalog.publish(published.write, &published.checksums)?;
        lock(&self.published).push(published);
        self.tend();
        Ok(())
    }

    /// Continues write-back, unless another thread does or transfers that an engine waits for are
    /// in flight. It stops waiting for those when half of the memory for dirty blocks is used. Each
    /// batch is small, so it delays other transfers only briefly.
    pub(super) fn tend(&self) {
        let Ok(mut commits) = self.commits.try_lock() else { return };
        commits.behind.append(&mut lock(&self.published));
        if commits.behind.is_empty() || self.keys().check_writable().is_err() {
            return;
        }
        let tended = self.with_plane(Plane::wants_writing).and_then(|may_write| {
            if !may_write {
                return Ok(());
            }
            // This flushes devices and writes the journal.
            self.end_behind(&mut commits)?;
            if commits.behind.iter().any(|one| one.ticket.is_some()) {
                return Ok(());
            }
            let depth_bytes = commits.write_depth_bytes;
            self.start_behind(&mut commits, depth_bytes)
        });
        if let Err(error) = tended {
            // Blocks that were given up are misses; the next `sync_journal` returns the error.
            tracing::warn!(%error, "writing back what is in host memory");
            commits.gave_up.get_or_insert(error);
        }
    }

    /// Gives up published requests whose blocks lookups no longer find, without writing them.
    /// Returns true if there were any.
    pub(super) fn spare(&self) -> bool {
        let Ok(mut commits) = self.commits.try_lock() else { return false };
        commits.behind.append(&mut lock(&self.published));
        let before = commits.behind.len();
        commits.behind.retain(|one| {
            let is_left = self.with_plane(|plane| {
                let keys = self.keys();
                let is_free = one.ticket.is_none();
                Ok(!is_free || plane.spare(one.job, |file| keys.catalog.is_stored(file))?)
            });
            if matches!(is_left, Ok(false)) {
                self.give_up(one.job, one.write);
            }
            !matches!(is_left, Ok(false))
        });
        commits.behind.len() < before
    }

    /// Makes everything that was published permanent, or gives it up.
    pub(super) fn write_back(&self, commits: &mut Commits) -> Result<(), StoreError> {
        commits.behind.append(&mut lock(&self.published));
        let mut result = commits.gave_up.take().map_or(Ok(()), Err);
        let mut waiter = Waiter::new(&*self.clock, self.clock.now() + self.wait_timeout);
        while !commits.behind.is_empty() {
            let started = self.start_behind(commits, u64::MAX);
            if let Some(ticket) = commits.behind.iter().find_map(|one| one.ticket.as_ref()) {
                // The job holds the result.
                let _ = self.wait_for(ticket);
                waiter = Waiter::new(&*self.clock, self.clock.now() + self.wait_timeout);
            } else if started.is_ok() && !commits.behind.is_empty() && !waiter.wait() {
                // Other requests use all IOCBs.
                result = Err(StoreError::Busy { in_flight: commits.behind.len() as u32 });
                break;
            }
            let ended = started.and(self.end_behind(commits));
            // A store that has failed writes nothing any more.
            self.keys().check()?;
            result = result.and(ended);
        }
        result
    }

    /// Starts writing as many requests as possible, up to `bytes_max` or one block.
    fn start_behind(&self, commits: &mut Commits, bytes_max: u64) -> Result<(), StoreError> {
        let (mut left, mut result) = (Vec::new(), Ok(()));
        let mut blocks = (bytes_max / self.superblock.layout.shape.block_bytes()).max(1) as usize;
        let mut is_writing = commits.behind.iter().any(|one| one.ticket.is_some());
        for mut one in std::mem::take(&mut commits.behind) {
            if one.ticket.is_none() && blocks > 0 {
                if planted(PlantedBug::RecordBeforeWriteBack) {
                    lock(&self.ready).push(Ready::behind(one, 0));
                    continue;
                }
                // Blocks that were dropped meanwhile need not be written.
                let begun = self.with_plane(|plane| {
                    let wanted = |file| self.keys().catalog.is_stored(file);
                    plane.write_behind(one.job, blocks, wanted)
                });
                match begun {
                    Ok(Some((ticket, started))) => {
                        one.ticket = Some(ticket);
                        (is_writing, blocks) = (true, blocks - started);
                    }
                    Err(StoreError::Busy { .. }) => {}
                    // Requests that are being written use the memory.
                    Err(StoreError::Ring(_)) if is_writing => {}
                    ended => {
                        self.give_up(one.job, one.write);
                        result = result.and(ended.map(|_| ()));
                        continue;
                    }
                }
            }
            left.push(one);
        }
        commits.behind = left;
        result
    }

    /// Commits requests that have been written. Failed ones are retried, or given up.
    fn end_behind(&self, commits: &mut Commits) -> Result<(), StoreError> {
        let (mut left, mut result) = (Vec::new(), Ok(()));
        for mut one in std::mem::take(&mut commits.behind) {
            let job = one.job;
            let over = |plane: &mut Plane| {
                plane.reap()?;
                let ticket = one.ticket.as_ref().filter(|ticket| plane.is_over(ticket));
                ticket.map(|ticket| plane.end_behind(job, ticket)).transpose()
            };
            match self.with_plane(over) {
                Ok(None) => left.push(one),
                Ok(Some(None)) => {
                    one.ticket = None;
                    left.push(one);
                }
                Ok(Some(Some(recoveries))) => {
                    lock(&self.ready).push(Ready::behind(one, recoveries))
                }
                Err(error) if self.again(&mut one) => {
                    tracing::warn!(%error, "what is in host memory is written again");
                    left.push(one);
                }
                Err(error) => {
                    self.give_up(one.job, one.write);
                    result = result.and(Err(error));
                }
            }
        }
        commits.behind.append(&mut left);
        if !lock(&self.ready).is_empty() {
            result = result.and(self.commit_ready(commits));
        }
        result
    }

    /// Resets the request for another attempt. Returns false after the last one.
    pub(super) fn again(&self, one: &mut Published) -> bool {
        one.ticket = None;
        one.tries += 1;
        one.tries < TRIES_MAX
    }

    /// Gives up a published request: its blocks are misses from now on.
    pub(super) fn give_up(&self, job: JobId, write: WriteId) {
        // A store that has failed has nothing left to release.
        let _ = self.with_plane(|plane| {
            plane.clean(job);
            let ended = self.keys().catalog.abort(write);
            debug_assert!(ended.is_ok(), "{ended:?}");
            Ok(())
        });
    }
}
