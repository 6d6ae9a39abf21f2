//! The C interface of Ripieno: `include/ripieno.h`, made of these files by `tests/header.rs`.
//!
//! # Architecture
//! - `status.rs`: what functions return, and the message of a thread's last failure.
//! - `config.rs`: the structs a caller fills, checked and turned into those of
//!   [`ripieno_stack`] and [`objstore`].
//! - `store.rs`: opening, closing, handles in other namespaces. `namespace.rs`: what a handle can
//!   do without moving data. `request.rs`: retrieving and storing, layer by layer. `report.rs`:
//!   counts.
//!
//! # Invariants
//! - No panic crosses the border: it is [`Status::Panic`].
//! - Null is refused where something is needed. Outputs are written on success only.
//! - A struct begins with its size, and only grows at its end: a caller that was compiled against
//!   an older header is understood, and one with a newer header is as long as what it adds is zero.
//! - Nothing that a caller gave by pointer is kept after the call, but the KV pool.
//!
//! # Not implemented
//! - GPUs: pools in their memory, order with their streams, and the I/O kernel on one.
//! - Drives through VFIO, and what their controllers report.
//! - The two halves of a store in two processes.

#![allow(
    clippy::missing_safety_doc,
    reason = "the rules for pointers are the same for all functions, and at the top of the header"
)]

// In the order in which the header has them.
mod status;
// What a caller fills.
mod config;
// Handles of a store.
mod store;
// Keys.
mod namespace;
// Layers.
mod request;
// Counts.
mod report;

pub use config::{Config, Namespace, Pool, Shape};
pub use namespace::*;
pub use report::*;
pub use request::*;
pub use status::*;
pub use store::*;
