//! The I/O kernel against a strict controller, with everything on one thread and virtual time.

#![allow(clippy::print_stdout, reason = "seeds and counts, shown when a test fails")]

mod checksums;
mod device;
mod faults;
mod fuzz;
mod memory;
mod moves;
mod rig;
mod shape;
