//! Encoded objects: the CPU encodes a layer before it is stored, and decodes it after it was read.
//!
//! The devices move encoded objects to and from staging memory, in which a block's number is its
//! place and the rows of all layers have the same addresses. The memory consists of units of
//! blocks, and an operation takes as many neighbouring ones as it needs. The ring has a pool for
//! each, which begins there: an operation names its blocks by their position in the request.
//!
//! The CPU copies through memory of its own. An object whose bytes are not those that were stored
//! does not get to the engine's block. Checksums are those of the raw bytes, so the I/O kernel has
//! none.

use std::collections::BTreeMap;

use gio_uring::{PoolDesc, PoolHandle, Uring};
use kv_catalog::{BlockId, Codec, FileId, KvShape, Layer, Row};
use nvme_driver::Bus;
use nvme_spec::nvm::Direction;

use super::{
    cache::{Cpu, LATER},
    copies::{Copies, Pairs},
    objects::Objects,
};
use crate::{
    data_path::Route,
    error::StoreError,
    ids::{Move, PoolId},
    registration::KvPool,
    stats::CodecStats,
};

/// Maximum bytes of staging memory; but at least a block in each unit. Pages that no request has
/// used are not allocated, except for drives that this process attaches.
const STAGING_MAX: u64 = 1 << 30;

/// Units of the memory, at most: as many layers may be in flight.
const UNITS: u64 = 64;

/// Staging memory, and what encodes and decodes.
#[derive(Debug)]
pub(in crate::plane) struct Coder {
    /// Of the engine's blocks.
    shape: KvShape,
    /// Set if checksums are computed and compared.
    is_checked: bool,
    staging: Objects,
    /// Blocks of a unit.
    unit: u32,
    units: Vec<Unit>,
    engines: BTreeMap<PoolId, Objects>,
    raw: Vec<u8>,
    encoded: Vec<u8>,
    pub(in crate::plane) counts: CodecStats,
}

#[derive(Debug)]
struct Unit {
    /// The memory from this unit on.
    pool: Option<PoolHandle>,
    is_used: bool,
}

impl Coder {
    /// Allocates the memory; `None` if the store has no codec.
    pub(super) fn new(
        bus: &dyn Bus,
        (codec, shape): (Codec, &KvShape),
        pool: &KvPool,
        has_gpu: bool,
    ) -> Result<Option<Self>, StoreError> {
        if codec == Codec::None {
            return Ok(None);
        }
        let wrong = |problem: String| StoreError::Config { field: "codec", problem };
        let Some(stored) = codec.stored(shape) else {
            return Err(wrong(format!("the store has {codec}, and blocks of {shape} have none")));
        };
        let engine = Objects::new(pool).filter(|_| pool.path() == Route::Host && !has_gpu);
        let Some(engine) = engine.filter(|_| !pool.is_bounced()) else {
            return Err(wrong(format!(
                "the store's objects are encoded ({codec}), which the CPU does in memory of this \
                 process, aligned and without a GPU; use such a KV pool, or make a store with \
                 codec none"
            )));
        };
        let one = KvShape { layers: 1, ..stored };
        let room = (STAGING_MAX / one.block_bytes()).max(1);
        let wanted = u64::from(pool.blocks()).saturating_mul(shape.layers.into()).min(room);
        let unit = wanted.div_ceil(UNITS);
        let units = wanted.div_ceil(unit);
        let blocks = (unit * units) as u32;
        let bytes = usize::try_from(one.block_bytes() * u64::from(blocks)).unwrap_or(usize::MAX);
        let memory = bus.dma().alloc_on(bytes, bus.numa_node());
        let memory = memory.map_err(|error| wrong(format!("{error}, or take codec none")))?;
        let own = KvPool::contiguous(memory, &one, blocks);
        let own = own.map_err(|error| wrong(error.to_string()))?;
        let staging = Objects::new(&own).ok_or_else(|| wrong("it has no address".to_owned()))?;
        let free = || Unit { pool: None, is_used: false };
        Ok(Some(Self {
            shape: *shape,
            is_checked: false,
            staging,
            unit: unit as u32,
            units: (0..units).map(|_| free()).collect(),
            engines: BTreeMap::from([(PoolId::default(), engine)]),
            raw: vec![0; shape.object_bytes as usize],
            encoded: vec![0; stored.object_bytes as usize],
            counts: CodecStats::default(),
        }))
    }

    /// Returns the staging memory.
    pub(in crate::plane) fn memory(&self) -> &KvPool {
        &self.staging.pool
    }

    /// Registers each unit with a ring.
    pub(super) fn register(
        &mut self,
        ring: &mut Uring,
        desc: &PoolDesc,
        checksums: bool,
    ) -> Result<(), StoreError> {
        self.is_checked = checksums;
        let (own, segments) = (&self.staging.pool, self.shape.segments);
        for (unit, first) in self.units.iter_mut().zip((0..).step_by(self.unit as usize)) {
            let row = |row| own.iova(BlockId(first), Row(row % segments)).expect("a block of it");
            unit.pool = Some(ring.register_pool(&PoolDesc {
                row_iova: (0..self.shape.rows()).map(row).collect(),
                block_stride: own.block_stride(),
                blocks: own.blocks() - first,
                ..desc.clone()
            })?);
        }
        Ok(())
    }

    pub(super) fn pool(&self, at: usize) -> Option<&PoolHandle> {
        self.units.get(at)?.pool.as_ref()
    }

    /// Returns the most blocks of an operation.
    pub(super) fn slots(&self) -> u32 {
        self.staging.pool.blocks()
    }

    fn units_of(&self, blocks: usize) -> usize {
        blocks.div_ceil(self.unit as usize)
    }

    /// Returns the first of enough free units for this number of blocks.
    pub(super) fn free(&self, blocks: usize) -> Option<usize> {
        let mut runs = self.units.windows(self.units_of(blocks).max(1));
        runs.position(|units| units.iter().all(|unit| !unit.is_used))
    }

    pub(super) fn use_units(&mut self, at: usize, blocks: usize, is_used: bool) {
        let count = self.units_of(blocks);
        self.units[at..][..count].iter_mut().for_each(|unit| unit.is_used = is_used);
    }

    /// Adds a pool of another engine. Returns false if this process does not reach it.
    pub(super) fn add_pool(&mut self, id: PoolId, pool: &KvPool) -> bool {
        Objects::new(pool).map(|engine| self.engines.insert(id, engine)).is_some()
    }

    /// Forgets a pool that was added.
    pub(super) fn remove_pool(&mut self, id: PoolId) {
        self.engines.remove(&id);
    }

    /// Prepares the copies of a job. `expected`: the checksums of a read.
    pub(in crate::plane) fn prepare(
        &self,
        copies: &mut Copies,
        direction: Direction,
        moves: &[Move],
        expected: &[u32],
    ) {
        let blocks = moves.iter().copied().zip((0..).map(BlockId)).collect();
        let words = match direction {
            Direction::Read => expected.to_vec(),
            Direction::Write if self.is_checked => {
                vec![0; moves.len() * self.shape.rows() as usize]
            }
            Direction::Write => Vec::new(),
        };
        copies.through = Pairs { blocks, words, uploaded: None };
    }

    /// Encodes a layer into the memory from unit `at` on, and into the DRAM cache. Returns the
    /// files of blocks that do not fit, and did so far.
    pub(super) fn encode(
        &mut self,
        copies: &mut Copies,
        layer: Layer,
        at: usize,
        mut cache: Option<&mut Cpu>,
    ) -> Vec<FileId> {
        let engine = self.engines.get(&copies.pool_of(layer)).expect(LATER);
        let Copies { through, fills, unfit, .. } = copies;
        let (rows, first) = (self.shape.rows() as usize, at as u32 * self.unit);
        let mut fills = fills.blocks.iter().peekable();
        let mut new = Vec::new();
        for (entry, BlockId(slot)) in &through.blocks {
            let fill = fills.next_if(|(fill, _)| fill == entry).map(|(_, to)| *to);
            for row in self.shape.layer_rows(layer) {
                engine.read(entry.block, Row(row), &mut self.raw);
                if let Some(word) = through.words.get_mut(*slot as usize * rows + row as usize) {
                    *word = crc32c::crc32c(&self.raw);
                }
                if !unfit.contains(&entry.file)
                    && let Err(error) = kv_codec::encode(&self.raw, &mut self.encoded)
                {
                    note_unfit(&mut self.counts, layer, &error);
                    unfit.insert(entry.file);
                    new.push(entry.file);
                }
                if unfit.contains(&entry.file) {
                    // Nobody will look for it, and it is not to have what was there.
                    self.encoded.fill(0);
                }
                let segment = Row(row % self.shape.segments);
                self.staging.write(BlockId(first + slot), segment, &self.encoded);
                if let (Some(to), Some(cache)) = (fill, &mut cache) {
                    cache.own.write(to, Row(row), &self.encoded);
                }
            }
        }
        self.counts.encoded_bytes += self.layer_bytes(through.blocks.len());
        new
    }

    /// Decodes a layer out of the memory from unit `at` on, and copies it to the DRAM cache as it
    /// is. Returns the blocks that are not what was stored.
    pub(super) fn decode(
        &mut self,
        copies: &Copies,
        layer: Layer,
        at: usize,
        mut cache: Option<&mut Cpu>,
    ) -> Vec<Move> {
        let (rows, first) = (self.shape.rows() as usize, at as u32 * self.unit);
        let mut fills = copies.fills.blocks.iter().peekable();
        let mut damaged = Vec::new();
        for ((entry, BlockId(slot)), words) in copies.through.with_words(rows) {
            let fill = fills.next_if(|(fill, _)| fill == entry).map(|(_, to)| *to);
            let mut is_whole = true;
            for row in self.shape.layer_rows(layer) {
                let segment = Row(row % self.shape.segments);
                self.staging.read(BlockId(first + slot), segment, &mut self.encoded);
                if let (Some(to), Some(cache)) = (fill, &mut cache) {
                    cache.own.write(to, Row(row), &self.encoded);
                }
                is_whole &= self.deliver(copies.pool_of(layer), entry.block, Row(row), words);
            }
            if !is_whole {
                damaged.push(*entry);
            }
        }
        self.counts.decoded_bytes += self.layer_bytes(copies.through.blocks.len());
        damaged
    }

    /// Decodes a layer of cached blocks. Returns one that is not what was stored.
    pub(super) fn serve(&mut self, own: &Objects, copies: &Copies, layer: Layer) -> Option<Move> {
        let hits = copies.hits.with_words(self.shape.rows() as usize);
        self.counts.decoded_bytes += self.layer_bytes(copies.hits().len());
        for ((entry, at), words) in hits {
            for row in self.shape.layer_rows(layer).map(Row) {
                own.read(*at, row, &mut self.encoded);
                if !self.deliver(copies.pool_of(layer), entry.block, row, words) {
                    return Some(*entry);
                }
            }
        }
        None
    }

    /// Decodes an object into the engine's block, unless it is not what was stored. `words`: the
    /// checksums of the block, if there are any.
    fn deliver(&mut self, pool: PoolId, block: BlockId, row: Row, words: &[u32]) -> bool {
        let is_whole = kv_codec::decode(&self.encoded, &mut self.raw).is_ok()
            && words.get(row.0 as usize).is_none_or(|word| *word == crc32c::crc32c(&self.raw));
        if is_whole {
            self.engines.get_mut(&pool).expect(LATER).write(block, row, &self.raw);
        }
        is_whole
    }

    fn layer_bytes(&self, blocks: usize) -> u64 {
        let KvShape { segments, object_bytes, .. } = self.shape;
        blocks as u64 * u64::from(segments) * u64::from(object_bytes)
    }
}

/// Counts a block that does not fit, and says so for the first one.
fn note_unfit(counts: &mut CodecStats, layer: Layer, error: &kv_codec::DoesNotFit) {
    if counts.unfit_blocks == 0 {
        tracing::warn!(
            %layer,
            %error,
            "a block does not fit the codec, and is not stored; if many do not, the KV cache is no \
             bf16 of a trained model: make a store with codec none"
        );
    }
    counts.unfit_blocks += 1;
}
