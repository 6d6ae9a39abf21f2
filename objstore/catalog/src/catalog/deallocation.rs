//! Groups of files that hold nothing, for drives that want to know.

use super::{Catalog, State, drop::SWEEP_ENTRIES};
use crate::{
    ids::FileId,
    planted::{PlantedBug, planted},
};

impl Catalog {
    /// Takes note from now on of groups of `files` files that are free as a whole
    /// ([`Geometry::group`](crate::Geometry::group)). Call it when everything was recovered.
    ///
    /// # Panics
    /// When `files` is 0.
    pub fn watch_groups(&mut self, files: u32) {
        self.pool.watch_groups(files);
    }

    /// Up to `most` groups, by their first files, that hold nothing and are expected to stay so for
    /// a while: all of their files are free, the journal has that for good, and as many files as
    /// are kept free ahead remain without them. Nobody gets their files before
    /// [`Catalog::deallocated`]. A group comes again only after it was written.
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

    /// The files of these groups can be used again, whether their drives deallocated them or not.
    /// Others are left alone.
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
