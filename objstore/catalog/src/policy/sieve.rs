//! SIEVE (Zhang et al., NSDI 2024).

use super::{
    Candidate, Policy, Tiers,
    list::{List, Nodes},
};
use crate::ids::FileId;

#[derive(Debug, Clone, Copy, Default)]
struct Queue {
    list: List,
    /// The next file to visit; `None` means the oldest.
    hand: Option<FileId>,
    /// Files used since the hand passed them.
    visited: u32,
}

/// Files keep their order of insertion. A hand moves from the oldest to the newest and evicts files
/// not used since its last visit.
#[derive(Debug)]
pub struct Sieve {
    nodes: Nodes,
    queues: Vec<Queue>,
}

impl Sieve {
    pub fn new(files: u32) -> Self {
        Self { nodes: Nodes::new(files), queues: Vec::new() }
    }
}

impl Policy for Sieve {
    fn add_namespace(&mut self) {
        self.queues.push(Queue::default());
    }

    fn insert(&mut self, namespace: u32, file: FileId, _hash: u64) {
        self.nodes.tick();
        self.nodes.push(&mut self.queues[namespace as usize].list, file);
        self.nodes.node_mut(file).mark = 0;
    }

    fn touch(&mut self, namespace: u32, file: FileId) {
        let mark = &mut self.nodes.node_mut(file).mark;
        self.queues[namespace as usize].visited += u32::from(*mark == 0);
        *mark = 1;
    }

    fn refresh(&mut self, _namespace: u32, _file: FileId) {}

    fn is_known(&self, file: FileId) -> bool {
        self.nodes.node(file).mark != 0
    }

    fn know(&mut self, namespace: u32, file: FileId) {
        self.touch(namespace, file);
    }

    fn remove(&mut self, namespace: u32, file: FileId) {
        let queue = &mut self.queues[namespace as usize];
        if queue.hand == Some(file) {
            queue.hand = self.nodes.newer(file);
        }
        queue.visited -= u32::from(self.nodes.node(file).mark);
        self.nodes.remove(&mut queue.list, file);
    }

    fn restore(&mut self, namespace: u32, file: FileId) {
        let queue = &mut self.queues[namespace as usize];
        queue.visited += u32::from(self.nodes.node(file).mark);
        self.nodes.push(&mut queue.list, file);
    }

    fn clear(&mut self, namespace: u32) {
        self.queues[namespace as usize] = Queue::default();
    }

    fn candidate(
        &mut self,
        namespace: u32,
        weight: u32,
        may_go: &dyn Fn(FileId) -> bool,
    ) -> Option<Candidate> {
        let queue = &mut self.queues[namespace as usize];
        // One round to clear all visited marks, and one more to find a file without.
        for _ in 0..=2 * queue.list.len() {
            let file = queue.hand.or(queue.list.oldest())?;
            queue.hand = Some(file);
            let node = self.nodes.node_mut(file);
            if node.mark == 0 && may_go(file) {
                let age = self.nodes.since(self.nodes.node(file).stamp) as f32 / weight as f32;
                return Some(Candidate { file, rate: 0.0, age });
            }
            queue.visited -= u32::from(node.mark);
            node.mark = 0;
            queue.hand = self.nodes.newer(file);
        }
        None
    }

    fn evict(&mut self, namespace: u32, file: FileId, _hash: u64) {
        self.remove(namespace, file);
    }

    fn tiers(&self, namespace: u32) -> Tiers {
        let queue = &self.queues[namespace as usize];
        Tiers { recent: queue.visited, idle: queue.list.len() - queue.visited }
    }

    fn age(&self, file: FileId) -> u32 {
        self.nodes.since(self.nodes.node(file).stamp)
    }
}
