//! Changes to a store that need no device, made at any time, also while another actor waits for a
//! commit.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, ensure};
use objstore::{BlockKey, Namespace, Store};
use rand::{Rng as _, rngs::SmallRng};

use crate::model::{Model, Name, SPACES};

/// A change of a namespace.
#[derive(Debug, Clone)]
pub enum Change {
    Evict(u32),
    Remove(Vec<BlockKey>),
    Clear,
    Epoch,
    Quota(Option<u32>),
    Weight(u32),
    /// Opens a new namespace, which finds none of these keys. It soon replaces an earlier one.
    Visit(u64, Vec<BlockKey>),
}

/// A store or handle that can be changed.
pub trait Target {
    fn contains(&self, name: &Name) -> bool;

    /// Makes a change. Returns the new epoch if the change starts one.
    fn change(&self, space: usize, change: &Change) -> Result<Option<u64>>;
}

/// A change that was made or rejected.
#[derive(Debug)]
pub struct Done {
    space: usize,
    change: Change,
    pub result: Result<Option<u64>>,
}

impl Target for Vec<Store> {
    fn contains(&self, name: &Name) -> bool {
        self[name.0].peek(&[name.1]) == 1
    }

    fn change(&self, space: usize, change: &Change) -> Result<Option<u64>> {
        let store = &self[space];
        match change {
            Change::Evict(files) => drop(store.evict(*files)?),
            Change::Remove(keys) => drop(store.remove(keys)?),
            Change::Clear => store.clear()?,
            Change::Epoch => return Ok(Some(store.bump_epoch()?)),
            Change::Quota(files) => store.set_quota(*files)?,
            Change::Weight(weight) => store.set_weight(*weight)?,
            Change::Visit(salt, keys) => {
                let new = store.within(&visitor(*salt))?;
                ensure!(!new.are_stored(keys)?.contains(&true), "a new namespace has blocks");
            }
        }
        Ok(None)
    }
}

/// Returns a namespace that was never opened before.
pub fn visitor(salt: u64) -> Namespace {
    Namespace { tenant_salt: salt.to_le_bytes().to_vec(), ..Namespace::default() }
}

/// Returns some adjacent keys.
pub fn some_keys(rng: &mut SmallRng, keys: &[BlockKey]) -> Vec<BlockKey> {
    let first = rng.random_range(0..keys.len());
    let len = rng.random_range(1..=5);
    keys[first..].iter().take(len).copied().collect()
}

impl Change {
    pub fn draw(rng: &mut SmallRng, keys: &[BlockKey]) -> Self {
        match rng.random_range(0..41) {
            0..12 => Self::Evict(rng.random_range(0..4)),
            12..18 => Self::Remove(some_keys(rng, keys)),
            // Rare if there is much to lose.
            18..20 if rng.random_range(0..keys.len()) < 20 => Self::Clear,
            20..22 if rng.random_range(0..keys.len()) < 20 => Self::Epoch,
            22..25 => {
                let files = rng.random_range(2..keys.len() as u32);
                Self::Quota(rng.random_bool(0.4).then_some(files))
            }
            25 => Self::Visit(rng.random(), keys.to_vec()),
            // Often, as each is a record: with few of them there is hardly a compaction.
            _ => Self::Weight(rng.random_range(1..9)),
        }
    }

    pub fn make(self, space: usize, target: &impl Target) -> Done {
        let result = target.change(space, &self);
        Done { space, change: self, result }
    }
}

impl Done {
    /// Records the change in the model. Returns the namespace if it was dropped.
    pub fn note(&self, model: &mut Model) -> Option<usize> {
        let Ok(epoch) = self.result else { return None };
        match self.change {
            Change::Quota(files) => model.set_quota(self.space, files),
            Change::Weight(weight) => model.set_weight(self.space, weight),
            Change::Clear | Change::Epoch => {
                model.drop_all(self.space, epoch);
                return Some(self.space);
            }
            Change::Evict(_) | Change::Remove(_) | Change::Visit(..) => {}
        }
        None
    }
}

/// Changes made while another actor waited, in order.
#[derive(Clone, Default)]
pub struct Meanwhile(Arc<Mutex<Vec<Done>>>);

impl Meanwhile {
    /// Takes the changes since the last call.
    pub fn take(&self) -> Vec<Done> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns an actor that makes occasional changes while `may_act` returns true.
    pub fn actor(
        &self,
        mut rng: SmallRng,
        target: impl Target + Send + 'static,
        keys: Vec<BlockKey>,
        may_act: impl Fn() -> bool + Send + 'static,
    ) -> impl FnMut() + Send + 'static {
        let done = self.0.clone();
        move || {
            if rng.random_bool(0.9) || !may_act() {
                return;
            }
            let space = rng.random_range(0..SPACES);
            let change = Change::draw(&mut rng, &keys).make(space, &target);
            done.lock().unwrap_or_else(PoisonError::into_inner).push(change);
        }
    }
}
