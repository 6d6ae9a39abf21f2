//! Model of the valid contents of a store after a crash.

use std::collections::{BTreeMap, BTreeSet};

use objstore::{BlockKey, Usage};

/// Number of namespaces in a store.
pub const SPACES: usize = 2;

/// A key in one of the namespaces.
pub type Name = (usize, BlockKey);

/// State of a stored version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Being written: must not be found.
    Open,
    /// A commit was attempted: may be found.
    Tried,
    /// Abandoned, dropped for good, or absent after a crash: must not be found.
    Gone,
}

/// The version that lookups find.
#[derive(Debug, Clone, Copy)]
struct Current {
    version: u64,
    /// True if it survives a crash.
    permanent: bool,
    /// True if it was acknowledged after a device fault.
    after_fault: bool,
}

/// Values of a setting that may be found after a crash: the last durable one, and all since.
#[derive(Debug, Clone)]
pub struct Setting<T>(Vec<T>);

impl<T: PartialEq + Copy> Setting<T> {
    fn new(value: T) -> Self {
        Self(vec![value])
    }

    fn set(&mut self, value: T) {
        if self.now() != value {
            self.0.push(value);
        }
    }

    fn now(&self) -> T {
        *self.0.last().expect("there is always one")
    }

    fn settle(&mut self) {
        self.0 = vec![self.now()];
    }

    fn may_be(&self, value: T) -> bool {
        self.0.contains(&value)
    }
}

#[derive(Debug, Clone)]
struct Block {
    /// All versions whose storing was started, in order.
    versions: Vec<(u64, Fate)>,
    current: Option<Current>,
}

/// Settings of a namespace.
#[derive(Debug, Clone)]
struct Space {
    quota: Setting<Option<u32>>,
    weight: Setting<u32>,
    epoch: Setting<u64>,
    /// Older versions were dropped, by a call that is not yet durable.
    dropped: u64,
}

/// Stored blocks, and the expected ones.
#[derive(Debug, Clone)]
pub struct Model {
    /// Number of the next version; a version is written only once.
    next: u64,
    blocks: BTreeMap<Name, Block>,
    spaces: [Space; SPACES],
}

/// Error in the data found under a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    /// An acknowledged commit is lost.
    Lost,
    /// A commit acknowledged after a device failure is lost.
    FalselyAcknowledged,
    /// Data is found that was dropped for good, abandoned, or never committed.
    CameBack,
    /// Another version than the acknowledged one is found.
    Stale,
}

/// Result of reading a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// Not found by a lookup.
    Nothing,
    /// Found by a lookup, but unreadable.
    Unreadable,
    /// All bytes are those of this version.
    Version(u64),
}

impl Default for Model {
    fn default() -> Self {
        let space = Space {
            quota: Setting::new(None),
            weight: Setting::new(1),
            epoch: Setting::new(0),
            dropped: 0,
        };
        Self { next: 0, blocks: BTreeMap::new(), spaces: [space.clone(), space] }
    }
}

impl Model {
    /// Returns a version that no block has had.
    pub fn new_version(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Records that a version of `name` is being written.
    pub fn begin(&mut self, name: Name, version: u64) {
        let new = || Block { versions: Vec::new(), current: None };
        self.blocks.entry(name).or_insert_with(new).versions.push((version, Fate::Open));
    }

    fn fate(&mut self, name: &Name, version: u64) -> Option<&mut Fate> {
        let versions = &mut self.blocks.get_mut(name)?.versions;
        versions.iter_mut().rev().find(|(of, _)| *of == version).map(|(_, fate)| fate)
    }

    /// Records a commit attempt: some of these may be found from now on.
    pub fn try_to(&mut self, names: &[(Name, u64)]) {
        for (name, version) in names {
            if let Some(fate @ Fate::Open) = self.fate(name, *version) {
                *fate = Fate::Tried;
            }
        }
    }

    /// Records that these were abandoned: they must not be found.
    pub fn give_up(&mut self, names: &[(Name, u64)]) {
        for (name, version) in names {
            if let Some(fate) = self.fate(name, *version) {
                *fate = Fate::Gone;
            }
        }
    }

    /// Records that the commit of `name` returned.
    pub fn publish(&mut self, name: Name, version: u64, permanent: bool, after_fault: bool) {
        // Its namespace was cleared while it was written: lookups find what came after that.
        if version < self.spaces[name.0].dropped {
            return;
        }
        if let Some(block) = self.blocks.get_mut(&name) {
            block.current = Some(Current { version, permanent, after_fault });
        }
    }

    /// Records that the store may have evicted all blocks that `contains` denies.
    pub fn retain(&mut self, contains: impl Fn(&Name) -> bool) {
        for (name, block) in &mut self.blocks {
            if block.current.is_some() && !contains(name) {
                block.current = None;
            }
        }
    }

    /// Returns the names that no lookup finds.
    pub fn missing(&self, contains: impl Fn(&Name) -> bool) -> BTreeSet<Name> {
        self.blocks.keys().filter(|name| !contains(name)).copied().collect()
    }

    /// Records that all earlier changes are durable. `missing` was taken before the sync began.
    pub fn sync(&mut self, missing: &BTreeSet<Name>, contains: impl Fn(&Name) -> bool) {
        for space in &mut self.spaces {
            space.quota.settle();
            space.weight.settle();
            space.epoch.settle();
        }
        for (name, block) in &mut self.blocks {
            if let Some(current) = &mut block.current {
                current.permanent = true;
            }
            let dropped = self.spaces[name.0].dropped;
            let is_missing = missing.contains(name) && !contains(name);
            for (version, fate) in &mut block.versions {
                if *version < dropped || is_missing && *fate == Fate::Tried {
                    *fate = Fate::Gone;
                }
            }
        }
    }

    /// Records that all blocks of a namespace were dropped, including those being written. `epoch`
    /// is the namespace's new epoch.
    pub fn drop_all(&mut self, space: usize, epoch: Option<u64>) {
        self.spaces[space].dropped = self.next + 1;
        for (_, block) in self.blocks.iter_mut().filter(|(name, _)| name.0 == space) {
            block.current = None;
        }
        if let Some(epoch) = epoch {
            self.spaces[space].epoch.set(epoch);
        }
    }

    pub fn set_quota(&mut self, space: usize, files: Option<u32>) {
        self.spaces[space].quota.set(files);
    }

    pub fn set_weight(&mut self, space: usize, weight: u32) {
        self.spaces[space].weight.set(weight);
    }

    /// Returns versions of `name` that were ever stored, the most likely ones first.
    pub fn versions(&self, name: &Name) -> impl Iterator<Item = u64> + '_ {
        let block = self.blocks.get(name);
        let current = block.and_then(|block| block.current).map(|current| current.version);
        let all = block.into_iter().flat_map(|block| block.versions.iter().rev());
        current.into_iter().chain(all.map(|(version, _)| *version))
    }

    /// Returns the versions that a lookup of `name` may find now.
    pub fn findable(&self, name: &Name) -> Vec<u64> {
        let Some(block) = self.blocks.get(name) else { return Vec::new() };
        if let Some(current) = block.current {
            return vec![current.version];
        }
        let dropped = self.spaces[name.0].dropped;
        let may_be = |(version, fate): &&(u64, Fate)| *fate == Fate::Tried && *version >= dropped;
        block.versions.iter().filter(may_be).map(|(version, _)| *version).collect()
    }

    /// Checks the data found under `name` after a crash.
    pub fn judge(&self, name: &Name, held: Held) -> Option<Wrong> {
        let block = self.blocks.get(name)?;
        let expected = block.current.filter(|current| current.permanent);
        let lost = expected.map(|current| match current.after_fault {
            true => Wrong::FalselyAcknowledged,
            false => Wrong::Lost,
        });
        let Held::Version(version) = held else { return lost };
        let fate = block.versions.iter().rev().find(|(of, _)| *of == version);
        match (expected, fate) {
            (_, Some((_, Fate::Open | Fate::Gone))) => Some(Wrong::CameBack),
            (Some(expected), _) if expected.version != version => Some(Wrong::Stale),
            _ => None,
        }
    }

    /// Returns how the settings of a newly opened namespace differ from the allowed ones.
    pub fn judge_space(&self, space: usize, usage: &Usage) -> Option<String> {
        let Space { quota, weight, epoch, .. } = &self.spaces[space];
        if !quota.may_be(usage.quota_files) {
            return Some(format!("quota {:?} and not {quota:?}", usage.quota_files));
        }
        if !weight.may_be(usage.weight) {
            return Some(format!("weight {} and not {weight:?}", usage.weight));
        }
        if !epoch.may_be(usage.epoch) {
            return Some(format!("epoch {} and not {epoch:?}", usage.epoch));
        }
        None
    }

    /// Continues from the contents found after a crash.
    pub fn restart(&mut self, found: &BTreeMap<Name, Held>, usages: &[Usage; SPACES]) {
        for (name, block) in &mut self.blocks {
            let held = found.get(name).copied().unwrap_or(Held::Nothing);
            block.current = match held {
                Held::Version(version) => {
                    Some(Current { version, permanent: true, after_fault: false })
                }
                _ => None,
            };
            for (version, fate) in &mut block.versions {
                let is_held = held == Held::Version(*version);
                if held != Held::Unreadable && !is_held {
                    *fate = Fate::Gone;
                } else if is_held {
                    *fate = Fate::Tried;
                }
            }
        }
        for (space, usage) in self.spaces.iter_mut().zip(usages) {
            space.quota = Setting::new(usage.quota_files);
            space.weight = Setting::new(usage.weight);
            space.epoch = Setting::new(usage.epoch);
            space.dropped = 0;
        }
    }

    /// Records that the store was emptied: nothing in it may be found.
    pub fn empty(&mut self) {
        let Self { next, mut blocks, .. } = std::mem::take(self);
        for block in blocks.values_mut() {
            block.current = None;
            block.versions.iter_mut().for_each(|(_, fate)| *fate = Fate::Gone);
        }
        (self.next, self.blocks) = (next, blocks);
    }

    /// Drops old versions, of which long lives have many.
    pub fn prune(&mut self, keep: usize) {
        for block in self.blocks.values_mut() {
            let surplus = block.versions.len().saturating_sub(keep);
            block.versions.drain(..surplus);
        }
    }
}
