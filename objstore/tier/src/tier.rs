//! A bounded cache of blocks in host memory.

mod entry;

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap},
    hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher, Hash},
    time::Duration,
};

use kv_catalog::{Candidate, FileId, Policy, PolicyKind};

use entry::{Entry, Phase};

/// Cost classes: octaves of a block's reload time, from a microsecond on.
const COSTS: u32 = 24;

/// Returns the weight of a cost class: doubling the reload time counts like doubling the rate.
fn again(cost: u32) -> f32 {
    (1_u64 << cost) as f32
}

/// A hasher without a random seed: the same events give the same decisions.
type Fixed = BuildHasherDefault<DefaultHasher>;

/// Index of a block of host memory in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostBlock(pub u32);

/// Size and policy of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierConfig {
    /// Blocks of host memory.
    pub blocks: u32,
    /// Bytes of each.
    pub block_bytes: u64,
    /// Policy that estimates how likely a block is reused.
    pub policy: PolicyKind,
}

/// A candidate for admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block<K> {
    /// Its key.
    pub key: K,
    /// Its reload time: from the drives, or by computing it.
    pub again: Duration,
    /// Deadline of a request that wants it; set for a prefetch.
    pub by: Option<Duration>,
}

/// Result of an admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Fill this memory, then call [`Tier::filled`].
    Fill(HostBlock),
    /// The block is in the tier, or on its way.
    Present,
    /// All blocks of the tier are more valuable or in use.
    Refused,
}

/// Retention class of a block. The greatest class is evicted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Being read or filled: not evicted.
    Active,
    /// Needed by an announced request: not evicted.
    Expected,
    /// Used since its admission, or admitted again soon after its eviction.
    Recent,
    /// Not used since its admission. Recent and idle blocks compete by value.
    Idle,
    /// Its request was aborted or preempted, or the block was discarded.
    Evictable,
}

/// Counters since creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierCounts {
    /// Lookups that found the block.
    pub hits: u64,
    /// Lookups that found no block, or an unfilled one: the drives must serve them.
    pub misses: u64,
    /// Bytes of the misses.
    pub miss_bytes: u64,
    /// Blocks admitted.
    pub admissions: u64,
    /// Blocks refused.
    pub refusals: u64,
    /// Blocks evicted.
    pub evictions: u64,
    /// Bytes of prefetched blocks evicted without use.
    pub wasted_bytes: u64,
}

/// The index and replacement state of host memory.
#[derive(Debug)]
pub struct Tier<K> {
    config: TierConfig,
    index: HashMap<K, u32, Fixed>,
    /// By block of memory, which is also the number in the policy.
    entries: Vec<Option<Entry<K>>>,
    free: Vec<u32>,
    policy: Box<dyn Policy>,
    /// Entries that are not in the policy's order, because a search met them there while they were
    /// in use or wanted, or because they are evictable. So no search visits them twice.
    parked: Vec<bool>,
    /// [`Class::Evictable`] entries, oldest first, without active ones that a search met here.
    evictable: BTreeSet<(u64, u32)>,
    /// Entries that are wanted, by deadline.
    expected: BTreeSet<(Duration, u32)>,
    /// Clock that orders `evictable`.
    turn: u64,
    counts: TierCounts,
}

impl<K: Copy + Eq + Hash + std::fmt::Debug> Tier<K> {
    /// Makes an empty tier.
    #[must_use]
    pub fn new(config: TierConfig) -> Self {
        let mut policy = config.policy.policy(config.blocks);
        (0..COSTS).for_each(|_| policy.add_namespace());
        Self {
            config,
            index: HashMap::default(),
            entries: (0..config.blocks).map(|_| None).collect(),
            free: (0..config.blocks).rev().collect(),
            policy,
            parked: vec![false; config.blocks as usize],
            evictable: BTreeSet::new(),
            expected: BTreeSet::new(),
            turn: 0,
            counts: TierCounts::default(),
        }
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> TierConfig {
        self.config
    }

    /// Returns the counters.
    #[must_use]
    pub fn counts(&self) -> TierCounts {
        self.counts
    }

    /// Returns the number of blocks of memory in use.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.config.blocks - self.free.len() as u32
    }

    /// Returns true when a block can be read from the tier.
    #[must_use]
    pub fn contains(&self, key: K) -> bool {
        self.index.get(&key).is_some_and(|id| self.entry(*id).phase == Phase::Ready)
    }

    /// Returns the class of a block; `None` if it is not in the tier.
    #[must_use]
    pub fn class(&self, key: K) -> Option<Class> {
        let id = *self.index.get(&key)?;
        let entry = self.entry(id);
        Some(if entry.is_active() {
            Class::Active
        } else if entry.by.is_some() {
            Class::Expected
        } else if entry.evictable.is_some() {
            Class::Evictable
        } else if self.policy.is_known(FileId(id)) {
            Class::Recent
        } else {
            Class::Idle
        })
    }

    /// Looks up a block for a reader, who holds it until [`Tier::release`].
    pub fn get(&mut self, key: K) -> Option<HostBlock> {
        let Some(id) = self.index.get(&key).copied().filter(|_| self.contains(key)) else {
            self.counts.misses += 1;
            self.counts.miss_bytes += self.config.block_bytes;
            return None;
        };
        self.counts.hits += 1;
        self.keep(id);
        let entry = self.entry_mut(id);
        entry.readers += 1;
        let (cost, is_first) = (entry.cost, std::mem::take(&mut entry.is_unused_prefetch));
        self.unpark(cost, id);
        match is_first {
            // The use that it was prefetched for was counted when it was admitted.
            true => self.policy.refresh(cost, FileId(id)),
            false => self.policy.touch(cost, FileId(id), self.hash(key)),
        }
        Some(HostBlock(id))
    }

    /// Ends a read of a block.
    pub fn release(&mut self, memory: HostBlock) {
        self.entry_mut(memory.0).readers -= 1;
        self.settle(memory.0);
    }

    /// Requests memory for a block, which may evict another one.
    pub fn admit(&mut self, block: Block<K>) -> Admission {
        let Block { key, again, by } = block;
        if self.index.contains_key(&key) {
            if let Some(by) = by {
                self.expect(key, by);
            }
            return Admission::Present;
        }
        let cost = (again.as_micros() as u64).max(1).ilog2().min(COSTS - 1);
        let hash = self.hash(key);
        let Some(id) = self.free.pop().or_else(|| self.make_room(cost, hash)) else {
            self.policy.refuse(hash);
            self.counts.refusals += 1;
            return Admission::Refused;
        };
        self.policy.insert(cost, FileId(id), hash);
        self.counts.admissions += 1;
        self.index.insert(key, id);
        self.entries[id as usize] = Some(Entry::new(key, cost, by));
        self.expected.extend(by.map(|by| (by, id)));
        Admission::Fill(HostBlock(id))
    }

    /// Ends the filling of an admitted block; `is_good` is false if it failed.
    pub fn filled(&mut self, memory: HostBlock, is_good: bool) {
        let id = memory.0;
        let entry = self.entry_mut(id);
        entry.phase = Phase::Ready;
        if !is_good && !entry.is_removed {
            self.remove_entry(id);
        } else {
            self.settle(id);
        }
    }

    /// Marks a block as needed by an announced request at this time. Does nothing if it is not in
    /// the tier.
    pub fn expect(&mut self, key: K, by: Duration) {
        let Some(id) = self.index.get(&key).copied() else { return };
        self.keep(id);
        if let Some(before) = self.entry_mut(id).by.replace(by) {
            self.expected.remove(&(before, id));
        }
        self.expected.insert((by, id));
    }

    /// Clears the mark: no announced request needs the block any more.
    pub fn forget(&mut self, key: K) {
        if let Some(id) = self.index.get(&key).copied() {
            self.unexpect(id);
        }
    }

    /// Clears the marks of all blocks whose requests were due before `now` and did not run.
    pub fn expire(&mut self, now: Duration) {
        while let Some((_, id)) = self.expected.first().copied().filter(|(by, _)| *by < now) {
            self.unexpect(id);
        }
    }

    /// Returns true when a block was prefetched and never used.
    #[must_use]
    pub fn is_unused(&self, key: K) -> bool {
        self.index.get(&key).is_some_and(|id| self.entry(*id).is_unused_prefetch)
    }

    /// Makes a block evictable before all others: no request is expected to want it.
    pub fn discard(&mut self, key: K) {
        let Some(id) = self.index.get(&key).copied() else { return };
        self.unexpect(id);
        if self.entry(id).evictable.is_none() {
            let turn = self.turn();
            let entry = self.entry_mut(id);
            entry.evictable = Some(turn);
            let cost = entry.cost;
            self.park(cost, id);
            self.evictable.insert((turn, id));
        }
    }

    /// Invalidates a block: lookups do not find it any more, and its memory is free when no reader
    /// is left.
    pub fn remove(&mut self, key: K) {
        if let Some(id) = self.index.get(&key).copied() {
            self.remove_entry(id);
        }
    }

    /// Takes memory for a new block from the least valuable entry, unless that is worth more.
    /// Active entries that it meets are parked until they are active no more ([`Self::settle`]).
    fn make_room(&mut self, cost: u32, hash: u64) -> Option<u32> {
        while let Some((_, first)) = self.evictable.pop_first() {
            if !self.entry(first).is_active() {
                return Some(self.evict(first));
            }
        }
        let candidates = (0..COSTS).filter_map(|cost| self.candidate(cost));
        let least = candidates.min_by(Candidate::order)?;
        let is_worth_it = self.policy.rate(hash) * again(cost) >= least.rate;
        is_worth_it.then(|| self.evict(least.file.0))
    }

    /// Returns the least valuable evictable entry of a cost class.
    fn candidate(&mut self, cost: u32) -> Option<Candidate> {
        let met = RefCell::new(Vec::new());
        let may_go = |file: FileId| {
            let entry = self.entries[file.0 as usize].as_ref().expect("it is used");
            let may_go = !entry.is_active() && entry.by.is_none();
            if !may_go {
                met.borrow_mut().push(file.0);
            }
            may_go
        };
        let found = self.policy.candidate(cost, 1, &may_go);
        met.into_inner().into_iter().for_each(|id| self.park(cost, id));
        let Candidate { file, rate, age } = found?;
        // By the time of the new block, which the policy does not have yet.
        Some(Candidate { file, rate: rate * again(cost), age: (age + 1.0) / again(cost) })
    }

    fn evict(&mut self, id: u32) -> u32 {
        self.unexpect(id);
        let entry = self.entry(id);
        let (key, cost, evictable) = (entry.key, entry.cost, entry.evictable);
        if let Some(turn) = evictable {
            self.evictable.remove(&(turn, id));
        } else {
            let hash = self.hash(key);
            self.policy.evict(cost, FileId(id), hash);
        }
        self.counts.evictions += 1;
        self.index.remove(&key);
        self.end(id);
        id
    }

    /// Ends an entry.
    fn end(&mut self, id: u32) {
        let entry = self.entries[id as usize].take().expect("it is used");
        if entry.is_unused_prefetch {
            self.counts.wasted_bytes += self.config.block_bytes;
        }
        self.parked[id as usize] = false;
    }

    fn remove_entry(&mut self, id: u32) {
        self.unexpect(id);
        self.keep(id);
        let entry = self.entry_mut(id);
        entry.is_removed = true;
        let (key, cost) = (entry.key, entry.cost);
        self.index.remove(&key);
        self.park(cost, id);
        self.settle(id);
    }

    /// Reclassifies an entry that is no longer active: free, evictable, expected or ordinary.
    fn settle(&mut self, id: u32) {
        let &Entry { by, evictable, is_removed, cost, .. } = self.entry(id);
        if self.entry(id).is_active() {
            return;
        }
        if is_removed {
            self.end(id);
            self.free.push(id);
        } else if let Some(turn) = evictable {
            self.evictable.insert((turn, id));
        } else if by.is_none() {
            self.unpark(cost, id);
        }
    }

    /// Takes an entry out of the policy's order.
    fn park(&mut self, cost: u32, id: u32) {
        if !std::mem::replace(&mut self.parked[id as usize], true) {
            self.policy.remove(cost, FileId(id));
        }
    }

    /// Returns an entry to the policy's order, as used now.
    fn unpark(&mut self, cost: u32, id: u32) {
        if std::mem::replace(&mut self.parked[id as usize], false) {
            self.policy.restore(cost, FileId(id));
        }
    }

    /// Makes an entry not evictable; the caller reclassifies it.
    fn keep(&mut self, id: u32) {
        if let Some(turn) = self.entry_mut(id).evictable.take() {
            self.evictable.remove(&(turn, id));
        }
    }

    /// Makes an entry not expected.
    fn unexpect(&mut self, id: u32) {
        if let Some(by) = self.entry_mut(id).by.take() {
            self.expected.remove(&(by, id));
            self.settle(id);
        }
    }

    fn turn(&mut self) -> u64 {
        self.turn += 1;
        self.turn
    }

    fn hash(&self, key: K) -> u64 {
        self.index.hasher().hash_one(key)
    }

    fn entry(&self, id: u32) -> &Entry<K> {
        self.entries[id as usize].as_ref().expect("it is used")
    }

    fn entry_mut(&mut self, id: u32) -> &mut Entry<K> {
        self.entries[id as usize].as_mut().expect("it is used")
    }
}

#[cfg(test)]
mod tests;
