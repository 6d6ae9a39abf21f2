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
//! A store on two software controllers, as `ripieno_testkit` makes them; `ripieno_stack` builds one
//! in a directory, from a plain configuration:
//!
//! ```
//! use nvme_driver::ControllerOptions;
//! use nvme_emu::EmuDomain;
//! use objstore::{
//!     BlockId, KeyChain, KvShape, Layer, Namespace, Store, StoreConfig, StoreDevice, StoreOptions,
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
//! // A prompt of two blocks. The key of each says what is in it and before it.
//! let mut chain = KeyChain::new(b"example");
//! let keys = [chain.next(&[15496, 995]), chain.next(&[318, 262])];
//! let sources = [BlockId(0), BlockId(1)];
//! for (block, key) in sources.into_iter().zip(keys) {
//!     kv.fill(block, key, 0); // what the engine computes
//! }
//! let writing = store.allocate(&keys, &sources)?;
//! for layer in (0..shape.layers).map(Layer) {
//!     store.store_layer(&writing, layer)?;
//! }
//! store.commit(writing)?; // waits for the layers; permanent when it returns
//!
//! // Later, another prompt that begins like this one.
//! let prefix = store.lookup(&keys)?;
//! let targets = [BlockId(9), BlockId(4)];
//! let transfer = store.retrieve(&prefix, &targets)?;
//! let layers = (0..shape.layers).map(Layer);
//! let tickets: Result<Vec<_>, _> = layers.map(|l| store.retrieve_layer(&transfer, l)).collect();
//! for (layer, ticket) in (0..).map(Layer).zip(tickets?) {
//!     store.wait(ticket)?; // and now the layer's attention
//!     assert!(kv.holds(targets[0], layer, keys[0], 0) && kv.holds(targets[1], layer, keys[1], 0));
//! }
//! drop((transfer, prefix));
//! store.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Paths
//! How the pool is registered says which way its data takes, and [`Store::open`] proves it before
//! it reports it ([`StoreStats::path`]): [`KvPool::on_gpu`] for memory of a GPU that the drives
//! reach ([`Path::Direct`]), [`KvPool::staged`] for memory of a GPU that they do not reach
//! ([`Path::Staged`]), [`KvPool::new`] for memory of this process ([`Path::Host`]). Each drive
//! writes a known pattern out of the memory and reads one into it, at both ends; for a staged pool,
//! the GPU moves objects both ways. What does not work is [`StoreError::Route`]; there is no other
//! path that is taken instead.
//!
//! On the staged path a layer is read into staging memory and moved by a kernel on a stream, or the
//! other way round. Staging memory is cut into [`StoreOptions::staging_buffers`] buffers. A layer
//! in flight takes one ([`StoreError::StagingBusy`] when there is none), and a request has to fit
//! into one ([`StoreError::Staging`]): long prefixes are retrieved in parts
//! ([`Store::retrieve_from`]).
//!
//! # Order, for authors of engines
//! With [`StoreConfig::gpu`], layers are put in order with the engine's streams, and the host waits
//! for nothing on the way:
//!
//! | call | the transfer starts | what is enqueued later |
//! |---|---|---|
//! | `retrieve_layer`, [`Order::Unordered`] | at once | does not wait |
//! | [`Order::AfterEvent`]`(event)` | when the event has its value | does not wait |
//! | [`Order::AfterStream`]`(stream)` | after what was enqueued before | does not wait |
//! | [`Order::InStream`]`(stream)`, or a stream | after what was enqueued before | waits for it |
//! | [`Store::join`]`(ticket, stream)` | | waits for it |
//!
//! What waits for a *retrieved* layer sees its data. What waits for a *stored* layer may change its
//! blocks; whether they were stored, [`Store::commit`] says. Loading early and waiting late, as
//! vLLM's connectors do:
//!
//! ```
//! use gio_uring::RawStream;
//! use objstore::{Layer, Order, Store, StoreError, Ticket, Transfer, Writing};
//!
//! /// Before the forward pass. The blocks may have been in use until now: `AfterStream`
//! /// keeps the store
//! /// from writing to them before what is enqueued is done, and holds nothing up.
//! fn start_load_kv(
//!     store: &Store,
//!     transfer: &Transfer,
//!     compute: RawStream,
//! ) -> Result<Vec<Ticket>, StoreError> {
//!     let layers = (0..store.shape().layers).map(Layer);
//!     let order = Order::AfterStream(compute);
//!     layers.map(|layer| store.retrieve_layer_on(transfer, layer, order)).collect()
//! }
//!
//! /// Before a layer's attention: what is enqueued from here on sees its KV.
//! fn wait_for_layer_load(
//!     store: &Store,
//!     ticket: &Ticket,
//!     compute: RawStream,
//! ) -> Result<(), StoreError> {
//!     store.join(ticket, compute)
//! }
//!
//! /// After a layer's attention: its KV is read once what was enqueued is done, and the next
//! /// kernel that writes to the blocks waits until it was.
//! fn save_kv_layer(
//!     store: &Store,
//!     writing: &Writing,
//!     layer: Layer,
//!     compute: RawStream,
//! ) -> Result<Ticket, StoreError> {
//!     store.store_layer_on(writing, layer, compute)
//! }
//!
//! /// After the pass, before its results are used: did every layer get there?
//! fn finish(store: &Store, tickets: Vec<Ticket>) -> Result<(), StoreError> {
//!     tickets.into_iter().try_for_each(|ticket| store.wait(ticket).map(|_| ()))
//! }
//! ```
//!
//! What to know about it:
//!
//! - **A stream goes on when a layer fails**, is cancelled, or the whole store fails: no error
//!   reaches it. So wait for the tickets before results are used. The blocks of a failed layer hold
//!   anything, and until [`Store::wait`] or [`Store::poll`] said that it failed, devices may still
//!   write to them.
//! - **Operations start in the order in which they were issued.** One that waits for its stream
//!   holds up all later ones, also those of other requests and streams. Issue layers in the order
//!   in which the streams get there, and never make a stream wait for a layer that was issued after
//!   one that waits for this stream's future: neither would start before
//!   [`StoreOptions::wait_timeout`], when everything in flight is cancelled. A staged retrieve
//!   waits on the GPU only, not in that order; but all moves for [`Order::Unordered`],
//!   `AfterEvent` and `AfterStream` share the store's own stream, where one holds up the next.
//! - **Events have to be signalled.** For a layer that is staged, or has to do with memory beside
//!   the devices, the event of [`Order::AfterEvent`] has to be signalled even after the layer has
//!   failed: the store's own stream waits for it. A stream that does not get to a move within
//!   [`StoreOptions::wait_timeout`] fails the store, because a move cannot be called back.
//! - [`Order::InStream`] costs three operations of a stream, `AfterStream` one and `join` two; a
//!   staged layer costs up to four of the stream that moves it. With memory beside the devices
//!   ([`StoreOptions::dram_bytes`]) a layer costs up to seven more, `join` four; what is copied for
//!   an order that holds up no stream shares the store's own. None of it grows with the number of
//!   blocks.
//! - **Streams have to live** until what was enqueued for the store is done. They are not used by
//!   the store at any other time.
//! - **Memory**: the pool belongs to the devices and the streams until [`Store::close`] returned;
//!   it may be freed after [`KvPool::unregister`], which unmaps it and refuses while anything holds
//!   it.
//!
//! # What survives
//! A store lives on its devices ([`Store::format`], [`Store::open`]). What [`Store::commit`]
//! returned for is found again after a crash or loss of power, and no lookup ever finds other bytes
//! than those that were stored under the key: docs/adr/0008-durable-store.md says how. With
//! [`DramMode::WriteBack`], of what a commit only copied to host memory, a crash leaves what
//! [`Store::sync_journal`] has returned for; of later ones it leaves all, some or none.
//!
//! # Architecture
//! - [`kv_catalog`] has what needs no data I/O: keys, files, references, namespaces, eviction, the
//!   layout of files, the on-disk format and the journal.
//! - [`Plane`] has the devices, the ring, the registered pool, and moves files by number. It knows
//!   no key. What it is told and what it tells is plain data, so that a catalog in another process
//!   can drive it. `plane/open.rs` creates and grants the queues, `route.rs` proves the path,
//!   `self_test.rs` the layout, `request.rs` and `layer.rs` start work, `complete.rs` sees it end,
//!   `recover.rs` is the way back after a timeout or a fault.
//! - `plane/streams.rs` has the events between streams, I/O kernel and plane, and the proof that no
//!   stream uses them any more; `staging.rs` the buffers of staging memory. What a stream does
//!   is a seam: [`gio_uring::StreamOps`]. `plane/events.rs` polls the controllers for what they
//!   report by themselves. `memory.rs` has blocks in memory of this process beside the devices
//!   ([`StoreOptions::dram_bytes`]), which the devices reach, too; which ones, [`kv_tier`] says.
//!   `memory/gpu.rs` has streams copy them where the pool is on a GPU, `memory/behind.rs` writes
//!   what only they have.
//! - [`Store`] is catalog, plane and journal in one process, for any number of threads.
//!   `store/commit.rs` makes commits permanent, many at once, `store/behind.rs` those that are so
//!   later. [`DurableCatalog`] is the half that a
//!   scheduler's process has when planes are in other ones (`store/ranks.rs`). [`PacedStore`] lets
//!   a [`kv_schedule::Scheduler`] decide when layers move (`store/paced.rs`), and reads ahead for
//!   requests that were announced (`store/ahead.rs`). Handles ([`Prefix`],
//!   [`Transfer`], [`Writing`]) are only names: they may be dropped anywhere and at any time.
//!
//! # Invariants
//! - A key is found only after every row of its block was written without an error
//!   ([`Store::commit`]) and where a drive cannot forget it; or, with [`DramMode::WriteBack`],
//!   copied to host memory, which serves it until then. No record of any kind tells of it before
//!   its bytes are where a drive cannot forget them.
//! - A key is in one file at most: what is stored or being stored is not stored again.
//! - A file with a reference (prefix, transfer, writing) is neither evicted nor reused, even when
//!   it lost its key meanwhile; a file is free only when no device can write to it any more and
//!   the journal no longer says that it holds a key.
//! - A file whose read failed is a miss from then on.
//! - When [`Store::wait`] returns, no device and no move touches a retrieved layer's blocks any
//!   more, and none reads a stored layer's but a move whose result is thrown away. If that cannot
//!   be had, the store has failed: every later call says why; memory is leaked rather than freed.
//! - Every event that a stream waits for is signalled, whatever fails.
//! - An event, table, staging buffer or pool is reused or freed only when every stream that uses it
//!   is past that use.
//! - Starting and waiting for a layer is O(1) in the number of blocks and allocates nothing, but
//!   for an event when a stream is seen for the first time, and for what this process copies to or
//!   from host memory before the devices.
//! - After a flush of any device that failed, or a write of the journal, nothing is stored or
//!   changed any more, and no device is asked to flush again, until the store is opened anew. A
//!   [`Plane`] that could not flush takes no writes either. What is stored can be retrieved.
//! - What was written before a controller was reset, and not flushed, is not committed.
//!
//! # Not implemented
//! - Several GPUs: a plane has one pool, on one GPU.
//! - Several ranks in one [`Store`]: it has one plane. A [`DurableCatalog`] serves many.
//! - Requests larger than a staging buffer, and buffers of different sizes.
//! - Cancelling: an operation in flight ends by itself, or with a recovery of all controllers.
//! - Telling a stream that a layer failed.
//! - Streams and a scheduler together: layers of a [`PacedStore`] have no [`Order`].
//! - Write-back where the catalog is a [`DurableCatalog`], and without checksums.
//! - Where the catalog is a [`DurableCatalog`], forgetting blocks of files that were evicted: they
//!   stay in host memory until others need it.
//! - Telling drives of less than a whole group that holds nothing; and, where the catalog is a
//!   [`DurableCatalog`], of anything.

mod config;
mod error;
mod order;
mod plane;
mod registration;
mod stats;
mod store;

pub use config::{
    DramMode, Durability, ExecutorFactory, Format, Overwrite, Part, StoreConfig, StoreDevice,
    StoreGpu, StoreOptions,
};
pub use error::{Failure, RegistrationError, StoreError};
pub use kv_catalog::{
    BlockId, BlockKey, Catalog, CatalogCounts, CatalogError, DeviceIndex, FileId, FormatError,
    Geometry, JournalError, KeyChain, KvShape, Layer, LayoutError, Namespace, NamespaceId,
    ObjectPlace, PolicyKind, Reference, ReferenceId, Region, Reported, Row, Slot, StoreId,
    StoredFile, Usage, Write, WriteBudget, WriteId,
};
pub use nvme_spec::nvm::Direction;
pub use order::Order;
pub use plane::{
    ClosedPlane, JobDone, JobFailure, JobId, KvView, LayerDone, Move, Plane, PlaneConfig,
    PlaneDevice, PlaneStats, Report, SharedController, StoreEvent, Ticket, kernel_read,
};
pub use registration::{InUse, KvPool};
pub use stats::{DramStats, Path, StoreStats};
pub use store::{
    Closed, Committed, DurableCatalog, Medium, PacedEnd, PacedStore, Prefix, RankConfig, RankId,
    Salvage, Store, Transfer, Writing,
};
