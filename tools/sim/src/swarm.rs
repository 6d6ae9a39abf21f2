//! Swarm's entries: activations by a law, and other ways to organize and to read them.

mod law;
mod other;

pub(crate) use law::{Activations, LAW, Law, Step};
pub(crate) use other::{Route, blocks, dot, k_means, lru, medoid_only, no_replicas, singles};
