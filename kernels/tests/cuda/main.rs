//! The CUDA executor, over a libcuda without a GPU (`kernels/mock`) and, where there is one and
//! it is asked for, on a GPU:
//! `cargo test -p gio-kernels --features cuda --test cuda -- --ignored --nocapture`.
//!
//! libcuda is loaded once in a process, so each test with the mock runs in a process of its own:
//! this program again, with the mock first in the loader's path.
#![cfg(feature = "cuda")]
#![allow(unsafe_code, reason = "calls the mock's own functions")]

mod cases;
mod copies;
mod gdr;
mod gpu;
mod load;
mod memory;
mod moves;
mod pool;
mod rig;
mod trouble;
mod vmm;
