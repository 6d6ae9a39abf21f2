//! Copies between the DRAM cache and an engine's blocks on a GPU, by kernels on streams, in the
//! layer's order.
//!
//! The stream of the layer's order, or else the store's own, copies hits to the blocks. Fills are
//! copied from the blocks: of a layer that is stored, when its order lets the store read them; of
//! one that is read, when the devices are done. A layer ends with its copies, also for streams
//! that wait for it.

use std::ops::Range;

use gio_uring::{DeviceArray, ScatterGather, ScatterGatherOp, Uring};
use kv_catalog::Layer;
use kv_tier::HostBlock;
use nvme_driver::DevicePtr;

use super::{Cached, Copier, HostMemory};
use crate::{error::StoreError, ids::Move, plane::checksums::JobChecksums, registration::KvPool};

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
pub(super) struct Copies {
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
    /// Uploads the tables of a job's copies, if streams do them.
    pub(in crate::plane) fn upload(
        &self,
        ring: &mut Uring,
        cached: &mut Cached,
    ) -> Result<(), StoreError> {
        if !self.copies_at_once() {
            let rows = self.shape.rows();
            cached.hit_copies = Copies::new(ring, &cached.hits, &cached.words, rows)?;
            cached.fill_copies = Copies::new(ring, &cached.fills, &[], rows)?;
        }
        Ok(())
    }

    /// Returns the stream operation of a layer.
    pub(super) fn scatter_gather(
        &self,
        op: ScatterGatherOp,
        copies: &Copies,
        layer: Layer,
        rows_of: Range<u32>,
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
            object_bytes: self.shape.object_bytes,
            checksums: checksums.and_then(|found| found.of_moves(layer, self.shape.segments)),
        })
    }
}
