//! Builds a store from a plain configuration, for the command line and for other languages.
//!
//! ```
//! use std::sync::Arc;
//!
//! use nvme_driver::{ControllerOptions, MonotonicClock};
//! use objstore::{
//!     BlockId, BlockKey, Format, KvShape, Layer, Namespace, StoreId, StoreOptions,
//! };
//! use ripieno_stack::{
//!     Executor, Home, HomeMedia, HomeOptions, PoolMemory, Request, Stack, StackConfig,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let place = tempfile::tempdir()?;
//! # let dir = place.path().join("store");
//! # use rand::{Rng as _, SeedableRng as _};
//! # let random: [u8; 16] = rand::rngs::StdRng::from_os_rng().random();
//! let shape = KvShape { layers: 4, segments: 2, object_bytes: 8192, block_tokens: 16 };
//! let config = |home: Home| StackConfig {
//!     place: home.into(),
//!     executor: Executor::Host,
//!     require: None,
//!     shape,
//!     namespace: Namespace::default(),
//!     pool: PoolMemory::Own { blocks: 8 },
//!     controller: ControllerOptions::default(),
//!     options: StoreOptions::default(),
//! };
//! let clock = Arc::new(MonotonicClock::default());
//! let keys = [BlockKey([1; 32]), BlockKey([2; 32])]; // an engine has digests here
//!
//! let media = HomeMedia::Files { count: 2, bytes: 64 << 20 };
//! let home = Home::create(&dir, &HomeOptions { id: 7, media, lba_bytes: 4096 })?;
//! let format = Format::new(StoreId(random), shape);
//! let stack = Stack::create(config(home), &format, clock.clone())?;
//! let pool = stack.pool_host().ok_or("the pool is not in this process's memory")?;
//! // SAFETY: the pool is as large, and no request uses it now.
//! unsafe { pool.write_bytes(0xAB, 8 * shape.block_bytes() as usize) };
//! let request = Request::store(stack.store(), &keys, &[BlockId(0), BlockId(1)])?;
//! request.move_all()?;
//! request.commit()?;
//! stack.close()?;
//!
//! // Another process, perhaps after this one was killed.
//! let stack = Stack::open(config(Home::open(&dir)?), clock)?;
//! let prefix = stack.store().lookup(&keys)?;
//! assert_eq!(prefix.len(), 2);
//! let request = Request::retrieve(stack.store(), &prefix, 0, &[BlockId(6), BlockId(7)])?;
//! for layer in (0..shape.layers).map(Layer) {
//!     request.start(layer)?;
//! }
//! for layer in (0..shape.layers).map(Layer) {
//!     request.wait(layer)?; // and now the layer's attention
//! }
//! let pool = stack.pool_host().ok_or("the pool is not in this process's memory")?;
//! // SAFETY: block 7 of the first row; the layers were waited for.
//! assert_eq!(unsafe { pool.add(7 * 8192).read() }, 0xAB);
//! drop((request, prefix));
//! stack.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Architecture
//! - [`Home`]: a store's directory on this machine. One file, or block device, for each software
//!   controller; their parameters; a lock.
//! - [`Place`]: a home, or drives ([`Drives`]) that are opened through VFIO. [`Fleet`]: its
//!   attached controllers, with memory for their queues.
//! - [`Executor`]: host threads, the calling thread, or a [`Gpu`], to run the I/O kernel.
//! - [`Route`]: the data path to the KV pool, whose memory is a [`PoolMemory`]. [`by_first_route`]
//!   takes the first route that is proven; [`Placement`] reports it, and why no better one was
//!   taken.
//! - [`Stack`]: devices, driver, executor, KV pool and store, in the order in which they are built
//!   and torn down (`build.rs`).
//! - [`Ranks`]: the directory of a store in several processes. [`CatalogStack`] and [`RankStack`]:
//!   the parts of the engine's scheduler and of each of its workers. A thread of each [`RankStack`]
//!   watches its devices, so that a device is given back when its owner requests it, and a removal
//!   is noticed, while the engine is idle or waits on its GPU.
//! - [`Request`]: a transfer of blocks, for callers that name layers by number and have no tickets.
//! - [`read_file`]: reads untrusted files, up to a limit.
//!
//! # Invariants
//! - A home, or a drive, belongs to one process at a time. An incomplete home is recognised; so is
//!   an incomplete store of ranks on drives.
//! - The files of a home have all their space from the beginning, and never more than requested:
//!   once it exists, no write fails because a disk is full.
//! - A drive is formatted only if it is empty, or has remains of a replay or a part of the same
//!   store, unless the caller allows more.
//! - Randomness and time are arguments: identities and the clock come from the caller.
//! - After the end of a request, no device and no copy accesses the engine's blocks.
//! - libcuda and libgdrapi are loaded only for [`Executor::Cuda`].
//!
//! # Not implemented
//! - Resizing a home or changing its devices. Adding drives to a store.
//! - Requests larger than a staging buffer (for a pool on a GPU that the devices do not reach):
//!   they are refused.
//! - Streams for [`Request`]; jobs of a [`objstore::Plane`] have them.
//! - No part of this has run on a GPU, or with drives and a GPU together: only over a mock libcuda,
//!   with software controllers.

mod arena;
mod build;
mod chosen;
mod drives;
mod emulation;
mod error;
mod executor;
mod fleet;
mod gpu;
pub mod home;
mod input;
mod place;
mod pool;
mod rank;
mod ranks;
mod request;
mod route;
mod size;
mod stack;
mod trial;

pub use gio_uring::RawStream;

pub use chosen::{MemoryPlace, NotTaken, Placement};
pub use drives::{
    DriveIdentity, Drives, Holds, check_drive, is_scratch, open_drive, prove_reach,
    reset_subsystem, vfio_space,
};
pub use emulation::{EMU_DEPTH, EMU_QUEUES, Emulation};
pub use error::{ErrorKind, StackError};
pub use executor::Executor;
pub use fleet::{Below, Fleet};
pub use gpu::{CudaChoice, Gpu};
pub use home::{Home, HomeDevice, HomeError, HomeMedia, HomeOptions};
pub use input::{open_file, read_file};
pub use objstore::Route;
pub use place::{Drive, Place};
pub use pool::{EngineMemory, GpuMemory, PoolLayout, PoolMemory};
pub use rank::{RankStack, RankStackConfig};
pub use ranks::{CatalogStack, RankMedia, Ranks, RanksOptions};
pub use request::Request;
pub use route::{PoolPlan, Prepared, by_first_route, routes};
pub use size::Size;
pub use stack::{Stack, StackConfig};
pub use trial::{trial_bytes, try_kernel};
