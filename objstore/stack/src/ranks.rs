//! A directory for a store in several processes: one for its catalog, and one for each rank.
//!
//! ```text
//!   DIR/store.json   identity of the store: state, id, ranks, files, shape
//!   DIR/lock         locked while the rest is being made
//!   DIR/catalog/     store directory of the catalog
//!   DIR/rank-0/      store directory of the first rank's data, unless that is on drives
//! ```
//!
//! Drives are divided among the ranks; `store.json` has their addresses and identities. Only the
//! process that makes the store opens all of them, under the lock, and releases them before it sets
//! the state `ready`; from then on a rank's process opens its own.
//!
//! The first process makes all of it ([`Ranks::prepare`]): an engine may start its workers before
//! its scheduler, or the other way round. `store.json` has the state `making` before anything else
//! exists, and `ready` when all parts were formatted: before that, nothing in them can be needed.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use nvme_driver::{Clock, ControllerOptions, Nanos, wait_until};
use objstore::{
    Codec, DurableCatalog, Format, KvShape, Overwrite, Part, RankId, Store, StoreDevice,
    StoreError, StoreId, StoreOptions, open_catalog,
};
use serde::{Deserialize, Serialize};

use crate::{
    devices::Devices,
    drives::{self, Drive, DriveAddress, DriveIdentity},
    error::{StackError, StoreDirError},
    expand_home,
    own::Process,
    store_dir::{self, Lock, State, StoreDir, StoreDirMedia, StoreDirOptions},
};

const NAME: &str = "store.json";
const FIELD: &str = "ripieno_ranks";
const VERSION: u32 = 1;
/// Maximum number of ranks: a file has at most so many checksums.
const RANKS_MAX: u32 = 1 << 16;
/// Time limit for another process to make the directories.
const MAKE_TIMEOUT: Nanos = Nanos::from_millis(120_000);
/// Minimum space on a catalog's device beside its journal.
const CATALOG_SPARE: u64 = 4 << 20;

/// Parameters of a store in several processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RanksOptions {
    /// Random id of the store.
    pub id: StoreId,
    /// Number of planes: workers of the engine.
    pub ranks: u32,
    /// Shape of a KV block on each rank.
    pub shape: KvShape,
    /// Codec of the objects.
    pub codec: Codec,
    /// Media of the ranks' data. The catalog is in the directory, and about a thousandth as large.
    pub media: RankMedia,
}

/// Media of the ranks' data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RankMedia {
    /// Files, in a directory for each rank.
    Files {
        /// Maximum bytes of all ranks together; allocated immediately.
        bytes: u64,
        /// Software controllers of each rank, each with a file.
        count: u32,
        /// Bytes of an LBA: 512 or 4096.
        lba_bytes: u32,
    },
    /// Drives.
    Drives {
        /// An equal number for each rank, those of the first rank first.
        addresses: Vec<DriveAddress>,
        /// Maximum bytes of all ranks together; `None`: all that fits.
        bytes: Option<u64>,
        /// Data that may be overwritten when the store is made.
        overwrite: Overwrite,
    },
}

/// LBA size of the catalog's file if the ranks have drives.
const CATALOG_LBA_BYTES: u32 = 4096;

/// Identity and state of a store.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Manifest {
    ripieno_ranks: u32,
    state: State,
    id: [u8; 16],
    ranks: u32,
    files: u32,
    #[serde(flatten)]
    shape: KvShape,
    /// Those of the first rank first; empty if the ranks have store directories. Addresses are
    /// those that were given last, and of PCI alone in older stores.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    drives: Vec<Drive>,
    /// With drives: requested bytes of all ranks; 0: all that fits. Missing in older stores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    drive_bytes: Option<u64>,
}

impl Manifest {
    /// Reads the manifest of `dir`; `None` if it has none.
    fn read(dir: &Path) -> Result<Option<Self>, StoreDirError> {
        let found = store_dir::read_json::<Self>(dir, NAME, FIELD, VERSION)?;
        // Users may have edited it, and the rest of the code has loops over the ranks.
        match found {
            Some(Self { ranks, .. }) if !(1..=RANKS_MAX).contains(&ranks) => {
                let why = format!("it has {ranks} ranks, and a store has 1 to {RANKS_MAX}");
                Err(StoreDirError::damaged(&dir.join(NAME), &why))
            }
            found => Ok(found),
        }
    }
}

/// The directory of a store in several processes.
#[derive(Debug)]
pub struct Ranks {
    dir: PathBuf,
    manifest: Manifest,
}

impl Ranks {
    /// Makes the missing parts: none if the store exists. Waits while another process makes it.
    ///
    /// # Errors
    /// Returns a [`StoreDirError`] if the existing store has other ranks, another shape or another
    /// size, or the directory has foreign files; [`StackError::NotEmpty`] if a drive has data that
    /// may not be lost; [`StackError::Config`] if the drives cannot be divided, or are not the
    /// store's; or an error of [`StoreDir::create`], [`Store::format`] or [`Devices::attach`].
    /// Files made until then are removed; drives formatted until then are recognised the next time.
    pub fn prepare(
        dir: &Path,
        options: &RanksOptions,
        clock: &Arc<dyn Clock>,
    ) -> Result<Self, StackError> {
        let dir = &*expand_home(dir);
        store_dir::private().recursive(true).create(dir).map_err(|error| {
            let hint = "name a directory that you may write to";
            store_dir::os(dir, "making the directory", hint, error)
        })?;
        store_dir::warn_of_others(dir);
        let found = Manifest::read(dir)?;
        let found = match found.filter(|found| found.state == State::Ready) {
            Some(found) => found,
            None => Self::make(dir, options, clock)?,
        };
        if (found.ranks, found.shape) != (options.ranks, options.shape) {
            let why = format!(
                "in {} holds a store for {} ranks and {:?}, and {} ranks and {:?} were asked for; \
                 name another directory, or remove this one",
                dir.display(),
                found.ranks,
                found.shape,
                options.ranks,
                options.shape
            );
            return Err(StoreDirError::options(&why).into());
        }
        let mut found = Self { dir: dir.to_owned(), manifest: found };
        found.find_drives(&options.media)?;
        found.check_size(&options.media)?;
        Ok(found)
    }

    /// Refuses another size than that of the store.
    fn check_size(&self, media: &RankMedia) -> Result<(), StackError> {
        let Manifest { ranks, drive_bytes, .. } = self.manifest;
        match (media, drive_bytes) {
            (RankMedia::Files { bytes, count, .. }, _) => {
                let media = StoreDirMedia::Files { count: *count, bytes: bytes / u64::from(ranks) };
                Ok(store_dir::check_files(&self.dir, ranks, &self.rank_dir(0), &media)?)
            }
            (RankMedia::Drives { bytes, .. }, Some(found)) if found != bytes.unwrap_or(0) => {
                let said = |bytes| match bytes {
                    0 => "all that fits".to_owned(),
                    bytes => format!("{bytes} bytes"),
                };
                let (found, asked) = (said(found), said(bytes.unwrap_or(0)));
                let problem = format!(
                    "{asked} of the drives were asked for, and the store in {} was made with \
                     {found}; a store keeps its size: ask for that, or remove the directory, and \
                     make another one with overwrite \"store\"",
                    self.dir.display()
                );
                Err(StackError::Config { field: "capacity", problem })
            }
            _ => Ok(()),
        }
    }

    /// Records the current addresses of the drives.
    fn find_drives(&mut self, media: &RankMedia) -> Result<(), StackError> {
        let asked: &[DriveAddress] = match media {
            RankMedia::Files { .. } => &[],
            RankMedia::Drives { addresses, .. } => addresses,
        };
        let drives = &mut self.manifest.drives;
        if drives.len() != asked.len() {
            let on = |count| match count {
                0 => "in files".to_owned(),
                count => format!("on {count} drives"),
            };
            let (found, asked) = (on(drives.len()), on(asked.len()));
            let problem = format!(
                "the store in {} is {found}, and {asked} was asked for; name what it was made \
                 with, or another directory",
                self.dir.display()
            );
            return Err(StackError::Config { field: "devices", problem });
        }
        if drives.iter().map(|drive| &drive.address).eq(asked) {
            return Ok(());
        }
        // They may have moved: serial numbers are compared when they are opened.
        drives.iter_mut().zip(asked).for_each(|(drive, now)| drive.address = now.clone());
        Ok(store_dir::write_json(&self.dir, NAME, &self.manifest)?)
    }

    /// Opens an existing store.
    ///
    /// # Errors
    /// Returns a [`StoreDirError`] if there is none, or one that is incomplete or damaged.
    pub fn open(dir: &Path) -> Result<Self, StackError> {
        let dir = &*expand_home(dir);
        let found = Manifest::read(dir)?;
        let dir = dir.to_owned();
        match found {
            None => Err(StoreDirError::missing(&dir, "").into()),
            Some(found) if found.state == State::Making => {
                Err(StoreDirError::half_made(&dir).into())
            }
            Some(manifest) => {
                store_dir::warn_of_others(&dir);
                Ok(Self { dir, manifest })
            }
        }
    }

    /// Returns the identity with which the worker of `rank` opens its plane.
    #[must_use]
    pub fn rank(&self, rank: u32) -> RankId {
        let Manifest { id, ranks, files, .. } = self.manifest;
        RankId { store: StoreId(id), rank, ranks, files }
    }

    /// Returns the shape of a KV block on each rank.
    #[must_use]
    pub fn shape(&self) -> KvShape {
        self.manifest.shape
    }

    /// Returns the directory of the catalog.
    #[must_use]
    pub fn catalog_dir(&self) -> PathBuf {
        self.dir.join("catalog")
    }

    /// Opens the devices of a rank, for its process only.
    ///
    /// # Errors
    /// Same as [`StoreDir::open`].
    pub fn devices(&self, rank: u32) -> Result<Devices, StackError> {
        let Manifest { drives, ranks, .. } = &self.manifest;
        if drives.is_empty() {
            return Ok(StoreDir::open(&self.rank_dir(rank))?.into());
        }
        let each = drives.len() / *ranks as usize;
        let own: Vec<Drive> =
            drives.iter().skip(rank as usize * each).take(each).cloned().collect();
        Ok(own.into())
    }

    /// Opens the devices of a rank to read them, beside its process.
    ///
    /// # Errors
    /// Returns [`StackError::Config`] if they are drives, or an error of [`StoreDir::open_beside`].
    pub fn devices_beside(&self, rank: u32) -> Result<Devices, StackError> {
        if !self.manifest.drives.is_empty() {
            let problem = "a drive belongs to one process, and others cannot read what it has: \
                           give each rank drives of its own, or use a server";
            return Err(StackError::config("devices", problem));
        }
        Ok(StoreDir::open_beside(&self.rank_dir(rank))?.into())
    }

    /// Returns the directory of a rank's data.
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
        let is_locked = |lock: &Result<Lock, _>| matches!(lock, Err(StoreDirError::Locked { .. }));
        wait_until(&**clock, clock.now() + MAKE_TIMEOUT, || {
            if is_locked(&lock) {
                lock = Lock::take(dir);
            }
            !is_locked(&lock)
        });
        let _lock = lock?;
        let mut id = options.id.0;
        match Manifest::read(dir)? {
            Some(found) if found.state == State::Ready => return Ok(found),
            Some(found) => {
                tracing::warn!(dir = %dir.display(), "removing a store that was not completed");
                if let RankMedia::Drives { .. } = options.media {
                    // Drives that were formatted for it are recognised by this id.
                    id = found.id;
                }
                Self { dir: dir.to_owned(), manifest: found }.remove_parts()?;
            }
            None => store_dir::check_empty(dir, |name| name == "store.json.new")?,
        }
        let RanksOptions { ranks, shape, .. } = *options;
        let manifest = Manifest {
            ripieno_ranks: VERSION,
            state: State::Making,
            id,
            ranks,
            files: 0,
            shape,
            drives: Vec::new(),
            drive_bytes: match options.media {
                RankMedia::Files { .. } => None,
                RankMedia::Drives { bytes, .. } => Some(bytes.unwrap_or(0)),
            },
        };
        store_dir::write_json(dir, NAME, &manifest)?;
        let mut made = Self { dir: dir.to_owned(), manifest };
        if let Err(error) = made.make_parts(options, clock) {
            // Reports the first failure; files that cannot be removed are recognised later.
            let _ = made.remove_parts();
            if let RankMedia::Files { .. } = options.media {
                let _ = made.forget();
            }
            return Err(error);
        }
        made.manifest.state = State::Ready;
        store_dir::write_json(dir, NAME, &made.manifest)?;
        Ok(made.manifest)
    }

    fn make_parts(
        &mut self,
        options: &RanksOptions,
        clock: &Arc<dyn Clock>,
    ) -> Result<(), StackError> {
        let RanksOptions { ranks, shape, codec, ref media, .. } = *options;
        if !(1..=RANKS_MAX).contains(&ranks) {
            let why = format!("has 1 to {RANKS_MAX} ranks, and not {ranks}");
            return Err(StoreDirError::options(&why).into());
        }
        let id = StoreId(self.manifest.id);
        let format = |part| Format { part, codec, ..Format::new(id, shape) };
        let mut files = u32::MAX;
        let lba_bytes = match media {
            RankMedia::Files { bytes, count, lba_bytes } => {
                let media = StoreDirMedia::Files { count: *count, bytes: bytes / u64::from(ranks) };
                for rank in 0..ranks {
                    let format = format(Part::Rank { rank, ranks });
                    let dir = self.rank_dir(rank);
                    let options = dir_options(id, rank + 1, media.clone(), *lba_bytes);
                    let made = StoreDir::create(&dir, &options)?;
                    files = files.min(make(made.into(), &format, clock)?.0);
                }
                *lba_bytes
            }
            RankMedia::Drives { addresses, bytes, overwrite } => {
                let each = shares(addresses, ranks)?;
                for (rank, share) in (0..ranks).zip(addresses.chunks(each)) {
                    let capacity_bytes = bytes.map(|bytes| bytes / u64::from(ranks));
                    let overwrite = *overwrite;
                    let part = format(Part::Rank { rank, ranks });
                    let format = Format { capacity_bytes, overwrite, ..part };
                    let (found, identities) = make(Devices::drives(share), &format, clock)?;
                    files = files.min(found);
                    let drives = share.iter().cloned().zip(identities);
                    let drive = |(address, id)| Drive { address, identity: Some(id) };
                    self.manifest.drives.extend(drives.map(drive));
                }
                CATALOG_LBA_BYTES
            }
        };
        let format = format(Part::Catalog { ranks, files });
        let bytes = Store::device_bytes(&format, 1, lba_bytes)? + CATALOG_SPARE;
        let options = dir_options(id, 0, StoreDirMedia::Files { count: 1, bytes }, lba_bytes);
        make(StoreDir::create(&self.catalog_dir(), &options)?.into(), &format, clock)?;
        self.manifest.files = files;
        Ok(())
    }

    /// Removes the directories of a store that is not ready.
    fn remove_parts(&self) -> Result<(), StoreDirError> {
        let ranks = (0..self.manifest.ranks).map(|rank| self.rank_dir(rank));
        for part in ranks.chain([self.catalog_dir()]) {
            store_dir::removed(&part, fs::remove_dir_all(&part))?;
        }
        store_dir::sync_directory(&self.dir)
    }

    /// Removes the manifest of a store that is not ready.
    fn forget(&self) -> Result<(), StoreDirError> {
        let path = self.dir.join(NAME);
        store_dir::removed(&path, fs::remove_file(&path))?;
        store_dir::sync_directory(&self.dir)
    }
}

/// Returns the number of drives of each rank.
fn shares(addresses: &[DriveAddress], ranks: u32) -> Result<usize, StackError> {
    let (count, all) = (addresses.len(), ranks as usize);
    let wrong = |problem| Err(StackError::Config { field: "devices", problem });
    if count == 0 || !count.is_multiple_of(all) {
        return wrong(format!(
            "{count} drives cannot be divided among {ranks} ranks; name a multiple of {ranks}"
        ));
    }
    let again = addresses.iter().enumerate().find(|(at, drive)| addresses[..*at].contains(drive));
    match again {
        Some((_, drive)) => wrong(format!("{drive} is named twice; name each drive once")),
        None => Ok(count / all),
    }
}

fn dir_options(id: StoreId, number: u32, media: StoreDirMedia, lba_bytes: u32) -> StoreDirOptions {
    let [a, b, c, d, e, f, g, h, ..] = id.0;
    let id = u64::from_le_bytes([a, b, c, d, e, f, g, h]).wrapping_add(number.into());
    StoreDirOptions { id, media, lba_bytes }
}

/// Formats devices, and releases them. Returns their number of files and their identities.
fn make(
    devices: Devices,
    format: &Format,
    clock: &Arc<dyn Clock>,
) -> Result<(u32, Vec<DriveIdentity>), StackError> {
    let mut devices = devices.clocked(clock.clone());
    devices.attach(&ControllerOptions::default(), None)?;
    let attached = devices.attached();
    let files = Store::plan(attached, format).map_err(StackError::of_format)?[0].layout.files;
    devices.format(attached, format)?;
    devices.set_ready()?;
    let identity = |it: &StoreDevice| drives::identity(&it.controller.lock());
    let identities = devices.attached().iter().map(identity).collect();
    devices.shut_down()?;
    Ok((files, identities))
}

/// The catalog with its devices, in the process of an engine's scheduler. Dropping it closes it,
/// and logs a failure; in a process that was forked, that leaves the catalog alone.
#[derive(Debug)]
pub struct CatalogStack {
    catalog: DurableCatalog,
    /// `None` once it was closed.
    below: Option<Devices>,
    process: Process,
}

impl CatalogStack {
    /// Opens the catalog of a store in several processes.
    ///
    /// # Errors
    /// Same as [`StoreDir::open`] and [`open_catalog`].
    pub fn open(
        ranks: &Ranks,
        options: &StoreOptions,
        clock: &Arc<dyn Clock>,
    ) -> Result<Self, StackError> {
        let dir = StoreDir::open(&ranks.catalog_dir())?;
        let mut devices = Devices::from(dir).clocked(clock.clone());
        devices.attach(&ControllerOptions::default(), None)?;
        let catalog = open_catalog(&devices.attached()[0], options, |_, _| {})?;
        Ok(Self { catalog, below: Some(devices), process: Process::current() })
    }

    /// Returns the catalog.
    #[must_use]
    pub fn catalog(&self) -> &DurableCatalog {
        &self.catalog
    }

    /// Makes everything durable, and releases the store directory.
    ///
    /// # Errors
    /// Returns [`StackError::Failed`], [`StackError::Forked`], or an error of
    /// [`DurableCatalog::close`].
    pub fn close(mut self) -> Result<(), StackError> {
        self.shut()
    }

    fn shut(&mut self) -> Result<(), StackError> {
        let Some(below) = self.below.take() else { return Ok(()) };
        if let Err(error) = self.process.check() {
            std::mem::forget(below);
            return Err(error);
        }
        let closed = self.catalog.close().map_err(StoreError::from);
        let shut_down = below.shut_down();
        closed?;
        shut_down
    }
}

impl Drop for CatalogStack {
    fn drop(&mut self) {
        match self.shut() {
            Ok(()) | Err(StackError::Forked { .. }) => {}
            Err(error) => tracing::error!(%error, "closing a catalog that was dropped"),
        }
    }
}
