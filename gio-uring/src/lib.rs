//! I/O control blocks, the rings that carry them, and the interface to the I/O kernel's executor.
//!
//! The caller names work (a layer of a request's blocks, or explicit byte ranges); the I/O kernel
//! on the other side of shared memory turns it into NVMe commands. This crate is the host side: it
//! lays out the memory, validates input, and decodes results.
//!
//! ```text
//!   init_queue -> register_pool, upload_map        once a pool, once a request
//!     submit                                       once a layer: 128 bytes and one ring word
//!       -> wait_completion -> BlockMap::statuses
//!     stop -> (controllers recover) -> restart     when a queue failed
//! ```
//!
//! # Architecture
//! - [`abi`]: the structs shared with the kernel. The C half, also for callers in C, is
//!   `kernels/include/gio/abi.h`.
//! - `ring`: submission and completion ring; its `Ordering:` paragraph is the memory model. `sync`
//!   is the only file that names atomics; loom replaces it.
//! - `shared`, `layout`, `arena`: accessors, layout and allocation of shared memory. Tables that
//!   the kernel only reads are near it: from a host, a GPU reads ring entries and IOCBs.
//! - [`Uring`]: the engine. `queues` builds warps from grants, `uring/iocb` fills IOCBs and tracks
//!   their state; operations refer to [`BlockMap`], [`PoolHandle`], [`Checksums`] and [`Event`]. A
//!   [`DeviceArray`] holds a table for other kernels on the same device.
//! - [`IoExecutor`]: the interface to the kernel. Its implementations live in `gio-kernels`.
//! - [`StreamOps`]: operations on an engine's streams that use this ring's events. The caller (the
//!   store) keeps events and tables alive until the streams are past them.
//!
//! # Order
//! - The kernel takes operations in ring order. One that waits for its event holds up all later
//!   ones, even those that wait for nothing: issue in the order in which the events will arrive.
//!   Operations already taken proceed and complete in any order.
//! - An operation never starts if its event depends on a later operation's signal. Only
//!   [`Uring::stop`] resolves this deadlock: it cancels operations that did not start.
//! - An operation signals when it ends, with or without errors, and when [`Uring::stop`] cancels
//!   it; [`Uring::abandon`] signals on behalf of a kernel that is given up. So a stream that waits
//!   for a signal always proceeds; the completion reports the outcome of the operation.
//!
//! # Invariants
//! - Every address the kernel gets comes from [`IoExecutor::alloc`] or [`IoExecutor::address`].
//! - An IOCB in flight, and its map, pool, checksums and events, are not changed, recycled or freed
//!   before its completion is consumed or the executor has proven that its kernel ended. If it
//!   cannot prove that, the memory is leaked.
//! - Neither ring can overflow, because an IOCB is published again only after its completion was
//!   consumed (proof in `ring`).
//! - No Rust reference to plain data in shared memory exists. Values written by the kernel are
//!   bounds-checked before use as an index, and an unknown status is never success.
//! - Issuing and awaiting an affine operation allocates nothing and costs the same for any map.
//!
//! # Not implemented
//! - Free arena blocks of different sizes are not merged.
//! - Events in memory of the caller: operations wait only for events made by [`Uring::event`],
//!   whose [`Event::address`] a GPU stream can write.
//! - Starting an operation whose event has arrived before earlier ones that still wait.
//! - Cancelling a single operation; stopping cancels all.
//! - Rings behind a write-combining CPU mapping (a GPU's BAR): publishing would need a fence that
//!   ordinary memory does not. Executors allocate ordinary memory.
//! - Checksums of explicit contexts.
//! - Rings shared between processes: handles assume that caller and ring live in one process.

pub mod abi;
mod arena;
mod checksums;
mod completion;
mod counters;
mod device_array;
mod error;
mod event;
mod executor;
mod explicit;
mod iocb_id;
mod layout;
mod map;
mod options;
mod pool;
mod queues;
mod ring;
mod shared;
mod status;
mod stream;
mod sync;
#[cfg(all(test, not(loom)))]
mod testing;
mod uring;

pub use abi::{Affine, IoCtx};
pub use checksums::Checksums;
pub use completion::Completion;
pub use counters::{Counters, Fault, FaultInfo, Outstanding, QueueCounters, UringCounters};
pub use device_array::{DeviceArray, DeviceScalar};
pub use error::Error;
pub use event::{Event, Signal, Wait};
pub use executor::{ExecutorError, IoExecutor, Mirror, Progress, SharedMemory};
pub use iocb_id::IocbId;
pub use map::BlockMap;
pub use nvme_spec::{nvm::Direction, status::Status as NvmeStatus};
pub use options::UringOptions;
pub use pool::{PoolDesc, PoolHandle, ROWS_MAX};
pub use status::IoStatus;
pub use stream::{
    MoveChecksums, RawStream, ScatterGather, ScatterGatherOp, StreamError, StreamOps,
};
pub use uring::{AffineOp, Uring};
