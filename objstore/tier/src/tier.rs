//! The pool: blocks come, are used, and go.

mod entry;

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap},
    hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher, Hash},
    time::Duration,
};

use kv_catalog::{Candidate, FileId, Policy, PolicyKind};

use entry::{Entry, Phase};

/// Octaves of the time that a block takes to get again, from a microsecond on.
const COSTS: u32 = 24;

/// Without a seed: the same events give the same decisions.
type Fixed = BuildHasherDefault<DefaultHasher>;

/// A block of host memory: its number in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostBlock(pub u32);

/// The size of a tier, and how it chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierConfig {
    /// Blocks of host memory.
    pub blocks: u32,
    /// Bytes of each.
    pub block_bytes: u64,
    /// How likely it is that a block is used again.
    pub policy: PolicyKind,
}

/// A block that could be admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block<K> {
    /// Its name.
    pub key: K,
    /// How long it takes to get again: from the drives, or by computing it.
    pub again: Duration,
    /// It is wanted at this time: read ahead.
    pub by: Option<Duration>,
}

/// What became of a block that could be admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Fill this memory, then call [`Tier::filled`].
    Fill(HostBlock),
    /// It is there, or on its way.
    Present,
    /// Everything there is worth more, or in use.
    Refused,
}

/// How much a block is wanted. What goes first is greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// It is read or filled: not evicted.
    Active,
    /// A request was announced that needs it: evicted only for one that runs earlier, and the
    /// latest first.
    Expected,
    /// It was used since it came, or came back soon after it had gone.
    Recent,
    /// It was used by nobody since it came. Recent and idle ones compete by what they are worth.
    Idle,
    /// Its request was aborted or preempted, or said that nobody will want it.
    Evictable,
}

/// What a tier did since the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierCounts {
    /// Blocks that were asked for and there.
    pub hits: u64,
    /// Blocks that were asked for and not there, or not yet: the drives have to serve them.
    pub misses: u64,
    /// Bytes of both.
    pub hit_bytes: u64,
    /// See `hit_bytes`.
    pub miss_bytes: u64,
    /// Blocks that were admitted.
    pub admissions: u64,
    /// Blocks that were not.
    pub refusals: u64,
    /// Blocks that went for others.
    pub evictions: u64,
    /// Bytes of blocks that were read ahead and went without being used.
    pub wasted_bytes: u64,
}

/// Which blocks are in host memory.
#[derive(Debug)]
pub struct Tier<K> {
    config: TierConfig,
    index: HashMap<K, u32, Fixed>,
    /// By number as the policy has it: one more than there is memory for, so that a new block can
    /// compete with those that are there.
    entries: Vec<Option<Entry<K>>>,
    unused: Vec<u32>,
    free: Vec<HostBlock>,
    /// The entry of each block of memory.
    owners: Vec<u32>,
    policy: Box<dyn Policy>,
    /// Entries that are not in the policy's order: a search met them there and they could not go,
    /// or they are evictable. So no search walks over them again, however many they are.
    parked: Vec<bool>,
    /// [`Class::Evictable`], oldest first, but for active ones that a search met here.
    evictable: BTreeSet<(u64, u32)>,
    /// Entries that are wanted, by time.
    expected: BTreeSet<(Duration, u32)>,
    /// The same of active ones that a search met there.
    expected_active: BTreeSet<(Duration, u32)>,
    /// What the order of `evictable` goes by.
    turn: u64,
    counts: TierCounts,
}

impl<K: Copy + Eq + Hash + std::fmt::Debug> Tier<K> {
    /// An empty one.
    #[must_use]
    pub fn new(config: TierConfig) -> Self {
        let mut policy = config.policy.policy(config.blocks + 1);
        (0..COSTS).for_each(|_| policy.add_namespace());
        Self {
            config,
            index: HashMap::default(),
            entries: (0..=config.blocks).map(|_| None).collect(),
            unused: (0..=config.blocks).rev().collect(),
            free: (0..config.blocks).rev().map(HostBlock).collect(),
            owners: vec![0; config.blocks as usize],
            policy,
            parked: vec![false; config.blocks as usize + 1],
            evictable: BTreeSet::new(),
            expected: BTreeSet::new(),
            expected_active: BTreeSet::new(),
            turn: 0,
            counts: TierCounts::default(),
        }
    }

    /// How it was made.
    #[must_use]
    pub fn config(&self) -> TierConfig {
        self.config
    }

    /// What it did.
    #[must_use]
    pub fn counts(&self) -> TierCounts {
        self.counts
    }

    /// Blocks of memory that are taken.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.config.blocks - self.free.len() as u32
    }

    /// Whether a block can be read here.
    #[must_use]
    pub fn contains(&self, key: K) -> bool {
        self.index.get(&key).is_some_and(|id| self.entry(*id).phase == Phase::Ready)
    }

    /// How much a block is wanted; `None` if it is not there.
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

    /// Asks for a block, for somebody who reads it until [`Tier::release`].
    pub fn get(&mut self, key: K) -> Option<HostBlock> {
        let bytes = self.config.block_bytes;
        let Some(id) = self.index.get(&key).copied().filter(|_| self.contains(key)) else {
            self.counts.misses += 1;
            self.counts.miss_bytes += bytes;
            return None;
        };
        self.counts.hits += 1;
        self.counts.hit_bytes += bytes;
        self.keep(id);
        let entry = self.entry_mut(id);
        entry.readers += 1;
        entry.is_unused_prefetch = false;
        let (cost, memory) = (entry.cost, entry.memory);
        self.unpark(cost, id);
        self.policy.touch(cost, FileId(id));
        Some(memory)
    }

    /// As [`Tier::get`] for memory that is filled or there, but nobody asks for it: it keeps bytes
    /// that the drives do not have yet.
    pub fn hold(&mut self, memory: HostBlock) {
        let id = self.owners[memory.0 as usize];
        self.entry_mut(id).readers += 1;
    }

    /// Somebody has read it.
    pub fn release(&mut self, memory: HostBlock) {
        let id = self.owners[memory.0 as usize];
        self.entry_mut(id).readers -= 1;
        self.settle(id);
    }

    /// Asks for memory for a block, which may evict others.
    pub fn admit(&mut self, block: Block<K>) -> Admission {
        let Block { key, again, by } = block;
        if self.index.contains_key(&key) {
            if let Some(by) = by {
                self.expect(key, by);
            }
            return Admission::Present;
        }
        let id = self.unused.pop().expect("there is one more than memory");
        let cost = (again.as_micros() as u64).max(1).ilog2().min(COSTS - 1);
        let hash = self.hash(key);
        self.policy.insert(cost, FileId(id), hash);
        let free = self.free.pop().or_else(|| self.make_room(id, by));
        let Some(memory) = free else {
            self.unpark(cost, id);
            self.policy.evict(cost, FileId(id), hash);
            self.unused.push(id);
            self.counts.refusals += 1;
            return Admission::Refused;
        };
        self.counts.admissions += 1;
        self.owners[memory.0 as usize] = id;
        self.index.insert(key, id);
        self.entries[id as usize] = Some(Entry::new(key, memory, cost, by));
        self.expected.extend(by.map(|by| (by, id)));
        Admission::Fill(memory)
    }

    /// The memory of a block that was admitted has its bytes, or will never.
    pub fn filled(&mut self, memory: HostBlock, is_good: bool) {
        let id = self.owners[memory.0 as usize];
        let entry = self.entry_mut(id);
        entry.phase = Phase::Ready;
        if !is_good && !entry.is_removed {
            self.remove_entry(id);
        } else {
            self.settle(id);
        }
    }

    /// A request that was announced needs the block at this time. If it is not there, nothing
    /// happens.
    pub fn expect(&mut self, key: K, by: Duration) {
        let Some(id) = self.index.get(&key).copied() else { return };
        self.keep(id);
        if let Some(before) = self.entry_mut(id).by.replace(by) {
            self.drop_expected(before, id);
        }
        self.expected.insert((by, id));
    }

    /// No request that was announced needs the block any more: it is one like others.
    pub fn forget(&mut self, key: K) {
        if let Some(id) = self.index.get(&key).copied() {
            self.unexpect(id);
        }
    }

    /// Whoever needed blocks before this time did not come: they are like others now.
    pub fn expire(&mut self, now: Duration) {
        let first = |it: &Self| {
            it.expected.first().into_iter().chain(it.expected_active.first()).min().copied()
        };
        while let Some((_, id)) = first(self).filter(|(by, _)| *by < now) {
            self.unexpect(id);
        }
    }

    /// Whether a block was read ahead, and nobody has asked for it.
    #[must_use]
    pub fn is_unused(&self, key: K) -> bool {
        self.index.get(&key).is_some_and(|id| self.entry(*id).is_unused_prefetch)
    }

    /// Nobody is going to want the block: it goes before all others.
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

    /// The block is another one now, or none: it is not found any more, and its memory is free when
    /// nobody uses it.
    pub fn remove(&mut self, key: K) {
        if let Some(id) = self.index.get(&key).copied() {
            self.remove_entry(id);
        }
    }

    /// Memory for the new entry `id`, of what is worth least. Active ones that it meets come back
    /// when they are active no more ([`Self::settle`]).
    fn make_room(&mut self, id: u32, by: Option<Duration>) -> Option<HostBlock> {
        while let Some((_, first)) = self.evictable.pop_first() {
            if !self.entry(first).is_active() {
                return Some(self.evict(first));
            }
        }
        let candidates = (0..COSTS).filter_map(|cost| self.candidate(cost, by.is_some()));
        if let Some(least) = candidates.min_by(Candidate::order) {
            return (least.file.0 != id).then(|| self.evict(least.file.0));
        }
        let by = by?;
        while let Some(latest) = self.expected.last().copied().filter(|(at, _)| *at > by) {
            if !self.entry(latest.1).is_active() {
                return Some(self.evict(latest.1));
            }
            self.expected.remove(&latest);
            self.expected_active.insert(latest);
        }
        None
    }

    /// What is worth least among those that cost as much and may go.
    fn candidate(&mut self, cost: u32, is_wanted: bool) -> Option<Candidate> {
        let met = RefCell::new(Vec::new());
        let may_go = |file: FileId| {
            let may_go = match &self.entries[file.0 as usize] {
                Some(entry) => !entry.is_active() && entry.by.is_none(),
                // The new one: a block that is wanted is not the one to go.
                None => !is_wanted,
            };
            if !may_go {
                met.borrow_mut().push(file.0);
            }
            may_go
        };
        let found = self.policy.candidate(cost, 1, &may_go);
        met.into_inner().into_iter().for_each(|id| self.park(cost, id));
        let Candidate { file, rate, age } = found?;
        let again = (1_u64 << cost) as f32;
        // What takes twice as long to get is kept as if it were used twice as often.
        Some(Candidate { file, rate: rate * again, age: age / again })
    }

    fn evict(&mut self, id: u32) -> HostBlock {
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
        self.end(id)
    }

    /// Forgets an entry.
    fn end(&mut self, id: u32) -> HostBlock {
        let entry = self.entries[id as usize].take().expect("it is used");
        if entry.is_unused_prefetch {
            self.counts.wasted_bytes += self.config.block_bytes;
        }
        self.parked[id as usize] = false;
        self.unused.push(id);
        entry.memory
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

    /// Puts an entry where it belongs, if it is active no more: it is free, or evictable, or
    /// expected, or one like others.
    fn settle(&mut self, id: u32) {
        let &Entry { by, evictable, is_removed, cost, .. } = self.entry(id);
        if self.entry(id).is_active() {
            return;
        }
        if is_removed {
            let memory = self.end(id);
            self.free.push(memory);
        } else if let Some(turn) = evictable {
            self.evictable.insert((turn, id));
        } else if let Some(by) = by {
            if self.expected_active.remove(&(by, id)) {
                self.expected.insert((by, id));
            }
        } else {
            self.unpark(cost, id);
        }
    }

    /// Takes an entry out of the policy's order.
    fn park(&mut self, cost: u32, id: u32) {
        if !std::mem::replace(&mut self.parked[id as usize], true) {
            self.policy.remove(cost, FileId(id));
        }
    }

    /// The opposite: it is used until now.
    fn unpark(&mut self, cost: u32, id: u32) {
        if std::mem::replace(&mut self.parked[id as usize], false) {
            self.policy.restore(cost, FileId(id));
        }
    }

    /// It is not evictable any more; whoever calls this says what it is.
    fn keep(&mut self, id: u32) {
        if let Some(turn) = self.entry_mut(id).evictable.take() {
            self.evictable.remove(&(turn, id));
        }
    }

    /// It is not expected any more.
    fn unexpect(&mut self, id: u32) {
        if let Some(by) = self.entry_mut(id).by.take() {
            self.drop_expected(by, id);
            self.settle(id);
        }
    }

    fn drop_expected(&mut self, by: Duration, id: u32) {
        if !self.expected.remove(&(by, id)) {
            self.expected_active.remove(&(by, id));
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
