//! Configuration of a store.

use std::{fmt, sync::Arc};

use gio_uring::{ExecutorError, IoExecutor, StreamOps};
use nvme_driver::{Clock, Controller, CopyEngine, Nanos, QueueMemory};
use nvme_spec::ids::{Lba, Nsid};

use kv_catalog::{Codec, KvShape, Namespace, Owner, PolicyKind, StoreId, WriteBudget};

use crate::{device::SharedController, registration::KvPool};

/// Creates the executor that runs the I/O kernel: on opening, and again if one is lost.
pub type ExecutorFactory = Box<dyn FnMut() -> Result<Box<dyn IoExecutor>, ExecutorError> + Send>;

/// A device of a store.
#[derive(Debug)]
pub struct StoreDevice {
    /// The controller, in the ready state. The store owns it until the store is closed.
    pub controller: SharedController,
    /// The namespace; the controller's first one if `None`.
    pub nsid: Option<Nsid>,
    /// First LBA and number of LBAs of the store's region; the whole namespace if `None`.
    pub region: Option<(Lba, u64)>,
    /// Memory of the device's queues, one entry for each; memory of the controller's address space
    /// if empty.
    pub queue_memory: Vec<QueueMemory>,
}

impl StoreDevice {
    /// Returns a device that uses the whole of the controller's first namespace.
    #[must_use]
    pub fn new(controller: Controller) -> Self {
        let controller = SharedController::new(controller);
        Self { controller, nsid: None, region: None, queue_memory: Vec::new() }
    }
}

/// Data that [`crate::Store::format`] may overwrite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Overwrite {
    /// Nothing but blank devices.
    #[default]
    Nothing,
    /// Another store, too. Everything in it is lost.
    Store,
    /// Anything, including data of other owners.
    Anything,
}

/// The part of a store that a set of devices becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Part {
    /// All of it, for one process ([`crate::Store`]).
    #[default]
    Whole,
    /// The catalog of a store with this many ranks and files, on one device
    /// ([`crate::DurableCatalog`]).
    Catalog {
        /// Planes: workers of the engine.
        ranks: u32,
        /// Files that fit on every rank: [`kv_catalog::StoreLayout::files`] of its plan.
        files: u32,
    },
    /// The data of one rank ([`crate::Plane::open_rank`]).
    Rank {
        /// The rank's number, from 0 on.
        rank: u32,
        /// Number of ranks.
        ranks: u32,
    },
}

/// Parameters of formatting a store.
#[derive(Debug, Clone)]
pub struct Format {
    /// Identifier of the store. Drawn at random, so that nothing of an earlier store on the same
    /// devices is mistaken for part of this one.
    pub store: StoreId,
    /// The part that the devices become.
    pub part: Part,
    /// Shape of a KV block on each rank.
    pub shape: KvShape,
    /// Codec of the objects. With any but [`Codec::None`], the KV pool must be in memory of this
    /// process, and without a GPU; a block that does not fit the codec is not stored, although its
    /// request succeeds ([`crate::CodecStats::unfit_blocks`]).
    pub codec: Codec,
    /// Bytes of file data over all devices, padding included; all that fits if `None`.
    pub capacity_bytes: Option<u64>,
    /// Files of a group, a multiple of the device count; chosen by the capacity if `None`.
    pub group: Option<u32>,
    /// Namespaces that the journal has room for.
    pub namespaces_max: u32,
    /// Set to keep a checksum of each object: four bytes of journal and of memory for each.
    pub checksums: bool,
    /// Data that may be overwritten.
    pub overwrite: Overwrite,
}

impl Format {
    /// Returns the format of a store as large as the devices, with checksums, on blank devices.
    #[must_use]
    pub fn new(store: StoreId, shape: KvShape) -> Self {
        let overwrite = Overwrite::Nothing;
        Self {
            store,
            part: Part::Whole,
            shape,
            codec: Codec::None,
            capacity_bytes: None,
            group: None,
            namespaces_max: 1024,
            checksums: true,
            overwrite,
        }
    }
}

/// The point at which written data counts as stored (decision 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// After a flush of the devices that have a volatile write cache, one for all waiting commits.
    #[default]
    Auto,
    /// When a write with force unit access (FUA) completes.
    Fua,
    /// When the write completes, unflushed: right if a drive cannot lose power without this host.
    Volatile,
}

/// Contents of the DRAM cache ([`StoreOptions::dram`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DramMode {
    /// Blocks that are stored, read from the devices, or prefetched. Stored blocks are written to
    /// the devices immediately.
    #[default]
    WriteThrough,
    /// Prefetched blocks only ([`crate::Plane::prefetch`], [`crate::Plane::announce`]). Blocks that
    /// are stored from or read into the engine's memory are not copied out of it.
    ReadAhead,
}

/// Tunable options of a store. The defaults suit a current data-centre drive.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Queue pairs per device, each served by one warp.
    pub queues: u16,
    /// Entries of each queue, a power of two; limited to the controller's maximum.
    pub depth: u32,
    /// Neighbouring objects are merged into commands of up to this many bytes, and MDTS. Drives
    /// reach their bandwidth at about 128 KiB, and larger commands give them fewer to work on in
    /// parallel; but objects of 32 KiB (Llama-3-8B, 16 tokens) need 256 KiB for at least four
    /// times fewer commands in a store that has been evicting for long.
    pub run_bytes: u32,
    /// Layer operations that may be in flight, a power of two.
    pub iocbs: u32,
    /// Codec that the store must have been formatted with; any if `None`.
    pub codec: Option<Codec>,
    /// Buffers that the staging memory of a staged pool is cut into. Each layer in flight takes
    /// one, and each request must fit into one: see [`KvPool::staging_bytes`].
    pub staging_buffers: u32,
    /// Bytes for tables of requests, near the I/O kernel (on a GPU, in its memory) and as many in
    /// shared memory: at most 16 for each block of an open request, and 4 for each of its objects
    /// with checksums. More is allocated on demand; but not beside a resident kernel on a GPU,
    /// where allocating might wait for the kernel: the request is refused.
    pub arena_bytes: usize,
    /// SMs that one operation may use; executors without SMs ignore it.
    pub sms: u32,
    /// Time limit of a command. After two thirds of it the controller is asked to abort that
    /// command; when it expires, the command's queue is abandoned and recreated.
    pub command_timeout: Nanos,
    /// Time that [`crate::Store::wait`] waits before it declares the I/O kernel or a device dead.
    /// Must exceed the time to drain the queue ahead, including stream dependencies.
    pub wait_timeout: Nanos,
    /// Time in which the I/O kernel must stop: it waits for commands that devices have.
    pub stop_timeout: Nanos,
    /// The point at which written data counts as stored.
    pub durability: Durability,
    /// Eviction policy.
    pub policy: PolicyKind,
    /// Bytes of host memory for the DRAM cache, which keeps blocks that were stored or retrieved
    /// beside the devices; the devices have them, too. Hits are copied instead of read. All of it
    /// is allocated, and with real devices or a GPU pinned, when the store is opened. 0: no cache.
    ///
    /// [`StoreOptions::dram_mode`] selects the blocks. With a GPU, on which the pool must have an
    /// address, its streams copy, in the layer's order: hits to the engine's blocks, and stored
    /// blocks and device reads out of them before the engine may use the blocks again. So on the
    /// direct path, where nothing else crosses host memory, a layer that misses takes the link
    /// twice. That pays off if blocks are reused soon, or drives are slower than the link.
    /// Prefetched blocks do not take it, and [`DramMode::ReadAhead`] keeps only those.
    pub dram: u64,
    /// Contents of the DRAM cache.
    pub dram_mode: DramMode,
    /// Bytes a day that may be stored, to limit drive wear; `None`: no limit. The store fills in
    /// the bytes of a file.
    pub write_budget: Option<WriteBudget>,
    /// Set to send deallocate hints (Dataset Management) for groups of files that hold nothing.
    /// They save drives wear; a medium that only keeps the space reserved is better off without.
    pub deallocate: bool,
    /// Set to keep the data of each namespace apart from the journal and from other namespaces, on
    /// drives with placement handles (Flexible Data Placement).
    pub placement: bool,
    /// Set to verify every layer and segment with a pattern when the store is opened.
    pub self_test: bool,
    /// Set if opening must not write to the devices: the catalog's records stay in memory, and the
    /// path is proven by reads. For stores that are only read, without self-test and deallocation,
    /// on media that take no writes.
    pub read_only: bool,
    /// Set if the store's clock is simulated: the I/O kernel then reads it.
    pub virtual_time: bool,
    /// This process, if other controllers may reach a device ([`Owner`]): then required, with an id
    /// of its own for each opening.
    pub owner: Owner,
    /// Time without a sign of life after which another owner of a device is taken for dead. The
    /// same for all processes, and a second at least.
    pub owner_timeout: Nanos,
}

/// Default of [`StoreOptions::owner_timeout`].
pub(crate) const OWNER_TIMEOUT: Nanos = Nanos::from_millis(3_000);

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            queues: 1,
            depth: 256,
            run_bytes: 256 << 10,
            iocbs: 256,
            codec: None,
            staging_buffers: 4,
            arena_bytes: 16 << 20,
            sms: 1,
            command_timeout: Nanos::from_millis(30_000),
            wait_timeout: Nanos::from_millis(60_000),
            stop_timeout: Nanos::from_millis(45_000),
            durability: Durability::Auto,
            policy: PolicyKind::default(),
            dram: 0,
            dram_mode: DramMode::default(),
            write_budget: None,
            deallocate: true,
            placement: true,
            self_test: true,
            read_only: false,
            virtual_time: false,
            owner: Owner::default(),
            owner_timeout: OWNER_TIMEOUT,
        }
    }
}

/// The GPU that holds the pool, and whose streams layers are ordered with.
#[derive(Debug, Clone)]
pub struct StoreGpu {
    /// Stream operations on this GPU.
    pub streams: Arc<dyn StreamOps>,
    /// Copies between GPU memory and this process, with which the store verifies a route.
    pub copies: Arc<dyn CopyEngine>,
}

/// Configuration of [`crate::Store::open`].
pub struct StoreConfig {
    /// The devices. All of their controllers must share one DMA address space with the pool.
    pub devices: Vec<StoreDevice>,
    /// Clock.
    pub clock: Arc<dyn Clock>,
    /// Creates the executor of the I/O kernel.
    pub executor: ExecutorFactory,
    /// Shape of a KV block, as the store was formatted.
    pub shape: KvShape,
    /// The namespace of the handle ([`crate::Store::within`] makes handles for others).
    pub namespace: Namespace,
    /// The engine's KV memory.
    pub pool: KvPool,
    /// The GPU. Needed for a pool on one, and for [`crate::Order`]s that name a stream.
    pub gpu: Option<StoreGpu>,
    /// Tunable options.
    pub options: StoreOptions,
}

impl fmt::Debug for StoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreConfig")
            .field("devices", &self.devices)
            .field("shape", &self.shape)
            .field("pool", &self.pool)
            .field("gpu", &self.gpu)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
