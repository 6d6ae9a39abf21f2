//! Scheduling of KV block I/O: reads by deadline, writes after reads, prefetches in time.
//!
//! # Architecture
//! - [`SlackTable`]: durations of layers by [`StepShape`], learned while they run, and I/O costs by
//!   size ([`IoCosts`]).
//! - [`Scheduler`]: a state machine. Steps and layers of the engine, new operations and completed
//!   ones go in; [`Decision`]s come out.
//!
//! # Invariants
//! - No I/O, threads, clock or randomness: the same events give the same decisions.
//! - No more bytes are in flight, or wait to be written, than [`Config`] allows; except for one
//!   read or write larger than that, and a second write as in [`Config::write_depth_bytes`].
//! - With [`Config::reads_first`], a write starts only if no read waits or is in flight, or if the
//!   devices mix both well; unless it is demanded.
//! - Every added operation is started, dropped (prefetches) or cancelled.
//!
//! # Not implemented
//! - Budgets of SMs: the I/O kernel has a partition of its own.

mod cost;
mod op;
mod scheduler;
mod table;

pub use cost::{Curve, CurveError, Direction, IoCosts};
pub use op::{BacklogFull, Cancelled, Decision, Flow, Kind, Op, OpId, StepId};
pub use scheduler::{Config, Counts, Scheduler};
pub use table::{Setting, SlackTable, StepShape, TableError};
