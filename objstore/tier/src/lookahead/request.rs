//! An announced request and the location of its blocks.

use std::{collections::HashMap, hash::Hash, time::Duration};

use kv_schedule::OpId;

use super::Hop;
use crate::tier::Tier;

/// Location of a block, as far as its request knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// On the drives, or being read to host memory for another request.
    Elsewhere,
    /// Scheduled from the drives, or in flight.
    OnDrives(OpId),
    /// In host memory.
    Host,
    /// Scheduled to the GPU, or in flight.
    OnLink(OpId),
    /// On the GPU.
    Gpu,
    /// Not retried until it is announced again.
    Left,
}

#[derive(Debug)]
pub(super) struct Request<K> {
    /// Time at which it runs.
    pub(super) by: Duration,
    /// Set when its waiting batches may have an outdated time.
    pub(super) is_changed: bool,
    /// True when its blocks on the GPU are allocated.
    pub(super) is_allocated: bool,
    /// In prefix order.
    blocks: Vec<(K, Place)>,
    places: HashMap<K, usize>,
}

impl<K: Copy + Eq + Hash + std::fmt::Debug> Request<K> {
    pub(super) fn new(by: Duration) -> Self {
        let (blocks, places) = Default::default();
        Self { by, is_changed: false, is_allocated: false, blocks, places }
    }

    /// Adds those of the blocks that are new.
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

    /// Makes blocks that were left eligible again.
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

    /// Finds the blocks that are in host memory, and returns those that were not before.
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

    /// Returns the positions of the blocks for which the hop is next.
    pub(super) fn due(&self, hop: Hop, tier: &Tier<K>) -> Vec<usize> {
        let is_due = |(key, place): &(K, Place)| match hop {
            // Excludes blocks being read for another request.
            Hop::Drives => *place == Place::Elsewhere && tier.class(*key).is_none(),
            Hop::Link => self.is_allocated && *place == Place::Host,
        };
        let found = self.blocks.iter().enumerate().filter(|(_, block)| is_due(block));
        found.map(|(at, _)| at).collect()
    }

    /// Marks a block as part of a batch.
    pub(super) fn schedule(&mut self, at: usize, hop: Hop, op: OpId) -> K {
        let (key, place) = &mut self.blocks[at];
        *place = match hop {
            Hop::Drives => Place::OnDrives(op),
            Hop::Link => Place::OnLink(op),
        };
        *key
    }

    /// Sets the location of a block at the end of its batch.
    pub(super) fn set(&mut self, key: K, op: OpId, place: Place) {
        let Some(at) = self.places.get(&key) else { return };
        let now = &mut self.blocks[*at].1;
        if matches!(*now, Place::OnDrives(of) | Place::OnLink(of) if of == op) {
            *now = place;
        }
    }
}
