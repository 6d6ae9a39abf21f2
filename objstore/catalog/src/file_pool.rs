//! Allocation of GPU files.
//!
//! Free files are kept as runs of neighbours, because a run of files is contiguous on every device
//! for every row (see [`crate::layout`]): a request with consecutive files needs few large commands
//! instead of many small ones. So an allocation takes the smallest run that holds all of it, else
//! the largest runs, and freed files merge with their neighbours. Every step costs O(log runs).

mod groups;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use self::groups::Groups;
use crate::ids::FileId;

/// The free files of a store.
#[derive(Debug, Clone)]
pub struct FilePool {
    files: u32,
    free: u32,
    /// First file of each free run -> its length.
    by_start: BTreeMap<u32, u32>,
    /// (length, first file) of each free run.
    by_len: BTreeSet<(u32, u32)>,
    groups: Option<Groups>,
}

impl FilePool {
    /// Makes a pool of files 0 to `files - 1`, all free.
    pub fn new(files: u32) -> Self {
        let (by_start, by_len) = (BTreeMap::new(), BTreeSet::new());
        let mut pool = Self { files, free: files, by_start, by_len, groups: None };
        if files > 0 {
            pool.insert(0, files);
        }
        pool
    }

    /// Makes a pool of one file per item; those not used are free.
    pub fn from_used(used: impl Iterator<Item = bool>) -> Self {
        let (mut files, mut free) = (0, 0);
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for used in used {
            if !used {
                free += 1;
                match runs.last_mut() {
                    Some((start, len)) if *start + *len == files => *len += 1,
                    _ => runs.push((files, 1)),
                }
            }
            files += 1;
        }
        let by_len = runs.iter().map(|(start, len)| (*len, *start)).collect();
        Self { files, free, by_start: runs.into_iter().collect(), by_len, groups: None }
    }

    /// Starts to track groups of `size` files that are free as a whole. Groups that are free now
    /// count as written.
    pub fn watch_groups(&mut self, size: u32) {
        let mut groups = Groups::new(self.files, size);
        let runs = self.by_start.iter();
        runs.flat_map(|(start, len)| *start..start + len).for_each(|file| groups.freed(file));
        self.groups = Some(groups);
    }

    /// Returns the files of a group; 0 without [`FilePool::watch_groups`].
    pub fn group_files(&self) -> u32 {
        self.groups.as_ref().map_or(0, Groups::size)
    }

    /// Takes a group that is free as a whole and was written, if at least `least` files stay free.
    /// Returns its first file. [`FilePool::free`] returns its files to the pool.
    pub fn take_group(&mut self, least: u32) -> Option<FileId> {
        let groups = self.groups.as_mut()?;
        let size = groups.size();
        if self.free < least.saturating_add(size) {
            return None;
        }
        let first = groups.pop()?;
        let (&start, &len) = self.by_start.range(..=first.0).next_back()?;
        self.take((start, len), first.0..first.0 + size);
        Some(first)
    }

    /// Takes the free files with number `first` or higher, up to the next one that is not free, and
    /// at most `most`. [`FilePool::free`] returns them to the pool.
    pub fn take_from(&mut self, first: FileId, most: u32) -> Option<Range<u32>> {
        let ends_after = |(start, len): (&u32, &u32)| start + len > first.0;
        let before = self.by_start.range(..=first.0).next_back().filter(|run| ends_after(*run));
        let (&start, &len) = before.or_else(|| self.by_start.range(first.0..).next())?;
        let from = start.max(first.0);
        let files = from..from.saturating_add(most).min(start + len);
        self.take((start, len), files.clone());
        if let Some(groups) = &mut self.groups {
            files.clone().for_each(|file| groups.taken(file));
        }
        Some(files)
    }

    /// Takes files of a run.
    fn take(&mut self, (start, len): (u32, u32), files: Range<u32>) {
        self.remove(start, len);
        if start < files.start {
            self.insert(start, files.start - start);
        }
        if files.end < start + len {
            self.insert(files.end, start + len - files.end);
        }
        self.free -= files.end - files.start;
    }

    /// Returns the number of free files.
    pub fn free_files(&self) -> u32 {
        self.free
    }

    /// Returns the number of runs of free files: 1 means no fragmentation.
    pub fn runs(&self) -> usize {
        self.by_start.len()
    }

    /// Takes up to `count` files, in as few and as long runs as possible. Appends them to `out` and
    /// returns their number.
    pub fn allocate(&mut self, count: u32, out: &mut Vec<FileId>) -> u32 {
        let wanted = count.min(self.free);
        let mut left = wanted;
        while left > 0 {
            let best = self.by_len.range((left, 0)..).next().or_else(|| self.by_len.last());
            let Some(&(len, start)) = best else { unreachable!("free files are in no run") };
            self.remove(start, len);
            let take = len.min(left);
            out.extend((start..start + take).map(FileId));
            if let Some(groups) = &mut self.groups {
                (start..start + take).for_each(|file| groups.taken(file));
            }
            if take < len {
                self.insert(start + take, len - take);
            }
            left -= take;
        }
        self.free -= wanted;
        wanted
    }

    /// Returns a file to the pool.
    ///
    /// # Panics
    /// Panics if the file does not exist or is already free: two owners of one file would be silent
    /// corruption.
    pub fn free(&mut self, file: FileId) {
        assert!(file.0 < self.files, "file {file} of {}", self.files);
        let (mut start, mut len) = (file.0, 1);
        if let Some((&before, &before_len)) = self.by_start.range(..=file.0).next_back() {
            assert!(before + before_len <= file.0, "file {file} was free already");
            if before + before_len == file.0 {
                self.remove(before, before_len);
                start = before;
                len += before_len;
            }
        }
        if let Some(&after_len) = self.by_start.get(&(file.0 + 1)) {
            self.remove(file.0 + 1, after_len);
            len += after_len;
        }
        self.insert(start, len);
        self.free += 1;
        if let Some(groups) = &mut self.groups {
            groups.freed(file.0);
        }
    }

    fn insert(&mut self, start: u32, len: u32) {
        self.by_start.insert(start, len);
        self.by_len.insert((len, start));
    }

    fn remove(&mut self, start: u32, len: u32) {
        self.by_start.remove(&start);
        self.by_len.remove(&(len, start));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Counts maximal runs of free files, the slow way.
    fn runs(free: &[bool]) -> usize {
        free.chunk_by(|a, b| a == b).filter(|run| run[0]).count()
    }

    proptest! {
        #[test]
        fn against_a_bitmap(
            files in 1u32..200,
            steps in proptest::collection::vec((any::<bool>(), any::<u16>()), 0..200),
        ) {
            let mut pool = FilePool::new(files);
            let mut free = vec![true; files as usize];
            for (allocate, number) in steps {
                if allocate {
                    let count = u32::from(number) % 40;
                    let fits = free.chunk_by(|a, b| a == b)
                        .any(|run| run[0] && run.len() >= count as usize);
                    let mut got = Vec::new();
                    let n = pool.allocate(count, &mut got);
                    prop_assert_eq!(n as usize, got.len());
                    prop_assert_eq!(n, count.min(free.iter().filter(|f| **f).count() as u32));
                    for file in &got {
                        prop_assert!(std::mem::replace(&mut free[file.at()], false));
                    }
                    if fits {
                        prop_assert!(got.windows(2).all(|p| p[1].0 == p[0].0 + 1), "one run");
                    }
                } else {
                    let file = u32::from(number) % files;
                    if !std::mem::replace(&mut free[file as usize], true) {
                        pool.free(FileId(file));
                    }
                }
                prop_assert_eq!(pool.free_files() as usize, free.iter().filter(|f| **f).count());
                prop_assert_eq!(pool.runs(), runs(&free));
            }
        }
    }

    proptest! {
        /// Each group that becomes free is returned once, and only while enough files stay free.
        #[test]
        fn groups_against_a_bitmap(
            files in 1u32..60,
            size in 1u32..8,
            least in 0u32..20,
            steps in proptest::collection::vec((0u8..3, any::<u16>()), 0..200),
        ) {
            let mut pool = FilePool::new(files);
            pool.watch_groups(size);
            let mut free = vec![true; files as usize];
            let mut written = vec![true; (files / size) as usize];
            for (step, number) in steps {
                let mut got = Vec::new();
                match step {
                    0 => {
                        pool.allocate(u32::from(number) % 20, &mut got);
                        for file in &got {
                            free[file.at()] = false;
                            if let Some(written) = written.get_mut(file.at() / size as usize) {
                                *written = true;
                            }
                        }
                    }
                    1 => {
                        let file = u32::from(number) % files;
                        if !std::mem::replace(&mut free[file as usize], true) {
                            pool.free(FileId(file));
                        }
                    }
                    _ => {
                        let wanted = |group: &usize| {
                            let files = group * size as usize..(group + 1) * size as usize;
                            written[*group] && free[files].iter().all(|free| *free)
                        };
                        let some = (0..written.len()).any(|group| wanted(&group));
                        let left = free.iter().filter(|free| **free).count() as u32;
                        let taken = pool.take_group(least);
                        prop_assert_eq!(taken.is_some(), some && left >= least + size);
                        if let Some(first) = taken {
                            let group = (first.0 / size) as usize;
                            prop_assert!(wanted(&group) && first.0.is_multiple_of(size));
                            written[group] = false;
                            free[first.at()..][..size as usize].fill(number % 2 == 0);
                            for file in (first.0..first.0 + size).filter(|_| number % 2 == 0) {
                                pool.free(FileId(file));
                            }
                        }
                    }
                }
                prop_assert_eq!(pool.free_files() as usize, free.iter().filter(|f| **f).count());
                prop_assert_eq!(pool.runs(), runs(&free));
            }
        }
    }

    #[test]
    fn free_files_are_taken_in_order() {
        let mut pool = FilePool::from_used([1, 0, 0, 0, 1, 0].into_iter().map(|used| used == 1));
        assert_eq!(pool.take_from(FileId(0), 2), Some(1..3));
        assert_eq!((pool.free_files(), pool.runs()), (2, 2));
        assert_eq!(pool.take_from(FileId(0), 9), Some(3..4));
        assert_eq!(pool.take_from(FileId(6), 9), None);
        (1..4).for_each(|file| pool.free(FileId(file)));
        assert_eq!(pool.take_from(FileId(2), 1), Some(2..3));
        assert_eq!(pool.take_from(FileId(4), 9), Some(5..6));
        assert_eq!((pool.free_files(), pool.runs()), (2, 2));
    }

    #[test]
    #[should_panic(expected = "was free already")]
    fn a_double_free_is_caught() {
        let mut pool = FilePool::new(8);
        pool.allocate(4, &mut Vec::new());
        pool.free(FileId(2));
        pool.free(FileId(2));
    }
}
