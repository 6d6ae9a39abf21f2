//! Commits: data first, then the catalog, then the journal.
//!
//! A commit queues behind the one that is in progress. The next thread does the work for all that
//! are queued by then: one flush of each device (`Plane::settle`), and one group in the journal
//! ([`kv_catalog::DurableCatalog::sync`]). With a queue for each of the two, of 16 commits that
//! share a flush the first one to go on would write its record alone, and 15 would wait for that,
//! before a second group has theirs. Neither lookups nor transfers wait.

use kv_catalog::{FileId, NotDurable, WriteId};

use super::{Inner, handles::Held, lock};
use crate::{error::StoreError, ids::JobId, plane::JobDone};

impl Inner {
    pub(super) fn commit(&self, job: JobId) -> Result<(), StoreError> {
        // This ends the job: dropping the handle does nothing from here on.
        self.plane.wait_for_job(job)?;
        let ended = self.plane.with(|plane| plane.end(job))?;
        let Some(Held::Write(write)) = lock(&self.jobs).held.remove(&job) else {
            return Err(StoreError::no_such_job(job));
        };
        lock(&self.queued).push((ended, write));
        let mut committed = lock(&self.committed);
        if !committed.contains_key(&job) {
            let queued = std::mem::take(&mut *lock(&self.queued));
            committed.extend(self.commit_all(queued));
        }
        let result = committed.remove(&job);
        drop(committed);
        result.unwrap_or_else(|| Err(StoreError::no_such_job(job)))?;
        self.deallocate();
        Ok(())
    }

    /// Commits ended jobs, each whose data is permanent. Returns their results.
    fn commit_all(&self, queued: Vec<(JobDone, WriteId)>) -> Vec<(JobId, Result<(), StoreError>)> {
        let (mut ended, writes): (Vec<_>, Vec<_>) = queued.into_iter().unzip();
        let unsettled = self.plane.settle(&mut ended).err().map(|error| error.to_string());
        let mut files = Vec::new();
        let mut results = Vec::new();
        for (JobDone { job, failure, checksums, .. }, write) in ended.into_iter().zip(writes) {
            let kept = match unsettled.clone() {
                None => Ok(()),
                // It may have flushed nothing. One that was closed says so.
                Some(cause) => self.plane.check_open().and(Err(StoreError::Failed { cause })),
            };
            let committed = kept.and_then(|()| failure.map_or(Ok(()), Err)).and_then(|()| {
                self.catalog.change(|catalog| {
                    let own = catalog.own_files(write);
                    catalog.written(write, 0, &checksums)?;
                    catalog.commit(write)?;
                    files.extend(own);
                    Ok(())
                })
            });
            if committed.is_err() {
                self.give_back(Held::Write(write));
            }
            results.push((job, committed));
        }
        let mut stored = results.iter_mut().filter(|(_, result)| result.is_ok()).peekable();
        if stored.peek().is_some()
            && let Err(refused) = self.make_permanent(files)
        {
            stored.for_each(|(_, result)| *result = Err(refused.clone().into()));
        }
        results
    }

    /// Makes the blocks of commits permanent. A caller whose commit failed must not find them.
    pub(super) fn make_permanent(&self, files: Vec<FileId>) -> Result<(), NotDurable> {
        self.catalog.sync().inspect_err(|_| {
            self.catalog.with(|catalog| files.into_iter().for_each(|file| catalog.lost(file)));
        })
    }
}
