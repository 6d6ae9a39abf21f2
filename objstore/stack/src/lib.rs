//! Builds a store from a plain configuration, for the command line and for other languages.
//!
//! # Architecture
//! - [`Home`]: a directory that is a store's place on this machine. One file, or block device, for
//!   each software controller; their parameters; a lock.
//!
//! # Invariants
//! - A home belongs to one process at a time. It is complete, or recognised as incomplete.
//! - The files of a home have all their space from the beginning, and never more than was asked
//!   for: once it exists, no write fails because a disk is full.
//! - Chance is an argument: identities come from the caller.
//!
//! # Not implemented
//! - Drives, executors and pools are built by the command line itself.
//! - Homes that grow, shrink, or get other devices.

pub mod home;

pub use home::{Home, HomeDevice, HomeError, HomeMedia, HomeOptions};
