//! Copies between the DRAM cache and an engine's blocks on a GPU, by kernels on streams, in the
//! layer's order.
//!
//! The stream of the layer's order, or else the store's own, copies hits to the blocks. Fills are
//! copied from the blocks: of a layer that is stored, when its order lets the store read them; of
//! one that is read, when the devices are done. A layer ends with its copies, also for streams
//! that wait for it.

use std::ops::Range;

use gio_uring::{DeviceArray, RawStream, ScatterGather, ScatterGatherOp, Uring, Wait};
use kv_catalog::{KvShape, Layer};
use kv_tier::HostBlock;
use nvme_driver::DevicePtr;
use nvme_spec::nvm::Direction;

use super::{Copier, HostMemory};
use crate::{
    error::StoreError,
    order::Order,
    plane::{
        Move, Op, Plane,
        checksums::JobChecksums,
        job::{Job, JobId, LayerDone, LayerState},
        streams::Refused,
    },
    registration::KvPool,
};

/// GPU addresses of both sides.
#[derive(Debug)]
pub(super) struct GpuCopier {
    /// First byte of the cache.
    base: DevicePtr,
    /// Distance in bytes between rows of the cache.
    row_bytes: u64,
    engine: KvPool,
    /// Address of block 0 in each row of the engine's pool; `None` before it is registered.
    rows: Option<DeviceArray<u64>>,
}

impl GpuCopier {
    /// Creates a copier for a cache with contiguous rows; `None` if the GPU does not reach it.
    pub(super) fn new(own: &KvPool, engine: &KvPool) -> Option<Self> {
        let row_bytes = own.block_stride() * u64::from(own.blocks());
        let base = own.memory().device()?;
        Some(Self { base, row_bytes, engine: engine.clone(), rows: None })
    }

    /// Uploads the tables that kernels of a ring read.
    pub(super) fn register(&mut self, ring: &mut Uring) -> Result<(), StoreError> {
        self.rows = Some(ring.upload(self.engine.row_device().into_iter())?);
        Ok(())
    }
}

/// Blocks of a job that streams copy, by position.
#[derive(Debug)]
pub(in crate::plane) struct Copies {
    host: DeviceArray<u32>,
    engine: DeviceArray<u32>,
    checksums: Option<JobChecksums>,
}

impl Copies {
    /// Returns `None` if there is nothing to copy. `words`: the checksums, `[block][row]`, or none.
    fn new(
        ring: &mut Uring,
        blocks: &[(Move, HostBlock)],
        words: &[u32],
        rows: u32,
    ) -> Result<Option<Self>, StoreError> {
        if blocks.is_empty() {
            return Ok(None);
        }
        let checksums = match words {
            [] => None,
            words => Some(JobChecksums::of_copies(ring, rows, blocks.len(), words)?),
        };
        Ok(Some(Self {
            host: ring.upload(blocks.iter().map(|(_, at)| at.0))?,
            engine: ring.upload(blocks.iter().map(|(entry, _)| entry.block.0))?,
            checksums,
        }))
    }

    /// Returns the positions with an object that did not match its checksum.
    pub(super) fn differing(&self) -> Vec<u32> {
        self.checksums.as_ref().map(JobChecksums::differing).unwrap_or_default()
    }
}

impl HostMemory {
    /// Returns the stream operation of a layer.
    fn scatter_gather(
        &self,
        op: ScatterGatherOp,
        copies: &Copies,
        layer: Layer,
        rows_of: Range<u32>,
        shape: &KvShape,
    ) -> Option<ScatterGather> {
        let Copier::Gpu(GpuCopier { base, row_bytes, engine, rows }) = &self.copier else {
            return None;
        };
        let checksums = copies.checksums.as_ref();
        Some(ScatterGather {
            op,
            staging: DevicePtr(base.0 + u64::from(rows_of.start) * row_bytes),
            staging_row: *row_bytes,
            staging_blocks: Some(copies.host.address(0)),
            rows: rows.as_ref()?.address(rows_of.start as usize),
            row_count: rows_of.len() as u32,
            blocks: copies.engine.address(0),
            count: copies.engine.len() as u32,
            block_stride: engine.block_stride(),
            object_bytes: shape.object_bytes,
            checksums: checksums.and_then(|found| found.of_moves(layer, shape.segments)),
        })
    }
}

impl Plane {
    /// Uploads the tables of a job's copies, if the GPU does them.
    pub(in crate::plane) fn upload_copies(&mut self, job: &mut Job) -> Result<(), StoreError> {
        if !self.memory.as_ref().is_some_and(|memory| matches!(memory.copier, Copier::Gpu(_))) {
            return Ok(());
        }
        let rows = self.shape.rows();
        let ring = self.ring()?;
        job.hit_copies = Copies::new(ring, &job.hits, &job.hit_words, rows)?;
        job.fill_copies = Copies::new(ring, &job.fills, &[], rows)?;
        Ok(())
    }

    /// Returns the copy of a layer's hits.
    fn hits(&self, id: JobId, layer: Layer) -> Option<ScatterGather> {
        let (memory, job) = (self.memory.as_ref()?, self.jobs.get(&id)?);
        let copies = job.hit_copies.as_ref()?;
        let rows = match job.is_ahead {
            true => 0..self.shape.rows(),
            false => self.shape.layer_rows(layer),
        };
        memory.scatter_gather(ScatterGatherOp::Scatter, copies, layer, rows, &self.shape)
    }

    /// Returns the copy of a layer's fills.
    fn fills(&self, id: JobId, layer: Layer) -> Option<ScatterGather> {
        let (memory, job) = (self.memory.as_ref()?, self.jobs.get(&id)?);
        let copies = job.fill_copies.as_ref()?;
        let rows = self.shape.layer_rows(layer);
        memory.scatter_gather(ScatterGatherOp::Gather, copies, layer, rows, &self.shape)
    }

    /// Has streams copy a layer of which the devices move nothing. Returns the event of its end.
    pub(in crate::plane) fn start_copied(
        &mut self,
        id: JobId,
        layer: Layer,
        order: Order<'_>,
    ) -> Result<Option<Wait>, StoreError> {
        let moves = self.hits(id, layer).ok_or(StoreError::Ended { layer })?;
        let (stream, first) = self.copy_stream(order)?;
        let (ring, streams) = self.streams()?;
        let moved = match streams.copy_objects(ring, stream, [first.as_ref(), None], &moves) {
            Ok(moved) => moved,
            Err(Refused { error, moving: true }) => return Err(self.fail(error.to_string())),
            Err(Refused { error, moving: false }) => return Err(error),
        };
        let job = self.jobs.get_mut(&id).ok_or(StoreError::Ended { layer })?;
        job.layers[layer.0 as usize] = LayerState::InFlight;
        job.in_flight += 1;
        let nothing = LayerDone { layer, objects: 0, bytes: 0, device_bytes: 0 };
        self.ops.push(Op {
            iocb: None,
            job: id,
            layer,
            outcome: Some(Ok(nothing)),
            end: None,
            buffer: None,
            moved: Some(moved.clone()),
            first,
        });
        Ok(Some(moved))
    }

    /// Has a stream copy hits, beside the operation that was just issued.
    pub(in crate::plane) fn copy_hits(
        &mut self,
        id: JobId,
        layer: Layer,
        stream: RawStream,
        first: Option<&Wait>,
    ) -> Result<Option<Wait>, StoreError> {
        match self.hits(id, layer) {
            Some(hits) => self.copy_beside(stream, [first, None], &hits).map(Some),
            None => Ok(None),
        }
    }

    /// Has a stream copy fills: for a layer that is read, behind the operation that was just
    /// issued, which signals `end`.
    pub(in crate::plane) fn copy_fills(
        &mut self,
        id: JobId,
        layer: Layer,
        stream: RawStream,
        [first, end]: [Option<&Wait>; 2],
    ) -> Result<Option<Wait>, StoreError> {
        let direction = self.jobs.get(&id).map(|job| job.direction);
        let end = end.filter(|_| direction == Some(Direction::Read));
        match self.fills(id, layer) {
            Some(fills) => self.copy_beside(stream, [first, end], &fills).map(Some),
            None => Ok(None),
        }
    }

    /// Has a stream move objects of the operation that was just issued, which does not end before
    /// that.
    pub(in crate::plane) fn copy_beside(
        &mut self,
        stream: RawStream,
        waits: [Option<&Wait>; 2],
        moves: &ScatterGather,
    ) -> Result<Wait, StoreError> {
        let (ring, streams) = self.streams()?;
        match streams.copy_objects(ring, stream, waits, moves) {
            Ok(moved) => {
                if let Some(op) = self.ops.last_mut() {
                    op.moved = Some(moved.clone());
                    op.first = op.first.take().or(waits[0].cloned());
                }
                Ok(moved)
            }
            // Objects will be moved at an unknown time.
            Err(Refused { error, moving: true }) => Err(self.fail(error.to_string())),
            Err(Refused { error, moving: false }) => self.give_up(error),
        }
    }
}
