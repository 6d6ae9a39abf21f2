//! The kinds of experiments.

use serde::Deserialize;

use super::{
    blog::{Capacity, OffloadedStep},
    decoding::Decoding,
    drives::{Bandwidth, Mix},
    hiding::{Hiding, WrongTable},
    lmcache::{FreePages, Messages, PromptTimes},
    numbers::{Numbers, Results},
    served::{Apart, Beside, Prompt, Questions},
    swarm::{
        growth::{Growth, Medoids},
        reading::{Memories, Organizations, Radius, Routes},
    },
};
use crate::parameters::Parameters;

/// An experiment with its parameters.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(super) enum Experiment {
    Apart(Apart),
    Bandwidth(Bandwidth),
    Beside(Beside),
    Capacity(Capacity),
    PromptTimes(PromptTimes),
    Decoding(Decoding),
    FreePages(FreePages),
    Growth(Growth),
    Hiding(Hiding),
    Medoids(Medoids),
    Memories(Memories),
    Messages(Messages),
    Mix(Mix),
    OffloadedStep(OffloadedStep),
    Organizations(Organizations),
    Prompt(Prompt),
    Questions(Questions),
    Radius(Radius),
    Routes(Routes),
    WrongTable(WrongTable),
}

impl Experiment {
    /// Runs it; `found` has the results of the scenario's experiments before.
    pub(super) fn run(&self, parameters: &Parameters, found: &Numbers) -> Results {
        match self {
            Self::Apart(it) => it.run(parameters),
            Self::Bandwidth(it) => it.run(parameters),
            Self::Beside(it) => it.run(parameters),
            Self::Capacity(it) => it.run(parameters),
            Self::PromptTimes(it) => it.run(parameters),
            Self::Decoding(it) => it.run(parameters, found),
            Self::FreePages(it) => it.run(parameters),
            Self::Growth(it) => it.run(),
            Self::Hiding(it) => it.run(parameters),
            Self::Medoids(it) => it.run(),
            Self::Memories(it) => it.run(parameters),
            Self::Messages(it) => it.run(parameters),
            Self::Mix(it) => it.run(parameters),
            Self::OffloadedStep(it) => it.run(parameters),
            Self::Organizations(it) => it.run(parameters),
            Self::Prompt(it) => it.run(parameters),
            Self::Questions(it) => it.run(parameters),
            Self::Radius(it) => it.run(parameters),
            Self::Routes(it) => it.run(parameters),
            Self::WrongTable(it) => it.run(parameters),
        }
    }
}
