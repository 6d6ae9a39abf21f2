//! A request that was announced, and where its blocks are.

use std::{collections::HashMap, hash::Hash, time::Duration};

use kv_schedule::OpId;

use super::Hop;
use crate::tier::Tier;

/// Where a block is, as its request knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// On the drives, or on its way to host memory for somebody else.
    Elsewhere,
    /// Scheduled from the drives, or on its way.
    OnDrives(OpId),
    /// In host memory.
    Host,
    /// Scheduled to the GPU, or on its way.
    OnLink(OpId),
    /// There.
    Gpu,
    /// It is not tried again, until it is announced again.
    Left,
}

#[derive(Debug)]
pub(super) struct Request<K> {
    /// When it runs.
    pub(super) by: Duration,
    /// What waits in the schedulers may have another time.
    pub(super) is_changed: bool,
    /// Whether it has blocks on the GPU.
    pub(super) is_allocated: bool,
    /// In the order of the prefix.
    blocks: Vec<(K, Place)>,
    places: HashMap<K, usize>,
}

impl<K: Copy + Eq + Hash + std::fmt::Debug> Request<K> {
    pub(super) fn new(by: Duration) -> Self {
        let (blocks, places) = Default::default();
        Self { by, is_changed: false, is_allocated: false, blocks, places }
    }

    /// Blocks that it needs, besides those that are known.
    pub(super) fn add(&mut self, keys: &[K]) {
        for key in keys {
            self.places.entry(*key).or_insert_with(|| {
                self.blocks.push((*key, Place::Elsewhere));
                self.blocks.len() - 1
            });
        }
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = K> {
        self.blocks.iter().map(|(key, _)| *key)
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = (K, Place)> {
        self.blocks.iter().copied()
    }

    /// What was left is tried once more.
    pub(super) fn retry(&mut self) {
        for (_, place) in &mut self.blocks {
            if *place == Place::Left {
                *place = Place::Elsewhere;
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Finds out what is in host memory, and says what is there now and was not.
    pub(super) fn look(&mut self, tier: &Tier<K>) -> Vec<K> {
        let mut came = Vec::new();
        for (key, place) in &mut self.blocks {
            match *place {
                Place::Elsewhere if tier.contains(*key) => {
                    *place = Place::Host;
                    came.push(*key);
                }
                Place::Host if !tier.contains(*key) => *place = Place::Elsewhere,
                _ => {}
            }
        }
        came
    }

    /// Blocks that the hop is next for, by their positions.
    pub(super) fn due(&self, hop: Hop, tier: &Tier<K>) -> Vec<usize> {
        let is_due = |(key, place): &(K, Place)| match hop {
            // Nor on its way for somebody else.
            Hop::Drives => *place == Place::Elsewhere && tier.class(*key).is_none(),
            Hop::Link => self.is_allocated && *place == Place::Host,
        };
        let found = self.blocks.iter().enumerate().filter(|(_, block)| is_due(block));
        found.map(|(at, _)| at).collect()
    }

    /// A block is in a batch from now on.
    pub(super) fn schedule(&mut self, at: usize, hop: Hop, op: OpId) -> K {
        let (key, place) = &mut self.blocks[at];
        *place = match hop {
            Hop::Drives => Place::OnDrives(op),
            Hop::Link => Place::OnLink(op),
        };
        *key
    }

    /// What became of a block of a batch.
    pub(super) fn set(&mut self, key: K, op: OpId, place: Place) {
        let Some(at) = self.places.get(&key) else { return };
        let now = &mut self.blocks[*at].1;
        if matches!(*now, Place::OnDrives(of) | Place::OnLink(of) if of == op) {
            *now = place;
        }
    }
}
