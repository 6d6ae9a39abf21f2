//! I/O control blocks, the rings that carry them, and the seam to the executor of the I/O kernel.
//!
//! The caller names work (a layer of a request's blocks, or explicit runs of bytes); the I/O kernel
//! on the other side of shared memory turns it into NVMe commands. This crate is everything between
//! the two: it lays out the memory, checks what goes in, and decodes what comes out.
//!
//! ```text
//!   init_queue -> register_pool, upload_map        once a pool, once a request
//!     submit                                       once a layer: 128 bytes and one ring word
//!       -> wait_completion -> map_status
//!     stop -> (controllers recover) -> restart     when a queue failed
//! ```
//!
//! # Architecture
//! - [`abi`]: the structs both sides know; the C half, and the one for callers in C, is
//!   `kernels/include/gio/abi.h`.
//! - `ring`: submission and completion ring; its `Ordering:` paragraph is the memory model. `sync`
//!   is the only file that names atomics, and what loom replaces.
//! - `shared`, `layout`, `arena`: accessors of shared memory, where things lie in it, and
//!   recycling.
//! - [`Uring`]: the engine. `queues` makes warps of grants, `iocb` tracks who holds which IOCB,
//!   [`BlockMap`], [`PoolHandle`], [`Checksums`] and [`Event`] are what operations name.
//!   [`DeviceArray`] are tables for other kernels on the same device.
//! - [`IoExecutor`]: the seam. Executors live with the kernel (`gio-kernels`).
//! - [`StreamOps`]: what an engine's streams do with the events of this ring. Its user (the store)
//!   keeps events and tables until the streams are past them.
//!
//! # Order
//! - The kernel takes operations in the order of the ring. One that waits for its event holds up
//!   all that were issued after it, also those that wait for nothing: issue in the order in which
//!   the events will come. What was taken before goes on, and completes in any order.
//! - An operation that waits for an event which comes only after a later operation's signal never
//!   starts. [`Uring::stop`] is the way out: it cancels what did not start.
//! - An operation signals when it ended, with or without errors, and when it was cancelled by
//!   [`Uring::stop`]; [`Uring::abandon`] signals for a kernel that is given up. So a stream that
//!   waits for a signal goes on in any case; the completion says what became of the operation.
//!
//! # Invariants
//! - Every address the kernel gets comes from [`IoExecutor::alloc`] or [`IoExecutor::address`].
//! - An IOCB in flight, and the map, pool, checksums and events it names, are not changed, recycled
//!   or freed before its completion was seen or the executor has proven that its kernel ended. If
//!   it cannot prove that, the memory is leaked.
//! - Neither ring can overflow, because an IOCB is published again only after its completion was
//!   consumed (proof in `ring`).
//! - No Rust reference to plain data in shared memory exists; what the kernel writes is
//!   bounds-checked before it is used as an index, and an unknown status is never success.
//! - Issuing and waiting for an affine operation allocates nothing, and costs the same for any map.
//!
//! # Not implemented
//! - Free arena blocks of different sizes are not merged.
//! - Events in memory that the caller brings: operations wait only for those
//!   made by [`Uring::event`], whose [`Event::address`] a GPU stream can write.
//! - Starting an operation whose event has come before earlier ones whose has not.
//! - A single operation cannot be cancelled; stopping cancels all.
//! - Rings in memory that the CPU sees through a write-combining mapping (a GPU's BAR): publishing
//!   would need a fence that ordinary memory does not. Executors allocate ordinary memory.
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
mod iocb;
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
