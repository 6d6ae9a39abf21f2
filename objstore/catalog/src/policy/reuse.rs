//! Evicts the file whose reuse is least likely, by the store's own history.
//!
//! Each namespace has two LRU lists: files used once (when they were written) and files used again.
//! The oldest files of the two compete, and the victim is the one whose kind, at its age, was
//! reused less often in the past. With one list this would be LRU. A scan fills only the first
//! list, and the rate at its ages falls.
//!
//! The rates must include files that would have been used had they been kept: evicted files are
//! remembered for a while ([`super::ghost`]). A file that is inserted again counts as used at its
//! age; one that is forgotten counts as never used again. (The rates are from LHD, Beckmann et al.,
//! NSDI 2018; the two lists and ghosts from ARC, Megiddo and Modha, FAST 2003.)

use super::{
    Candidate, Policy, Tiers,
    ghost::{Ghost, Ghosts},
    list::{List, Nodes},
};
use crate::ids::FileId;

/// Ages are bucketed in eighths of an octave.
const BUCKETS: usize = 8 * 32;

/// Decay of older counts when the rates are recomputed.
const KEPT: f32 = 0.98;

/// Reuse of files of one kind, by age.
#[derive(Debug, Clone)]
struct History {
    /// Count of files used again at this age.
    used: Vec<f32>,
    /// Count of files forgotten at this age without a use.
    gone: Vec<f32>,
    /// Fraction of the files reaching this age that are used again.
    rates: Vec<f32>,
}

impl History {
    fn new() -> Self {
        Self { used: vec![0.0; BUCKETS], gone: vec![0.0; BUCKETS], rates: vec![0.0; BUCKETS] }
    }

    fn learn(&mut self) {
        let (mut used, mut all) = (0.0, 0.0);
        for at in (0..BUCKETS).rev() {
            used += self.used[at];
            all += self.used[at] + self.gone[at];
            self.rates[at] = if all > 0.0 { used / all } else { 0.0 };
            self.used[at] *= KEPT;
            self.gone[at] *= KEPT;
        }
    }
}

fn bucket(age: u32) -> usize {
    let age = u64::from(age) + 8;
    let octave = age.ilog2();
    (octave as usize - 3) * 8 + (age >> (octave - 3)) as usize - 8
}

/// The reuse-rate policy; see the module documentation.
#[derive(Debug)]
pub struct ReuseRate {
    nodes: Nodes,
    /// [used once, used again] of each namespace.
    lists: Vec<[List; 2]>,
    ghosts: Ghosts,
    /// [used once, used again].
    histories: [History; 2],
    /// Files counted since the rates were computed, and the number that triggers it.
    counted: u32,
    period: u32,
}

impl ReuseRate {
    pub fn new(files: u32) -> Self {
        Self {
            nodes: Nodes::new(files),
            lists: Vec::new(),
            ghosts: Ghosts::new(files),
            histories: [History::new(), History::new()],
            counted: 0,
            period: (files / 64).clamp(64, 1 << 16),
        }
    }

    /// Counts a file of one kind as `used` again at an age, or as gone.
    fn count(&mut self, reused: bool, age: u32, used: bool) {
        let history = &mut self.histories[usize::from(reused)];
        let counts = if used { &mut history.used } else { &mut history.gone };
        counts[bucket(age)] += 1.0;
        self.counted += 1;
        if self.counted >= self.period {
            self.counted = 0;
            self.histories.iter_mut().for_each(History::learn);
        }
    }

    fn move_to_newest(&mut self, namespace: u32, file: FileId, reused: bool) {
        self.remove(namespace, file);
        self.nodes.node_mut(file).mark = u8::from(reused);
        self.nodes.push(&mut self.lists[namespace as usize][usize::from(reused)], file);
    }
}

impl Policy for ReuseRate {
    fn add_namespace(&mut self) {
        self.lists.push([List::default(); 2]);
    }

    fn insert(&mut self, namespace: u32, file: FileId, hash: u64) {
        self.nodes.tick();
        let ghost = self.ghosts.take(hash);
        if let Some(ghost) = ghost {
            self.count(ghost.reused, self.nodes.since(ghost.stamp), true);
        }
        let reused = ghost.is_some();
        self.nodes.node_mut(file).mark = u8::from(reused);
        self.nodes.push(&mut self.lists[namespace as usize][usize::from(reused)], file);
    }

    fn touch(&mut self, namespace: u32, file: FileId) {
        let node = self.nodes.node(file);
        let (reused, age) = (node.mark != 0, self.nodes.since(node.stamp));
        self.count(reused, age, true);
        self.move_to_newest(namespace, file, true);
    }

    fn refresh(&mut self, namespace: u32, file: FileId) {
        let reused = self.nodes.node(file).mark != 0;
        self.move_to_newest(namespace, file, reused);
    }

    fn is_known(&self, file: FileId) -> bool {
        self.nodes.node(file).mark != 0
    }

    fn know(&mut self, namespace: u32, file: FileId) {
        self.move_to_newest(namespace, file, true);
    }

    fn remove(&mut self, namespace: u32, file: FileId) {
        let reused = usize::from(self.nodes.node(file).mark);
        self.nodes.remove(&mut self.lists[namespace as usize][reused], file);
    }

    fn restore(&mut self, namespace: u32, file: FileId) {
        let reused = usize::from(self.nodes.node(file).mark);
        self.nodes.push(&mut self.lists[namespace as usize][reused], file);
    }

    fn clear(&mut self, namespace: u32) {
        self.lists[namespace as usize] = [List::default(); 2];
    }

    fn candidate(
        &mut self,
        namespace: u32,
        weight: u32,
        may_go: &dyn Fn(FileId) -> bool,
    ) -> Option<Candidate> {
        let lists = &mut self.lists[namespace as usize];
        let candidates = lists.iter_mut().zip(&self.histories).filter_map(|(list, history)| {
            let file = self.nodes.oldest(list, may_go)?;
            let age = self.nodes.since(self.nodes.node(file).stamp) / weight;
            Some(Candidate { file, rate: history.rates[bucket(age)], age: age as f32 })
        });
        candidates.min_by(Candidate::order)
    }

    fn evict(&mut self, namespace: u32, file: FileId, hash: u64) {
        let node = *self.nodes.node(file);
        let ghost = Ghost { stamp: node.stamp, reused: node.mark != 0 };
        if let Some(gone) = self.ghosts.insert(hash, ghost) {
            self.count(gone.reused, self.nodes.since(gone.stamp), false);
        }
        self.remove(namespace, file);
    }

    fn tiers(&self, namespace: u32) -> Tiers {
        let [once, again] = &self.lists[namespace as usize];
        Tiers { recent: again.len(), idle: once.len() }
    }

    fn age(&self, file: FileId) -> u32 {
        self.nodes.since(self.nodes.node(file).stamp)
    }
}
