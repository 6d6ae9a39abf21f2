//! Groups of which every file is free, so that drives can deallocate them.

use std::collections::VecDeque;

use crate::ids::FileId;

/// Tracks groups that are free and were written since they were last deallocated.
#[derive(Debug, Clone)]
pub(super) struct Groups {
    /// Files of a group.
    size: u32,
    /// Free files of each whole group.
    free: Vec<u32>,
    /// Written since the last deallocation, or unknown.
    written: Vec<bool>,
    /// Groups that became free, in that order; some are in use again.
    ready: VecDeque<u32>,
}

impl Groups {
    /// Makes a tracker for `files` files. Nothing is free yet, and everything counts as written.
    pub(super) fn new(files: u32, size: u32) -> Self {
        let groups = (files / size) as usize;
        Self { size, free: vec![0; groups], written: vec![true; groups], ready: VecDeque::new() }
    }

    pub(super) fn size(&self) -> u32 {
        self.size
    }

    pub(super) fn freed(&mut self, file: u32) {
        let group = file / self.size;
        // A partial group at the end is not tracked.
        let Some(free) = self.free.get_mut(group as usize) else { return };
        *free += 1;
        if *free == self.size && self.written[group as usize] {
            self.ready.push_back(group);
        }
    }

    /// Counts a file as allocated, and its group as written.
    pub(super) fn taken(&mut self, file: u32) {
        let group = (file / self.size) as usize;
        if let Some(free) = self.free.get_mut(group) {
            *free -= 1;
            self.written[group] = true;
        }
    }

    /// Takes the group that has been free longest. None of its files counts as free afterwards, and
    /// the group does not count as written.
    pub(super) fn pop(&mut self) -> Option<FileId> {
        while let Some(group) = self.ready.pop_front() {
            let at = group as usize;
            if self.free[at] == self.size && self.written[at] {
                (self.free[at], self.written[at]) = (0, false);
                return Some(FileId(group * self.size));
            }
        }
        None
    }
}
