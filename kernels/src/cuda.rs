//! The I/O kernel on an NVIDIA GPU.
//!
//! ```text
//!   CudaDriver -- load() ------> CudaDevice (primary context)      api, error, device
//!   CudaDevice -- pinned() ----> PinnedMemory  rings, maps, queues  memory
//!              -- register*() -> Registration  memory of a bus, doorbells
//!              -- allocate() --> DeviceMemory
//!   Gdr        -- map() ------> GdrMapping    GPU memory for host and drives   gdr
//!   CudaCopies                   batches of copies, for software controllers  copy
//!   CudaStream                   its own SMs (green context), or a priority   stream
//!   CudaModule, CudaFunction     kernels of any PTX                           module
//!   CudaExecutor                 launch per batch, or resident                executor
//!                                its warps' state in the GPU's memory         state
//!   CudaStreams                  waits, writes and moves for a store, on any stream   streams
//!   CudaPattern                  contents made and checked on the GPU         pool
//! ```
//!
//! libcuda is loaded at run time: a program with this feature starts on a machine without it, and
//! [`CudaDriver::load`] says what is missing.
//!
//! # Invariants
//! - While an executor of a device is started, nothing of that device is freed, unregistered or
//!   destroyed: such calls may wait for kernels, and a resident one does not end. What is dropped
//!   meanwhile is parked; pinned memory of the same length is handed out again.
//! - GPU memory that GDRCopy mapped is unmapped at once when its last user drops it, and freed, or
//!   given back to the engine it belongs to, only after that.
//! - Nothing waits for a kernel while an executor is started, except what says so: allocating,
//!   compiling. [`CudaCopies`] and [`CudaPattern`] take their
//!   memory beforehand.
//! - An executor that is dropped while its kernel may still run leaks what the kernel may reach.
//! - An error after which CUDA can do nothing more in this process (an illegal address, a kernel
//!   that was killed) is remembered by its device, and is the answer to every later call.
//! - No drop panics; what fails there is logged.
//!
//! # What this does not promise
//! A green context says which SMs the I/O kernel uses. It does not keep others away from them: an
//! engine that must not share them runs in a green context of the remaining ones.

mod api;
mod copy;
mod device;
mod driver;
mod error;
mod executor;
mod gdr;
mod memory;
mod module;
mod pool;
mod report;
mod state;
mod stream;
mod streams;

pub use copy::CudaCopies;
pub use device::CudaDevice;
pub use driver::CudaDriver;
pub use error::{CudaError, ErrorCode};
pub use executor::{CudaExecutor, CudaOptions, CudaReport, LaunchMode};
pub use gdr::{Gdr, GdrError, GdrMapping, MappingKind};
pub use memory::{DeviceMemory, DoorbellKind, PinnedMemory, Registration};
pub use module::{CudaFunction, CudaModule};
pub use pool::{CudaPattern, PatternCheck, PatternItem};
pub use report::{DeviceReport, PartitionReport, StreamKind, WritesOrdering};
pub use stream::CudaStream;
pub use streams::CudaStreams;
