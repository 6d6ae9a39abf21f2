//! The C interface of Ripieno: `tests/header.rs` generates `include/ripieno.h` from these files.
//!
//! # Architecture
//! - `status.rs`: status codes, and the message of a thread's last failure.
//! - `config.rs`: the structs that a caller fills, checked and converted to those of
//!   [`ripieno_stack`] and [`objstore`].
//! - `place.rs`: the handles, of a [`ripieno_stack::KvStore`] in this process or at a server.
//! - `store.rs`: opening, closing, handles in other namespaces. `namespace.rs`: operations that
//!   move no data. `request.rs`: retrieving and storing, layer by layer. `report.rs`: counters.
//!
//! # Invariants
//! - No panic crosses the C boundary: it becomes [`Status::Panic`].
//! - Null is refused for required pointers. Outputs are written on success only.
//! - A struct begins with its size, and only grows at its end: callers compiled against an older
//!   header work, and so do those with a newer header as long as the added fields are zero.
//! - No pointer of a caller is kept after the call, except for the KV pool.
//!
//! # Not implemented
//! - Of a server's store: what its clients cannot do, such as pins.
//! - GPUs: pools in their memory, order with their streams, and the I/O kernel on a GPU.
//! - Drives through VFIO, and events of their controllers.
//! - Catalog and plane of a store in two processes.

#![allow(
    clippy::missing_safety_doc,
    reason = "the rules for pointers are the same for all functions, and at the top of the header"
)]

// The modules are in the order of the header.
mod status;
// Structs that a caller fills.
mod config;
// Handles of a store.
mod place;
mod store;
// Operations on keys.
mod namespace;
// Operations on layers.
mod request;
// Counters.
mod report;

pub use config::{Config, Namespace, Pool, Shape};
pub use namespace::*;
pub use place::*;
pub use report::*;
pub use request::*;
pub use status::*;
pub use store::*;
