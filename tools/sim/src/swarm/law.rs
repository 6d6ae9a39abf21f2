//! The law of activations: a stand-in for attention, which needs weights and texts.

use libm::{floor, pow};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use kv_swarm::Entry;

use crate::workload::normal;

/// Dimensions of an entry's key.
const DIMENSIONS: usize = 32;
/// Groups of an entry, at most.
const GROUPS: f64 = 40.0;

/// Overlapping groups of entries, of which each step activates some as a whole.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Law {
    /// Entries at the beginning.
    pub entries: u32,
    /// Mean number of entries that belong to a group first of all.
    pub group: f64,
    /// An entry is in `k` groups or more with the probability `k` to the power of minus this.
    pub overlap: f64,
    /// Mean number of neighbouring tokens with the same first group.
    pub run: f64,
    /// The group of rank `k` is drawn for entries like `k` to the power of minus this.
    pub sizes: f64,
    /// The same for activations; ranks of both have nothing in common.
    pub popularity: f64,
    /// Probability that an active group is so in the next step.
    pub stays: f64,
    /// Steps after which two groups exchange their popularity.
    pub drift: u32,
    /// Probability that an entry is activated with its group. As many others are instead.
    pub faithful: f64,
    /// Fraction of the entries that a step activates: as many whole groups as fit.
    pub active: f64,
}

/// The law of all scenarios. `active` is the paper's sparsity, `group` follows from the memory of
/// its table 4, `faithful` from its table 5, and `overlap` from its entries with more than 20
/// groups; all else is assumed.
pub(crate) const LAW: Law = Law {
    entries: 4096,
    group: 12.0,
    overlap: 2.2,
    run: 2.0,
    sizes: 0.5,
    popularity: 0.8,
    stays: 0.25,
    drift: 8,
    faithful: 0.997,
    active: 0.1,
};

/// A step of decoding.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    /// Attention score of each entry; from 1 on it is activated.
    pub scores: Vec<f32>,
    /// The activated ones.
    pub active: Vec<Entry>,
}

impl Step {
    pub(crate) fn is_active(&self, entry: Entry) -> bool {
        self.scores[entry.0 as usize] >= 1.0
    }
}

/// Draws ranks with the probability of `rank + 1` to the power of `-exponent`.
#[derive(Debug, Clone)]
struct Zipf(Vec<f64>);

impl Zipf {
    fn new(count: usize, exponent: f64) -> Self {
        let weights = (1..=count).map(|rank| pow(rank as f64, -exponent));
        let sum = |sum: &mut f64, weight| {
            *sum += weight;
            Some(*sum)
        };
        Self(weights.scan(0.0, sum).collect())
    }

    fn draw(&self, chance: &mut StdRng) -> usize {
        let all = self.0[self.0.len() - 1];
        let at = chance.random_range(0.0..all);
        self.0.partition_point(|sum| *sum <= at).min(self.0.len() - 1)
    }
}

/// Activations of entries, step by step.
#[derive(Debug, Clone)]
pub(crate) struct Activations {
    law: Law,
    chance: StdRng,
    sizes: Zipf,
    popularity: Zipf,
    /// Groups by rank of their popularity.
    ranks: Vec<usize>,
    /// Groups of each entry.
    groups: Vec<Vec<usize>>,
    /// Entries of each group.
    members: Vec<Vec<usize>>,
    active: Vec<usize>,
    steps: u32,
    /// Direction of each group's keys.
    directions: Vec<Vec<f32>>,
    keys: Vec<Vec<f32>>,
}

impl Activations {
    pub(crate) fn new(law: Law, seed: u64) -> Self {
        let mut chance = StdRng::seed_from_u64(seed);
        let count = (f64::from(law.entries) / law.group) as usize;
        let mut ranks: Vec<usize> = (0..count).collect();
        for at in (1..count).rev() {
            ranks.swap(at, chance.random_range(0..=at));
        }
        let directions = (0..count).map(|_| random_key(&mut chance)).collect();
        let mut all = Self {
            law,
            chance,
            sizes: Zipf::new(count, law.sizes),
            popularity: Zipf::new(count, law.popularity),
            ranks,
            groups: Vec::new(),
            members: vec![Vec::new(); count],
            active: Vec::new(),
            steps: 0,
            directions,
            keys: Vec::new(),
        };
        (0..law.entries).for_each(|_| _ = all.append());
        all
    }

    /// Adds an entry, as the next token does.
    pub(crate) fn append(&mut self) -> Entry {
        let entry = self.groups.len();
        let continues = self.chance.random_bool(1.0 - self.law.run.recip());
        let previous = self.groups.last().filter(|_| continues).map(|groups| groups[0]);
        let first = previous.unwrap_or_else(|| self.sizes.draw(&mut self.chance));
        let chance = 1.0 - self.chance.random_range(0.0..1.0);
        let count = floor(pow(chance, -self.law.overlap.recip())).min(GROUPS) as usize;
        let mut groups = vec![first];
        while groups.len() < count.min(self.members.len()) {
            let group = self.sizes.draw(&mut self.chance);
            if !groups.contains(&group) {
                groups.push(group);
            }
        }
        let mut key = random_key(&mut self.chance);
        for group in &groups {
            self.members[*group].push(entry);
            key.iter_mut().zip(&self.directions[*group]).for_each(|(sum, it)| *sum += it);
        }
        self.keys.push(key);
        self.groups.push(groups);
        Entry(entry as u32)
    }

    /// Returns the number of groups of each entry.
    pub(crate) fn overlaps(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(Vec::len)
    }

    /// Returns the entries' keys: the sum of their groups' directions, and noise as long as one.
    pub(crate) fn keys(&self) -> &[Vec<f32>] {
        &self.keys
    }

    pub(crate) fn step(&mut self) -> Step {
        self.steps += 1;
        if self.steps.is_multiple_of(self.law.drift) {
            let [one, other] = [(); 2].map(|()| self.chance.random_range(0..self.ranks.len()));
            self.ranks.swap(one, other);
        }
        self.change_groups();
        let entries = self.groups.len();
        let mut scores: Vec<f32> =
            (0..entries).map(|_| self.chance.random_range(0.0..0.5)).collect();
        let mut missing = 0;
        for group in &self.active {
            let strength = self.chance.random_range(1.0..2.0_f32);
            for member in &self.members[*group] {
                match self.chance.random_bool(self.law.faithful) {
                    true => scores[*member] += strength,
                    false => missing += 1,
                }
            }
        }
        for _ in 0..missing {
            scores[self.chance.random_range(0..entries)] += 1.0;
        }
        let is_active = |(_, score): &(Entry, &f32)| **score >= 1.0;
        let active = (0..).map(Entry).zip(&scores).filter(is_active).map(|(entry, _)| entry);
        Step { active: active.collect(), scores }
    }

    /// Draws the active groups: those that stay, and others, as long as they fit.
    fn change_groups(&mut self) {
        /// Draws that find no group that fits, before the step has all of its groups.
        const TRIES: u32 = 16;
        let most = (self.groups.len() as f64 * self.law.active) as usize;
        let mut is_active = vec![false; self.groups.len()];
        let mut used = 0;
        let mut tries = 0;
        let before = std::mem::take(&mut self.active);
        let mut staying = before.into_iter();
        while tries < TRIES {
            let group = match staying.next() {
                Some(_) if !self.chance.random_bool(self.law.stays) => continue,
                Some(group) => group,
                None => self.ranks[self.popularity.draw(&mut self.chance)],
            };
            let new = self.members[group].iter().filter(|it| !is_active[**it]).count();
            if self.active.contains(&group) || used + new > most {
                tries += 1;
                continue;
            }
            used += new;
            self.members[group].iter().for_each(|it| is_active[*it] = true);
            self.active.push(group);
        }
    }
}

/// Draws a key of a length of about 1.
fn random_key(chance: &mut StdRng) -> Vec<f32> {
    (0..DIMENSIONS).map(|_| (normal(chance) / (DIMENSIONS as f64).sqrt()) as f32).collect()
}
