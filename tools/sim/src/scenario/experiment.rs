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

/// Declares the kinds: those that need only the parameters, and TierKV's, which also takes the
/// results of the scenario's experiments before.
macro_rules! kinds {
    ($($kind:ident)*) => {
        /// An experiment with its parameters.
        #[derive(Debug, Deserialize)]
        #[serde(tag = "kind", rename_all = "kebab-case")]
        pub(super) enum Experiment {
            Decoding(Decoding),
            $($kind($kind),)*
        }

        impl Experiment {
            /// Runs it; `found` has the results of the scenario's experiments before.
            pub(super) fn run(&self, parameters: &Parameters, found: &Numbers) -> Results {
                match self {
                    Self::Decoding(it) => it.run(parameters, found),
                    $(Self::$kind(it) => it.run(parameters),)*
                }
            }
        }
    };
}

kinds! {
    Apart Bandwidth Beside Capacity FreePages Growth Hiding Medoids Memories Messages Mix
    OffloadedStep Organizations Prompt PromptTimes Questions Radius Routes WrongTable
}
