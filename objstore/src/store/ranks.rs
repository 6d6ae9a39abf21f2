//! A store in several processes: the catalog with its journal in one, and a plane for each rank.

use std::sync::Arc;

use kv_catalog::{DurableCatalog, Expected, KvShape, StoreId, Superblock};
use nvme_driver::Clock;

use super::open::{Place, durable, plane_devices, read_superblocks};
use crate::{
    config::{ExecutorFactory, StoreDevice, StoreGpu, StoreOptions},
    error::StoreError,
    plane::{Plane, PlaneConfig},
    registration::KvPool,
};

/// Identifies the part of a store that a worker has. Plain data, provided by the catalog's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankId {
    /// The store.
    pub store: StoreId,
    /// The worker's rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Files of the catalog.
    pub files: u32,
}

/// Configuration of a rank's plane.
pub struct RankConfig {
    /// Identifier of the rank.
    pub id: RankId,
    /// The rank's devices, formatted as [`crate::Part::Rank`]. All of their controllers must share
    /// one DMA address space with the pool.
    pub devices: Vec<StoreDevice>,
    /// Clock.
    pub clock: Arc<dyn Clock>,
    /// Creates the executor of the I/O kernel.
    pub executor: ExecutorFactory,
    /// Shape of a KV block on this rank.
    pub shape: KvShape,
    /// The worker's KV memory.
    pub pool: KvPool,
    /// The GPU. Needed for a pool on one, and for [`crate::Order`]s that name a stream.
    pub gpu: Option<StoreGpu>,
    /// Tunable options; those of the catalog are not used.
    pub options: StoreOptions,
}

impl std::fmt::Debug for RankConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RankConfig")
            .field("id", &self.id)
            .field("devices", &self.devices)
            .field("shape", &self.shape)
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

impl RankId {
    /// Returns the identifier with which the worker of `rank` opens its plane. `superblock` is the
    /// catalog's.
    #[must_use]
    pub fn of(superblock: &Superblock, rank: u32) -> Self {
        let Superblock { store, ranks, layout, .. } = superblock;
        Self { store: *store, rank, ranks: *ranks, files: layout.files }
    }
}

/// Opens the catalog on `device`, for the process of an engine's scheduler. The workers are other
/// processes, each with a [`Plane`] ([`Plane::open_rank`]). Of `options`, only `policy` and
/// `write_budget` are used. Calls `progress` with the bytes of the journal read so far, and their
/// maximum.
///
/// The device is formatted as [`crate::Part::Catalog`]. The catalog exchanges plain data with the
/// planes:
/// 1. [`Catalog::begin`] allocates files for new blocks. Each worker moves them ([`Plane::begin`]
///    with [`crate::Move`]s, the layers, [`Plane::end`], which makes them permanent) and
///    reports the checksums of its objects: [`Catalog::written`]. A worker that failed reports
///    [`Catalog::failed`].
/// 2. When all ranks have reported, [`Catalog::commit`] makes the blocks visible, and
///    [`DurableCatalog::sync`] makes them durable.
/// 3. [`Catalog::acquire`] takes references on stored blocks; each worker retrieves its part with
///    the checksums from [`Catalog::checksums`]; [`Catalog::release`] follows when all have
///    reported. Files that a plane could not read are [`Catalog::lost`].
///
/// [`DurableCatalog::close`] ends it.
///
/// [`Catalog::begin`]: kv_catalog::Catalog::begin
/// [`Catalog::written`]: kv_catalog::Catalog::written
/// [`Catalog::failed`]: kv_catalog::Catalog::failed
/// [`Catalog::commit`]: kv_catalog::Catalog::commit
/// [`Catalog::acquire`]: kv_catalog::Catalog::acquire
/// [`Catalog::checksums`]: kv_catalog::Catalog::checksums
/// [`Catalog::release`]: kv_catalog::Catalog::release
/// [`Catalog::lost`]: kv_catalog::Catalog::lost
///
/// # Errors
/// Returns [`StoreError::Format`] if the device is not a store's catalog, [`StoreError::Journal`]
/// if the journal is damaged, or [`StoreError::Config`] if the device also holds data: that is a
/// store of one process ([`crate::Store::open`]).
pub fn open_catalog(
    device: &StoreDevice,
    options: &StoreOptions,
    progress: impl FnMut(u64, u64),
) -> Result<DurableCatalog, StoreError> {
    let place = Place::new(device)?;
    if place.is_shared {
        let name = place.controller.lock().id().to_owned();
        let problem = format!("other controllers reach {name}; a catalog needs a device by itself");
        return Err(StoreError::Config { field: "device", problem });
    }
    let superblocks = read_superblocks(std::slice::from_ref(&place), &Expected::default())?;
    if superblocks[0].data.is_some() {
        let name = place.controller.lock().id().to_owned();
        let problem = format!("{name} carries data; a catalog by itself was asked for");
        return Err(StoreError::Config { field: "device", problem });
    }
    let catalog = durable(&place, &superblocks[0], options, progress)?;
    catalog.evict_ahead();
    Ok(catalog)
}

impl Plane {
    /// Opens the plane of one rank: checks that the devices belong to this rank of this store, and
    /// proves the path and the pool's layout as [`crate::Store::open`] does.
    ///
    /// # Errors
    /// Returns [`StoreError::Format`], which names the device that is missing, foreign, in another
    /// place, of another rank or changed; [`StoreError::Config`] if the rank has room for fewer
    /// files than the catalog has; and the errors of [`Plane::open`] and [`Plane::self_test`].
    pub fn open_rank(config: RankConfig) -> Result<Self, StoreError> {
        let RankConfig { id, devices, clock, executor, shape, pool, gpu, options } = config;
        let wrong = |problem| StoreError::Config { field: "devices", problem };
        let places = Place::all(&devices)?;
        let expected = Expected { store: Some(id.store), rank: id.rank, shape: Some(shape) };
        read_superblocks(&places, &expected)?;
        let owner = Place::claim(&places, &options, &clock)?;
        let superblocks = read_superblocks(&places, &expected)?;
        let Superblock { ranks, layout, .. } = &superblocks[0];
        let geometry = superblocks[0]
            .geometry()
            .ok_or_else(|| wrong("they carry a catalog without data".to_owned()))?;
        if *ranks != id.ranks || layout.files < id.files {
            return Err(wrong(format!(
                "rank {} was formatted for {} files and {ranks} ranks, and the catalog has {} \
                 files and {} ranks; format them together",
                id.rank, layout.files, id.files, id.ranks
            )));
        }
        let self_test = options.self_test;
        let plane = Self::open(PlaneConfig {
            devices: plane_devices(&places, &superblocks, devices),
            clock,
            executor,
            shape,
            geometry,
            // One more: for the self-test.
            files: layout.files + 1,
            checksums: layout.words_per_file > 0,
            pool,
            gpu,
            options,
        })?;
        plane.keep(owner)?;
        if self_test {
            plane.self_test(None)?;
        }
        Ok(plane)
    }
}
