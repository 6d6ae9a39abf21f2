//! Memory that the ring moves objects to and from, and its registration.

use std::sync::Arc;

use gio_uring::{PoolDesc, PoolHandle, Uring};
use kv_catalog::{Geometry, KvShape, Region};
use nvme_driver::{Bus, DmaMemory};

use super::staging::{Staging, StagingLayout};
use crate::{config::StoreOptions, data_path::Route, error::StoreError, registration::KvPool};

/// Memory that the ring moves objects to and from.
#[derive(Debug)]
pub(super) enum Target {
    /// The engine's memory.
    Pool(PoolHandle),
    /// Staging memory, for a pool that no device reaches.
    Staged(Staging),
}

/// Allocates memory for the padding of objects: zeroes to write, then a target for reads.
pub(super) fn pads(
    bus: &dyn Bus,
    geometry: &Geometry,
) -> Result<Option<Arc<dyn DmaMemory>>, StoreError> {
    let padding = (geometry.slot_bytes() - geometry.object_bytes()) as usize;
    if padding == 0 {
        return Ok(None);
    }
    let memory = bus.dma().alloc_on(2 * padding.next_multiple_of(4096), bus.numa_node());
    match memory {
        Ok(memory) => Ok(Some(memory)),
        Err(source) => Err(StoreError::Config { field: "padding", problem: source.to_string() }),
    }
}

/// Returns the description of the ring's pool, without the addresses of its objects.
pub(super) fn describe(
    geometry: &Geometry,
    regions: &[Region],
    files: u32,
    pads: Option<&Arc<dyn DmaMemory>>,
    options: &StoreOptions,
) -> PoolDesc {
    let pad = pads.map(|memory| memory.segments()[0].iova);
    let half = pads.map_or(0, |memory| memory.len() as u64 / 2);
    PoolDesc {
        row_iova: Vec::new(),
        row_memory: Vec::new(),
        data_lba: regions.iter().map(|region| region.first.0).collect(),
        block_stride: 0,
        blocks: 0,
        files,
        group: geometry.group(),
        object_bytes: geometry.object_bytes(),
        slot_bytes: geometry.slot_bytes(),
        run_bytes: options.run_bytes,
        pad_read: pad.map(|iova| iova.offset(half)),
        pad_write: pad,
    }
}

/// Completes the description for a pool that the devices reach.
pub(super) fn with_objects(desc: &PoolDesc, pool: &KvPool, checksums: bool) -> PoolDesc {
    PoolDesc {
        row_iova: pool.row_iova().to_vec(),
        row_memory: if checksums { pool.row_places() } else { Vec::new() },
        block_stride: pool.block_stride(),
        blocks: pool.blocks(),
        ..desc.clone()
    }
}

/// Registers the pool with the ring, or each buffer of its staging memory.
pub(super) fn target(
    ring: &mut Uring,
    pool: &KvPool,
    shape: &KvShape,
    desc: &PoolDesc,
    checksums: bool,
    options: &StoreOptions,
) -> Result<Target, StoreError> {
    if pool.path() != Route::Staged {
        return Ok(Target::Pool(ring.register_pool(&with_objects(desc, pool, checksums))?));
    }
    let layout = StagingLayout::new(pool.memory().len() as u64, shape, options.staging_buffers)?;
    let mut pools = Vec::with_capacity(layout.buffers as usize);
    for at in 0..layout.buffers {
        pools.push(ring.register_pool(&PoolDesc {
            row_iova: layout.row_iova(at, pool, shape)?,
            block_stride: u64::from(shape.object_bytes),
            blocks: layout.slots,
            ..desc.clone()
        })?);
    }
    Ok(Target::Staged(Staging::new(ring, layout, pool, shape, pools)?))
}
