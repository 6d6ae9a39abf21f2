//! Builds a store from a plain configuration, for the command line and for other languages.
//!
//! # Architecture
//! - [`Home`]: a directory that is a store's place on this machine. One file, or block device, for
//!   each software controller; their parameters; a lock.
//! - [`Stack`]: devices, driver, executor, KV pool and store, in the order in which they are built
//!   and taken apart. `emulation.rs` has the software controllers, `executor.rs` who runs the I/O
//!   kernel, `pool.rs` the engine's memory, `bounce.rs` what it is copied through where devices
//!   cannot describe it.
//! - [`Request`]: blocks on their way, for callers that know layers by number and have no tickets.
//!
//! # Invariants
//! - A home belongs to one process at a time. It is complete, or recognised as incomplete.
//! - The files of a home have all their space from the beginning, and never more than was asked
//!   for: once it exists, no write fails because a disk is full.
//! - Chance is an argument: identities come from the caller. So is the clock.
//! - When a request has ended, no device and no copy touches the engine's blocks any more.
//!
//! # Not implemented
//! - Drives, GPUs and pools in their memory: the command line builds those itself.
//! - Homes that grow, shrink, or get other devices.

mod bounce;
mod emulation;
mod error;
mod executor;
pub mod home;
mod pool;
mod request;
mod stack;

pub use emulation::{EMU_DEPTH, EMU_QUEUES, Emulation};
pub use error::StackError;
pub use executor::Executor;
pub use home::{Home, HomeDevice, HomeError, HomeMedia, HomeOptions};
pub use pool::{EngineMemory, PoolLayout};
pub use request::Request;
pub use stack::{PoolMemory, Stack, StackConfig};
