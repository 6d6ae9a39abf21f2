//! The I/O kernel: turns operations of a `gio-uring` into NVMe commands, one warp per granted queue
//! pair, and completions back into ring entries. One C++ source for GPUs and host threads.
//!
//! # Architecture
//! The algorithm is in `include/gio`, one header per concept: `order.cuh` (all fences, atomics and
//! MMIO stores), `warp.cuh` (32 lanes in lockstep, or a loop), `state.cuh` (a warp's registers),
//! `operation.cuh` (results and completion of an operation), `queue.cuh` (command slots, SGLs and
//! PRPs, doorbells, completions, timeouts), `cursor.cuh` (the next ring entry, decoding of I/O
//! contexts), `engine.cuh` (entry points, rounds, runs, batches), `crc32c.cuh` (CRC-32C, by a warp
//! or by the processor's instructions), `checksum.cuh` (storing and verifying objects' checksums),
//! and `abi.h`, from which [`gio_uring::abi`] is generated.
//!
//! ```text
//!   round: reap up to 32 completions -> stop word, timeouts -> submit up to 32 commands
//!   submit: 32 IOCTXs -> addresses -> runs of neighbours -> descriptors and SQEs
//!           -> one fence, one doorbell
//! ```
//!
//! [`HostExecutor`] distributes warps over threads, [`InlineExecutor`] runs them on the caller's
//! thread (deterministic with a simulated clock). Both call `gio_host_run`. The feature `cuda` adds
//! a third, `cuda::CudaExecutor`, which launches [`ptx`] on an NVIDIA GPU. [`FileExecutor`] runs no
//! kernel: it does the same operations on files, by io_uring.
//!
//! A second module, `include/pool`, has two kernels that work on a KV pool, also from one source
//! for GPU and host: `unit.cuh` (unit of one memory access), `scatter_gather.cuh` (copies objects
//! between staging memory and their blocks), `pattern.cuh` (generated contents that can be checked
//! without a copy), `kernel.cuh`, and `abi.h`, from which [`pool`] is generated. The host uses
//! [`pattern`]; on a GPU `cuda::CudaPattern` and `cuda::CudaStreams` launch them.
//!
//! # Invariants
//! - One warp owns one queue pair; nothing on the submission path is shared, locked or allocated.
//! - At most depth - 1 commands are outstanding, timed-out ones included: no queue can overflow.
//! - A command slot and its descriptor area are reused only after a completion with the generation
//!   of the slot's last use.
//! - Each operation completes exactly once, whatever a device does: an I/O context that could not
//!   be transferred has an error status, and never counts as done.
//! - Out-of-bounds input (block, file, range, padding without SGL) is rejected and never submitted.
//! - An invalid or missing completion fails the queue for good: nothing more is submitted to it,
//!   and its outstanding slots stay quarantined until the controller has reclaimed it.
//! - A read with checksums verifies every object once, after the last of its commands and before it
//!   counts as done.
//! - Control flow is warp-uniform outside of lane bodies, and no lane's state is in local memory.
//! - Host and GPU generate the same contents from a seed, for any alignment and any division.
//!
//! # Not implemented
//! - The CUDA executor (module `cuda`, feature `cuda`) launches [`ptx`]. On a GPU it has run
//!   with software controllers only, never with GDRCopy or a drive. The speed of the pool's kernels
//!   has not been measured alone.
//! - `objects` of an operation is a lower bound if an object of several commands failed in part.
//! - On a GPU the queue's warp computes checksums itself, and submits nothing meanwhile.
//! - Runs are merged within 32 I/O contexts at a time, and never across rows or operations.

#[cfg(test)]
mod crc32c_tests;
#[cfg(feature = "cuda")]
pub mod cuda;
mod ffi;
mod file;
mod host;
mod inline;
mod memory;
pub mod pattern;
pub mod pool;
pub mod ptx;

pub use file::{Ends, EndsClock, FileExecutor, FileTarget, Lesser, Reach};
pub use host::{HostExecutor, HostOptions};
pub use inline::InlineExecutor;
