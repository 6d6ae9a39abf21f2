//! The CUDA executor, over a libcuda without a GPU (`kernels/mock`) and, on request, on a GPU:
//! `cargo test -p gio-kernels --features cuda --test cuda -- --ignored --nocapture`.
//!
//! A process loads libcuda only once, so each test with the mock runs in a child process: this
//! program again, with the mock first in the loader's path.
#![cfg(feature = "cuda")]
#![allow(unsafe_code, reason = "calls the mock's own functions")]

mod cases;
mod checksums;
mod copies;
mod faults;
mod gdr;
mod gpu;
mod launches;
mod load;
mod memory;
mod pool;
mod rig;
mod vmm;
