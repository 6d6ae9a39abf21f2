//! The DRAM cache: blocks in host memory beside the devices; hits are copied instead of read.
//!
//! The devices have all of them, so that nothing is lost with the process. Blocks are keyed by
//! file. The bytes of a file change only when it is written, and every write begins by dropping its
//! cached block.
//!
//! The devices reach this memory, too: reading ahead does not use the engine's blocks. If the
//! engine's pool is on a GPU, the GPU reaches it and does the copies.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Duration,
};

use gio_uring::PoolHandle;
use kv_catalog::{BlockId, FileId, KvShape, Layer, Row};
use kv_tier::{Admission, Block, HostBlock, Tier, TierConfig, TierCounts};
use nvme_driver::{Bus, DmaMemory};
use nvme_spec::nvm::Direction;

use super::{
    copies::{Copies, Pairs},
    objects::Objects,
};
use crate::{
    config::{DramMode, StoreGpu, StoreOptions},
    data_path::Route,
    error::StoreError,
    ids::{Move, PoolId},
    registration::KvPool,
    stats::DramStats,
};

/// Reload cost of any block: the same for all, as they are on the same devices.
pub(crate) const RELOAD_COST: Duration = Duration::from_millis(1);

/// A copy that was left out would leave other bytes in the cache.
pub(super) const LATER: &str = "a pool is removed after its jobs";

/// The memory, and its index.
#[derive(Debug)]
pub(in crate::plane) struct Cache {
    pub(in crate::plane) tier: Tier<FileId>,
    /// Its blocks.
    pub(in crate::plane) own: KvPool,
    /// The CPU, if it copies: immediately. `None`: kernels on streams do.
    pub(super) cpu: Option<Cpu>,
    /// The memory as a pool of the ring.
    pub(super) target: Option<PoolHandle>,
    /// Blocks that a job may copy to the cache: all, or none for reading ahead only.
    fill_max: usize,
    /// True if hits are compared with checksums.
    pub(super) is_checked: bool,
    pub(super) retrieved_bytes: u64,
    pub(super) prefetched_bytes: u64,
}

/// The memory that the CPU copies from and to: it reaches all pools.
#[derive(Debug)]
pub(super) struct Cpu {
    pub(super) own: Objects,
    engines: BTreeMap<PoolId, Objects>,
}

impl Cpu {
    fn new(own: &KvPool, engine: &KvPool) -> Option<Self> {
        let mut own = Objects::new(own)?;
        own.touch();
        Some(Self { own, engines: BTreeMap::from([(PoolId::default(), Objects::new(engine)?)]) })
    }

    /// Adds a pool of another engine. Returns false if it cannot be copied from and to.
    pub(super) fn add_pool(&mut self, id: PoolId, pool: &KvPool) -> bool {
        Objects::new(pool).map(|engine| self.engines.insert(id, engine)).is_some()
    }

    /// Forgets a pool that was added.
    pub(super) fn remove_pool(&mut self, id: PoolId) {
        self.engines.remove(&id);
    }

    /// Copies rows of cached blocks to the engine. Returns a block whose bytes do not match its
    /// checksums.
    pub(super) fn serve(&mut self, copies: &Copies, shape: &KvShape, layer: Layer) -> Option<Move> {
        let engine = self.engines.get_mut(&copies.pool_of(layer)).expect(LATER);
        let mut hits = copies.hits.with_words(shape.rows() as usize);
        let differs = hits.find(|((entry, at), words)| {
            !engine.copy_from(entry.block, (&self.own, *at), shape.layer_rows(layer), words)
        });
        differs.map(|((entry, _), _)| *entry)
    }

    /// Copies a layer to the cache that was read or is being written.
    pub(super) fn fill(&mut self, copies: &Copies, shape: &KvShape, layer: Layer) {
        let engine = self.engines.get(&copies.pool_of(layer)).expect(LATER);
        for (entry, at) in &copies.fills.blocks {
            self.own.copy_from(*at, (engine, entry.block), shape.layer_rows(layer), &[]);
        }
    }
}

impl Cache {
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
        let cpu = gpu.is_none().then(|| Cpu::new(&own, engine));
        let has_address = match &cpu {
            Some(cpu) => cpu.is_some(),
            None => own.memory().device().is_some(),
        };
        if !has_address {
            return Err(wrong("it has no address".to_owned()));
        }
        let tier = Tier::new(TierConfig { blocks, block_bytes, policy: options.policy });
        let fill_max = match options.dram_mode {
            DramMode::ReadAhead => 0,
            _ => blocks as usize,
        };
        Ok(Some(Self {
            tier,
            own,
            cpu: cpu.flatten(),
            target: None,
            fill_max,
            is_checked: false,
            retrieved_bytes: 0,
            prefetched_bytes: 0,
        }))
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

    /// Allocates memory for a block, if possible; `by` is the time when it is needed.
    fn take(&mut self, entry: &Move, by: Option<Duration>) -> Option<(Move, BlockId)> {
        let block = Block { key: entry.file, again: RELOAD_COST, by };
        match self.tier.admit(block) {
            Admission::Fill(at) => Some((*entry, BlockId(at.0))),
            _ => None,
        }
    }

    /// Takes the cached blocks out of a job's moves, and cache memory for the others. Returns the
    /// checksums of the other blocks for a read. `expected`: those of all, or none.
    pub(super) fn divide(
        &mut self,
        copies: &mut Copies,
        direction: Direction,
        moves: &mut Vec<Move>,
        expected: &[u32],
        now: Duration,
    ) -> Option<Vec<u32>> {
        self.tier.expire(now);
        let mut rest = Vec::new();
        if direction == Direction::Write {
            moves.iter().for_each(|entry| self.tier.remove(entry.file));
        } else {
            let mut words = expected.chunks_exact(self.own.rows() as usize);
            moves.retain(|entry| {
                let words = words.next().unwrap_or_default();
                let found = self.tier.get(entry.file);
                match found {
                    Some(at) => {
                        copies.hits.blocks.push((*entry, BlockId(at.0)));
                        copies.hits.words.extend(words);
                    }
                    None => rest.extend(words),
                }
                found.is_none()
            });
        }
        // Allocate from the tail, so that it is evicted before its prefix; if there is not enough
        // room, the tail is left out.
        // The owner of a pool that was added may change its blocks at any time.
        let is_trusted = self.is_checked || copies.pool == PoolId::default();
        let fill_max = if is_trusted { self.fill_max } else { 0 };
        let first = moves.iter().take(fill_max).rev();
        let mut fills: Vec<_> = first.filter_map(|entry| self.take(entry, None)).collect();
        // In the order of the checksums, and of the engine's blocks, which is faster to copy.
        fills.reverse();
        copies.fills = Pairs { blocks: fills, ..Pairs::default() };
        (direction == Direction::Read).then_some(rest)
    }

    /// Releases the memory of an ended job: its hits may be evicted, and its fills are found if
    /// `is_whole`, which means that the devices moved all of it. Drops `written` files from the
    /// cache unless they were filled: they may have been prefetched while they were written.
    pub(super) fn release(&mut self, copies: &Copies, is_whole: bool, written: &[Move]) {
        let (hits, fills) = (copies.hits(), &copies.fills.blocks);
        hits.iter().for_each(|(_, at)| self.tier.release(HostBlock(at.0)));
        fills.iter().rev().for_each(|(_, at)| self.tier.filled(HostBlock(at.0), is_whole));
        if fills.len() < written.len() {
            let filled: HashSet<FileId> = fills.iter().map(|(entry, _)| entry.file).collect();
            let others = written.iter().filter(|entry| !filled.contains(&entry.file));
            others.for_each(|entry| self.tier.remove(entry.file));
        }
    }

    /// Takes memory for files to be read ahead, except for those that are there or being read. All
    /// of them are protected from eviction until `by`. Returns how many leading files there are,
    /// and the memory taken; with `is_full`, takes none.
    pub(in crate::plane) fn admit(
        &mut self,
        files: &[FileId],
        is_full: bool,
        now: Duration,
        by: Duration,
    ) -> (usize, Vec<(Move, BlockId)>) {
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
