//! Tests that need more than one crate. The tests are in `tests/`, one file, and so one name on the
//! command line, for each subject; this library has the code that several of them share.
//!
//! # Architecture
//!
//! - [`conformance`]: cases with the results that the NVMe specification requires, for any
//!   [`target`]. `tests/conformance.rs` runs them against our software controller, `tests/qemu.rs`
//!   against QEMU's, an independent check of both the suite and the driver.
//! - [`raw`]: a controller without a driver, to provoke errors that the driver would never cause.
//! - [`qtest`]: QEMU's controller as a bus, without a guest and without privileges.
//! - [`store`]: a store over any controllers, with blocks of known contents.
//!
//! `cargo test -p ripieno-tests --test tidy` runs the rules that hold for every file of the
//! repository. The other subjects drive the real driver and the real I/O kernel against real
//! controllers; none of our own parts is mocked.
//!
//! # Invariants
//!
//! No test needs a device, a GPU, root or the network, and each failure prints the seed that
//! repeats it. A test that could not run is reported as ignored or failed, never as passed.
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
