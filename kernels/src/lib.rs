//! The I/O kernel: turns operations of a `gio-uring` into NVMe commands, one warp for each granted
//! queue pair, and completions back into ring entries. One C++ source, for GPUs and host threads.
//!
//! # Architecture
//! The algorithm is in `include/gio`, one header per concept: `order.cuh` (every fence, atomic and
//! MMIO store), `warp.cuh` (32 lanes in step, or a loop), `state.cuh` (a warp's registers),
//! `operation.cuh` (ring entry to completion), `queue.cuh` (command slots, doorbells, completions,
//! timeouts), `descriptor.cuh` (SGL, PRP), `cursor.cuh` (what an I/O context means), `engine.cuh`
//! (chunks, runs, batches), `crc32c.cuh` (CRC-32C, by a warp or by the processor's instructions),
//! `checksum.cuh` (which objects have one, and what differs), `kernel.cuh` (entry points), and
//! `abi.h`, from which [`gio_uring::abi`] is made.
//!
//! ```text
//!   round: reap up to 32 completions -> stop word, timeouts -> submit up to 32 commands
//!   submit: 32 IOCTXs -> addresses -> runs of neighbours -> descriptors and SQEs
//!           -> one fence, one doorbell
//! ```
//!
//! [`HostExecutor`] gives warps to threads, [`InlineExecutor`] runs them in the caller's thread
//! (deterministic with a simulated clock). Both call `gio_host_run`. The feature `cuda` adds a
//! third, `cuda::CudaExecutor`, which launches [`ptx`] on an NVIDIA GPU.
//!
//! A second module has two kernels that work on a KV pool, one source for both sides, too:
//! `include/pool`, with `unit.cuh` (what one access moves), `scatter_gather.cuh` (objects between
//! staging memory and their blocks), `pattern.cuh` (contents that are made, and can be checked,
//! without a copy), `kernel.cuh`, and `abi.h`, from which [`pool`] is made. The host uses
//! [`pattern`]; a GPU gets `cuda::CudaPattern` and `cuda::CudaStreams`.
//!
//! # Invariants
//! - One warp owns one queue pair; nothing on the submission path is shared, locked or allocated.
//! - At most depth - 1 commands are outstanding, those given up included: no queue can overflow.
//! - A command slot, and the descriptor area that belongs to it, is reused only after a completion
//!   with the generation of its last use.
//! - Each operation completes exactly once, whatever a device does: an I/O context that could not
//!   be moved has a status, and never counts as done.
//! - What is out of bounds (block, file, range, padding without SGL) is refused and never sent.
//! - A completion that makes no sense, or none in time, fails the queue for good: nothing is
//!   submitted to it any more, and its outstanding slots stay quarantined until the controller took
//!   it back.
//! - A read with checksums looks at every object once, after the last of its commands, and before
//!   it counts as done.
//! - Control flow is warp-uniform outside of lane bodies, and no lane's state is in local memory.
//! - Host and GPU make the same contents from a seed, whatever alignment and division they use.
//!
//! # Not implemented
//! - The CUDA executor (module `cuda`, with the feature of that name) launches [`ptx`], and has run
//!   over a libcuda without a GPU only: nobody has seen it on one. The same holds for the pool's
//!   kernels, whose speed nobody has measured.
//! - `objects` of an operation is a lower bound when an object of several commands failed in part.
//! - On a GPU the warp of a queue makes the checksums itself, and submits nothing meanwhile.
//! - Runs are merged within 32 I/O contexts at a time, and never across rows or operations.

#[cfg(test)]
mod crc32c_tests;
#[cfg(feature = "cuda")]
pub mod cuda;
mod ffi;
mod host;
mod inline;
mod memory;
pub mod pattern;
pub mod pool;
pub mod ptx;

pub use host::{HostExecutor, HostOptions};
pub use inline::InlineExecutor;
