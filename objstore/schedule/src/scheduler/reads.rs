//! Waiting reads, earliest deadline first.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::Duration,
};

use super::Step;
use crate::op::{Op, OpId, StepId};

/// Layers are ordered by step and number; their deadlines change, and are computed on demand.
#[derive(Debug, Default)]
pub(super) struct Reads {
    layers: BTreeMap<(StepId, u32), VecDeque<Op>>,
    soon: BTreeMap<(Duration, OpId), Op>,
    /// The queue of each read.
    places: HashMap<OpId, Place>,
}

#[derive(Debug, Clone, Copy)]
enum Place {
    Layer(StepId, u32),
    Soon(Duration),
}

/// Returns the deadline of a layer's reads; zero if its step is over.
fn due(steps: &BTreeMap<StepId, Step>, step: StepId, layer: u32) -> Duration {
    steps.get(&step).map_or(Duration::ZERO, |step| step.due(layer))
}

impl Reads {
    pub(super) fn add_layer(&mut self, step: StepId, layer: u32, op: Op) {
        self.places.insert(op.id, Place::Layer(step, layer));
        self.layers.entry((step, layer)).or_default().push_back(op);
    }

    pub(super) fn add_soon(&mut self, due: Duration, op: Op) {
        self.places.insert(op.id, Place::Soon(due));
        self.soon.insert((due, op.id), op);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns the most urgent read and its deadline. Of two with the same deadline, the one for a
    /// step's layer comes first.
    pub(super) fn first(&self, steps: &BTreeMap<StepId, Step>) -> Option<(Duration, Op)> {
        // Only the first layer of each step matters: steps are few.
        let mut layer: Option<(Duration, Op)> = None;
        let mut from = StepId(0);
        while let Some((key, ops)) = self.layers.range((from, 0)..).next() {
            let found = due(steps, key.0, key.1);
            if layer.is_none_or(|(best, _)| found < best) {
                layer = ops.front().map(|op| (found, *op));
            }
            let Some(next) = key.0.0.checked_add(1) else { break };
            from = StepId(next);
        }
        let soon = self.soon.first_key_value().map(|(key, op)| (key.0, *op));
        match (layer, soon) {
            (Some(layer), Some(soon)) if soon.0 < layer.0 => Some(soon),
            (layer, soon) => layer.or(soon),
        }
    }

    pub(super) fn remove(&mut self, id: OpId) -> Option<Op> {
        match self.places.remove(&id)? {
            Place::Soon(due) => self.soon.remove(&(due, id)),
            Place::Layer(step, layer) => {
                let ops = self.layers.get_mut(&(step, layer))?;
                let op = ops.iter().position(|op| op.id == id).and_then(|at| ops.remove(at));
                if ops.is_empty() {
                    self.layers.remove(&(step, layer));
                }
                op
            }
        }
    }
}
