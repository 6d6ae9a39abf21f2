//! S3-FIFO (Yang et al., SOSP 2023).

use super::{
    Candidate, Policy, Tiers,
    ghost::{Ghost, Ghosts},
    list::{List, Nodes},
};
use crate::ids::FileId;

/// The small queue's share of all files: one in this many.
const SMALL: u32 = 10;

/// Uses are counted up to this number.
const USES_MAX: u8 = 3;

/// Set in the mark of files in the main queue; the rest of the mark counts uses.
const MAIN: u8 = 0x80;

/// A new file must be used in the small queue to enter the main one, unless it was recently evicted
/// from there. Both queues are FIFO, and a used file is queued again.
#[derive(Debug)]
pub struct S3Fifo {
    nodes: Nodes,
    /// [small, main] of each namespace.
    queues: Vec<[List; 2]>,
    ghosts: Ghosts,
}

impl S3Fifo {
    pub fn new(files: u32) -> Self {
        Self { nodes: Nodes::new(files), queues: Vec::new(), ghosts: Ghosts::new(files) }
    }

    fn queue(&mut self, namespace: u32, mark: u8) -> &mut List {
        &mut self.queues[namespace as usize][usize::from(mark & MAIN != 0)]
    }
}

impl Policy for S3Fifo {
    fn add_namespace(&mut self) {
        self.queues.push([List::default(); 2]);
    }

    fn insert(&mut self, namespace: u32, file: FileId, hash: u64) {
        self.nodes.tick();
        let mark = if self.ghosts.take(hash).is_some() { MAIN } else { 0 };
        self.nodes.node_mut(file).mark = mark;
        let main = usize::from(mark != 0);
        self.nodes.push(&mut self.queues[namespace as usize][main], file);
    }

    fn touch(&mut self, _namespace: u32, file: FileId) {
        let mark = &mut self.nodes.node_mut(file).mark;
        if *mark & !MAIN < USES_MAX {
            *mark += 1;
        }
    }

    fn refresh(&mut self, _namespace: u32, _file: FileId) {}

    fn is_known(&self, file: FileId) -> bool {
        self.nodes.node(file).mark & MAIN != 0
    }

    fn know(&mut self, namespace: u32, file: FileId) {
        self.remove(namespace, file);
        self.nodes.node_mut(file).mark = MAIN;
        self.nodes.push(&mut self.queues[namespace as usize][1], file);
    }

    fn remove(&mut self, namespace: u32, file: FileId) {
        let main = usize::from(self.nodes.node(file).mark & MAIN != 0);
        self.nodes.remove(&mut self.queues[namespace as usize][main], file);
    }

    fn restore(&mut self, namespace: u32, file: FileId) {
        let main = usize::from(self.nodes.node(file).mark & MAIN != 0);
        self.nodes.push(&mut self.queues[namespace as usize][main], file);
    }

    fn clear(&mut self, namespace: u32) {
        self.queues[namespace as usize] = [List::default(); 2];
    }

    fn candidate(
        &mut self,
        namespace: u32,
        weight: u32,
        may_go: &dyn Fn(FileId) -> bool,
    ) -> Option<Candidate> {
        let files = self.queues[namespace as usize].iter().map(List::len).sum::<u32>();
        // Each step takes one use from a file, moves it to the main queue, or skips it.
        for _ in 0..=files * (u32::from(USES_MAX) + 2) {
            let small = self.queue(namespace, 0).len();
            let main = files - small;
            let from = if small > 0 && (small * SMALL >= files || main == 0) { 0 } else { MAIN };
            let file = self.queue(namespace, from).oldest()?;
            let node = self.nodes.node(file);
            let uses = node.mark & !MAIN;
            if uses == 0 && may_go(file) {
                let age = self.nodes.since(node.stamp) as f32 / weight as f32;
                return Some(Candidate { file, rate: 0.0, age });
            }
            let queues = &mut self.queues[namespace as usize];
            self.nodes.remove(&mut queues[usize::from(from != 0)], file);
            // A file in use counts as used.
            let uses = if from == 0 { 0 } else { uses.saturating_sub(1) };
            self.nodes.node_mut(file).mark = MAIN | uses;
            self.nodes.append(&mut queues[1], file);
        }
        None
    }

    fn evict(&mut self, namespace: u32, file: FileId, hash: u64) {
        let node = *self.nodes.node(file);
        if node.mark & MAIN == 0 {
            self.ghosts.insert(hash, Ghost { stamp: node.stamp, reused: false });
        }
        self.remove(namespace, file);
    }

    fn tiers(&self, namespace: u32) -> Tiers {
        let [small, main] = &self.queues[namespace as usize];
        Tiers { recent: main.len(), idle: small.len() }
    }

    fn age(&self, file: FileId) -> u32 {
        self.nodes.since(self.nodes.node(file).stamp)
    }
}
