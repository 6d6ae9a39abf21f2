//! Least recently used.

use super::Policy;
use crate::ids::FileId;

/// The end of a list.
const NONE: u32 = u32::MAX;

/// Evicts what was not used for the longest time.
#[derive(Debug)]
pub struct Lru {
    /// (newer, older) of each file.
    links: Vec<(u32, u32)>,
    /// (newest, oldest) of each namespace.
    ends: Vec<(u32, u32)>,
}

impl Lru {
    /// For this many files.
    #[must_use]
    pub fn new(files: u32) -> Self {
        Self { links: vec![(NONE, NONE); files as usize], ends: Vec::new() }
    }
}

impl Policy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn add_namespace(&mut self) {
        self.ends.push((NONE, NONE));
    }

    fn insert(&mut self, namespace: u32, file: FileId) {
        let ends = &mut self.ends[namespace as usize];
        let second = std::mem::replace(&mut ends.0, file.0);
        self.links[file.at()] = (NONE, second);
        match second {
            NONE => ends.1 = file.0,
            _ => self.links[second as usize].0 = file.0,
        }
    }

    fn touch(&mut self, namespace: u32, file: FileId) {
        self.remove(namespace, file);
        self.insert(namespace, file);
    }

    fn remove(&mut self, namespace: u32, file: FileId) {
        let (newer, older) = self.links[file.at()];
        let ends = &mut self.ends[namespace as usize];
        match newer {
            NONE => ends.0 = older,
            _ => self.links[newer as usize].1 = older,
        }
        match older {
            NONE => ends.1 = newer,
            _ => self.links[older as usize].0 = newer,
        }
    }

    fn clear(&mut self, namespace: u32) {
        self.ends[namespace as usize] = (NONE, NONE);
    }

    fn evict(&mut self, namespace: u32, may_go: &dyn Fn(FileId) -> bool) -> Option<FileId> {
        let newest = self.ends[namespace as usize].0;
        loop {
            let file = match self.ends[namespace as usize].1 {
                NONE => return None,
                oldest => FileId(oldest),
            };
            if may_go(file) {
                self.remove(namespace, file);
                return Some(file);
            }
            // In use, so it is not old: the next search does not meet it again.
            self.touch(namespace, file);
            if file.0 == newest {
                return None;
            }
        }
    }
}
