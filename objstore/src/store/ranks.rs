//! A store in several processes: the catalog with its journal in one, and a plane for each rank.

use std::sync::{Arc, Mutex};

use kv_catalog::{Catalog, Expected, KvShape, PlantedBug, StoreId, Superblock, planted};
use nvme_driver::{Clock, Controller};

use super::{
    lock,
    open::{Place, open_catalog, plane_devices, read_superblocks},
    writer::JournalWriter,
};
use crate::{
    config::{ExecutorFactory, StoreDevice, StoreGpu, StoreOptions},
    error::StoreError,
    plane::{Plane, PlaneConfig, SharedController},
    registration::KvPool,
};

/// State of lookups. Never locked during I/O.
#[derive(Debug)]
struct State {
    catalog: Catalog,
    /// Set when nothing becomes permanent any more, with the cause.
    read_only: Option<String>,
}

/// A catalog with its journal, on a device of its own, for the process of an engine's scheduler.
/// The workers are other processes, each with a [`Plane`] ([`Plane::open_rank`]).
///
/// It is formatted as [`crate::Part::Catalog`] and exchanges plain data with the planes:
/// 1. [`Catalog::begin`] allocates files for new blocks. Each worker moves them ([`Plane::begin`]
///    with [`crate::Move`]s, the layers, [`Plane::end`]), makes them permanent ([`Plane::flush`]),
///    and reports the checksums of its objects: [`Catalog::written`]. A worker that failed reports
///    [`Catalog::failed`].
/// 2. When all ranks have reported, [`Catalog::commit`] makes the blocks visible, and
///    [`DurableCatalog::sync`] makes them durable.
/// 3. [`Catalog::acquire`] takes references on stored blocks; each worker retrieves its part with
///    the checksums from [`Catalog::checksums`]; [`Catalog::release`] follows when all have
///    reported. Files that a plane could not read are [`Catalog::lost`].
#[derive(Debug)]
pub struct DurableCatalog {
    superblock: Superblock,
    controller: SharedController,
    /// Locked before the state.
    journal: Mutex<JournalWriter>,
    state: Mutex<State>,
}

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

impl DurableCatalog {
    /// Opens the catalog on `device`. Of `options`, only `policy` and `write_budget` are used.
    /// Calls `progress` with the bytes of the journal read so far, and their maximum.
    ///
    /// # Errors
    /// Returns [`StoreError::Format`] if the device is not a store's catalog,
    /// [`StoreError::Journal`] if the journal is damaged, or [`StoreError::Config`] if the device
    /// also holds data: that is a store of one process ([`crate::Store::open`]).
    pub fn open(
        device: &StoreDevice,
        options: &StoreOptions,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Self, StoreError> {
        let place = Place::new(device)?;
        let superblock = read_superblocks(std::slice::from_ref(&place), &Expected::default())?
            .pop()
            .expect("one for each device");
        if superblock.data.is_some() {
            let name = place.controller.lock().id().to_owned();
            let problem = format!("{name} carries data; a catalog by itself was asked for");
            return Err(StoreError::Config { field: "device", problem });
        }
        let file_bytes = superblock.layout.shape.block_bytes() * u64::from(superblock.ranks);
        let (catalog, journal) =
            open_catalog(&place, &superblock, file_bytes, options, &mut progress)?;
        Ok(Self {
            superblock,
            controller: place.controller,
            journal: Mutex::new(journal),
            state: Mutex::new(State { catalog, read_only: None }),
        })
    }

    /// Returns the superblock of the device.
    #[must_use]
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Returns the identifier with which the worker of `rank` opens its plane.
    #[must_use]
    pub fn rank(&self, rank: u32) -> RankId {
        let Superblock { store, ranks, layout, .. } = &self.superblock;
        RankId { store: *store, rank, ranks: *ranks, files: layout.files }
    }

    /// Calls `act` with the catalog locked. Only [`DurableCatalog::sync`] may take the records that
    /// the catalog makes.
    pub fn with<T>(&self, act: impl FnOnce(&mut Catalog) -> T) -> T {
        act(&mut lock(&self.state).catalog)
    }

    /// Makes all commits, evictions, pins, removals and registrations so far permanent, including
    /// those of other threads. Lookups do not wait for it. Evicted files can be written again
    /// afterwards, and some are evicted ahead.
    ///
    /// # Errors
    /// Returns [`StoreError::JournalFailed`]: from then on nothing becomes permanent, so nothing
    /// should be stored. Blocks that lookups find can be retrieved.
    pub fn sync(&self) -> Result<(), StoreError> {
        let mut journal = lock(&self.journal);
        let refused = |cause: &String| StoreError::JournalFailed { cause: cause.clone() };
        {
            let State { catalog, read_only } = &mut *lock(&self.state);
            if let Some(cause) = read_only {
                return Err(refused(cause));
            }
            let ahead = catalog.wants_space();
            catalog.evict(None, ahead)?;
        }
        journal.write(|act| self.with(|catalog| act(catalog))).map_err(|error| {
            tracing::error!(%error, "the catalog takes no records any more");
            refused(lock(&self.state).read_only.insert(error.to_string()))
        })
    }

    /// Makes everything permanent and returns the controller.
    ///
    /// # Errors
    /// Same as [`DurableCatalog::sync`], and [`StoreError::Failed`] if something else shares the
    /// controller.
    pub fn close(self) -> Result<Controller, StoreError> {
        let written = self.sync();
        let noted = lock(&self.journal).close();
        written?;
        noted.map_err(|error| StoreError::JournalFailed { cause: error.to_string() })?;
        drop(self.journal);
        super::open::unshare(self.controller)
    }
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
        let superblocks = read_superblocks(&places, &expected)?;
        let Superblock { ranks, layout, .. } = &superblocks[0];
        let geometry = superblocks[0]
            .geometry()
            .ok_or_else(|| wrong("they carry a catalog without data".to_owned()))?;
        let too_few = layout.files < id.files && !planted(PlantedBug::RankWithFewerFiles);
        if *ranks != id.ranks || too_few {
            return Err(wrong(format!(
                "rank {} was formatted for {} files and {ranks} ranks, and the catalog has {} \
                 files and {} ranks; format them together",
                id.rank, layout.files, id.files, id.ranks
            )));
        }
        let self_test = options.self_test;
        let mut plane = Self::open(PlaneConfig {
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
        if self_test {
            plane.self_test(None)?;
        }
        Ok(plane)
    }
}
