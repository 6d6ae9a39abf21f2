//! Serving with tiers of KV cache, simulated in virtual time.
//!
//! # Architecture
//! - [`Gpu`] and [`Model`]: how long a layer computes (a roofline). [`LaneModel`]: how long bytes
//!   take. Both have few parameters; scenarios say where those are from.
//! - [`Run`]: an engine with continuous batching, requests and steps as events. What is stored and
//!   evicted is the store's own [`kv_catalog::Catalog`], and [`kv_tier::Tier`] for host memory
//!   before it, with its [`kv_tier::Lookahead`]; what moves when is its own
//!   [`kv_schedule::Scheduler`].
//! - [`Policy`]: where KV cache is kept, and how it gets to the GPU.
//! - `paging`: an engine whose requests take turns to decode, for TierKV's tables: [`kv_tier`] says
//!   which of their blocks are in host memory, and which come when.
//! - [`Machine`]: GPUs, host memory and drives; [`compare()`] serves a workload on one, with all
//!   policies beside each other. [`Summary`], [`Prices`]: how well, and for how much.
//! - [`Scenario`]: what can be simulated by name. [`Outcome`]: what was found, as tables and plots,
//!   and a paper's numbers beside ours. [`page`]: as HTML.
//!
//! # Invariants
//! - No threads, clock or chance: the same requests give the same report, on every machine.
//!
//! # Not implemented
//! - Replicas of an engine that share tiers.

mod compare;
mod engine;
mod gpu;
mod lane;
mod machine;
mod outcome;
mod page;
mod paging;
mod plan;
mod policy;
mod scenario;
mod summary;
mod workload;

pub use compare::{POLICIES, compare};
pub use engine::{Report, Request, Run, Second, Served, Setup, Span, Work};
pub use gpu::{A100, GLM_4_9B_1M, Gpu, H100, H200, LLAMA_3_8B, LLAMA_3_70B, Model};
pub use lane::LaneModel;
pub use machine::Machine;
pub use outcome::{Bar, Basis, Comparison, Gantt, Line, Outcome, Plot, Table};
pub use page::{comparisons, page};
pub use plan::{Choices, plan};
pub use policy::{HostMemory, Loads, Medium, Policy, TWO_DRIVES, Tier};
pub use scenario::Scenario;
pub use summary::{Prices, Summary, Times};
pub use workload::{Documents, L_EVAL, LOOGLE, Lengths, Profile, abort};
