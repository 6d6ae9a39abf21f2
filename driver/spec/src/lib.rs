//! NVMe wire types: the data exchanged between host and controller, and nothing else.
//!
//! Pinned revision: NVM Express Base Specification 2.1, NVM Command Set Specification 1.1 and NVMe
//! over PCIe Transport Specification 1.1 (2024). Doc comments name sections of these by title.
//!
//! # Architecture
//!
//! One module per part of the specification: [`ids`], [`reg`]isters, [`sqe`] and [`cqe`],
//! [`status`], [`admin`] commands, [`identify`] data, [`nvm`] commands, [`prp`] and [`sgl`]
//! descriptors, [`log`] pages, Flexible Data Placement ([`fdp`]). Driver and software controller
//! share them, so a wrong layout here would be wrong on both sides alike: sizes and offsets are
//! therefore asserted next to each type.
//!
//! # Invariants
//!
//! - Types are `repr(C)` and have the size the specification gives, asserted at compile time.
//! - Enumerations are open: an unknown value is preserved and printed, never rejected or lost.
//! - Fields whose name ends in `_z` are zero-based: the value n means n + 1.
//! - Multi-byte fields are little-endian; the crate does not compile for big-endian targets.
//!
//! # Not implemented
//!
//! Metadata and protection information, fabrics, zoned and key-value command sets, the directive
//! commands, reservations, security commands.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(not(target_endian = "little"))]
compile_error!("nvme-spec reads wire structures in place and needs a little-endian target");

#[macro_use]
mod dwords;
#[macro_use]
mod open_enum;

pub mod admin;
pub mod cqe;
pub mod fdp;
pub mod identify;
pub mod ids;
pub mod log;
pub mod nvm;
pub mod prp;
pub mod reg;
pub mod sgl;
pub mod sqe;
pub mod status;

#[cfg(test)]
mod tests;
