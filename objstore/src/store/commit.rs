//! Commits: data first, then the catalog, then the journal.
//!
//! Commits of several threads share their flushes ([`crate::Plane::end`]) and the groups of the
//! journal ([`kv_catalog::DurableCatalog::sync`]): one is for all that have waited for the one
//! before. Neither lookups nor transfers wait for that.

use kv_catalog::FileId;

use super::{Inner, handles::Held};
use crate::{error::StoreError, ids::JobId, plane::JobDone};

impl Inner {
    pub(super) fn commit(&self, job: JobId) -> Result<(), StoreError> {
        // This ends the job: dropping the handle does nothing from here on.
        let done = self.plane.end(&[job])?.pop();
        let held = self.jobs().held.remove(&job);
        let (Some(done), Some(Held::Write(write))) = (done, held) else {
            return Err(StoreError::NoSuchJob { job });
        };
        let JobDone { failure, checksums, .. } = done;
        let committed = failure.map_or(Ok(()), Err).and_then(|()| {
            self.catalog.change(|catalog| {
                let files = catalog.own_files(write);
                catalog.written(write, 0, &checksums)?;
                catalog.commit(write)?;
                Ok::<Vec<FileId>, StoreError>(files)
            })
        });
        let files = match committed {
            Ok(files) => files,
            Err(error) => {
                self.give_back(Held::Write(write));
                return Err(error);
            }
        };
        self.make_permanent(files)
    }

    /// Makes the blocks of commits permanent. A caller whose commit failed must not find them.
    pub(super) fn make_permanent(&self, files: Vec<FileId>) -> Result<(), StoreError> {
        if let Err(refused) = self.catalog.sync() {
            self.catalog.with(|catalog| files.into_iter().for_each(|file| catalog.lost(file)));
            return Err(refused.into());
        }
        self.deallocate();
        Ok(())
    }
}
