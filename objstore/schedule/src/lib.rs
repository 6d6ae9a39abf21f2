//! When KV blocks move: reads by deadline, writes into slack, prefetches in time.
//!
//! # Architecture
//! - [`SlackTable`]: how long layers compute, learned while they do ([`StepShape`]), and what I/O
//!   costs by its size ([`IoCosts`]).
//! - [`Scheduler`]: a step machine. The engine's steps and layers, new operations and ended ones go
//!   in; [`Decision`]s come out.
//!
//! # Invariants
//! - No I/O, threads, clock or chance: the same events give the same decisions.
//! - No more bytes are in flight, or wait to be written, than [`Config`] says; but for one read
//!   or write that is larger than that, and a second write as [`Config::write_depth_bytes`] says.
//! - A write starts only if every read that waits is in time nevertheless, by the table.
//! - What was added ends: it is started, dropped (prefetches) or cancelled.
//!
//! # Not implemented
//! - Budgets of SMs by operator: a layer is one window.

mod cost;
mod op;
mod scheduler;
mod table;

pub use cost::{Curve, Direction, IoCosts};
pub use op::{BacklogFull, Cancelled, Decision, Flow, Kind, Op, OpId, StepId};
pub use scheduler::{Config, Counts, Scheduler};
pub use table::{Setting, SlackTable, StepShape, TableError};
