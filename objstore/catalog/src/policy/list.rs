//! Doubly linked lists through one array, with a node for each file.

use crate::ids::FileId;

/// The end of a list.
const NONE: u32 = u32::MAX;

/// A file's links and its policy data.
#[derive(Debug, Clone, Copy, Default)]
pub struct Node {
    newer: u32,
    older: u32,
    /// Time of the last use, or of the insertion.
    pub stamp: u32,
    /// Data of the policy.
    pub mark: u8,
}

/// One list. Its files' links are in [`Nodes`].
#[derive(Debug, Clone, Copy)]
pub struct List {
    newest: u32,
    oldest: u32,
    len: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { newest: NONE, oldest: NONE, len: 0 }
    }
}

impl List {
    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn oldest(&self) -> Option<FileId> {
        some(self.oldest)
    }

    pub fn newest(&self) -> Option<FileId> {
        some(self.newest)
    }
}

fn some(at: u32) -> Option<FileId> {
    (at != NONE).then_some(FileId(at))
}

/// The nodes of all files, and the clock: files inserted so far.
#[derive(Debug)]
pub struct Nodes {
    nodes: Vec<Node>,
    now: u32,
}

impl Nodes {
    pub fn new(files: u32) -> Self {
        Self { nodes: vec![Node::default(); files as usize], now: 0 }
    }

    /// Advances the clock: one more file is inserted.
    pub fn tick(&mut self) {
        self.now = self.now.wrapping_add(1);
    }

    /// Returns the number of files.
    pub fn len(&self) -> u32 {
        self.nodes.len() as u32
    }

    /// Returns the clock.
    pub fn now(&self) -> u32 {
        self.now
    }

    /// Returns the number of files inserted since `stamp`.
    pub fn since(&self, stamp: u32) -> u32 {
        self.now.wrapping_sub(stamp)
    }

    pub fn node(&self, file: FileId) -> &Node {
        &self.nodes[file.at()]
    }

    pub fn node_mut(&mut self, file: FileId) -> &mut Node {
        &mut self.nodes[file.at()]
    }

    /// Makes `file` the newest of `list`, used now.
    pub fn push(&mut self, list: &mut List, file: FileId) {
        let second = std::mem::replace(&mut list.newest, file.0);
        let node = &mut self.nodes[file.at()];
        (node.newer, node.older, node.stamp) = (NONE, second, self.now);
        match second {
            NONE => list.oldest = file.0,
            _ => self.nodes[second as usize].newer = file.0,
        }
        list.len += 1;
    }

    /// Removes `file` from `list`.
    pub fn remove(&mut self, list: &mut List, file: FileId) {
        let Node { newer, older, .. } = self.nodes[file.at()];
        match newer {
            NONE => list.newest = older,
            _ => self.nodes[newer as usize].older = older,
        }
        match older {
            NONE => list.oldest = newer,
            _ => self.nodes[older as usize].newer = newer,
        }
        list.len -= 1;
    }

    /// Returns the oldest file of `list` that `may_go`. Files met before it are in use: they become
    /// the newest, so that the next search does not meet them again.
    pub fn oldest(&mut self, list: &mut List, may_go: &dyn Fn(FileId) -> bool) -> Option<FileId> {
        let last = list.newest()?;
        loop {
            let file = list.oldest()?;
            if may_go(file) {
                return Some(file);
            }
            self.remove(list, file);
            self.push(list, file);
            if file == last {
                return None;
            }
        }
    }
}
