//! Eviction and admission policies: one trait, several implementations.
//!
//! Each of them keeps each namespace's files in lists, oldest first, and counts time in files
//! inserted: a clock that stands still when nothing is inserted, as eviction does.

mod ghost;
mod history;
mod list;
mod lru;
mod reuse;

use self::{lru::Lru, reuse::ReuseRate};
use crate::ids::FileId;

/// Eviction policies. docs/results/catalog.md compares them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// Evicts blocks whose reuse is least likely soon at their age, learned from the store's own
    /// history by number of uses, and refuses new ones that are worth less.
    #[default]
    ReuseRate,
    /// Evicts the least recently used file.
    Lru,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: &[Self] = &[Self::ReuseRate, Self::Lru];

    /// Returns the name for reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ReuseRate => "reuse rate",
            Self::Lru => "LRU",
        }
    }

    /// Makes the policy for `files` files, without a namespace.
    #[must_use]
    pub fn policy(self, files: u32) -> Box<dyn Policy> {
        match self {
            Self::ReuseRate => Box::new(ReuseRate::new(files)),
            Self::Lru => Box::new(Lru::new(files)),
        }
    }
}

/// A file that could be evicted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The file.
    pub file: FileId,
    /// Expected uses of such a block per time: the lowest is evicted first.
    pub rate: f32,
    /// Time since its last use or insertion, divided by the namespace's weight: among equal rates,
    /// the oldest is evicted first.
    pub age: f32,
}

impl Candidate {
    /// Orders candidates for eviction: the least is evicted first.
    #[must_use]
    pub fn order(&self, other: &Self) -> std::cmp::Ordering {
        self.rate.total_cmp(&other.rate).then(other.age.total_cmp(&self.age))
    }
}

/// Files of one namespace, by tier of the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tiers {
    /// Used since they were inserted: kept longer.
    pub recent: u32,
    /// Not used since.
    pub idle: u32,
}

/// The order of eviction. A policy never sees keys, references or pins: the catalog asks it for a
/// candidate of each namespace, and evicts the least valuable one.
///
/// `hash` stands for a file's key: equal for equal keys, and nearly always different otherwise. The
/// blocks of a request are passed tail first: among equals, a block is evicted before its
/// predecessors.
pub trait Policy: std::fmt::Debug + Send {
    /// Adds a namespace; the first call adds number 0.
    fn add_namespace(&mut self);

    /// Adds `file`, which now holds a block.
    fn insert(&mut self, namespace: u32, file: FileId, hash: u64);

    /// Returns the rate ([`Candidate::rate`]) of a block that is not stored, were it inserted now.
    fn rate(&self, hash: u64) -> f32;

    /// Returns true when the policy remembers a block that is not stored: it was evicted or
    /// refused lately.
    fn remembers(&self, _hash: u64) -> bool {
        false
    }

    /// Records a use of a block that is neither stored nor inserted.
    fn refuse(&mut self, hash: u64);

    /// Records a use of `file`.
    fn touch(&mut self, namespace: u32, file: FileId, hash: u64);

    /// Refreshes `file`, which belongs to the prefix of a request that just inserted files. This is
    /// not another use, but it should not be evicted before them.
    fn refresh(&mut self, namespace: u32, file: FileId);

    /// Returns true when `file` was used again since its insertion, if the policy tracks that.
    fn is_known(&self, _file: FileId) -> bool {
        false
    }

    /// Marks `file` as used again before the policy saw it, as in recovery. It becomes the newest
    /// of its kind.
    fn know(&mut self, _namespace: u32, _file: FileId, _hash: u64) {}

    /// Removes `file`: it holds no block any more, or must not be evicted for now.
    fn remove(&mut self, namespace: u32, file: FileId);

    /// Makes `file` evictable again after [`Policy::remove`], with its known history, as if last
    /// used now.
    fn restore(&mut self, namespace: u32, file: FileId);

    /// Forgets all files of a namespace.
    fn clear(&mut self, namespace: u32);

    /// Returns the next victim of a namespace among those files that `may_go`; `None` if there is
    /// none. Files that may not go are in use.
    fn candidate(
        &mut self,
        namespace: u32,
        weight: u32,
        may_go: &dyn Fn(FileId) -> bool,
    ) -> Option<Candidate>;

    /// Evicts `file`: the candidate, or in recovery a former one.
    fn evict(&mut self, namespace: u32, file: FileId, hash: u64);

    /// Returns the number of files in each tier.
    fn tiers(&self, namespace: u32) -> Tiers;

    /// Returns the time since `file` was used or inserted, in files inserted since then: roughly,
    /// older files are evicted earlier.
    fn age(&self, file: FileId) -> u32;
}
