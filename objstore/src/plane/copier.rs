//! Copies of layers between the engine's blocks and other memory, on the way to and from devices.
//!
//! | memory | when | who copies |
//! |---|---|---|
//! | bounce buffers | the devices cannot describe the engine's memory | the CPU |
//! | staging memory | no device reaches the engine's pool, on a GPU | kernels on streams |
//! | staging memory | the store has a codec | the CPU, which encodes and decodes |
//! | the DRAM cache | there is one | the CPU, or kernels if the pool is on a GPU |
//!
//! The CPU copies at once: before the operation of a layer is issued, or when it has ended. Streams
//! copy in the order of the layer, which ends with its copies.

mod bounce;
mod cache;
mod coder;
mod copies;
mod objects;
mod staging;

use std::{mem, time::Duration};

use gio_uring::{
    DeviceArray, IoStatus, PoolDesc, PoolHandle, ScatterGather, ScatterGatherOp, Uring, Wait,
};
use kv_catalog::{FileId, KvShape, Layer, StoreLayout};
use kv_tier::Tier;
use nvme_driver::{Bus, Clock, DevicePtr};
use nvme_spec::nvm::Direction;

use self::{bounce::Bounce, coder::Coder};
pub(super) use self::{
    cache::{Cache, RELOAD_COST},
    copies::{Copies, Uploaded},
    staging::{Staging, Until},
};
use super::checksums::JobChecksums;
use crate::{
    config::{StoreGpu, StoreOptions},
    data_path::Route,
    error::{Failure, StoreError},
    ids::{LayerDone, Move, PoolId},
    registration::KvPool,
    stats::{CodecStats, DramStats},
};

/// The memory beside an engine's pool, and what copies from and to it.
#[derive(Debug)]
pub(super) struct Copier {
    shape: KvShape,
    bounce: Option<Bounce>,
    pub(super) coder: Option<Coder>,
    pub(super) staging: Option<Staging>,
    pub(super) cache: Option<Cache>,
    /// For streams: GPU address of block 0 in each row of the engine's pool.
    rows: Option<DeviceArray<u64>>,
    block_stride: u64,
}

/// Copies of a layer by streams.
#[derive(Debug)]
pub(super) struct OnStreams {
    /// Between the engine's blocks and this staging buffer.
    pub(super) staged: Option<(usize, ScatterGather)>,
    /// From the DRAM cache.
    pub(super) hits: Option<ScatterGather>,
    /// To the DRAM cache.
    pub(super) fills: Option<ScatterGather>,
}

impl Copier {
    /// Allocates the DRAM cache of the options, and staging memory if the layout has a codec.
    pub(super) fn new(
        bus: &dyn Bus,
        layout: &StoreLayout,
        pool: &KvPool,
        gpu: Option<&StoreGpu>,
        options: &StoreOptions,
    ) -> Result<Self, StoreError> {
        let (shape, stored) = (layout.shape, layout.stored());
        Ok(Self {
            shape,
            bounce: Bounce::new(pool),
            coder: Coder::new(bus, (layout.codec, &shape), pool, gpu.is_some())?,
            staging: None,
            cache: Cache::new(bus, &stored, pool, gpu, options)?,
            rows: None,
            block_stride: pool.block_stride(),
        })
    }

    /// Registers the memory beside `pool` with a ring, its staging memory as this many buffers, and
    /// uploads the table that kernels read.
    pub(super) fn register(
        &mut self,
        ring: &mut Uring,
        pool: &KvPool,
        desc: &PoolDesc,
        checksums: bool,
        buffers: u32,
    ) -> Result<(), StoreError> {
        if pool.path() == Route::Staged {
            let old = self.staging.take();
            self.staging = Some(Staging::new(ring, pool, &self.shape, desc, buffers, old)?);
        }
        if let Some(coder) = &mut self.coder {
            coder.register(ring, desc, checksums)?;
        }
        if let Some(cache) = &mut self.cache {
            cache.is_checked = checksums;
            // The I/O kernel has no checksums of encoded objects.
            let checksums = checksums && self.coder.is_none();
            cache.target = Some(ring.register_pool(&cache.own.describe(desc, checksums))?);
        }
        if self.staging.is_some() || self.cache.as_ref().is_some_and(|cache| cache.cpu.is_none()) {
            self.rows = Some(ring.upload(pool.row_device().into_iter())?);
        }
        Ok(())
    }

    /// Leaks memory that a stream may still use.
    pub(super) fn leak(&mut self) {
        let cache = self.cache.as_ref().map(|cache| cache.own.clone());
        mem::forget((self.staging.take(), self.coder.take(), self.rows.take(), cache));
    }

    /// Returns true if the pool has bounce buffers.
    pub(super) fn is_bounced(&self) -> bool {
        self.bounce.is_some()
    }

    /// Returns the option for which the CPU copies at once, if there is one: a layer cannot wait
    /// for an event.
    pub(super) fn copies_at_once(&self) -> Option<&'static str> {
        let cached = self.cache.as_ref().filter(|cache| cache.cpu.is_some()).map(|_| "dram");
        self.coder.as_ref().map(|_| "codec").or(cached)
    }

    /// Returns true if operations name blocks by their position in the request.
    pub(super) fn is_staged(&self) -> bool {
        self.staging.is_some() || self.coder.is_some()
    }

    /// Returns the most blocks of an operation, if there is a limit.
    pub(super) fn slots(&self) -> Option<u32> {
        let coder = self.coder.as_ref().map(Coder::slots);
        coder.or(self.staging.as_ref().map(Staging::slots))
    }

    /// Returns true if there is staging memory for so many blocks, or none is needed.
    pub(super) fn has_room(&self, blocks: usize) -> bool {
        self.staging.as_ref().is_none_or(|staging| staging.free().is_some())
            && self.coder.as_ref().is_none_or(|coder| coder.free(blocks).is_some())
    }

    /// Adds a pool of another engine. Returns false if it is out of reach of whoever copies.
    pub(super) fn add_pool(&mut self, id: PoolId, pool: &KvPool) -> bool {
        let is_reached = self.coder.as_mut().is_none_or(|coder| coder.add_pool(id, pool));
        let Some(cache) = self.cache.as_mut().filter(|_| is_reached) else { return is_reached };
        cache.cpu.as_mut().is_some_and(|cpu| cpu.add_pool(id, pool))
    }

    /// Forgets a pool that was added.
    pub(super) fn remove_pool(&mut self, id: PoolId) {
        if let Some(cpu) = self.cache.as_mut().and_then(|cache| cache.cpu.as_mut()) {
            cpu.remove_pool(id);
        }
        if let Some(coder) = &mut self.coder {
            coder.remove_pool(id);
        }
    }

    /// Returns a buffer of staging memory, or otherwise the DRAM cache, for operations of the ring.
    pub(super) fn target(&self, buffer: Option<usize>) -> Option<&PoolHandle> {
        match (buffer, &self.coder) {
            (Some(at), Some(coder)) => coder.pool(at),
            (Some(at), None) => Some(self.staging.as_ref()?.pool(at)),
            (None, _) => self.cache.as_ref()?.target.as_ref(),
        }
    }

    /// Returns the index of the DRAM cache.
    pub(super) fn tier(&mut self) -> Option<&mut Tier<FileId>> {
        self.cache.as_mut().map(|cache| &mut cache.tier)
    }

    pub(super) fn stats(&self) -> DramStats {
        self.cache.as_ref().map(Cache::stats).unwrap_or_default()
    }

    pub(super) fn codec_stats(&self) -> CodecStats {
        self.coder.as_ref().map(|coder| coder.counts).unwrap_or_default()
    }

    /// Takes staging memory for a layer of encoded objects, and encodes what is stored. Returns it,
    /// and the files whose blocks do not fit. `None` without a codec, or room.
    pub(super) fn encode(
        &mut self,
        copies: &mut Copies,
        (direction, layer): (Direction, Layer),
        clock: &dyn Clock,
    ) -> Option<(usize, Vec<FileId>)> {
        let Self { coder, cache, .. } = self;
        let (coder, blocks) = (coder.as_mut()?, copies.through.len());
        let at = coder.free(blocks)?;
        coder.use_units(at, blocks, true);
        if direction == Direction::Read {
            return Some((at, Vec::new()));
        }
        let (cpu, since) = (cache.as_mut().and_then(|cache| cache.cpu.as_mut()), clock.now());
        let unfit = coder.encode(copies, layer, at, cpu);
        coder.counts.encodes.add(clock.now() - since);
        Some((at, unfit))
    }

    /// Decodes a layer that was read. Returns the blocks that are not what was stored.
    pub(super) fn decode(
        &mut self,
        copies: &Copies,
        layer: Layer,
        at: usize,
        clock: &dyn Clock,
    ) -> Vec<Move> {
        let Self { coder, cache, .. } = self;
        let Some(coder) = coder else { return Vec::new() };
        let (cpu, since) = (cache.as_mut().and_then(|cache| cache.cpu.as_mut()), clock.now());
        let damaged = coder.decode(copies, layer, at, cpu);
        coder.counts.decodes.add(clock.now() - since);
        damaged
    }

    /// Releases the staging memory of an operation that has ended.
    pub(super) fn end_operation(&mut self, copies: &Copies, at: usize) {
        if let Some(coder) = &mut self.coder {
            coder.use_units(at, copies.through.len(), false);
        }
        if let Some(staging) = &mut self.staging {
            staging.end(at);
        }
    }

    /// Counts bytes that were read ahead.
    pub(super) fn read_ahead(&mut self, bytes: u64) {
        if let Some(cache) = &mut self.cache {
            cache.prefetched_bytes += bytes;
        }
    }

    /// Takes memory for a job's copies: names bounce buffers in its moves instead of the engine's
    /// blocks, and takes those that are cached out of them, unless it goes past the DRAM cache.
    /// Returns the checksums of the other blocks of a read. `expected`: those of all, or none.
    pub(super) fn take(
        &mut self,
        (pool, direction): (PoolId, Direction),
        moves: &mut Vec<Move>,
        expected: &[u32],
        is_cached: bool,
        now: Duration,
    ) -> Result<(Copies, Option<Vec<u32>>), StoreError> {
        let mut copies = Copies { pool, ..Copies::default() };
        if let Some(bounce) = &mut self.bounce {
            copies.through = bounce.take(moves)?;
        }
        let cache = self.cache.as_mut().filter(|_| is_cached);
        let rest =
            cache.and_then(|cache| cache.divide(&mut copies, direction, moves, expected, now));
        Ok((copies, rest))
    }

    /// Uploads the tables of copies that streams do.
    pub(super) fn upload(&self, ring: &mut Uring, copies: &mut Copies) -> Result<(), StoreError> {
        if self.rows.is_none() || self.cache.is_none() {
            return Ok(());
        }
        copies.hits.upload(ring, &self.shape)?;
        copies.fills.upload(ring, &self.shape)
    }

    /// Releases the memory of an ended job; see [`Cache::release`].
    pub(super) fn release(&mut self, copies: &Copies, is_whole: bool, written: &[Move]) {
        if let Some(bounce) = &mut self.bounce {
            bounce.give_back(&copies.through);
        }
        if let Some(cache) = &mut self.cache {
            cache.release(copies, is_whole, written);
        }
    }

    /// Makes the CPU's copies of a layer that is about to start. If cached bytes do not match the
    /// checksums, returns the block and drops it from the cache: the devices may have the right
    /// bytes.
    pub(super) fn start(
        &mut self,
        copies: &Copies,
        direction: Direction,
        layer: Layer,
    ) -> Result<(), Failure> {
        if let (Some(bounce), Direction::Write) = (&self.bounce, direction) {
            bounce.copy(&copies.through, direction, &self.shape, layer);
        }
        let Some(cache) = self.cache.as_mut().filter(|_| !copies.hits().is_empty()) else {
            return Ok(());
        };
        let Some(cpu) = &mut cache.cpu else { return Ok(()) };
        let differing = match &mut self.coder {
            Some(coder) => coder.serve(&cpu.own, copies, layer),
            None => cpu.serve(copies, &self.shape, layer),
        };
        differing.map_or(Ok(()), |entry| {
            cache.tier.remove(entry.file);
            Err(differs(&entry, layer, 1))
        })
    }

    /// Has the CPU copy a layer to the cache that was read or is being written. Encoded objects are
    /// there already.
    pub(super) fn fill(&mut self, copies: &Copies, layer: Layer) {
        let cache = self.cache.as_mut().filter(|_| self.coder.is_none());
        if let Some(cpu) = cache.and_then(|cache| cache.cpu.as_mut()) {
            cpu.fill(copies, &self.shape, layer);
        }
    }

    /// Makes the CPU's copies of a layer that has ended, adds what the DRAM cache had of it, and
    /// checks what streams copied of that, as [`Copier::start`] does.
    pub(super) fn end(
        &mut self,
        copies: &Copies,
        direction: Direction,
        done: LayerDone,
    ) -> Result<LayerDone, Failure> {
        let LayerDone { layer, mut objects, mut bytes, device_bytes } = done;
        if direction == Direction::Read {
            self.fill(copies, layer);
        }
        if let Some(cache) = &mut self.cache {
            // If several layers are in flight, it is unknown which one differs: all of them fail.
            let differing = copies.hits.differing();
            differing.iter().for_each(|entry| cache.tier.remove(entry.file));
            if let Some(entry) = differing.first() {
                return Err(differs(entry, layer, 1));
            }
            let served = copies.hits().len() as u64 * u64::from(self.shape.segments);
            cache.retrieved_bytes += served * u64::from(cache.own.object_bytes());
            objects += served;
            bytes += served * u64::from(self.shape.object_bytes);
        }
        if let (Some(bounce), Direction::Read) = (&self.bounce, direction) {
            bounce.copy(&copies.through, direction, &self.shape, layer);
        }
        Ok(LayerDone { layer, objects, bytes, device_bytes })
    }

    /// Returns the copies of a layer that streams do, and takes a staging buffer if one is needed.
    /// `first` is kept until the buffer's operation has ended.
    pub(super) fn on_streams(
        &mut self,
        copies: &Copies,
        (direction, layer): (Direction, Layer),
        checksums: Option<&JobChecksums>,
        first: Option<Wait>,
    ) -> Result<OnStreams, StoreError> {
        let mut staged = None;
        if let (Some(staging), Some(blocks)) = (&mut self.staging, &copies.through.uploaded) {
            let at = staging.take(first, blocks)?;
            staged = self.staged(at, direction, layer, blocks, checksums).map(|moves| (at, moves));
        }
        let cached = |blocks: &Uploaded, op| {
            let own = &self.cache.as_ref()?.own;
            let row_bytes = own.block_stride() * u64::from(own.blocks());
            let first = u64::from(self.shape.layer_rows(layer).start);
            let base = DevicePtr(own.memory().device()?.0 + first * row_bytes);
            self.scatter_gather(op, (base, row_bytes), layer, blocks, blocks.checksums.as_ref())
        };
        let of = |blocks: &Option<Uploaded>, op| cached(blocks.as_ref()?, op);
        let hits = of(&copies.hits.uploaded, ScatterGatherOp::Scatter);
        let fills = of(&copies.fills.uploaded, ScatterGatherOp::Gather);
        Ok(OnStreams { staged, hits, fills })
    }

    /// Returns the copy of a layer's objects between staging buffer `at` and the pool.
    pub(super) fn staged(
        &self,
        at: usize,
        direction: Direction,
        layer: Layer,
        blocks: &Uploaded,
        checksums: Option<&JobChecksums>,
    ) -> Option<ScatterGather> {
        let op = match direction {
            Direction::Read => ScatterGatherOp::Scatter,
            Direction::Write => ScatterGatherOp::Gather,
        };
        self.scatter_gather(op, self.staging.as_ref()?.place(at), layer, blocks, checksums)
    }

    /// Returns the copy of a layer's objects from or to memory with rows at this distance.
    fn scatter_gather(
        &self,
        op: ScatterGatherOp,
        (staging, staging_row): (DevicePtr, u64),
        layer: Layer,
        blocks: &Uploaded,
        checksums: Option<&JobChecksums>,
    ) -> Option<ScatterGather> {
        let KvShape { segments, object_bytes, .. } = self.shape;
        Some(ScatterGather {
            op,
            staging,
            staging_row,
            staging_blocks: blocks.other.as_ref().map(|other| other.address(0)),
            rows: self.rows.as_ref()?.address(self.shape.layer_rows(layer).start as usize),
            row_count: segments,
            blocks: blocks.engine.address(0),
            count: blocks.engine.len() as u32,
            block_stride: self.block_stride,
            object_bytes,
            checksums: checksums.and_then(|made| made.of_moves(layer, segments)),
        })
    }
}

/// Returns the failure of a block whose bytes do not match its checksums.
pub(super) fn differs(entry: &Move, layer: Layer, errors: u32) -> Failure {
    let (direction, status) = (Direction::Read, IoStatus::Checksum);
    let Move { file, position, .. } = *entry;
    Failure { direction, layer, position, file, status, errors }
}
