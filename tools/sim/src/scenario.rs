//! Named simulations.

mod hiding;
mod io;
mod lmcache;
mod serving;
mod swarm;
mod tierkv;
mod tutti;
mod vllm;

pub use swarm::{SwarmStep, SwarmSteps};

use crate::{
    outcome::{Basis, Comparison, Outcome},
    parameters::Parameters,
};

/// A scenario.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// Name.
    pub name: &'static str,
    /// Title.
    pub title: &'static str,
    run: fn(&Parameters) -> Outcome,
}

impl Scenario {
    /// All scenarios.
    pub const ALL: &[Self] = &[
        Self::new("tutti-2", "tiers at 64K tokens, 75 % stored", tutti::figure_2),
        Self::new(
            "tutti-6",
            "bandwidth of mixed reads and writes, concurrent and decoupled",
            io::figure_6,
        ),
        Self::new("tutti-table-1", "hit rates by tier", serving::table_1),
        Self::new("tutti-8", "TTFT and inter-token latency by request rate", serving::figure_8),
        Self::new("tutti-9", "bandwidth of retrieve and store by context length", io::figure_9),
        Self::new("tutti-11", "TTFT by stored prefix, 128K tokens", tutti::figure_11),
        Self::new("tutti-12", "TTFT by stored prefix, GLM-4-9B-1M on two GPUs", tutti::figure_12),
        Self::new("tutti-13", "bubble and computation by hit rate, 32K tokens", tutti::figure_13),
        Self::new("tutti-14", "cost of a million tokens", serving::figure_14),
        Self::new("hiding", "the scheduler against layer-wise order, by hit rate", hiding::hiding),
        Self::new(
            "tierkv-4",
            "TierKV, table 4: what prefetching gains by model size",
            tierkv::table_4,
        ),
        Self::new(
            "tierkv-5",
            "TierKV, tables 3 and 5: decoding by oversubscription and policy",
            tierkv::table_5,
        ),
        Self::new("tierkv-6", "TierKV, table 6: how far ahead is enough", tierkv::sweep::table_6),
        Self::new("tierkv-blocks", "TierKV, section 4.5: sizes of blocks", tierkv::blocks::blocks),
        Self::new(
            "tierkv-patterns",
            "TierKV, section 4.7: workloads beside an oracle",
            tierkv::blocks::patterns,
        ),
        Self::new(
            "vllm-offload",
            "the vLLM blog: decode steps with blocks from below, and capacity",
            vllm::tables,
        ),
        Self::new(
            "lmcache-1",
            "LMCache, tables 1 and 5: throughput by size of a message",
            lmcache::messages::table_1,
        ),
        Self::new(
            "lmcache-4",
            "LMCache, figure 4: free pages that have a copy, and allocations that wait for one",
            lmcache::offload::figure_4,
        ),
        Self::new(
            "lmcache-7",
            "LMCache, figure 7: a central store behind a slow link",
            lmcache::central::figure_7,
        ),
        Self::new(
            "lmcache-8",
            "LMCache, figures 8 and 11: prefill and decoding apart",
            lmcache::apart::figure_8,
        ),
        Self::new(
            "lmcache-10",
            "LMCache, figure 10: loads beside computation, for requests that wait",
            lmcache::queue::figure_10,
        ),
        Self::new(
            "lmcache-12",
            "LMCache, figure 12: load or compute, by link and length",
            lmcache::figure_12,
        ),
        Self::new("swarm-4", "Swarm, table 4: the index of medoids", swarm::growth::table_4),
        Self::new(
            "swarm-5",
            "Swarm, figure 5 and table 5: overlap, and clusters that grow",
            swarm::growth::figure_5,
        ),
        Self::new(
            "swarm-11",
            "Swarm, figure 11: against no clusters, blocks and k-means",
            swarm::reading::figure_11,
        ),
        Self::new(
            "swarm-12",
            "Swarm, figure 12: clusters without their parts, by radius",
            swarm::reading::figure_12,
        ),
        Self::new(
            "swarm-14",
            "Swarm, figures 5b and 14: retrieval, by number of drives",
            swarm::reading::figure_14,
        ),
        Self::new(
            "swarm-15",
            "Swarm, figure 15: clusters in host memory",
            swarm::reading::figure_15,
        ),
    ];

    const fn new(name: &'static str, title: &'static str, run: fn(&Parameters) -> Outcome) -> Self {
        Self { name, title, run }
    }

    /// Returns the scenario of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        Self::ALL.iter().find(|scenario| scenario.name == name)
    }

    /// Runs the simulation.
    #[must_use]
    pub fn run(&self, parameters: &Parameters) -> Outcome {
        let (name, title) = (self.name.to_owned(), self.title.to_owned());
        let mut outcome = (self.run)(parameters);
        outcome.setting.extend(parameters.replaced());
        Outcome { name, title, ..outcome }
    }
}

fn predicted(
    what: &str,
    unit: &'static str,
    paper: f64,
    ours: f64,
    note: &'static str,
) -> Comparison {
    let (what, ours, basis) = (what.to_owned(), Some(ours), Basis::Predicted);
    Comparison { what, unit, paper, ours, basis, note }
}

fn calibrated(
    what: &str,
    unit: &'static str,
    paper: f64,
    ours: f64,
    note: &'static str,
) -> Comparison {
    Comparison { basis: Basis::Calibrated, ..predicted(what, unit, paper, ours, note) }
}

fn input(what: &str, unit: &'static str, paper: f64, ours: f64, note: &'static str) -> Comparison {
    Comparison { basis: Basis::Input, ..predicted(what, unit, paper, ours, note) }
}

#[cfg(test)]
mod tests;
