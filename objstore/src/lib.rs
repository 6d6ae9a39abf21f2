//! GPU-centric KV-cache object store: moves an engine's KV blocks to and from NVMe SSDs by layer.
//!
//! The engine registers its KV memory once. It names blocks by content ([`BlockKey`]), looks up the
//! longest stored prefix of a request, reads the layers of that prefix into blocks it chose, and
//! stores new blocks. The split follows the paper (Tutti, section 3.1): per-block work is done once
//! per request, on the CPU; per-layer work costs the same for any number of blocks.
//!
//! ```text
//!   lookup(keys) -> Prefix          allocate(keys, blocks) -> StoreRequest       once a request
//!   retrieve(prefix, blocks)          |
//!     -> LoadRequest                     |
//!   start(load, layer) -> Ticket    start(save, layer) -> Ticket            once a layer, O(1)
//!   wait(ticket)                    wait(ticket)
//!   drop                            commit(save)
//! ```
//!
//! A store on two software controllers, built with `ripieno_testkit`; `ripieno_stack` builds one
//! in a directory, from a plain configuration:
//!
//! ```
//! use nvme_driver::ControllerOptions;
//! use nvme_emu::EmuDomain;
//! use objstore::{
//!     BlockId, KeyChain, KvShape, Layer, Namespace, Order, Store, StoreConfig, StoreDevice,
//!     StoreOptions,
//! };
//! use ripieno_testkit::{Drives, KvMemory, format, host_executor, memory_drives};
//!
//! # fn main() -> Result<(), objstore::StoreError> {
//! let shape = KvShape { layers: 2, segments: 2, object_bytes: 4096, block_tokens: 16 };
//! let drives = Drives::threaded(EmuDomain::new("example"), memory_drives(2, 64 << 20, 4096));
//! let mut kv = KvMemory::new(&*drives.domain, shape, 16); // the engine's memory: 16 blocks
//! let attached = drives.attach(&ControllerOptions::default());
//! let devices: Vec<StoreDevice> = attached.into_iter().map(StoreDevice::new).collect();
//! Store::format(&devices, &format(shape))?;
//! let store = Store::open(StoreConfig {
//!     devices,
//!     clock: drives.clock.clone(),
//!     executor: host_executor(drives.clock.clone()),
//!     shape,
//!     namespace: Namespace::default(),
//!     pool: kv.pool.clone(),
//!     gpu: None,
//!     options: StoreOptions::default(),
//! })?;
//!
//! // A prompt of two blocks. Each key covers the tokens of its block and all tokens before them.
//! let mut chain = KeyChain::new(b"example");
//! let keys = [chain.next(&[15496, 995]), chain.next(&[318, 262])];
//! let sources = [BlockId(0), BlockId(1)];
//! for (block, key) in sources.into_iter().zip(keys) {
//!     kv.fill(block, key, 0); // stands in for the engine's computation
//! }
//! let save = store.allocate(&keys, &sources)?;
//! for layer in (0..shape.layers).map(Layer) {
//!     store.start(&save, layer, Order::Unordered)?;
//! }
//! store.commit(save)?; // waits for the layers; permanent when it returns
//!
//! // Later, another prompt that begins like this one.
//! let prefix = store.lookup(&keys)?;
//! let targets = [BlockId(9), BlockId(4)];
//! let load = store.retrieve(&prefix, &targets)?;
//! let layers = (0..shape.layers).map(Layer);
//! let start = |layer| store.start(&load, layer, Order::Unordered);
//! let tickets: Result<Vec<_>, _> = layers.map(start).collect();
//! for (layer, ticket) in (0..).map(Layer).zip(tickets?) {
//!     store.wait(ticket)?; // then run the layer's attention
//!     assert!(kv.holds(targets[0], layer, keys[0], 0) && kv.holds(targets[1], layer, keys[1], 0));
//! }
//! drop((load, prefix));
//! store.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Paths
//! The constructor that registers the pool selects the data path: [`KvPool::on_gpu`] for GPU memory
//! that the drives reach ([`Route::Direct`]), [`KvPool::staged`] for GPU memory that they do not
//! reach ([`Route::Staged`]), [`KvPool::new`] for memory of this process ([`Route::Host`]).
//! [`Store::open`] proves the path before [`PlaneStats::path`] reports it: each drive writes a
//! known pattern out of the memory and reads one into it, at both ends; for a staged pool, the GPU
//! moves objects both ways. A path that does not work is [`StoreError::Route`], never a fallback.
//!
//! On the staged path a layer is read into staging memory and a kernel on a stream moves it to the
//! pool; storing does the reverse. Staging memory is cut into [`StoreOptions::staging_buffers`]
//! buffers. A layer in flight takes one, for which starting it waits
//! ([`StoreError::StagingBusy`] if none gets free in time), and a request must fit into one
//! ([`StoreError::Staging`]): retrieve long prefixes in parts ([`Store::retrieve_from`]).
//!
//! # Ordering, for engine authors
//! With [`StoreConfig::gpu`], layers are ordered with the engine's streams, and the host waits only
//! to start a layer while as many are in flight as there may be:
//!
//! | call | the transfer starts | work enqueued later |
//! |---|---|---|
//! | [`Store::start`], [`Order::Unordered`] | immediately | does not wait |
//! | [`Order::AfterEvent`]`(event)` | when the event reaches its value | does not wait |
//! | [`Order::AfterStream`]`(stream)` | after the work enqueued before | does not wait |
//! | [`Order::InStream`]`(stream)`, or a stream | after the work enqueued before | waits for it |
//! | [`Store::join`]`(ticket, stream)` | | waits for it |
//!
//! Work that waits for a *retrieved* layer sees its data. Work that waits for a *stored* layer may
//! change its blocks; [`Store::commit`] reports if they were stored. Load early and wait late, as
//! vLLM's connectors do:
//!
//! ```
//! use gio_uring::RawStream;
//! use objstore::{Layer, Order, Store, StoreError, Ticket, LoadRequest, StoreRequest};
//!
//! /// Before the forward pass. The blocks may have been in use until now: `AfterStream` keeps the
//! /// store from writing to them before the enqueued work is done, and delays no later work.
//! fn start_load_kv(
//!     store: &Store,
//!     load: &LoadRequest,
//!     compute: RawStream,
//! ) -> Result<Vec<Ticket>, StoreError> {
//!     let layers = (0..store.shape().layers).map(Layer);
//!     let order = Order::AfterStream(compute);
//!     layers.map(|layer| store.start(load, layer, order)).collect()
//! }
//!
//! /// Before a layer's attention: work enqueued from here on sees its KV.
//! fn wait_for_layer_load(
//!     store: &Store,
//!     ticket: &Ticket,
//!     compute: RawStream,
//! ) -> Result<(), StoreError> {
//!     store.join(ticket, compute)
//! }
//!
//! /// After a layer's attention: its KV is read once the enqueued work is done. Kernels enqueued
//! /// later wait for that read, so they may overwrite the blocks.
//! fn save_kv_layer(
//!     store: &Store,
//!     save: &StoreRequest,
//!     layer: Layer,
//!     compute: RawStream,
//! ) -> Result<Ticket, StoreError> {
//!     store.start(save, layer, compute)
//! }
//!
//! /// After the pass, before its results are used: fails if any layer failed.
//! fn finish(store: &Store, tickets: Vec<Ticket>) -> Result<(), StoreError> {
//!     tickets.into_iter().try_for_each(|ticket| store.wait(ticket).map(|_| ()))
//! }
//! ```
//!
//! Rules and costs:
//!
//! - **A stream continues when a layer fails**, is cancelled, or the whole store fails: no error
//!   reaches the stream. Wait for the tickets before using results. The blocks of a failed layer
//!   have undefined contents, and devices may still write to them until [`Store::wait`] or
//!   [`Store::poll`] reports the failure.
//! - **Operations start in the order in which they were issued.** One that waits for its stream
//!   holds up all later ones, including those of other requests and streams. Issue layers in the
//!   order in which the streams reach them, and never make a stream wait for a layer that was
//!   issued after one that waits for this stream's future work: neither would start before
//!   [`StoreOptions::wait_timeout`], when everything in flight is cancelled. A staged retrieve
//!   waits on the GPU only, outside that order; but all moves for [`Order::Unordered`],
//!   `AfterEvent` and `AfterStream` share the store's own stream, where one holds up the next.
//! - **Events must be signalled.** For a layer that is staged or uses the DRAM cache, the event of
//!   [`Order::AfterEvent`] must be signalled even after the layer has failed: the store's own
//!   stream waits for it. A stream that does not reach a move within
//!   [`StoreOptions::wait_timeout`] fails the store, because a move cannot be cancelled.
//! - [`Order::InStream`] costs three stream operations, `AfterStream` one and `join` two; a staged
//!   layer costs up to four on the stream that moves it. With a DRAM cache
//!   ([`StoreOptions::dram`]) a layer costs up to seven more, `join` four; copies for an
//!   order that holds up no stream run on the store's own. None of these costs grows with the
//!   number of blocks.
//! - **Streams must live** until the work enqueued on them for the store is done. The store does
//!   not use them at any other time.
//! - **Memory**: the pool belongs to the devices and the streams until [`Store::close`] returns.
//!   Free it after [`KvPool::unregister`], which unmaps it and refuses while anything holds it.
//!
//! # Durability
//! A store lives on its devices ([`Store::format`], [`Store::open`]). Blocks of a [`Store::commit`]
//! that returned survive a crash or loss of power, and a lookup never finds bytes other than those
//! stored under the key: see docs/adr/0008-durable-store.md.
//!
//! # Architecture
//! - [`kv_catalog`] does everything that needs no data I/O: keys, files, references, namespaces,
//!   eviction, the layout of files, the on-disk format and the journal. Its [`DurableCatalog`] is
//!   what a scheduler's process holds when the planes are in other processes ([`open_catalog`]).
//! - [`Plane`] moves files by number: a handle that any number of threads use. It knows no keys.
//!   Its inputs and outputs are plain data, so that a catalog in another process can drive it. It
//!   names a layer of a job by a [`Ticket`], and has all waiting for layers (`plane/wait.rs`), for
//!   room to start one, and for the only flush.
//! - `plane/mover.rs` is its state: jobs, their beginning and end. `start.rs` starts layers,
//!   `complete.rs` ends them, `pacing.rs` decides when they start, and reads ahead. `transport.rs`
//!   has the ring, the table of operations in flight and their recovery; `devices.rs` queues,
//!   events and slow commands.
//! - `plane/copier.rs` copies layers through other memory: staging memory for a pool on a GPU that
//!   no device reaches, bounce buffers for memory that no device can describe, and the DRAM cache
//!   ([`StoreOptions::dram`]), whose blocks [`kv_tier`] chooses. A job has one table of its
//!   copies. `streams.rs` has the events between streams, I/O kernel and plane, and the proof that
//!   no stream uses them any more. Stream operations go through a trait: [`gio_uring::StreamOps`].
//! - `plane/pools.rs` has the engine's pool, and those of engines in other processes, whose memory
//!   this one shares.
//! - `plane/open.rs` opens a plane, `route.rs` proves the path, `self_test.rs` the layout.
//! - [`Store`] is a [`DurableCatalog`] and a [`Plane`] in one process, for any number of threads.
//!   `store/clusters.rs` has clusters of entries that attention activates together, whose copies
//!   are files. `store/commit.rs` makes commits permanent. Handles ([`Prefix`],
//!   [`LoadRequest`], [`StoreRequest`]) are only names: they may be dropped anywhere and at any
//!   time.
//! - With [`Plane::pace`] a [`kv_schedule::Scheduler`] decides when layers start, and announced
//!   requests are read ahead ([`Plane::announce`]). Without it, layers start in the order of the
//!   calls.
//!
//! # Invariants
//! - A key is found only after all rows of its block were written without an error and made durable
//!   ([`Store::commit`]). Its journal record is written after that: meanwhile the key is found, and
//!   if the record cannot be written, it is a miss again.
//! - A key is in one file at most: a key that is stored or being stored is not stored again.
//! - A file with a reference (prefix, load request, store request) is neither evicted nor reused,
//!   even if it lost its key meanwhile; a file is free only when no device can write to it any more
//!   and the journal no longer says that it holds a key.
//! - A file whose medium failed, or which differed from its checksum twice, is a miss from then on.
//! - When [`Store::wait`] returns, no device and no move accesses a retrieved layer's blocks any
//!   more, and none reads a stored layer's except a move whose result is discarded. If that cannot
//!   be guaranteed, the store fails: every later call returns the cause, and memory is leaked
//!   rather than freed.
//! - Every event that a stream waits for is signalled, whatever fails.
//! - An event, table, staging buffer or pool is reused or freed only when every stream that uses it
//!   is past that use.
//! - Starting and waiting for a layer is O(1) in the number of blocks and allocates nothing, except
//!   for an event when a stream is first seen, and for copies that the CPU makes to or from the
//!   DRAM cache.
//! - After a failed flush of any device, or a failed journal write, nothing is stored or changed
//!   any more, and no device is asked to flush again, until the store is reopened: catalog and
//!   plane share a [`Seal`]. Stored blocks can still be retrieved.
//! - Data written before a controller reset, and not flushed, is not committed.
//!
//! # Not implemented
//! - Several GPUs: a plane has one pool, on one GPU.
//! - Pools of other owners ([`Plane::add_pool`]) beside a GPU or bounce buffers.
//! - Several ranks in one [`Store`]: it has one plane. A [`DurableCatalog`] serves many.
//! - Requests larger than a staging buffer, and buffers of different sizes.
//! - Cancelling: an operation in flight ends by itself, or with a recovery of all controllers.
//! - Telling a stream that a layer failed.
//! - Pacing of layers with [`Order::InStream`]: they start at once, because a stream can wait only
//!   for an operation that was issued.
//! - Where the catalog is a [`DurableCatalog`], dropping cached blocks of evicted files: they stay
//!   in host memory until other blocks need the space.
//! - Entries that join clusters while they serve, and another copy in place of a damaged one.
//! - Deallocate hints for less than a whole free group; and, where the catalog is a
//!   [`DurableCatalog`], any.

mod config;
mod data_path;
mod device;
mod engine_memory;
mod error;
mod ids;
mod order;
mod plane;
mod pool_layout;
mod registration;
mod stats;
mod store;
mod watch;

pub use config::{
    DramMode, Durability, ExecutorFactory, Format, Overwrite, Part, StoreConfig, StoreDevice,
    StoreGpu, StoreOptions,
};
pub use data_path::Route;
pub use device::{Below, SharedController};
pub use error::{Failure, RegistrationError, StoreError};
pub use ids::{JobId, LayerDone, Move, PoolId, Ticket};
pub use kv_catalog::{
    BlockId, BlockKey, Catalog, CatalogCounts, CatalogError, Codec, DeviceIndex, DurableCatalog,
    FileId, FormatError, Geometry, JournalError, KeyChain, KeyState, KvShape, Layer, LayoutError,
    Namespace, NamespaceId, NamespaceOwner, NewPin, NotDurable, ObjectPlace, Outcome, Owner,
    PinAnswer, PinLimits, PinList, PinStatus, PolicyKind, Reference, ReferenceId, Region, Reported,
    Row, Seal, Slot, StoreId, StoredFile, Usage, Write, WriteBudget, WriteId,
};
pub use nvme_spec::nvm::Direction;
pub use order::Order;
pub use plane::{
    Advanced, ClosedPlane, JobDone, KvView, Plane, PlaneDevice, RawRing, StoreEvent, kernel_read,
};
pub use pool_layout::PoolLayout;
pub use registration::{InUse, KvPool, check_layout};
pub use stats::{
    CodecStats, DURATION_LIMITS_US, DramStats, Durations, Lookups, PlaneStats, StoreStats, Times,
};
pub use store::{
    Closed, ClusterCopies, Committed, Erased, LoadRequest, Medium, Prefix, RankId, Reservation,
    Salvage, Store, StoreRequest, StoredClusters, Transfer, open_catalog,
};
pub use watch::Watch;
