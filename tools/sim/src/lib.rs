//! Simulation of serving with a tiered KV cache, in virtual time.
//!
//! # Architecture
//! - [`Gpu`] and [`Model`]: compute time of a layer (a roofline). [`LaneModel`]: transfer time.
//!   [`Parameters`]: their numbers, each with its source. [`Storage`]: the channels and capacities
//!   of the tiers.
//! - [`serve`]: an engine with continuous batching; requests and steps are events. In the model of
//!   its [`Tiers`], storing and evicting is done by the store's own [`kv_catalog::Catalog`], and by
//!   [`kv_tier::Tier`] for host memory, with its [`kv_tier::Lookahead`]; the order of transfers by
//!   its own [`kv_schedule::Scheduler`]. [`serve_over`]: the same engine over other [`Tiers`].
//! - [`Policy`]: the tiers that keep KV cache, and the path of the data to the GPU.
//! - `paging`: an engine whose requests take turns to decode, for TierKV's tables: [`kv_tier`]
//!   decides which of their blocks are in host memory, and when they are read.
//! - `swarm`: activations of entries by a law, and other ways to organize them, for the figures of
//!   Swarm; [`kv_swarm`] has its clusters.
//! - [`Machine`]: GPUs, host memory and drives; [`compare()`] serves a workload on one, with all
//!   policies side by side. [`Summary`], [`Prices`]: performance and cost. [`cluster()`]: on
//!   several, behind a router, with a directory of their blocks and links between them.
//! - [`Scenario`]: the papers' simulations by name, from the files in `scenarios/`: parameters of
//!   experiments, and the tables, plots and comparisons of their results. `shown`: these, of any
//!   numbers by name; also the commands' tables. [`Outcome`]: results next to a paper's numbers.
//!   [`page`]: results as HTML.
//!
//! # Invariants
//! - No clock and no unseeded randomness, and one thread for each run: equal requests give equal
//!   reports on any machine. Several runs go side by side.
//!
//! # Not implemented
//! - Engines that share a tier; those of a cluster have their own, and fetch from each other.

mod cluster;
mod compare;
mod engine;
mod gpu;
mod lane;
mod machine;
mod outcome;
mod page;
mod paging;
mod parallel;
mod parameters;
mod plan;
mod policy;
mod scenario;
mod shown;
mod storage;
mod summary;
mod swarm;
mod workload;

pub use cluster::{Clusters, cluster};
pub use compare::{POLICIES, compare};
pub use engine::{
    Ended, Hit, LayerTimes, Place, Purpose, Report, Request, Second, Served, Setup, Span, Tiers,
    Work, plain_catalog, serve, serve_over, watch,
};
pub use gpu::{GLM_4_9B_1M, Gpu, LLAMA_3_8B, LLAMA_3_70B, Model, QWEN3_32B};
pub use lane::LaneModel;
pub use machine::Machine;
pub use outcome::{Bar, Basis, Comparison, Gantt, Line, Outcome, Plot, Table};
pub use page::{comparisons, page, svg};
pub use parameters::{PARAMETERS, Parameters};
pub use plan::{Choices, Limits, plan};
pub use policy::{AT_ONCE, HostMemory, Loads, Path, Policy, Tier};
pub use scenario::Scenario;
pub use storage::Storage;
pub use summary::{Counted, Prices, Summary, Times, median, percentile};
pub use workload::{Documents, Workload, abort};
