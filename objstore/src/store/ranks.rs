//! A store in several processes: the catalog with its journal in one, and a plane for each rank.

use kv_catalog::{DurableCatalog, Expected, StoreId, Superblock};

use super::open::{Claimed, Place, durable, read_superblocks};
use crate::{
    config::{StoreConfig, StoreDevice, StoreOptions},
    error::StoreError,
    plane::Plane,
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
    /// Opens the plane of one rank: checks that the devices, formatted as [`crate::Part::Rank`],
    /// belong to this rank of this store, and proves the path and the pool's layout as
    /// [`crate::Store::open`] does. Of `config`, the namespace and the options of the catalog are
    /// not used.
    ///
    /// # Errors
    /// Returns [`StoreError::Format`], which names the device that is missing, foreign, in another
    /// place, of another rank or changed; [`StoreError::Config`] if the rank has room for fewer
    /// files than the catalog has; and the errors of [`crate::Store::open`] but those of a journal.
    pub fn open_rank(id: RankId, config: StoreConfig) -> Result<Self, StoreError> {
        let (shape, codec) = (Some(config.shape), config.options.codec);
        let expected = Expected { store: Some(id.store), rank: id.rank, shape, codec };
        let claimed = Claimed::take(&config, &expected)?;
        let Superblock { ranks, layout, .. } = &claimed.superblocks[0];
        if *ranks != id.ranks || layout.files < id.files {
            let problem = format!(
                "rank {} was formatted for {} files and {ranks} ranks, and the catalog has {} \
                 files and {} ranks; format them together",
                id.rank, layout.files, id.files, id.ranks
            );
            return Err(StoreError::Config { field: "devices", problem });
        }
        claimed.plane(config)
    }
}
