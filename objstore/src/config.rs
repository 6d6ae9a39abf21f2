//! What a store is opened with.

use std::{fmt, str::FromStr, sync::Arc};

use gio_uring::{ExecutorError, IoExecutor, StreamOps};
use nvme_driver::{Clock, Controller, CopyEngine, Nanos, QueueMemory};
use nvme_spec::ids::{Lba, Nsid};

use kv_catalog::{KvShape, Namespace, PolicyKind, StoreId, WriteBudget};

use crate::{plane::SharedController, registration::KvPool};

/// Makes the executor that runs the I/O kernel: on opening, and again should one be lost.
pub type ExecutorFactory = Box<dyn FnMut() -> Result<Box<dyn IoExecutor>, ExecutorError> + Send>;

/// A device of a store.
#[derive(Debug)]
pub struct StoreDevice {
    /// The controller, ready. The store owns it until it is closed.
    pub controller: SharedController,
    /// The namespace; the first one there is if `None`.
    pub nsid: Option<Nsid>,
    /// First LBA and number of LBAs of the store's region; the whole namespace if `None`.
    pub region: Option<(Lba, u64)>,
    /// Where its queues live, one entry for each; memory of the controller's address space if
    /// empty.
    pub queue_memory: Vec<QueueMemory>,
}

impl StoreDevice {
    /// All of the controller's first namespace.
    #[must_use]
    pub fn new(controller: Controller) -> Self {
        let controller = SharedController::new(controller);
        Self { controller, nsid: None, region: None, queue_memory: Vec::new() }
    }
}

/// What [`crate::Store::format`] may overwrite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Overwrite {
    /// Nothing but blank devices.
    #[default]
    Nothing,
    /// Another store, too. Everything in it is lost.
    Store,
    /// Whatever is there, also what belongs to somebody else.
    Anything,
}

/// Which part of a store devices become.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Part {
    /// All of it, for one process ([`crate::Store`]).
    #[default]
    Whole,
    /// The catalog of a store with so many ranks and files, on one device
    /// ([`crate::DurableCatalog`]).
    Catalog {
        /// Planes: workers of the engine.
        ranks: u32,
        /// What every rank has room for: [`kv_catalog::StoreLayout::files`] of its plan.
        files: u32,
    },
    /// The data of one rank ([`crate::Plane::open_rank`]).
    Rank {
        /// Which, from 0 on.
        rank: u32,
        /// Of how many.
        ranks: u32,
    },
}

/// How a store is formatted.
#[derive(Debug, Clone)]
pub struct Format {
    /// Names the store. Drawn at random, so that nothing of an earlier store on the same devices
    /// is taken for this one's.
    pub store: StoreId,
    /// Which part of it.
    pub part: Part,
    /// What a KV block is made of, on each rank.
    pub shape: KvShape,
    /// Bytes of file data over all devices, padding included; all that fits if `None`.
    pub capacity_bytes: Option<u64>,
    /// Files of a group, a multiple of the device count; chosen by the capacity if `None`.
    pub group: Option<u32>,
    /// Namespaces that the journal has room for.
    pub namespaces_max: u32,
    /// Whether a checksum of each object is kept: four bytes of journal and of memory for each.
    pub checksums: bool,
    /// What may be overwritten.
    pub overwrite: Overwrite,
}

impl Format {
    /// As large as the devices, with checksums, on blank devices only.
    #[must_use]
    pub fn new(store: StoreId, shape: KvShape) -> Self {
        let overwrite = Overwrite::Nothing;
        Self {
            store,
            part: Part::Whole,
            shape,
            capacity_bytes: None,
            group: None,
            namespaces_max: 1024,
            checksums: true,
            overwrite,
        }
    }
}

/// When written data counts as stored (decision 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// Once the devices that have a volatile write cache were flushed: once for all commits that
    /// wait.
    #[default]
    Auto,
    /// When it was written, with force unit access.
    Fua,
    /// Never: right where a drive cannot lose power without this host.
    Volatile,
}

/// What gets into the memory of [`StoreOptions::dram_bytes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DramMode {
    /// What is stored, what is read from the devices, and what is read ahead. The devices get what
    /// is stored at once.
    #[default]
    WriteThrough,
    /// What is read ahead alone ([`crate::Plane::prefetch`], [`crate::PacedStore`]). What is stored
    /// or read into the engine's blocks is not copied out of them.
    ReadAhead,
    /// As `WriteThrough`, but a [`crate::Store`] copies what is stored there alone, and lookups
    /// find it when it is committed. The devices get it, and it becomes permanent, when nothing
    /// else is moved, when more of it waits than a quarter of the memory has room for, and at
    /// [`crate::Store::sync_journal`]. Until then at most
    /// [`kv_schedule::Config::write_depth_bytes`] are written at a time (without a
    /// [`crate::PacedStore`] as many as by default), and more at the next commit, allocation or
    /// [`crate::Store::poll_events`]. What has no room in half of the memory is written through.
    /// Needs a store with checksums in one process.
    WriteBack,
}

impl DramMode {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::WriteThrough, Self::ReadAhead, Self::WriteBack];

    /// Its name, as [`DramMode::from_str`] reads it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::WriteThrough => "write-through",
            Self::ReadAhead => "read-ahead",
            Self::WriteBack => "write-back",
        }
    }
}

impl fmt::Display for DramMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DramMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|mode| mode.name() == text);
        let names = Self::ALL.map(Self::name).join(" or ");
        found.ok_or_else(|| format!("there is no mode {text}; use {names}"))
    }
}

/// The numbers of a store. The defaults suit a current data-centre drive.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Queue pairs per device, each served by one warp.
    pub queues_per_device: u16,
    /// Entries of each queue, a power of two; cut to what the controller allows.
    pub queue_depth: u32,
    /// Neighbouring objects are merged into commands of up to this many bytes, and MDTS. Drives
    /// reach their bandwidth at about 128 KiB, and larger commands leave them fewer to work on at
    /// once; but objects of 32 KiB (Llama-3-8B, 16 tokens) need 256 KiB to become at least four
    /// times fewer commands in a store that has long evicted.
    pub run_bytes: u32,
    /// Layer operations that may be in flight, a power of two.
    pub iocbs: u32,
    /// Parts that the staging memory of a staged pool is cut into. Each layer in flight takes one
    /// and each request has to fit into one: see [`KvPool::staging_bytes`].
    pub staging_buffers: u32,
    /// Bytes of memory, shared with the I/O kernel, for what requests bring along: at most 64 bytes
    /// for each block of a request that is open. More is taken when it is needed; but not beside a
    /// resident kernel on a GPU, where taking it might wait for the kernel: the request is refused.
    pub arena_bytes: usize,
    /// SMs that one operation may use; executors without SMs ignore it.
    pub sms: u32,
    /// How long a command may take. After two thirds of it the controller is asked to abort the
    /// command alone; in the end its queue is given up and made anew.
    pub command_timeout: Nanos,
    /// How long [`crate::Store::wait`] waits before it takes the I/O kernel or a device for dead.
    /// Has to cover all operations queued before the one waited for, and what the streams that
    /// they wait for have to do first.
    pub wait_timeout: Nanos,
    /// How long the I/O kernel may take to stop: it waits for commands that devices have.
    pub stop_timeout: Nanos,
    /// When written data counts as stored.
    pub durability: Durability,
    /// What is evicted first.
    pub policy: PolicyKind,
    /// Bytes of memory of this process in which blocks that were stored or retrieved are kept
    /// beside the devices, which have them all the same ([`DramMode::WriteBack`]: later): what is
    /// found there is copied, and not read. All of it is taken, and with real devices or a GPU
    /// pinned, when the store is opened. 0: none.
    ///
    /// [`StoreOptions::dram_mode`] says which blocks. With a GPU, on which the pool has to have an
    /// address, its streams copy, in the order that a layer has: hits to the engine's blocks, and
    /// everything that is stored or read from the devices out of them, before the blocks are the
    /// engine's again. So on the direct path, where nothing else crosses host memory, a layer that
    /// is not found there takes the link twice. It is worth that where blocks come back soon, or
    /// drives are slower than the link. What is prefetched gets there without it, and
    /// [`DramMode::ReadAhead`] keeps nothing else.
    pub dram_bytes: u64,
    /// What gets into the memory of `dram_bytes`.
    pub dram_mode: DramMode,
    /// How many bytes a day may be stored, because drives wear; `None`: all that is asked for. The
    /// store knows the bytes of a file itself.
    pub write_budget: Option<WriteBudget>,
    /// Whether drives are told of groups of files that hold nothing (Dataset Management). It saves
    /// them wear; a medium that only keeps the space is better off without.
    pub deallocate: bool,
    /// Whether data of each namespace is kept apart from the journal and from that of others, on
    /// drives with placement handles (Flexible Data Placement).
    pub placement: bool,
    /// Whether opening sends a pattern through every layer and segment first.
    pub self_test: bool,
    /// The I/O kernel takes the time from the store's clock, which is a simulated one.
    pub virtual_time: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            queues_per_device: 1,
            queue_depth: 256,
            run_bytes: 256 << 10,
            iocbs: 256,
            staging_buffers: 4,
            arena_bytes: 16 << 20,
            sms: 1,
            command_timeout: Nanos::from_millis(30_000),
            wait_timeout: Nanos::from_millis(60_000),
            stop_timeout: Nanos::from_millis(45_000),
            durability: Durability::Auto,
            policy: PolicyKind::default(),
            dram_bytes: 0,
            dram_mode: DramMode::default(),
            write_budget: None,
            deallocate: true,
            placement: true,
            self_test: true,
            virtual_time: false,
        }
    }
}

/// The GPU that the pool is on, and whose streams layers are put in order with.
#[derive(Debug, Clone)]
pub struct StoreGpu {
    /// What its streams do for the store.
    pub streams: Arc<dyn StreamOps>,
    /// Copies between its memory and this process: how the store verifies a route.
    pub copies: Arc<dyn CopyEngine>,
}

/// Everything a store is opened with.
pub struct StoreConfig {
    /// The devices. All of their controllers have to share one DMA address space with the pool.
    pub devices: Vec<StoreDevice>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Makes the executor of the I/O kernel.
    pub executor: ExecutorFactory,
    /// What a KV block is made of: what the store was formatted for.
    pub shape: KvShape,
    /// The namespace that the handle works in ([`crate::Store::within`] makes others).
    pub namespace: Namespace,
    /// The engine's KV memory.
    pub pool: KvPool,
    /// The GPU. Needed for a pool on one, and for [`crate::Order`]s that name a stream.
    pub gpu: Option<StoreGpu>,
    /// The numbers.
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
