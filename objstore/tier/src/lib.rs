//! The host-memory tier above the drives: cached KV blocks, and prefetch into it.
//!
//! # Architecture
//! - [`Tier`]: a bounded cache of blocks in host memory: lookup, admission, fill and eviction. It
//!   evicts the least valuable block: the likelihood of reuse (an eviction policy of
//!   [`kv_catalog`]) times the time to reload it.
//! - [`Lookahead`]: prefetches for requests that the engine announces, as batches of blocks from
//!   the drives to host memory, and from there to the GPU (TierKV, sections 3.4 and 3.5). Each hop
//!   has a [`kv_schedule::Scheduler`], which decides when a batch starts, or that it is too late
//!   for it; the scheduler of the drives also carries all other I/O.
//!
//! # Invariants
//! - No I/O, threads, clock or randomness: the same events give the same decisions.
//! - The tier never holds more blocks than it has memory for.
//! - A block being read, filled or held is not evicted; a block that no drive has yet is held.
//! - Every scheduled batch ends: it is started and ended, dropped, or cancelled.
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
