//! The DRAM cache: blocks in host memory beside the devices; hits are copied instead of read.
//!
//! The devices have all of them, so that nothing is lost with the process. Blocks are keyed by
//! file. The bytes of a file change only when it is written, and every write begins by dropping its
//! cached block.
//!
//! The devices reach this memory, too: reading ahead does not use the engine's blocks. If the
//! engine's pool is on a GPU, the GPU reaches it and does the copies (`gpu.rs`).

mod gpu;

use std::{
    collections::{BTreeMap, HashSet},
    ops::Range,
    sync::Arc,
    time::Duration,
};

use gio_uring::{IoStatus, PoolDesc, PoolHandle, ScatterGather, ScatterGatherOp, Uring};
use kv_catalog::{BlockId, FileId, KvShape, Layer, Region, Row};
use kv_tier::{Admission, Block, HostBlock, Tier, TierConfig, TierCounts};
use nvme_driver::{Bus, DmaMemory, DmaSlice, platform::buffer::Buffer};
use nvme_spec::nvm::Direction;

use self::gpu::{Copies, GpuCopier};
use super::{devices::Device, route, target::with_objects};
use crate::{
    config::{DramMode, StoreGpu, StoreOptions},
    data_path::Route,
    error::{Failure, StoreError},
    ids::{Move, PoolId},
    registration::KvPool,
    stats::DramStats,
};

/// Reload cost of any block: the same for all, as they are on the same devices.
pub(crate) const RELOAD_COST: Duration = Duration::from_millis(1);

/// A copy that was left out would leave other bytes in the cache.
const LATER: &str = "a pool is removed after its jobs";

/// The smallest page size.
const PAGE_BYTES: usize = 4 << 10;

/// The memory, and its index.
#[derive(Debug)]
pub(super) struct HostMemory {
    pub(super) tier: Tier<FileId>,
    /// Its blocks.
    pub(super) own: KvPool,
    copier: Copier,
    /// The memory as a pool of the ring.
    target: Option<PoolHandle>,
    shape: KvShape,
    /// Blocks that a job may copy to the cache: all, or none for reading ahead only.
    fill_max: usize,
    /// True if hits are compared with checksums.
    is_checked: bool,
    retrieved_bytes: u64,
    pub(super) prefetched_bytes: u64,
}

/// The blocks of a job that are copied from and to the cache.
#[derive(Debug, Default)]
pub(super) struct Cached {
    /// The pool of the engine's blocks.
    pool: PoolId,
    /// Cached blocks, which are copied to the engine's.
    pub(super) hits: Vec<(Move, HostBlock)>,
    /// Their checksums, `[block][row]`; empty if there are none.
    words: Vec<u32>,
    /// Blocks that are copied to the cache: after the devices read them, or while they write them.
    fills: Vec<(Move, HostBlock)>,
    /// Copies of `hits`, if streams do them.
    hit_copies: Option<Copies>,
    /// Copies of `fills`, if streams do them.
    fill_copies: Option<Copies>,
}

impl Cached {
    /// Creates the part of a job that reads ahead, whose blocks are marked as filled when it ends.
    pub(super) fn of_fills(fills: Vec<(Move, HostBlock)>) -> Self {
        Self { fills, ..Self::default() }
    }

    /// Returns true if streams copy any blocks.
    pub(super) fn is_on_streams(&self) -> bool {
        self.hit_copies.is_some() || self.fill_copies.is_some()
    }
}

/// Copier between the cache and the engine's blocks.
#[derive(Debug)]
enum Copier {
    /// The CPU, which reaches all pools: copies are done immediately.
    Cpu { own: Buffer, engines: BTreeMap<PoolId, Engine> },
    /// Kernels on streams: the engine's blocks are on a GPU.
    Gpu(GpuCopier),
}

/// A pool of an engine, and its bytes.
#[derive(Debug)]
struct Engine {
    bytes: Buffer,
    pool: KvPool,
}

impl Engine {
    fn new(pool: &KvPool) -> Option<Self> {
        Some(Self { bytes: buffer(pool)?, pool: pool.clone() })
    }
}

fn buffer(pool: &KvPool) -> Option<Buffer> {
    DmaSlice::whole(pool.memory().clone()).ok().and_then(Buffer::new)
}

/// Has the system provide all pages now: it takes longer to clear a page than to copy to it, and
/// later requests would wait for that.
fn touch(memory: &mut Buffer) {
    for at in (0..memory.len()).step_by(PAGE_BYTES) {
        memory.write(at, &[0]).expect("it is inside");
    }
}

impl HostMemory {
    /// Allocates the cache with the size of the options; `None` if that is 0.
    pub(super) fn new(
        bus: &dyn Bus,
        shape: &KvShape,
        engine: &KvPool,
        gpu: Option<&StoreGpu>,
        options: &StoreOptions,
    ) -> Result<Option<Self>, StoreError> {
        if options.dram == 0 {
            return Ok(None);
        }
        let wrong = |problem| StoreError::Config { field: "dram", problem };
        let block_bytes = shape.block_bytes();
        let blocks = u32::try_from(options.dram / block_bytes).unwrap_or(u32::MAX - 1);
        if blocks == 0 {
            let bytes = options.dram;
            return Err(wrong(format!(
                "{bytes} bytes have no room for a block of {block_bytes}; give more, or 0"
            )));
        }
        let is_reached = match gpu {
            Some(_) => engine.device(BlockId(0), Row(0)).is_some(),
            None => engine.path() == Route::Host,
        };
        if !is_reached {
            let problem = "the pool is out of reach of whoever copies: the GPU if there is one";
            return Err(wrong(format!("{problem}, or else this process; leave it 0")));
        }
        let bytes = usize::try_from(u64::from(blocks) * block_bytes).unwrap_or(usize::MAX);
        let memory = alloc(bus, gpu, bytes);
        let memory = memory.map_err(|error| wrong(format!("{error}, or give less")))?;
        let own = KvPool::contiguous(memory, shape, blocks);
        let own = own.map_err(|error| wrong(error.to_string()))?;
        let copier = match gpu {
            Some(_) => GpuCopier::new(&own, engine).map(Copier::Gpu),
            None => buffer(&own).zip(Engine::new(engine)).map(|(mut own, engine)| {
                touch(&mut own);
                Copier::Cpu { own, engines: BTreeMap::from([(PoolId::default(), engine)]) }
            }),
        };
        let copier = copier.ok_or_else(|| wrong("it has no address".to_owned()))?;
        let tier = Tier::new(TierConfig { blocks, block_bytes, policy: options.policy });
        let fill_max = match options.dram_mode {
            DramMode::ReadAhead => 0,
            _ => blocks as usize,
        };
        Ok(Some(Self {
            tier,
            own,
            copier,
            target: None,
            shape: *shape,
            fill_max,
            is_checked: false,
            retrieved_bytes: 0,
            prefetched_bytes: 0,
        }))
    }

    /// Proves that every device reaches it.
    pub(super) fn prove(&self, devices: &[Device], scratch: &[Region]) -> Result<(), StoreError> {
        route::prove(devices, scratch, &self.own, None)
    }

    /// Registers it with a ring, so that operations can name it.
    pub(super) fn register(
        &mut self,
        ring: &mut Uring,
        desc: &PoolDesc,
        checksums: bool,
    ) -> Result<(), StoreError> {
        self.is_checked = checksums;
        self.target = Some(ring.register_pool(&with_objects(desc, &self.own, checksums))?);
        match &mut self.copier {
            Copier::Gpu(gpu) => gpu.register(ring),
            Copier::Cpu { .. } => Ok(()),
        }
    }

    /// Returns the pool for operations of the ring.
    pub(super) fn target(&self) -> &PoolHandle {
        self.target.as_ref().expect("it was registered when the plane was opened")
    }

    pub(super) fn stats(&self) -> DramStats {
        let TierCounts { hits, misses, evictions, wasted_bytes, .. } = self.tier.counts();
        let Self { retrieved_bytes, prefetched_bytes, .. } = *self;
        let blocks = self.tier.used();
        DramStats {
            hits,
            misses,
            retrieved_bytes,
            blocks,
            evictions,
            prefetched_bytes,
            wasted_bytes,
        }
    }

    /// Returns the number of objects of a layer of this many blocks, and their bytes.
    pub(super) fn size(&self, blocks: usize) -> (u64, u64) {
        let objects = blocks as u64 * u64::from(self.shape.segments);
        (objects, objects * u64::from(self.shape.object_bytes))
    }

    /// Allocates memory for a block, if possible; `by` is the time when it is needed.
    fn take(&mut self, entry: &Move, by: Option<Duration>) -> Option<(Move, HostBlock)> {
        let block = Block { key: entry.file, again: RELOAD_COST, by };
        match self.tier.admit(block) {
            Admission::Fill(at) => Some((*entry, at)),
            _ => None,
        }
    }

    /// Returns true if a copy is complete when the call that starts it returns.
    pub(super) fn copies_at_once(&self) -> bool {
        matches!(self.copier, Copier::Cpu { .. })
    }

    /// Adds a pool of another engine. Returns false if it cannot be copied from and to.
    pub(super) fn add_pool(&mut self, id: PoolId, pool: &KvPool) -> bool {
        match (&mut self.copier, Engine::new(pool)) {
            (Copier::Cpu { engines, .. }, Some(engine)) => {
                engines.insert(id, engine);
                true
            }
            _ => false,
        }
    }

    /// Forgets a pool that was added.
    pub(super) fn remove_pool(&mut self, id: PoolId) {
        if let Copier::Cpu { engines, .. } = &mut self.copier {
            engines.remove(&id);
        }
    }

    /// Takes the cached blocks out of a job's moves, and cache memory for the others. Returns both,
    /// and the checksums of the other blocks for a read. `expected`: those of all, or none.
    pub(super) fn divide(
        &mut self,
        pool: PoolId,
        direction: Direction,
        moves: &mut Vec<Move>,
        expected: &[u32],
        now: Duration,
    ) -> (Cached, Option<Vec<u32>>) {
        self.tier.expire(now);
        let (mut cached, mut rest) = (Cached { pool, ..Cached::default() }, Vec::new());
        if direction == Direction::Write {
            moves.iter().for_each(|entry| self.tier.remove(entry.file));
        } else {
            let mut words = expected.chunks_exact(self.shape.rows() as usize);
            moves.retain(|entry| {
                let words = words.next().unwrap_or_default();
                let found = self.tier.get(entry.file);
                match found {
                    Some(at) => {
                        cached.hits.push((*entry, at));
                        cached.words.extend(words);
                    }
                    None => rest.extend(words),
                }
                found.is_none()
            });
        }
        // Allocate from the tail, so that it is evicted before its prefix; if there is not enough
        // room, the tail is left out.
        // The owner of a pool that was added may change its blocks at any time.
        let is_trusted = self.is_checked || pool == PoolId::default();
        let fill_max = if is_trusted { self.fill_max } else { 0 };
        let first = moves.iter().take(fill_max).rev();
        cached.fills = first.filter_map(|entry| self.take(entry, None)).collect();
        // In the order of the checksums, and of the engine's blocks, which is faster to copy.
        cached.fills.reverse();
        (cached, (direction == Direction::Read).then_some(rest))
    }

    /// Releases the memory of an ended job: its hits may be evicted, and its fills are found if
    /// `is_whole`, which means that the devices moved all of it. Drops `written` files from the
    /// cache unless they were filled: they may have been prefetched while they were written.
    pub(super) fn release(&mut self, cached: &Cached, is_whole: bool, written: &[Move]) {
        let Cached { hits, fills, .. } = cached;
        hits.iter().for_each(|(_, at)| self.tier.release(*at));
        fills.iter().rev().for_each(|(_, at)| self.tier.filled(*at, is_whole));
        if fills.len() < written.len() {
            let filled: HashSet<FileId> = fills.iter().map(|(entry, _)| entry.file).collect();
            let others = written.iter().filter(|entry| !filled.contains(&entry.file));
            others.for_each(|entry| self.tier.remove(entry.file));
        }
    }

    /// Takes memory for files to be read ahead, except for those that are there or being read. All
    /// of them are protected from eviction until `by`. Returns how many leading files there are,
    /// and the memory taken; with `is_full`, takes none.
    pub(super) fn admit(
        &mut self,
        files: &[FileId],
        is_full: bool,
        now: Duration,
        by: Duration,
    ) -> (usize, Vec<(Move, HostBlock)>) {
        self.tier.expire(now);
        files.iter().for_each(|file| self.tier.expect(*file, by));
        let (mut there, mut taken) = (0, Vec::new());
        for (file, position) in files.iter().copied().zip(0..) {
            if self.tier.class(file).is_none() {
                // If there is not enough room, the tail is left out.
                let entry = Move { file, block: BlockId(0), position };
                match (!is_full).then(|| self.take(&entry, Some(by))).flatten() {
                    Some(block) => taken.push(block),
                    None => break,
                }
            }
            there += 1;
        }
        (there, taken)
    }

    /// Copies a layer of cached blocks to the engine, unless a stream does. If the bytes do not
    /// match the checksums, returns the block and drops it from the cache: the devices may have the
    /// right bytes.
    pub(super) fn serve(&mut self, cached: &Cached, layer: Layer) -> Result<(), Failure> {
        if !self.copies_at_once() {
            return Ok(());
        }
        let words = cached.words.chunks_exact(self.shape.rows() as usize);
        let mut words = words.chain(std::iter::repeat(&[][..]));
        for (entry, host) in &cached.hits {
            let words = words.next().unwrap_or_default();
            let rows = self.shape.layer_rows(layer);
            if !self.give(cached.pool, entry, *host, rows, words) {
                return Err(differs(entry, layer));
            }
        }
        self.retrieved_bytes += self.size(cached.hits.len()).1;
        Ok(())
    }

    /// Checks a layer that a stream has copied in the same way.
    pub(super) fn served(&mut self, cached: &Cached, layer: Layer) -> Result<(), Failure> {
        let Some(copies) = &cached.hit_copies else { return Ok(()) };
        // If several layers are in flight, it is unknown which one differs: all of them fail.
        let differing = copies.differing();
        let entries = differing.iter().filter_map(|at| cached.hits.get(*at as usize));
        entries.for_each(|(entry, _)| self.tier.remove(entry.file));
        match differing.first().and_then(|at| cached.hits.get(*at as usize)) {
            Some((entry, _)) => Err(differs(entry, layer)),
            None => {
                self.retrieved_bytes += self.size(cached.hits.len()).1;
                Ok(())
            }
        }
    }

    /// Copies rows of a block to the engine. `words` are its checksums, if there are any. Returns
    /// true if the bytes match them.
    fn give(
        &mut self,
        pool: PoolId,
        to: &Move,
        host: HostBlock,
        rows: Range<u32>,
        words: &[u32],
    ) -> bool {
        let Copier::Cpu { own: from, engines } = &mut self.copier else { return false };
        let Engine { bytes: engine, pool } = engines.get_mut(&pool).expect(LATER);
        for row in rows {
            let own = self.own.offset(BlockId(host.0), Row(row)).expect("a block of its own");
            let offset = pool.offset(to.block, Row(row)).expect("it was checked");
            let (bytes, expected) = (self.shape.object_bytes as usize, words.get(row as usize));
            let sum = copy(from, own, engine, offset, bytes, expected.is_some());
            if expected.is_some_and(|expected| *expected != sum) {
                self.tier.remove(to.file);
                return false;
            }
        }
        true
    }

    /// Copies a layer to the cache that was read or is being written, unless a stream does.
    pub(super) fn fill(&mut self, cached: &Cached, layer: Layer) {
        let Copier::Cpu { own: to, engines } = &mut self.copier else { return };
        let Engine { bytes: engine, pool } = engines.get(&cached.pool).expect(LATER);
        for (entry, host) in &cached.fills {
            for row in self.shape.layer_rows(layer) {
                let own = self.own.offset(BlockId(host.0), Row(row)).expect("a block of its own");
                let offset = pool.offset(entry.block, Row(row)).expect("it was checked");
                copy(engine, offset, to, own, self.shape.object_bytes as usize, false);
            }
        }
    }

    /// Returns the copy by a stream of a layer's hits to the engine's blocks.
    pub(super) fn copy_of_hits(
        &self,
        cached: &Cached,
        layer: Layer,
        rows: Range<u32>,
    ) -> Option<ScatterGather> {
        let copies = cached.hit_copies.as_ref()?;
        self.scatter_gather(ScatterGatherOp::Scatter, copies, layer, rows)
    }

    /// Returns the copy by a stream of a layer's fills out of the engine's blocks.
    pub(super) fn copy_of_fills(&self, cached: &Cached, layer: Layer) -> Option<ScatterGather> {
        let copies = cached.fill_copies.as_ref()?;
        self.scatter_gather(ScatterGatherOp::Gather, copies, layer, self.shape.layer_rows(layer))
    }
}

/// Allocates memory that the devices reach, and the GPU if there is one.
fn alloc(
    bus: &dyn Bus,
    gpu: Option<&StoreGpu>,
    bytes: usize,
) -> Result<Arc<dyn DmaMemory>, String> {
    let memory = match gpu {
        None => bus.dma().alloc_on(bytes, bus.numa_node()),
        Some(gpu) => {
            let pinned = gpu.streams.host_memory(bytes).map_err(|error| error.to_string())?;
            bus.dma().import(pinned)
        }
    };
    memory.map_err(|error| error.to_string())
}

/// Returns the failure of a block whose bytes do not match its checksums.
fn differs(entry: &Move, layer: Layer) -> Failure {
    let (direction, status) = (Direction::Read, IoStatus::Checksum);
    let Move { file, position, .. } = *entry;
    Failure { direction, layer, position, file, status, errors: 1 }
}

/// Copies `len` bytes. Returns their CRC-32C if `sum` is set.
fn copy(from: &Buffer, at: u64, to: &mut Buffer, offset: u64, len: usize, sum: bool) -> u32 {
    let mut crc = 0;
    let add = |bytes: &[u8]| {
        if sum {
            crc = crc32c::crc32c_append(crc, bytes);
        }
    };
    to.copy_from(offset as usize, from, at as usize, len, add).expect("the pool was checked");
    crc
}
