//! The Tutti paper's figures without an engine: bytes, a scheduler, and a channel.

use std::time::Duration;

use kv_schedule::{Decision, Direction, Flow, Kind, Op, OpId, Scheduler};
use serde::Deserialize;

use super::{
    numbers::{Results, results},
    testbed::{Testbed, policy},
};
use crate::{
    lane::{Lane, LaneModel},
    parameters::Parameters,
    policy::{Loads, Policy, Tier},
    storage::Storage,
};

const GB: f64 = 1e9;

/// Returns the time until the last read and the last write, all submitted at the beginning.
fn moved((tier, model): &(Tier, LaneModel), reads: &[u64], writes: &[u64]) -> [f64; 2] {
    let (mut lane, mut scheduler) =
        (Lane::new(*model), Scheduler::new(tier.schedule, model.table()));
    let directions = [Direction::Read, Direction::Write];
    let mut ops = Vec::new();
    for at in 0..reads.len().max(writes.len()) {
        for (direction, all) in directions.into_iter().zip([reads, writes]) {
            let Some(bytes) = all.get(at).copied() else { continue };
            let (id, flow) = (OpId(ops.len() as u64), Flow::default());
            let kind = if direction == Direction::Read { Kind::Soon } else { Kind::Write };
            scheduler.add(Op { id, flow, bytes, kind }, Duration::ZERO).expect("room for all");
            ops.push((direction, bytes));
        }
    }
    let (mut now, mut last) = (Duration::ZERO, [0.0; 2]);
    loop {
        while let Decision::Start(id) = scheduler.next(now) {
            let (direction, bytes) = ops[id.0 as usize];
            lane.push(now, id, direction, bytes, 1);
        }
        let Some(next) = lane.next_event() else { return last };
        now = next;
        for (id, _) in lane.arrived(now) {
            let (direction, bytes) = ops[id.0 as usize];
            scheduler.ended(id, bytes, now);
            last[usize::from(direction == Direction::Write)] = now.as_secs_f64();
        }
    }
}

/// Returns a policy's tier with an unlimited write backlog, and its channel. Reads and writes are
/// independent, so that they mix only on the drives.
fn tier(storage: &Storage, policy: &Policy) -> (Tier, LaneModel) {
    let mut tier = policy.tier.expect("a policy with a tier");
    tier.schedule.backlog_bytes = u64::MAX;
    (tier, LaneModel { window: usize::MAX, ..storage.lane(tier.path) })
}

/// Reads and writes of two drives that mix.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Mix {
    /// Percentage of the bytes that is written; the one at which reads and writes end together, so
    /// that neither continues alone, if there is none.
    pub(super) writes: Option<f64>,
}

impl Mix {
    pub(super) fn run(&self, parameters: &Parameters) -> Results {
        const ALL: u64 = 64 << 30;
        const EACH: u64 = 256 << 20;
        let storage = &parameters.storage(2, 1);
        let lane = storage.direct;
        let both = lane.write / (lane.read + lane.write);
        let part = self.writes.map_or(both, |percent| percent / 100.0);
        let count = |part: f64| vec![EACH; ((ALL / EACH) as f64 * part).round() as usize];
        let (reads, writes) = (count(1.0 - part), count(part));
        let of = |policy: &Policy| {
            let [read, written] = moved(&tier(storage, policy), &reads, &writes);
            ((reads.len() + writes.len()) as u64 * EACH) as f64 / read.max(written) / GB
        };
        results([
            ("concurrent", of(&Policy::NAIVE)),
            ("decoupled", of(&Policy::OURS)),
            ("best", GB.recip() / ((1.0 - part) / lane.read + part / lane.write)),
        ])
    }
}

/// Bandwidth of some tokens, read or written by layers, or as a whole.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Bandwidth {
    machine: Testbed,
    #[serde(deserialize_with = "policy")]
    policy: Policy,
    /// Tokens, in units of 1,024.
    tokens: u64,
    /// True if they are written.
    is_store: bool,
}

impl Bandwidth {
    pub(super) fn run(&self, parameters: &Parameters) -> Results {
        let setup = self.machine.setup(parameters);
        let (tier, model) = (tier(&setup.storage, &self.policy), setup.model);
        let tokens = self.tokens * 1024;
        let ops = match tier.0.loads {
            Loads::Layers => vec![tokens * model.token_layer_bytes(); model.layers as usize],
            Loads::Step | Loads::Whole => vec![tokens * model.token_bytes()],
        };
        let [read, written] =
            if self.is_store { moved(&tier, &[], &ops) } else { moved(&tier, &ops, &[]) };
        results([("GB/s", ops.iter().sum::<u64>() as f64 / read.max(written) / GB)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_decoupled_is_as_fast_as_the_drives_and_what_mixes_is_not() {
        let mix = |percent: f64| {
            let found = Mix { writes: Some(percent) }.run(&Parameters::default());
            [0, 1, 2].map(|at: usize| found[at].1)
        };
        for percent in [25.0, 50.0, 75.0] {
            let [naive, ours, best] = mix(percent);
            assert!(ours > best * 0.99 && ours <= best * 1.001, "{percent}: {ours} of {best}");
            assert!(naive < ours * 0.8, "{percent}: {naive} {ours}");
        }
        for percent in [0.0, 100.0] {
            let [naive, ours, _] = mix(percent);
            assert!((naive / ours - 1.0).abs() < 0.01, "{percent}: {naive} {ours}");
        }
    }
}
