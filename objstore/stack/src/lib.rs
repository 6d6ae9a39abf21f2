//! Builds a store in a directory or on drives. This program stores a block, and finds it when it is
//! run again:
//!
//! ```no_run
//! use ripieno_stack::{BlockId, BlockKey, Builder, KvShape, StackConfig};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let shape = KvShape { layers: 4, segments: 2, object_bytes: 8192, block_tokens: 16 };
//!     let config = StackConfig { capacity: Some(64 << 20), ..StackConfig::at("hello-store") };
//!     let store = Builder::new(config, shape).open()?;
//!     // An engine has a digest of the tokens here, and its own memory.
//!     let (key, block) = (BlockKey([7; 32]), BlockId(0));
//!     if store.load(&[key], &[block])? == [true] {
//!         println!("found: {:#x}", store.read(block)?[0]);
//!     } else {
//!         store.write(block, &vec![0xAB; shape.block_bytes() as usize])?;
//!         store.save(&[key], &[block])?;
//!         println!("stored; run it again");
//!     }
//!     Ok(store.close()?)
//! }
//! ```
//!
//! # The crates
//!
//! | for | crate |
//! |---|---|
//! | a store in a program, blocks as a whole | this one: [`Builder`], [`Stack`] |
//! | layers in flight, streams, reservations, clusters | [`objstore`], below each [`Stack`] |
//! | a scheduler and workers in processes of their own | this one: [`Ranks`] |
//! | a store that a server shares | `ripieno_serve`; [`KvStore`] is a store wherever it is |
//! | keys, eviction, the format on disk | [`kv_catalog`] |
//! | when layers move, and what is in host memory | [`kv_schedule`], [`kv_tier`] |
//! | queues of I/O, and who runs them | [`gio_uring`], [`gio_kernels`] |
//! | NVMe: wire types, a driver, a controller | [`nvme_spec`], [`nvme_driver`], [`nvme_emu`] |
//!
//! # Architecture
//! - [`StackConfig`]: the options of a store, each declared once, for all interfaces and programs;
//!   [`OPTIONS`]: their names, values, defaults and help.
//! - [`StoreDir`]: a store's directory on this machine. One file, or block device, for each
//!   software controller; their parameters; a lock.
//! - [`Devices`]: a store directory, drives that are opened through VFIO, or other software
//!   controllers; with their clock, and once the driver is attached, their controllers.
//! - [`Executor`]: io_uring on files; or host threads, the calling thread, or a [`Gpu`], to run the
//!   I/O kernel.
//! - [`Builder`]: opens a store, or creates it, by the first [`Route`] of data to the KV pool that
//!   is proven; the pool's memory is a [`PoolMemory`]. A program may take part ([`OpenSteps`]).
//!   [`Placement`] reports the route, and why no better one was taken.
//! - [`Stack`]: devices, driver, executor, KV pool and store, in the order in which they are built
//!   and torn down. [`RawStack`]: the same with a ring and no store.
//! - [`Ranks`]: the directory of a store in several processes. [`CatalogStack`] and [`RankStack`]:
//!   the parts of the engine's scheduler and of each of its workers. A thread of each [`RankStack`]
//!   watches its devices, so that a device is given back when its owner requests it, and a removal
//!   is noticed, while the engine is idle or waits on its GPU.
//! - [`Request`]: a transfer of blocks, for callers that name layers by number and have no tickets.
//! - [`METRICS`]: the metrics by name. [`Endpoint`]: serves them, by a thread of its own;
//!   [`MetricsPage`]: their text, for a server that has other pages.
//! - [`read_file`]: reads untrusted files, up to a limit. [`HostMemory`]: the memory that this
//!   process may use.
//!
//! # Invariants
//! - A drive belongs to one process at a time, and so does a directory: others may only read its
//!   files beside it ([`Ranks::devices_beside`]). An incomplete directory is recognised; so is an
//!   incomplete store of ranks on drives.
//! - The files of a directory have all their space from the beginning, and never more than
//!   requested: once it exists, no write fails because a disk is full.
//! - A drive is formatted only if it is empty, or has remains of a replay or a part of the same
//!   store, unless the caller allows more.
//! - Randomness and time are arguments, except for [`Builder`], which draws the identity of a store
//!   that it creates, and uses the monotonic clock.
//! - After the end of a request, no device and no copy accesses the engine's blocks.
//! - libcuda and libgdrapi are loaded only for [`Executor::Cuda`].
//!
//! # Not implemented
//! - Resizing a store directory or changing its devices. Adding drives to a store.
//! - Requests larger than a staging buffer (for a pool on a GPU that the devices do not reach):
//!   they are refused.
//! - Streams for [`Request`]; jobs of a [`objstore::Plane`] have them.
//! - GPU and drives together have never run: a GPU has, with software controllers only.

mod address;
mod arena;
mod builder;
mod chosen;
mod config;
mod controllers;
mod devices;
mod drives;
mod emulation;
mod error;
mod executor;
mod foreign;
mod found;
mod gpu;
mod held;
pub mod http;
mod input;
mod kv_store;
mod memory;
mod metrics;
mod own;
mod owner;
mod pacing;
mod pool;
mod rank;
mod ranks;
mod request;
mod route;
mod size;
mod socket_file;
mod stack;
pub mod store_dir;
mod trial;

pub use gio_kernels::{
    FileTarget,
    cuda::{GpuHandle, StreamMarks, is_reached},
};
pub use gio_uring::RawStream;

pub use address::MetricsAddress;
pub use builder::{Builder, OpenSteps};
pub use chosen::{MemoryPlace, NotTaken, Placement};
pub use config::{
    DeviceChoice, OPTIONS, StackConfig, StackOption, former_option, nearest, unknown_option,
};
pub use devices::Devices;
pub use drives::{
    Drive, DriveAddress, DriveIdentity, check_drive, drive_name, open_drive, prove_reach,
    reset_subsystem, vfio_space,
};
pub use emulation::{EMU_DEPTH, EMU_QUEUES};
pub use error::{ErrorKind, StackError, StoreDirError};
pub use executor::Executor;
pub use foreign::{CopyFence, ForeignGpu};
pub use found::{KvPrefix, find};
pub use gpu::{CudaChoice, Gpu};
pub use held::{Held, clear_edges, edges, namespaces};
pub use input::{expand_home, open_file, read_file};
pub use kv_store::{Fetched, KvRequest, KvStore, OwnStore};
pub use memory::HostMemory;
pub use metrics::{
    ComputeSaved, Endpoint, METRICS, Metric, MetricKind, MetricsPage, SampleValue, samples,
};
pub use objstore::{BlockId, BlockKey, KvShape, PoolLayout, Route};
pub use own::Own;
pub use owner::this_process;
pub use pacing::pace;
pub use pool::{EngineMemory, GpuMemory, PoolMemory};
pub use rank::RankStack;
pub use ranks::{CatalogStack, RankMedia, Ranks, RanksOptions};
pub use request::Request;
pub use route::routes;
pub use size::Size;
pub use socket_file::SocketFile;
pub use stack::{RawStack, Stack};
pub use store_dir::{StoreDir, StoreDirDevice, StoreDirMedia, StoreDirOptions, file_target};
pub use trial::{trial_bytes, try_kernel};
