//! Which file is evicted next: one seam, several answers.
//!
//! All of them keep each namespace's files in lists, oldest first, and count time in files
//! inserted: a clock that stands still when nothing new comes, as eviction does.

mod ghost;
mod list;
mod lru;
mod reuse;
mod s3_fifo;
mod sieve;

use self::{lru::Lru, reuse::ReuseRate, s3_fifo::S3Fifo, sieve::Sieve};
use crate::ids::FileId;

/// Ways to choose what is evicted. docs/results/catalog.md compares them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// Where blocks of that age were used again least often, learned from the store's own history,
    /// and separately for blocks used once and blocks used again.
    #[default]
    ReuseRate,
    /// What was not used for the longest time.
    Lru,
    /// SIEVE: a hand goes over the files in the order in which they came, and takes what was not
    /// used since it passed.
    Sieve,
    /// S3-FIFO: a small queue for what is new, a main one for what was used there or is known.
    S3Fifo,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: &[Self] = &[Self::ReuseRate, Self::Lru, Self::Sieve, Self::S3Fifo];

    /// As reports name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ReuseRate => "reuse rate",
            Self::Lru => "LRU",
            Self::Sieve => "SIEVE",
            Self::S3Fifo => "S3-FIFO",
        }
    }

    /// A policy for so many files, without a namespace.
    #[must_use]
    pub fn policy(self, files: u32) -> Box<dyn Policy> {
        match self {
            Self::ReuseRate => Box::new(ReuseRate::new(files)),
            Self::Lru => Box::new(Lru::new(files)),
            Self::Sieve => Box::new(Sieve::new(files)),
            Self::S3Fifo => Box::new(S3Fifo::new(files)),
        }
    }
}

/// A file that could be evicted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The file.
    pub file: FileId,
    /// How often blocks like this one are used again, as far as the policy knows: the lowest goes.
    pub rate: f32,
    /// Time since it was used or inserted, divided by the namespace's weight: among equal rates,
    /// the oldest goes.
    pub age: f32,
}

impl Candidate {
    /// What goes first is less.
    #[must_use]
    pub fn order(&self, other: &Self) -> std::cmp::Ordering {
        self.rate.total_cmp(&other.rate).then(other.age.total_cmp(&self.age))
    }
}

/// Files of one namespace, by how the policy sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tiers {
    /// Used since they came: kept longer.
    pub recent: u32,
    /// The others.
    pub idle: u32,
}

/// The order of eviction. It never sees keys, references or pins: the catalog asks it for a
/// candidate of each namespace, and takes the one that is worth least.
///
/// `hash` stands for a file's key: equal for equal keys, and nearly always different otherwise.
/// The blocks of a request come tail first, so that among equals a block goes before the blocks it
/// follows.
pub trait Policy: std::fmt::Debug + Send {
    /// There is one more namespace; the first call makes number 0.
    fn add_namespace(&mut self);

    /// `file` holds a block now.
    fn insert(&mut self, namespace: u32, file: FileId, hash: u64);

    /// `file` was used.
    fn touch(&mut self, namespace: u32, file: FileId);

    /// `file` belongs to the prefix of a request that has inserted files just now, which is no
    /// further use of it: but it should not go before them.
    fn refresh(&mut self, namespace: u32, file: FileId);

    /// Whether `file` was used again since it came, as far as the policy tells such files apart.
    fn is_known(&self, _file: FileId) -> bool {
        false
    }

    /// `file` was used again, before the policy was there to see it. It becomes the newest of its
    /// kind.
    fn know(&mut self, _namespace: u32, _file: FileId) {}

    /// `file` holds no block any more, or must not be evicted for now.
    fn remove(&mut self, namespace: u32, file: FileId);

    /// `file` may be evicted again after [`Policy::remove`]: with what is known of it, and as if it
    /// was used until now.
    fn restore(&mut self, namespace: u32, file: FileId);

    /// Forgets all files of a namespace.
    fn clear(&mut self, namespace: u32);

    /// What should go next in a namespace among those files that `may_go`; `None` when there is
    /// none. Files that may not go are in use.
    fn candidate(
        &mut self,
        namespace: u32,
        weight: u32,
        may_go: &dyn Fn(FileId) -> bool,
    ) -> Option<Candidate>;

    /// `file` is evicted: the candidate, or in recovery what was one.
    fn evict(&mut self, namespace: u32, file: FileId, hash: u64);

    /// How many files are in which tier; pinned ones are in none.
    fn tiers(&self, namespace: u32) -> Tiers;

    /// Time since `file` was used or inserted, in files inserted since then: what was used longer
    /// ago goes earlier, roughly.
    fn age(&self, file: FileId) -> u32;
}
