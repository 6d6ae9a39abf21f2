//! The Tutti paper's figures without an engine: bytes, a scheduler, and a channel.

use std::time::Duration;

use kv_schedule::Kind;
use serde::Deserialize;

use super::testbed::Testbed;
use crate::{
    engine::{ALONE, Link, Purpose},
    lane::LaneModel,
    parameters::Parameters,
    policy::{Loads, Policy, Tier},
    shown::{Results, results},
    storage::Storage,
};

const GB: f64 = 1e9;

/// Returns the seconds until all reads and writes, of `bytes` each, have ended. They are submitted
/// at the beginning, one of each in turn.
fn moved((tier, model): &(Tier, LaneModel), bytes: u64, [reads, writes]: [u64; 2]) -> f64 {
    let mut link = Link::new(*model, (tier.schedule, model.table()), bytes, 1);
    for at in 0..reads.max(writes) {
        for (kind, count) in [(Kind::Soon, reads), (Kind::Write, writes)] {
            let is_taken = at >= count || link.add(Purpose::Whole, kind, 0, (1, 1), Duration::ZERO);
            assert!(is_taken, "room for all");
        }
    }
    let mut now = Duration::ZERO;
    loop {
        link.pump(now, ALONE);
        let Some(next) = link.next_event() else { return now.as_secs_f64() };
        now = next;
        link.ended(now, ALONE);
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
        let counts = [1.0 - part, part].map(|part| ((ALL / EACH) as f64 * part).round() as u64);
        let bytes = (counts.iter().sum::<u64>() * EACH) as f64;
        let of = |policy: &Policy| bytes / moved(&tier(storage, policy), EACH, counts) / GB;
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
        let (bytes, ops) = match tier.0.loads {
            Loads::Layers => (tokens * model.token_layer_bytes(), model.layers.into()),
            Loads::Step | Loads::Whole => (tokens * model.token_bytes(), 1),
        };
        let counts = if self.is_store { [0, ops] } else { [ops, 0] };
        results([("GB/s", (ops * bytes) as f64 / moved(&tier, bytes, counts) / GB)])
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
