//! Host memory before the drives: which KV blocks are there, and which get there ahead of time.
//!
//! # Architecture
//! - [`Tier`]: a bounded pool of blocks of host memory. Blocks are asked for, admitted, filled and
//!   evicted; it says where they are. What goes is what is worth least: how likely it is used again
//!   (an eviction policy of [`kv_catalog`]), times how long it takes to get again.
//! - [`Lookahead`]: what the engine says will run soon, as batches of blocks from the drives to
//!   host memory, and from there to the GPU (TierKV, sections 3.4 and 3.5). Each hop has a
//!   [`kv_schedule::Scheduler`], which decides when a batch starts, or that it is too late for it;
//!   that of the drives is the one which all other I/O goes through.
//!
//! # Invariants
//! - No I/O, threads, clock or chance: the same events give the same decisions.
//! - No more blocks are in the tier than it has memory for.
//! - What is read, filled or held is not evicted: what no drive has yet is held.
//! - Every batch that is scheduled ends: it is started and ended, dropped or cancelled.
//!
//! # Not implemented
//! - Blocks of different sizes in one tier.

mod lookahead;
mod pace;
mod tier;

pub use lookahead::{
    Batch, Hop, Lookahead, LookaheadConfig, LookaheadCounts, Missing, RequestId, When,
};
pub use pace::Pace;
pub use tier::{Admission, Block, Class, HostBlock, Tier, TierConfig, TierCounts};
