//! Tests that need more than one crate. The tests are in `tests/`, one file, and so one name on the
//! command line, for each subject; here is what several of them share.
//!
//! # Architecture
//!
//! - [`conformance`]: cases that say what the NVMe specification wants, generic over a [`target`].
//!   `tests/conformance.rs` runs them against our software controller, `tests/qemu.rs` against
//!   QEMU's, a second opinion on both the suite and the driver.
//! - [`raw`]: a controller without a driver, to provoke errors that the driver would never cause.
//! - [`qtest`]: QEMU's controller as a bus, without a guest and without privileges.
//! - [`store`]: a store over any controllers, with blocks whose right contents are known.
//!
//! `cargo test -p ripieno-tests --test tidy` runs the rules that hold for every file of the
//! repository. The other subjects drive the real driver and the real I/O kernel against real
//! controllers; nothing here stands in for one of our own parts.
//!
//! # Invariants
//!
//! No test needs a device, a GPU, root or the network, and each failure prints the seed that
//! repeats it. What could not run is reported as ignored or failed, never as passed.
//!
//! # Not implemented
//!
//! Tests against VFIO in a virtual machine, and against a GPU.

pub mod conformance;
pub mod qtest;
pub mod raw;
pub mod store;
pub mod target;

pub use ripieno_testkit::pattern;
