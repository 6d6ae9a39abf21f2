//! Least recently used.

use super::{
    Candidate, Policy, Tiers,
    list::{List, Nodes},
};
use crate::ids::FileId;

/// Evicts the least recently used file.
#[derive(Debug)]
pub struct Lru {
    nodes: Nodes,
    lists: Vec<List>,
}

impl Lru {
    pub fn new(files: u32) -> Self {
        Self { nodes: Nodes::new(files), lists: Vec::new() }
    }
}

impl Policy for Lru {
    fn add_namespace(&mut self) {
        self.lists.push(List::default());
    }

    fn insert(&mut self, namespace: u32, file: FileId, _hash: u64) {
        self.nodes.tick();
        self.nodes.push(&mut self.lists[namespace as usize], file);
    }

    fn rate(&self, _hash: u64) -> f32 {
        0.0
    }

    fn refuse(&mut self, _hash: u64) {}

    fn touch(&mut self, namespace: u32, file: FileId, _hash: u64) {
        self.refresh(namespace, file);
    }

    fn refresh(&mut self, namespace: u32, file: FileId) {
        let list = &mut self.lists[namespace as usize];
        self.nodes.remove(list, file);
        self.nodes.push(list, file);
    }

    fn remove(&mut self, namespace: u32, file: FileId) {
        self.nodes.remove(&mut self.lists[namespace as usize], file);
    }

    fn restore(&mut self, namespace: u32, file: FileId) {
        self.nodes.push(&mut self.lists[namespace as usize], file);
    }

    fn clear(&mut self, namespace: u32) {
        self.lists[namespace as usize] = List::default();
    }

    fn candidate(
        &mut self,
        namespace: u32,
        weight: u32,
        may_go: &dyn Fn(FileId) -> bool,
    ) -> Option<Candidate> {
        let file = self.nodes.oldest(&mut self.lists[namespace as usize], may_go)?;
        let age = self.nodes.since(self.nodes.node(file).stamp) as f32 / weight as f32;
        Some(Candidate { file, rate: 0.0, age })
    }

    fn evict(&mut self, namespace: u32, file: FileId, _hash: u64) {
        self.remove(namespace, file);
    }

    fn tiers(&self, namespace: u32) -> Tiers {
        Tiers { recent: 0, idle: self.lists[namespace as usize].len() }
    }

    fn age(&self, file: FileId) -> u32 {
        self.nodes.since(self.nodes.node(file).stamp)
    }
}
