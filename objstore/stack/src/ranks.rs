//! A directory for a store in several processes: the home of its catalog, and one for each rank.
//!
//! ```text
//!   DIR/store.json   which store it is: state, identity, ranks, files, shape
//!   DIR/lock         locked while the rest is being made
//!   DIR/catalog/     the home of the catalog
//!   DIR/rank-0/      the home of the first rank's data
//! ```
//!
//! Whoever comes first makes all of it ([`Ranks::prepare`]): an engine starts its workers before
//! its scheduler, or the other way round. `store.json` says `making` before anything else is there,
//! and `ready` when all parts were formatted: before that nothing in them can be needed.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use nvme_driver::{Clock, ControllerOptions, Nanos, wait_until};
use objstore::{
    DurableCatalog, Format, KvShape, Part, RankId, Store, StoreDevice, StoreId, StoreOptions,
};
use serde::{Deserialize, Serialize};

use crate::{
    emulation::Emulation,
    error::StackError,
    home::{self, Home, HomeError, HomeMedia, HomeOptions, Lock, State},
    stack::shut_down,
};

const NAME: &str = "store.json";
const FIELD: &str = "ripieno_ranks";
const VERSION: u32 = 1;
/// How long another process may take to make the homes.
const MAKE_TIMEOUT: Nanos = Nanos::from_millis(120_000);
/// What a catalog's device has beside its journal, at least.
const CATALOG_SPARE: u64 = 4 << 20;

/// How a store in several processes is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RanksOptions {
    /// Names the store: a random number.
    pub id: StoreId,
    /// Planes: workers of the engine.
    pub ranks: u32,
    /// What a KV block is made of, on each rank.
    pub shape: KvShape,
    /// Bytes of all ranks' data on the disk, at the most; allocated at once. The catalog's are
    /// beside them: about a thousandth.
    pub bytes: u64,
    /// Software controllers of each rank, each with a file.
    pub devices: u32,
    /// Bytes of a logical block: 512 or 4096.
    pub lba_bytes: u32,
}

/// Which store it is.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Manifest {
    ripieno_ranks: u32,
    state: State,
    id: [u8; 16],
    ranks: u32,
    files: u32,
    layers: u32,
    segments: u32,
    object_bytes: u32,
    block_tokens: u32,
}

impl Manifest {
    fn shape(&self) -> KvShape {
        let Self { layers, segments, object_bytes, block_tokens, .. } = *self;
        KvShape { layers, segments, object_bytes, block_tokens }
    }
}

/// The directory of a store in several processes.
#[derive(Debug)]
pub struct Ranks {
    dir: PathBuf,
    manifest: Manifest,
}

impl Ranks {
    /// Makes what is missing: nothing if the store is there. Waits while another process makes it.
    ///
    /// # Errors
    /// [`HomeError::Options`] when a store with other ranks or another shape is there;
    /// [`HomeError::NotEmpty`] for a directory with something else; and as for [`Home::create`] and
    /// [`Store::format`]. What was made until then is removed.
    pub fn prepare(
        dir: &Path,
        options: &RanksOptions,
        clock: &Arc<dyn Clock>,
    ) -> Result<Self, StackError> {
        fs::create_dir_all(dir).map_err(|error| {
            let hint = "name a directory that you may write to";
            home::os(dir, "making the directory", hint, error)
        })?;
        let found = home::read_json::<Manifest>(dir, NAME, FIELD, VERSION)?;
        let found = match found.filter(|found| found.state == State::Ready) {
            Some(found) => found,
            None => Self::make(dir, options, clock)?,
        };
        let wanted = (options.ranks, options.shape);
        if (found.ranks, found.shape()) != wanted {
            let why = format!(
                "in {} holds a store for {} ranks and {:?}, and {} ranks and {:?} were asked for; \
                 name another directory, or remove this one",
                dir.display(),
                found.ranks,
                found.shape(),
                options.ranks,
                options.shape
            );
            return Err(HomeError::Options { why }.into());
        }
        Ok(Self { dir: dir.to_owned(), manifest: found })
    }

    /// Opens what [`Ranks::prepare`] made.
    ///
    /// # Errors
    /// [`HomeError::Missing`], [`HomeError::HalfMade`], [`HomeError::Damaged`], [`HomeError::Os`].
    pub fn open(dir: &Path) -> Result<Self, StackError> {
        let found = home::read_json::<Manifest>(dir, NAME, FIELD, VERSION)?;
        let dir = dir.to_owned();
        match found {
            None => Err(HomeError::Missing { dir }.into()),
            Some(found) if found.state == State::Making => Err(HomeError::HalfMade { dir }.into()),
            Some(manifest) => Ok(Self { dir, manifest }),
        }
    }

    /// What the worker of `rank` opens its plane with.
    #[must_use]
    pub fn rank(&self, rank: u32) -> RankId {
        let Manifest { id, ranks, files, .. } = self.manifest;
        RankId { store: StoreId(id), rank, ranks, files }
    }

    /// What a KV block is made of, on each rank.
    #[must_use]
    pub fn shape(&self) -> KvShape {
        self.manifest.shape()
    }

    /// The home of the catalog.
    #[must_use]
    pub fn catalog_dir(&self) -> PathBuf {
        self.dir.join("catalog")
    }

    /// The home of a rank's data.
    #[must_use]
    pub fn rank_dir(&self, rank: u32) -> PathBuf {
        self.dir.join(format!("rank-{rank}"))
    }

    fn make(
        dir: &Path,
        options: &RanksOptions,
        clock: &Arc<dyn Clock>,
    ) -> Result<Manifest, StackError> {
        let mut lock = Lock::take(dir);
        let is_locked = |lock: &Result<Lock, _>| matches!(lock, Err(HomeError::Locked { .. }));
        wait_until(&**clock, clock.now() + MAKE_TIMEOUT, || {
            if is_locked(&lock) {
                lock = Lock::take(dir);
            }
            !is_locked(&lock)
        });
        let _lock = lock?;
        match home::read_json::<Manifest>(dir, NAME, FIELD, VERSION)? {
            Some(found) if found.state == State::Ready => return Ok(found),
            Some(found) => {
                tracing::warn!(dir = %dir.display(), "removing a store that was not completed");
                Self { dir: dir.to_owned(), manifest: found }.remove()?;
            }
            None => check_empty(dir)?,
        }
        let RanksOptions { id, ranks, shape, .. } = *options;
        let KvShape { layers, segments, object_bytes, block_tokens } = shape;
        let (ripieno_ranks, state, id, files) = (VERSION, State::Making, id.0, 0);
        let manifest = Manifest {
            ripieno_ranks,
            state,
            id,
            ranks,
            files,
            layers,
            segments,
            object_bytes,
            block_tokens,
        };
        home::write_json(dir, NAME, &manifest)?;
        let mut made = Self { dir: dir.to_owned(), manifest };
        if let Err(error) = made.make_parts(options, clock) {
            // The first failure is the one to report; what cannot be removed is recognised later.
            let _ = made.remove();
            return Err(error);
        }
        made.manifest.state = State::Ready;
        home::write_json(dir, NAME, &made.manifest)?;
        Ok(made.manifest)
    }

    fn make_parts(
        &mut self,
        options: &RanksOptions,
        clock: &Arc<dyn Clock>,
    ) -> Result<(), StackError> {
        let RanksOptions { ranks, bytes, devices, lba_bytes, .. } = *options;
        if ranks == 0 {
            return Err(HomeError::Options { why: "needs at least one rank".to_owned() }.into());
        }
        let format = |part| Format { part, ..Format::new(options.id, options.shape) };
        let mut files = u32::MAX;
        for rank in 0..ranks {
            let format = format(Part::Rank { rank, ranks });
            let media = HomeMedia::Files { count: devices, bytes: bytes / u64::from(ranks) };
            let dir = self.rank_dir(rank);
            files = files.min(make_part(&dir, rank + 1, media, lba_bytes, &format, clock)?);
        }
        let format = format(Part::Catalog { ranks, files });
        let bytes = Store::device_bytes(&format, 1, lba_bytes)? + CATALOG_SPARE;
        let media = HomeMedia::Files { count: 1, bytes };
        make_part(&self.catalog_dir(), 0, media, lba_bytes, &format, clock)?;
        self.manifest.files = files;
        Ok(())
    }

    /// Removes a store that is not ready.
    fn remove(&self) -> Result<(), HomeError> {
        let ranks = (0..self.manifest.ranks).map(|rank| self.rank_dir(rank));
        for part in ranks.chain([self.catalog_dir()]) {
            removed(&part, fs::remove_dir_all(&part))?;
        }
        let path = self.dir.join(NAME);
        removed(&path, fs::remove_file(&path))?;
        home::sync_directory(&self.dir)
    }
}

fn removed(path: &Path, result: io::Result<()>) -> Result<(), HomeError> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(home::os(path, "removing it", "remove it by hand", error))
        }
        _ => Ok(()),
    }
}

/// Refuses a directory with files of somebody else.
fn check_empty(dir: &Path) -> Result<(), HomeError> {
    let os = |error| home::os(dir, "reading it", "name a directory that you may read", error);
    for entry in fs::read_dir(dir).map_err(os)? {
        let found = entry.map_err(os)?.file_name().to_string_lossy().into_owned();
        let ours = [home::LOCK, "store.json.new", home::LOST_AND_FOUND];
        if !ours.contains(&found.as_str()) {
            return Err(HomeError::NotEmpty { dir: dir.to_owned(), found });
        }
    }
    Ok(())
}

/// Makes a home and formats its devices. Says how many files it has.
fn make_part(
    dir: &Path,
    number: u32,
    media: HomeMedia,
    lba_bytes: u32,
    format: &Format,
    clock: &Arc<dyn Clock>,
) -> Result<u32, StackError> {
    let [a, b, c, d, e, f, g, h, ..] = format.store.0;
    let id = u64::from_le_bytes([a, b, c, d, e, f, g, h]).wrapping_add(number.into());
    let mut home = Home::create(dir, &HomeOptions { id, media, lba_bytes })?;
    let (_emulation, controllers, _) =
        Emulation::of_home(&home, clock, &ControllerOptions::default())?;
    let devices: Vec<StoreDevice> = controllers.into_iter().map(StoreDevice::new).collect();
    let files = Store::plan(&devices, format)?[0].layout.files;
    Store::format(&devices, format)?;
    home.set_ready()?;
    for device in devices {
        shut_down(&mut device.controller.lock())?;
    }
    Ok(files)
}

/// What the process of an engine's scheduler has: the catalog, and what is below it.
#[derive(Debug)]
pub struct CatalogStack {
    catalog: DurableCatalog,
    _emulation: Emulation,
    _home: Home,
}

impl CatalogStack {
    /// Opens the catalog of a store in several processes.
    ///
    /// # Errors
    /// As for [`Home::open`] and [`DurableCatalog::open`].
    pub fn open(
        ranks: &Ranks,
        options: &StoreOptions,
        clock: &Arc<dyn Clock>,
    ) -> Result<Self, StackError> {
        let home = Home::open(&ranks.catalog_dir())?;
        let (emulation, controllers, _) =
            Emulation::of_home(&home, clock, &ControllerOptions::default())?;
        let mut devices = controllers.into_iter().map(StoreDevice::new);
        let device = devices.next().expect("a home has a device");
        let catalog = DurableCatalog::open(&device, options, |_, _| {})?;
        Ok(Self { catalog, _emulation: emulation, _home: home })
    }

    /// The catalog.
    #[must_use]
    pub fn catalog(&self) -> &DurableCatalog {
        &self.catalog
    }

    /// Makes everything permanent, and lets go of the home.
    ///
    /// # Errors
    /// As for [`DurableCatalog::close`], and [`StackError::Shutdown`].
    pub fn close(self) -> Result<(), StackError> {
        let Self { catalog, _emulation, _home } = self;
        shut_down(&mut catalog.close()?)
    }
}
