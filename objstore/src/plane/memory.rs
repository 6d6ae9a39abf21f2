//! The DRAM cache: blocks in host memory beside the devices; hits are copied instead of read.
//!
//! The devices have all of them, so that nothing is lost with the process (write-through). Blocks
//! are keyed by file. The bytes of a file change only when it is written, and every write begins by
//! dropping its cached block.
//!
//! The devices reach this memory, too: [`Plane::prefetch`] reads into it without using the engine's
//! blocks. If the engine's pool is on a GPU, the GPU reaches it and does the copies (`gpu.rs`).

mod ahead;
mod gpu;

use std::{collections::HashSet, ops::Range, sync::Arc, time::Duration};

use gio_uring::{IoStatus, PoolDesc, PoolHandle, Uring};
use kv_catalog::{BlockId, FileId, KvShape, Layer, PlantedBug, Region, Row, planted};
use kv_tier::{Admission, Block, HostBlock, Tier, TierConfig, TierCounts};
use nvme_driver::{Bus, DmaMemory, DmaSlice, platform::buffer::Buffer};
use nvme_spec::nvm::Direction;

pub(crate) use self::ahead::Copied;
pub(super) use self::gpu::Copies;
use self::gpu::GpuCopier;
use super::{Device, Move, Plane, job::Job, open, route};
use crate::{
    config::{DramMode, StoreGpu, StoreOptions},
    error::{Failure, StoreError},
    registration::KvPool,
    stats::{DramStats, Path},
};

/// Reload cost of any block: the same for all, as they are on the same devices.
pub(crate) const AGAIN: Duration = Duration::from_millis(1);

/// The smallest page size.
const PAGE_BYTES: usize = 4 << 10;

/// The memory, and its index.
#[derive(Debug)]
pub(super) struct HostMemory {
    tier: Tier<FileId>,
    /// Its blocks.
    pub(super) own: KvPool,
    copier: Copier,
    /// The memory as a pool of the ring.
    target: Option<PoolHandle>,
    shape: KvShape,
    retrieved_bytes: u64,
    pub(super) prefetched_bytes: u64,
}

/// Copier between the cache and the engine's blocks.
#[derive(Debug)]
enum Copier {
    /// The CPU, which reaches both: copies are done immediately.
    Cpu { own: Buffer, engine: Buffer, pool: KvPool },
    /// Kernels on streams: the engine's blocks are on a GPU.
    Gpu(GpuCopier),
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
        if options.dram_bytes == 0 {
            return Ok(None);
        }
        let wrong = |problem| StoreError::Config { field: "dram_bytes", problem };
        let block_bytes = shape.block_bytes();
        let blocks = u32::try_from(options.dram_bytes / block_bytes).unwrap_or(u32::MAX - 1);
        if blocks == 0 {
            let bytes = options.dram_bytes;
            return Err(wrong(format!(
                "{bytes} bytes have no room for a block of {block_bytes}; give more, or 0"
            )));
        }
        let is_reached = match gpu {
            Some(_) => engine.device(BlockId(0), Row(0)).is_some(),
            None => engine.path() == Path::Host,
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
            None => buffer(&own).zip(buffer(engine)).map(|(mut own, bytes)| {
                touch(&mut own);
                let pool = engine.clone();
                Copier::Cpu { own, engine: bytes, pool }
            }),
        };
        let copier = copier.ok_or_else(|| wrong("it has no address".to_owned()))?;
        let tier = Tier::new(TierConfig { blocks, block_bytes, policy: options.policy });
        Ok(Some(Self {
            tier,
            own,
            copier,
            target: None,
            shape: *shape,
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
        self.target = Some(ring.register_pool(&open::of_pool(desc, &self.own, checksums))?);
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
        let block = Block { key: entry.file, again: AGAIN, by };
        match self.tier.admit(block) {
            Admission::Fill(at) => Some((*entry, at)),
            _ => None,
        }
    }

    /// Returns true if a copy is complete when the call that starts it returns.
    pub(super) fn copies_at_once(&self) -> bool {
        matches!(self.copier, Copier::Cpu { .. })
    }

    /// Copies a layer of cached blocks to the engine, unless a stream does. If the bytes do not
    /// match the checksums, returns the block and drops it from the cache: the devices may have the
    /// right bytes.
    pub(super) fn serve(&mut self, job: &Job, layer: Layer) -> Result<(), Failure> {
        if !self.copies_at_once() {
            return Ok(());
        }
        let words = job.hit_words.chunks_exact(self.shape.rows() as usize);
        let mut words = words.chain(std::iter::repeat(&[][..]));
        for (entry, host) in &job.hits {
            let words = words.next().unwrap_or_default();
            if !self.give(entry, *host, self.shape.layer_rows(layer), words) {
                return Err(differs(entry, layer));
            }
        }
        self.retrieved_bytes += self.size(job.hits.len()).1;
        Ok(())
    }

    /// Checks a layer that a stream has copied in the same way.
    pub(super) fn served(&mut self, job: &Job, layer: Layer) -> Result<(), Failure> {
        let Some(copies) = &job.hit_copies else { return Ok(()) };
        // If several layers are in flight, it is unknown which one differs: all of them fail.
        let differing = copies.differing();
        let entries = differing.iter().filter_map(|at| job.hits.get(*at as usize));
        entries.for_each(|(entry, _)| self.tier.remove(entry.file));
        match differing.first().and_then(|at| job.hits.get(*at as usize)) {
            Some((entry, _)) => Err(differs(entry, layer)),
            None if job.is_ahead => Ok(()),
            None => {
                self.retrieved_bytes += self.size(job.hits.len()).1;
                Ok(())
            }
        }
    }

    /// Copies rows of a block to the engine. `words` are its checksums, if there are any. Returns
    /// true if the bytes match them.
    fn give(&mut self, to: &Move, host: HostBlock, rows: Range<u32>, words: &[u32]) -> bool {
        let Copier::Cpu { own: from, engine, pool } = &mut self.copier else { return false };
        for row in rows {
            let own = self.own.offset(BlockId(host.0), Row(row)).expect("a block of its own");
            let offset = pool.offset(to.block, Row(row)).expect("it was checked");
            let (bytes, expected) = (self.shape.object_bytes as usize, words.get(row as usize));
            let is_passed = planted(PlantedBug::HitsUnchecked)
                || row > 0 && planted(PlantedBug::HitsCheckedOnce);
            let expected = expected.filter(|_| !is_passed);
            let sum = copy(from, own, engine, offset, bytes, expected.is_some());
            if expected.is_some_and(|expected| *expected != sum) {
                self.tier.remove(to.file);
                return false;
            }
        }
        true
    }

    /// Copies a layer to the cache that was read or is being written, unless a stream does.
    pub(super) fn fill(&mut self, job: &Job, layer: Layer) {
        let Copier::Cpu { own: to, engine, pool } = &mut self.copier else { return };
        for (entry, host) in &job.fills {
            for row in self.shape.layer_rows(layer) {
                let own = self.own.offset(BlockId(host.0), Row(row)).expect("a block of its own");
                let offset = pool.offset(entry.block, Row(row)).expect("it was checked");
                let bytes = self.shape.object_bytes as usize;
                copy(engine, offset, to, own, bytes, false);
            }
        }
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

impl Plane {
    /// Takes the hits out of a job's moves, and allocates cache memory for the rest. Returns the
    /// checksums of the rest, for a read.
    pub(super) fn divide(&mut self, job: &mut Job, expected: &[u32]) -> Option<Vec<u32>> {
        let memory = self.memory.as_mut()?;
        // The self-test must reach the devices.
        if job.moves.iter().any(|entry| entry.file.0 + 1 == self.files) {
            return None;
        }
        memory.tier.expire(Duration::from_nanos(self.clock.now().0));
        let mut rest = Vec::new();
        if job.direction == Direction::Write {
            job.moves.iter().for_each(|entry| memory.tier.remove(entry.file));
        } else {
            let mut words = expected.chunks_exact(self.shape.rows() as usize);
            let Job { moves, hits, hit_words, .. } = job;
            moves.retain(|entry| {
                let words = words.next().unwrap_or_default();
                let found = memory.tier.get(entry.file);
                match found {
                    Some(at) => {
                        hits.push((*entry, at));
                        hit_words.extend(words);
                    }
                    None => rest.extend(words),
                }
                found.is_none()
            });
        }
        let kept = match self.options.dram_mode {
            DramMode::WriteThrough => memory.own.blocks() as usize,
            DramMode::ReadAhead => 0,
        };
        // Allocate from the tail, so that it is evicted before its prefix; if there is not enough
        // room, the tail is left out.
        let first = job.moves.iter().take(kept).rev();
        job.fills = first.filter_map(|entry| memory.take(entry, None)).collect();
        // In the order of the checksums, and of the engine's blocks, which is faster to copy.
        job.fills.reverse();
        (job.direction == Direction::Read).then_some(rest)
    }

    /// Releases the cache memory of an ended job: its hits may be evicted, and its fills are found
    /// if the whole job was moved.
    pub(super) fn let_go(&mut self, job: &Job) {
        let Some(memory) = &mut self.memory else { return };
        // Blocks that were copied ahead are released by the caller.
        let hits = job.hits.iter().filter(|_| !job.is_ahead);
        hits.for_each(|(_, at)| memory.tier.release(*at));
        let is_whole = job.map.is_some() && job.verdict().is_none();
        job.fills.iter().rev().for_each(|(_, at)| memory.tier.filled(*at, is_whole));
        if job.direction == Direction::Write && job.fills.len() < job.moves.len() {
            // These files may have been prefetched while they were written.
            let filled: HashSet<FileId> = job.fills.iter().map(|(entry, _)| entry.file).collect();
            let others = job.moves.iter().filter(|entry| !filled.contains(&entry.file));
            others.for_each(|entry| memory.tier.remove(entry.file));
        }
    }

    /// Returns the index of the cache; `None` without a cache.
    pub(crate) fn tier(&mut self) -> Option<&mut Tier<FileId>> {
        self.memory.as_mut().map(|memory| &mut memory.tier)
    }

    /// Returns true if there is a DRAM cache.
    pub(crate) fn keeps_blocks(&self) -> bool {
        self.memory.is_some()
    }

    /// Drops the cached blocks of freed files.
    pub(crate) fn forget(&mut self, files: &[FileId]) {
        if let Some(memory) = &mut self.memory {
            files.iter().for_each(|file| memory.tier.remove(*file));
        }
    }
}
