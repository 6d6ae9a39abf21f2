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
        tutti::FIGURE_2,
        io::FIGURE_6,
        serving::TABLE_1,
        serving::FIGURE_8,
        io::FIGURE_9,
        tutti::FIGURE_11,
        tutti::FIGURE_12,
        tutti::FIGURE_13,
        serving::FIGURE_14,
        hiding::HIDING,
        tierkv::TABLE_4,
        tierkv::TABLE_5,
        tierkv::TABLE_6,
        tierkv::BLOCKS,
        tierkv::PATTERNS,
        vllm::TABLES,
        lmcache::TABLE_1,
        lmcache::FIGURE_4,
        lmcache::FIGURE_7,
        lmcache::FIGURE_8,
        lmcache::FIGURE_10,
        lmcache::FIGURE_12,
        swarm::TABLE_4,
        swarm::FIGURE_5,
        swarm::FIGURE_11,
        swarm::FIGURE_12,
        swarm::FIGURE_14,
        swarm::FIGURE_15,
    ];

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
