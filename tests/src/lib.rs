//! Tests that need more than one crate. The library itself is empty: the tests are in `tests/`,
//! one file, and so one name on the command line, for each subject.
//!
//! # Architecture
//!
//! `cargo test -p ripieno-tests --test tidy` runs the rules that hold for every file of the
//! repository. The other subjects drive the real driver and the real I/O kernel against the real
//! software controller; nothing here stands in for one of our own parts.
//!
//! # Invariants
//!
//! No test needs a device, a GPU, root or the network, and each failure prints the seed that
//! repeats it.
//!
//! # Not implemented
//!
//! Tests against VFIO in a virtual machine, and against a GPU.
