//! Groups of files that hold no data, for drives that receive deallocate (TRIM) hints.

use super::{Catalog, State, drop::SWEEP_ENTRIES};
use crate::{
    ids::FileId,
    planted::{PlantedBug, planted},
};

impl Catalog {
    /// Starts to track groups of `files` files that are free as a whole
    /// ([`Geometry::group`](crate::Geometry::group)). Call it after recovery.
    ///
    /// # Panics
    /// Panics if `files` is 0.
    pub fn watch_groups(&mut self, files: u32) {
        self.pool.watch_groups(files);
    }

    /// Returns up to `most` groups, by their first files, that hold nothing and should stay empty
    /// for a while: all of their files are free, durably so in the journal, and the number of files
    /// kept free ahead remains without them. Their files are not allocated before
    /// [`Catalog::deallocated`]. A group is returned again only after it was written.
    pub fn unused_groups(&mut self, most: usize) -> Vec<FileId> {
        if planted(PlantedBug::DeallocateBeforeEvictRecord) {
            let size = self.pool.group_files();
            let firsts = self.log.limbo_files().map(|file| FileId(file.0 / size * size));
            let holds_nothing = |first: &FileId| {
                let group = self.entries.get(first.at()..first.at() + size as usize);
                group.is_some_and(|group| group.iter().all(|entry| entry.state == State::Free))
            };
            return firsts.filter(holds_nothing).collect();
        }
        self.sweep(u32::MAX, SWEEP_ENTRIES);
        let ahead = (self.config.files / 64).min(self.config.files_ahead);
        let groups = std::iter::from_fn(|| self.pool.take_group(ahead));
        let groups: Vec<FileId> = groups.take(most).collect();
        self.deallocating.extend(&groups);
        groups
    }

    /// Returns the files of these groups to the pool, whether their drives deallocated them or not.
    /// Ignores groups that were not handed out.
    pub fn deallocated(&mut self, groups: &[FileId]) {
        for first in groups {
            let Some(at) = self.deallocating.iter().position(|group| group == first) else {
                continue;
            };
            self.deallocating.swap_remove(at);
            let files = self.pool.group_files();
            (first.0..first.0 + files).for_each(|file| self.pool.free(FileId(file)));
        }
    }
}
