//! The tier against a model with linear searches.

use super::*;

#[derive(Debug, Clone)]
pub(super) enum Op {
    Get(u32),
    Release(usize),
    Admit { key: u32, by: Option<u64>, cost: u32 },
    Fill(usize, bool),
    Expect(u32, u64),
    Forget(u32),
    Discard(u32),
    Remove(u32),
    Expire(u64),
}

#[derive(Debug, Clone)]
struct Known {
    key: u32,
    memory: HostBlock,
    readers: u32,
    is_filling: bool,
    is_removed: bool,
    evictable: Option<u64>,
    by: Option<u64>,
    /// Time of its last use.
    used: u64,
    /// Set when it could not go as the oldest, or is evictable: counts as used until that ends.
    is_parked: bool,
}

impl Known {
    fn is_active(&self) -> bool {
        self.readers > 0 || self.is_filling
    }

    fn unpark(&mut self, time: u64) {
        if self.is_parked && !self.is_active() && self.by.is_none() && self.evictable.is_none() {
            (self.is_parked, self.used) = (false, time);
        }
    }
}

pub(super) struct Model {
    tier: Tier<u32>,
    /// True for LRU with one cost class, for which every decision is known.
    is_exact: bool,
    known: Vec<Known>,
    time: u64,
}

impl Model {
    pub(super) fn new(blocks: u32, policy: PolicyKind, is_exact: bool) -> Self {
        Self { tier: tier(blocks, policy), is_exact, known: Vec::new(), time: 0 }
    }

    pub(super) fn run(&mut self, ops: &[Op]) {
        for op in ops {
            self.step(op);
            self.check();
        }
    }

    fn find(&mut self, key: u32) -> Option<&mut Known> {
        self.known.iter_mut().find(|known| known.key == key && !known.is_removed)
    }

    /// Returns the `n`th of those for which `holds` is true.
    fn pick(&mut self, n: usize, holds: impl Fn(&Known) -> bool) -> Option<&mut Known> {
        let found: Vec<usize> =
            (0..self.known.len()).filter(|at| holds(&self.known[*at])).collect();
        (!found.is_empty()).then(|| &mut self.known[found[n % found.len()]])
    }

    fn step(&mut self, op: &Op) {
        self.time += 1;
        let time = self.time;
        match *op {
            Op::Get(key) => {
                let found = self.tier.get(key);
                let known = self.find(key).filter(|known| !known.is_filling);
                assert_eq!(found, known.as_ref().map(|known| known.memory));
                if let Some(known) = known {
                    known.readers += 1;
                    (known.used, known.evictable, known.is_parked) = (time, None, false);
                }
            }
            Op::Release(n) => {
                let Some(known) = self.pick(n, |known| known.readers > 0) else { return };
                known.readers -= 1;
                let memory = known.memory;
                self.tier.release(memory);
            }
            Op::Admit { key, by, cost } => self.admit(key, by, cost),
            Op::Fill(n, is_good) => {
                let Some(known) = self.pick(n, |known| known.is_filling) else { return };
                known.is_filling = false;
                known.is_removed |= !is_good;
                let memory = known.memory;
                self.tier.filled(memory, is_good);
            }
            Op::Expect(key, by) => {
                self.tier.expect(key, Duration::from_secs(by));
                if let Some(known) = self.find(key) {
                    (known.by, known.evictable) = (Some(by), None);
                }
            }
            Op::Forget(key) => {
                self.tier.forget(key);
                self.find(key).into_iter().for_each(|known| known.by = None);
            }
            Op::Discard(key) => {
                self.tier.discard(key);
                if let Some(known) = self.find(key) {
                    (known.by, known.is_parked) = (None, true);
                    known.evictable.get_or_insert(time);
                }
            }
            Op::Remove(key) => {
                self.tier.remove(key);
                self.find(key).into_iter().for_each(|known| known.is_removed = true);
            }
            Op::Expire(by) => {
                self.tier.expire(Duration::from_secs(by));
                let over = |known: &&mut Known| known.by.is_some_and(|other| other < by);
                // Blocks wanted earlier are restored earlier.
                let mut over: Vec<&mut Known> = self.known.iter_mut().filter(over).collect();
                over.sort_by_key(|known| (known.by, known.memory));
                for known in over {
                    known.by = None;
                    self.time += 1;
                    known.unpark(self.time);
                }
            }
        }
        let time = self.time;
        self.known.iter_mut().for_each(|known| known.unpark(time));
        let is_held = |known: &Known| known.readers > 0 || known.is_filling;
        self.known.retain(|known| !known.is_removed || is_held(known));
    }

    fn admit(&mut self, key: u32, by: Option<u64>, cost: u32) {
        let again = if self.is_exact { MS } else { MS * 3_u32.pow(cost) };
        let by_time = by.map(Duration::from_secs);
        let was_full = self.tier.used() == self.tier.config().blocks;
        let found = self.tier.admit(Block { key, again, by: by_time });
        if let Some(known) = self.find(key) {
            assert_eq!(found, Admission::Present);
            if by.is_some() {
                (known.by, known.evictable) = (by, None);
            }
            return;
        }
        if was_full {
            let gone = if self.is_exact { self.victim() } else { self.seen_victim() };
            assert_eq!(gone.is_some(), matches!(found, Admission::Fill(_)));
            if let Some(at) = gone {
                assert!(!self.known[at].is_active(), "{:?}", self.known[at]);
                self.known.remove(at);
            }
        }
        if let Admission::Fill(memory) = found {
            assert!(self.known.iter().all(|known| known.memory != memory), "it is somebody's");
            let known = Known {
                key,
                memory,
                readers: 0,
                is_filling: true,
                is_removed: false,
                evictable: None,
                by,
                used: self.time,
                is_parked: false,
            };
            self.known.push(known);
        }
    }

    /// Returns the block that was evicted, whatever the reason.
    fn seen_victim(&self) -> Option<usize> {
        let gone = |known: &Known| !known.is_removed && self.tier.class(known.key).is_none();
        let mut gone = (0..self.known.len()).filter(|at| gone(&self.known[*at]));
        let first = gone.next();
        assert_eq!(gone.next(), None, "more than one went");
        first
    }

    /// Returns the expected victim for a new block.
    fn victim(&mut self) -> Option<usize> {
        let may_go = |at: &usize| !self.known[*at].is_active() && !self.known[*at].is_removed;
        let all = 0..self.known.len();
        let evictable = all.clone().filter(may_go).filter(|at| self.known[*at].evictable.is_some());
        if let Some(at) = evictable.min_by_key(|at| self.known[*at].evictable) {
            return Some(at);
        }
        let in_list = |known: &Known| !known.is_parked && !known.is_removed;
        let list = |it: &Self| {
            all.clone().filter(|at| in_list(&it.known[*at])).min_by_key(|at| it.known[*at].used)
        };
        while let Some(at) = list(self) {
            if !self.known[at].is_active() && self.known[at].by.is_none() {
                return Some(at);
            }
            self.known[at].is_parked = true;
        }
        None
    }

    fn check(&self) {
        let tier = &self.tier;
        assert!(tier.used() <= tier.config().blocks);
        assert_eq!(tier.used() as usize, self.known.len());
        for known in self.known.iter().filter(|known| !known.is_removed) {
            assert_eq!(tier.contains(known.key), !known.is_filling);
            let class = tier.class(known.key).unwrap();
            assert_eq!(class == Class::Active, known.is_active());
            assert_eq!(class == Class::Evictable, !known.is_active() && known.evictable.is_some());
            let is_expected = !known.is_active() && known.by.is_some();
            assert_eq!(class == Class::Expected, is_expected);
        }
    }
}
