//! The kinds of experiments.

use serde::Deserialize;

use super::{
    blog::OffloadedStep,
    drives::{Bandwidth, Mix},
    hiding::Hiding,
    lmcache::{FreePages, Messages},
    served::{Apart, Prompts, Questions},
    swarm::{
        growth::Growth,
        reading::{Memories, Reading},
    },
};
use crate::{paging::Decode, parameters::Parameters, shown::Results};

/// Declares the kinds.
macro_rules! kinds {
    ($($kind:ident)*) => {
        /// An experiment with its parameters.
        #[derive(Debug, Deserialize)]
        #[serde(tag = "kind", rename_all = "kebab-case")]
        pub(super) enum Experiment {
            $($kind($kind),)*
        }

        impl Experiment {
            pub(super) fn run(&self, parameters: &Parameters) -> Results {
                match self {
                    $(Self::$kind(it) => it.run(parameters),)*
                }
            }
        }
    };
}

kinds! {
    Apart Bandwidth Decode FreePages Growth Hiding Memories Messages Mix OffloadedStep
    Prompts Questions Reading
}
