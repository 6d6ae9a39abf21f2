//! GPU-centric object store for KV cache: an engine's KV blocks on NVMe SSDs, moved layer by layer.
//!
//! The engine registers its KV memory once. It names blocks by content ([`BlockKey`]), and asks for
//! the longest stored prefix of a request, for its layers to be read into blocks it chose, and for
//! new blocks to be stored. The paper's split (Tutti, section 3.1): what costs time per block is
//! done once a request, on the CPU; what is done per layer costs the same for any number of blocks.
//!
//! ```text
//!   lookup(keys) -> Prefix          allocate(keys, blocks) -> Writing       once a request
//!   retrieve(prefix, blocks)          |
//!     -> Transfer                     |
//!   retrieve_layer(layer) -> Ticket store_layer(layer) -> Ticket            once a layer, O(1)
//!   wait(ticket)                    wait(ticket)
//!   drop                            commit(writing)
//! ```
//!
//! # Architecture
//! - Without I/O, each tested against a slow model: [`KvShape`] and [`Geometry`] (where each object
//!   lives: affine, in groups), [`FilePool`] (free files, in runs), [`KeyChain`], [`Index`] (keys,
//!   references, pins, order of eviction), [`KvPool`] (where each object is in memory).
//! - [`Store`] ties them to a [`gio_uring::Uring`] and the controllers behind it. `store/open.rs`
//!   creates and grants the queues, `request.rs` starts work, `complete.rs` sees it end,
//!   `recover.rs` is the way back after a timeout or a fault.
//! - A handle ([`Prefix`], [`Transfer`], [`Writing`]) is only a name; what devices use belongs to
//!   the store. Dropped handles report through a channel, so they may be dropped anywhere and at
//!   any time. Operations nobody waits for are noticed at the next call.
//!
//! # Invariants
//! - A key is found only after every row of its block was written without an error
//!   ([`Store::commit`]), with force unit access where a drive could forget it.
//! - A key is in one file at most: what is stored or being stored is not stored again.
//! - A file with a reference (prefix, transfer, writing) is neither evicted nor reused, even when
//!   it lost its key meanwhile; a file is free only when no device can write to it any more.
//! - A file whose read failed is a miss from then on.
//! - When [`Store::wait`] returns, no device touches the layer's blocks any more. If that cannot
//!   be had, the store has failed: every later call says why; memory is leaked rather than freed.
//! - A block is evicted before the blocks it follows.
//! - Starting and waiting for a layer is O(1) in the number of blocks and allocates nothing.
//!
//! # Not implemented
//! - A journal: the index lives in memory and a store is empty when it is opened.
//! - Checksums: a device that returns other bytes and calls it success is believed.
//! - The staged path. [`Path::Direct`] is reported for memory on a GPU, but no round trip of a
//!   known pattern proves the route first; whoever opens the store has to.
//! - Cancelling: an operation in flight ends by itself, or with a recovery of all controllers.
//! - Trimming evicted groups.

mod config;
mod error;
mod file_pool;
mod ids;
mod index;
mod key;
mod layout;
mod order;
mod registration;
mod shape;
mod stats;
mod store;
mod transfer;

pub use config::{Durability, ExecutorFactory, StoreConfig, StoreDevice, StoreGpu, StoreOptions};
pub use error::{Direction, Failure, LayoutError, RegistrationError, StoreError};
pub use file_pool::FilePool;
pub use ids::{BlockId, DeviceIndex, FileId, Layer, Row, Slot};
pub use index::{Found, Index, IndexCounts, Position};
pub use key::{BlockKey, KeyChain};
pub use layout::{Geometry, ObjectPlace, Region};
pub use order::Order;
pub use registration::{InUse, KvPool};
pub use shape::KvShape;
pub use stats::{Path, StoreStats};
pub use store::{Closed, Store};
pub use transfer::{Committed, LayerDone, Prefix, Ticket, Transfer, Writing};
