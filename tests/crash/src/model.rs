//! What a store may hold after a crash.

use std::collections::BTreeMap;

use objstore::BlockKey;

/// A key of one of the namespaces.
pub type Name = (usize, BlockKey);

/// What was stored, and what has to be there.
#[derive(Debug, Default)]
pub struct Model {
    /// The number of the next version; every version is written once.
    next: u64,
    /// All versions that were begun to be stored, by key.
    begun: BTreeMap<Name, Vec<u64>>,
    /// Acknowledged as permanent, and not seen to be evicted.
    acknowledged: BTreeMap<Name, u64>,
    /// Found, and not yet permanent.
    published: BTreeMap<Name, u64>,
    /// By namespace: versions below were dropped.
    dropped: [u64; 2],
    /// By namespace: versions below were dropped, and that was acknowledged as permanent.
    gone: [u64; 2],
}

/// What is wrong with what was found under a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    /// An acknowledged commit is not there.
    Lost,
    /// It holds what was dropped for good.
    CameBack,
    /// Another version than the acknowledged one.
    Stale,
}

impl Model {
    /// A version that no block had.
    pub fn new_version(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// A version of `name` may be on the devices from now on.
    pub fn begin(&mut self, name: Name, version: u64) {
        self.begun.entry(name).or_default().push(version);
    }

    /// The commit of `name` returned, and it is permanent with the next sync.
    pub fn publish(&mut self, name: Name, version: u64) {
        self.published.insert(name, version);
    }

    /// The commit of `name` returned.
    pub fn acknowledge(&mut self, name: Name, version: u64) {
        self.acknowledged.insert(name, version);
    }

    /// The store may have forgotten all but what `contains` says.
    pub fn retain(&mut self, contains: impl Fn(&Name) -> bool) {
        self.acknowledged.retain(|name, _| contains(name));
        self.published.retain(|name, _| contains(name));
    }

    /// All of a namespace was dropped.
    pub fn drop_all(&mut self, namespace: usize) {
        self.dropped[namespace] = self.next + 1;
        self.acknowledged.retain(|name, _| name.0 != namespace);
        self.published.retain(|name, _| name.0 != namespace);
    }

    /// What was dropped is so for good, and what was published is permanent.
    pub fn sync(&mut self) {
        self.gone = self.dropped;
        self.acknowledged.append(&mut self.published);
    }

    /// All versions of `name` that may ever have been stored.
    pub fn versions(&self, name: &Name) -> &[u64] {
        self.begun.get(name).map_or(&[], Vec::as_slice)
    }

    /// Judges that `name` holds `version`, or nothing.
    pub fn judge(&self, name: &Name, found: Option<u64>) -> Option<Wrong> {
        match (self.acknowledged.get(name), found) {
            (Some(_), None) => Some(Wrong::Lost),
            (_, Some(version)) if version < self.gone[name.0] => Some(Wrong::CameBack),
            (Some(expected), Some(version)) if version != *expected => Some(Wrong::Stale),
            _ => None,
        }
    }

    /// From here on, what was found counts.
    pub fn restart(&mut self, found: BTreeMap<Name, u64>) {
        self.acknowledged = found;
        self.published.clear();
        // What was dropped and not acknowledged may have come back.
        self.dropped = self.gone;
    }
}
