//! The CUDA executor, over a libcuda without a GPU (`kernels/mock`) and, where there is one and
//! it is asked for, on a GPU:
//! `cargo test -p gio-kernels --features cuda --test cuda -- --ignored --nocapture`.
//!
//! libcuda is loaded once in a process, so each test with the mock runs in a process of its own:
//! this program again, with the mock first in the loader's path.
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
