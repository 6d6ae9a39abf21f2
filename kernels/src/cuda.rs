//! The I/O kernel on an NVIDIA GPU.
//!
//! ```text
//!   CudaDriver -- load() ------> CudaDevice (primary context)      api, error, device
//!   CudaDevice -- pinned() ----> PinnedMemory  rings, maps, queues  memory
//!              -- register*() -> Registration  DMA memory, doorbells
//!              -- allocate() --> DeviceMemory
//!   Gdr        -- map() ------> GdrMapping    GPU memory for host and drives   gdr
//!   CudaCopies                   batches of copies, for software controllers  copy
//!   CudaStream                   its own SMs (green context), or a priority   stream
//!   CudaModule, CudaFunction     kernels of any PTX                           module
//!   CudaExecutor                 launch per batch, or resident                executor
//!                                its warps' state in the GPU's memory         state
//!   CudaStreams                  waits, writes and moves for a store, on any stream   streams
//!   GpuHandle  -- open() -----> ForeignMemory  GPU memory of another process   ipc
//!   StreamMarks                  how far streams have got, for another process ipc
//!   CudaPattern                  contents generated and checked on the GPU    pool
//! ```
//!
//! libcuda is loaded at run time: a program with this feature also starts on a machine without it,
//! and [`CudaDriver::load`] reports what is missing.
//!
//! # Invariants
//! - While an executor of a device is started, nothing of that device is freed, unregistered or
//!   destroyed: such calls may wait for kernels, and a resident kernel does not end. Resources
//!   dropped meanwhile are parked; pinned memory of the same length is reused.
//! - GPU memory mapped by GDRCopy is unmapped as soon as its last user drops it, and only then
//!   freed or returned to the engine that owns it.
//! - Nothing waits for a kernel while an executor is started, except functions documented to do so
//!   (allocation, compilation). [`CudaCopies`] and [`CudaPattern`] allocate their memory
//!   beforehand.
//! - An executor dropped while its kernel may still run leaks all memory the kernel may reach.
//! - An error after which CUDA is unusable in this process (an illegal address, a killed kernel) is
//!   remembered by its device and returned by every later call.
//! - Drop never panics; failures in it are logged.
//!
//! # Not guaranteed
//! A green context limits the I/O kernel to its SMs. It does not keep other kernels off them: an
//! engine that must not share them runs in a green context of the remaining SMs.

mod api;
mod copy;
mod device;
mod driver;
mod error;
mod executor;
mod gdr;
mod ipc;
mod memory;
mod module;
mod pool;
mod report;
mod state;
mod stream;
mod streams;

pub use copy::CudaCopies;
pub use device::{CudaDevice, Registration};
pub use driver::CudaDriver;
pub use error::{CudaError, ErrorCode};
pub use executor::{CudaExecutor, CudaOptions, CudaReport, LaunchMode};
pub use gdr::{Gdr, GdrError, GdrMapping, MappingKind};
pub use ipc::{ForeignMemory, GpuHandle, StreamMarks, is_reached};
pub use memory::{DeviceMemory, DoorbellKind, PinnedMemory};
pub use module::{CudaFunction, CudaModule};
pub use pool::{CudaPattern, PatternCheck, PatternItem};
pub use report::{DeviceReport, PartitionReport, StreamKind, WritesOrdering};
pub use stream::CudaStream;
pub use streams::CudaStreams;
