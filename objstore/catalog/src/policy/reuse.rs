//! Evicts the file whose reuse is least likely soon, by the store's own history, and refuses blocks
//! that are worth less than it.
//!
//! Each namespace has an LRU list for each kind of file: those used once (when they were written),
//! 2 or 3 times, 4 to 7 times, and so on. The oldest files of the lists compete, and the victim is
//! the one of which the least uses per time can be expected ([`super::history`]). With one list
//! this would be LRU. A scan fills only the first list, whose rates fall; then most of a scan is
//! not stored at all.
//!
//! Uses of evicted and of refused blocks are remembered for a while ([`super::ghost`]). (The lists
//! and ghosts are from ARC, Megiddo and Modha, FAST 2003.)

use super::{
    Candidate, Policy, Tiers,
    ghost::{Ghost, Ghosts, USES_MAX},
    history::{History, KINDS, kind},
    list::{List, Nodes},
};
use crate::ids::FileId;

/// A refused block that is wanted again is of the same request until one block for this many of the
/// store's has passed.
const SAME_REQUEST: u32 = 16;

/// The reuse-rate policy; see the module documentation. The mark of a node counts its uses.
#[derive(Debug)]
pub struct ReuseRate {
    nodes: Nodes,
    /// By kind, of each namespace.
    lists: Vec<[List; KINDS]>,
    ghosts: Ghosts,
    history: History,
}

impl ReuseRate {
    pub fn new(files: u32) -> Self {
        Self {
            nodes: Nodes::new(files),
            lists: Vec::new(),
            ghosts: Ghosts::new(files),
            history: History::new(files),
        }
    }

    /// Returns the number of uses of a block that is not stored, including the present one, and
    /// whether that is a new one: an engine may store the same request several times, in parts.
    fn uses(&self, hash: u64) -> (u8, bool) {
        let Some(Ghost { uses, stamp }) = self.ghosts.get(hash) else { return (1, true) };
        let is_new = self.nodes.since(stamp) > self.nodes.len() / SAME_REQUEST;
        ((uses + u8::from(is_new)).min(USES_MAX), is_new)
    }

    /// Counts a use of a block that is not stored. Returns the number of its uses.
    fn use_ghost(&mut self, hash: u64) -> u8 {
        let (uses, is_new) = self.uses(hash);
        if is_new {
            self.nodes.tick();
            self.history.used(hash, kind(uses), self.nodes.now());
        }
        self.ghosts.remove(hash);
        uses
    }

    fn list(&mut self, namespace: u32, file: FileId) -> &mut List {
        &mut self.lists[namespace as usize][kind(self.nodes.node(file).mark)]
    }

    /// Makes a listed file the newest of those used `uses` times.
    fn relist(&mut self, namespace: u32, file: FileId, uses: u8) {
        self.remove(namespace, file);
        self.nodes.node_mut(file).mark = uses;
        self.restore(namespace, file);
    }
}

impl Policy for ReuseRate {
    fn add_namespace(&mut self) {
        self.lists.push([List::default(); KINDS]);
    }

    fn insert(&mut self, namespace: u32, file: FileId, hash: u64) {
        self.nodes.node_mut(file).mark = self.use_ghost(hash);
        self.restore(namespace, file);
    }

    fn rate(&self, hash: u64) -> f32 {
        self.history.rate(kind(self.uses(hash).0), 0)
    }

    fn remembers(&self, hash: u64) -> bool {
        self.ghosts.get(hash).is_some()
    }

    fn refuse(&mut self, hash: u64) {
        let uses = self.use_ghost(hash);
        self.ghosts.insert(hash, Ghost { uses, stamp: self.nodes.now() });
    }

    fn touch(&mut self, namespace: u32, file: FileId, hash: u64) {
        let uses = (self.nodes.node(file).mark + 1).min(USES_MAX);
        self.history.used(hash, kind(uses), self.nodes.now());
        self.relist(namespace, file, uses);
    }

    fn refresh(&mut self, namespace: u32, file: FileId) {
        self.relist(namespace, file, self.nodes.node(file).mark);
    }

    fn is_known(&self, file: FileId) -> bool {
        self.nodes.node(file).mark > 1
    }

    fn know(&mut self, namespace: u32, file: FileId, hash: u64) {
        let uses = self.nodes.node(file).mark.max(2);
        self.history.know(hash, kind(uses));
        self.relist(namespace, file, uses);
    }

    fn remove(&mut self, namespace: u32, file: FileId) {
        let mut list = *self.list(namespace, file);
        self.nodes.remove(&mut list, file);
        *self.list(namespace, file) = list;
    }

    fn restore(&mut self, namespace: u32, file: FileId) {
        let mut list = *self.list(namespace, file);
        self.nodes.push(&mut list, file);
        *self.list(namespace, file) = list;
    }

    fn clear(&mut self, namespace: u32) {
        self.lists[namespace as usize] = [List::default(); KINDS];
    }

    fn candidate(
        &mut self,
        namespace: u32,
        weight: u32,
        may_go: &dyn Fn(FileId) -> bool,
    ) -> Option<Candidate> {
        let lists = &mut self.lists[namespace as usize];
        let candidates = lists.iter_mut().enumerate().filter_map(|(kind, list)| {
            let file = self.nodes.oldest(list, may_go)?;
            let age = self.nodes.since(self.nodes.node(file).stamp) / weight;
            Some(Candidate { file, rate: self.history.rate(kind, age), age: age as f32 })
        });
        candidates.min_by(Candidate::order)
    }

    fn evict(&mut self, namespace: u32, file: FileId, hash: u64) {
        let node = self.nodes.node(file);
        self.ghosts.insert(hash, Ghost { uses: node.mark, stamp: node.stamp });
        self.remove(namespace, file);
    }

    fn tiers(&self, namespace: u32) -> Tiers {
        let [once, again @ ..] = &self.lists[namespace as usize];
        Tiers { recent: again.iter().map(List::len).sum(), idle: once.len() }
    }

    fn age(&self, file: FileId) -> u32 {
        self.nodes.since(self.nodes.node(file).stamp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_stored_in_parts_uses_a_block_once() {
        let mut policy = ReuseRate::new(64);
        let hash = |number: u64| number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        policy.refuse(hash(0));
        policy.refuse(hash(0));
        assert_eq!(policy.uses(hash(0)), (1, false));
        (1..10).for_each(|other| policy.refuse(hash(other)));
        assert_eq!(policy.uses(hash(0)), (2, true));
    }
}
