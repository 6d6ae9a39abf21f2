//! Formatting, opening and closing a store.

use std::sync::{Arc, Mutex};

use kv_catalog::{
    Catalog, DeviceIdentity, DurableCatalog, DurableConfig, Expected, FormatError, Member,
    OnDevice, Plan, PlantedBug, Region, SCRATCH, Seal, Superblock, Time, check_set, planted,
};
use nvme_driver::Controller;
use nvme_spec::ids::{Lba, Nsid};

use super::{
    Inner, Jobs, Store, block_device::BlockDevice, deallocation::Drive, lock,
};
use crate::{
    config::{Format, Overwrite, Part, StoreConfig, StoreDevice, StoreOptions},
    device::SharedController,
    error::StoreError,
    ids::PoolId,
    plane::{Plane, PlaneConfig, PlaneDevice},
    registration::KvPool,
};

/// The parts of a closed store.
#[derive(Debug)]
pub struct Closed {
    /// The controllers, in the order of the configuration.
    pub controllers: Vec<Controller>,
    /// The engine's pool, still registered.
    pub pool: KvPool,
}

/// A device's region, for access to superblock and journal while no store is open on it.
pub struct Medium {
    /// Reads and writes the region, by byte offsets from its start.
    pub io: Box<dyn kv_catalog::BlockIo>,
    /// Identity of the device.
    pub identity: DeviceIdentity,
    /// The part of the namespace.
    pub region: Region,
}

impl std::fmt::Debug for Medium {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Medium").field("device", &self.io.name()).finish_non_exhaustive()
    }
}

/// A device, and the part of it that belongs to the store.
pub(super) struct Place {
    pub(super) controller: SharedController,
    pub(super) nsid: Nsid,
    region: Region,
    identity: DeviceIdentity,
}

impl Place {
    pub(super) fn new(device: &StoreDevice) -> Result<Self, StoreError> {
        let controller = device.controller.lock();
        let wrong = |problem| StoreError::Config { field: "devices", problem };
        let first = || controller.namespaces().first().map(|space| space.nsid);
        let nsid = device
            .nsid
            .or_else(first)
            .ok_or_else(|| wrong(no_namespace(&controller)))?;
        let space = controller.namespace(nsid).map_err(|error| wrong(error.to_string()))?;
        let (first, lbas) = device.region.unwrap_or((Lba(0), space.lbas));
        if first.0.checked_add(lbas).is_none_or(|end| end > space.lbas) {
            return Err(wrong(format!(
                "{lbas} LBAs from LBA {first} on were given to the store, but namespace {nsid} of \
                 {} has {} LBAs",
                controller.id(),
                space.lbas
            )));
        }
        let info = controller.info();
        let identity = DeviceIdentity {
            model: padded(&info.model),
            serial: padded(&info.serial),
            nsid: nsid.0,
            nguid: space.nguid,
            eui64: space.eui64,
            lba_bytes: 1 << space.lba_shift,
            namespace_lbas: space.lbas,
        };
        let region = Region { first, lbas, lba_shift: space.lba_shift };
        let controller = device.controller.clone();
        Ok(Self { controller, nsid, region, identity })
    }

    pub(super) fn all(devices: &[StoreDevice]) -> Result<Vec<Self>, StoreError> {
        if devices.is_empty() {
            let problem = "a store needs at least one device".to_owned();
            return Err(StoreError::Config { field: "devices", problem });
        }
        devices.iter().map(Self::new).collect()
    }

    /// Returns the region as a medium that nothing else flushes.
    fn medium(&self) -> BlockDevice {
        self.sealed(Seal::default())
    }

    /// Returns the region as a medium.
    fn sealed(&self, seal: Seal) -> BlockDevice {
        BlockDevice::new(self.controller.clone(), self.nsid, self.region, seal)
    }

    fn scratch(&self) -> Region {
        let shift = self.region.lba_shift;
        let first = Lba(self.region.first.0 + (SCRATCH.start >> shift));
        Region { first, lbas: (SCRATCH.end - SCRATCH.start) >> shift, lba_shift: shift }
    }
}

fn no_namespace(controller: &Controller) -> String {
    let refused = controller.refused_namespaces().iter();
    let why: String = refused.map(|(nsid, why)| format!("; namespace {nsid}: {why}")).collect();
    format!("{} has no usable namespace{why}", controller.id())
}

/// Returns an identify string, padded as on the wire.
fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [b' '; N];
    let len = text.len().min(N);
    bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
    bytes
}

impl Store {
    /// Formats the devices as a store: superblocks, journal, and room for files.
    ///
    /// # Errors
    /// Returns [`StoreError::Format`] if a device holds data that may not be overwritten (nothing
    /// was written then), is too small, or fails.
    pub fn format(devices: &[StoreDevice], format: &Format) -> Result<(), StoreError> {
        let mut superblocks = Self::plan(devices, format)?;
        let places = Place::all(devices)?;
        let mut media: Vec<BlockDevice> = places.iter().map(Place::medium).collect();
        let mut media: Vec<&mut dyn kv_catalog::BlockIo> =
            media.iter_mut().map(|medium| medium as &mut dyn kv_catalog::BlockIo).collect();
        kv_catalog::format_devices(&mut media, &mut superblocks)?;
        Ok(())
    }

    /// Returns the superblocks that [`Store::format`] would write. Writes nothing.
    ///
    /// # Errors
    /// Same as [`Store::format`].
    pub fn plan(devices: &[StoreDevice], format: &Format) -> Result<Vec<Superblock>, StoreError> {
        let places = Place::all(devices)?;
        for place in &places {
            check_overwrite(&mut place.medium(), format.overwrite)?;
        }
        let regions: Vec<(DeviceIdentity, Region)> =
            places.iter().map(|place| (place.identity.clone(), place.region)).collect();
        Ok(plan(format, &regions).superblocks()?)
    }

    /// Returns the devices' regions without opening the store, for tools that inspect them.
    ///
    /// # Errors
    /// Returns [`StoreError::Config`] if a device lacks the namespace or region.
    pub fn media(devices: &[StoreDevice]) -> Result<Vec<Medium>, StoreError> {
        let medium = |place: Place| Medium {
            io: Box::new(place.medium()),
            identity: place.identity,
            region: place.region,
        };
        Ok(Place::all(devices)?.into_iter().map(medium).collect())
    }

    /// Returns the minimum bytes of each of `devices` devices with LBAs of `lba_bytes` for this
    /// format, for creating software controllers. [`Format::capacity_bytes`] must be set, unless
    /// it is a catalog.
    ///
    /// # Errors
    /// Returns [`StoreError::Format`] if no size fits.
    pub fn device_bytes(format: &Format, devices: u32, lba_bytes: u32) -> Result<u64, StoreError> {
        let lba_shift = lba_bytes.trailing_zeros() as u8;
        let region = Region { first: Lba(0), lbas: u64::MAX >> (lba_shift + 1), lba_shift };
        let identity = DeviceIdentity {
            model: [b' '; 40],
            serial: [b' '; 20],
            nsid: 1,
            nguid: [0; 16],
            eui64: [0; 8],
            lba_bytes,
            namespace_lbas: region.lbas,
        };
        let regions = vec![(identity, region); devices as usize];
        let superblocks = plan(format, &regions).superblocks()?;
        let Superblock { journal, data, .. } = &superblocks[0];
        let journal = journal.map_or(0, |journal| journal.offset + 2 * journal.half_bytes);
        Ok(data.map_or(journal, |data| data.offset + data.bytes))
    }

    /// Formats the devices, then opens the store.
    ///
    /// # Errors
    /// Same as [`Store::format`] and [`Store::open`].
    pub fn create(config: StoreConfig, format: &Format) -> Result<Self, StoreError> {
        Self::format(&config.devices, format)?;
        Self::open(config)
    }

    /// Opens the store on these devices: checks that they are the ones it was formatted on, reads
    /// the journal, proves that data gets to the pool and back on the path that it is registered
    /// for, and starts the I/O kernel.
    ///
    /// The pool's memory may not be used meanwhile: proof and self-test write to it, and restore
    /// its contents.
    ///
    /// # Errors
    /// Returns [`StoreError::Format`], which names the device that is missing, foreign, in another
    /// place or changed; [`StoreError::Journal`] if the journal is damaged; and the errors of
    /// [`Plane::open`] and [`Plane::self_test`].
    pub fn open(config: StoreConfig) -> Result<Self, StoreError> {
        Self::open_with(config, |_, _| {})
    }

    /// Same as [`Store::open`]. Calls `progress` with the bytes of the journal read so far, and
    /// their maximum: a store of millions of files takes seconds to open.
    ///
    /// # Errors
    /// Same as [`Store::open`].
    pub fn open_with(
        config: StoreConfig,
        progress: impl FnMut(u64, u64),
    ) -> Result<Self, StoreError> {
        let StoreConfig { devices, clock, executor, shape, namespace, pool, gpu, options } = config;
        let places = Place::all(&devices)?;
        let expected = Expected { shape: Some(shape), ..Expected::default() };
        let superblocks = read_superblocks(&places, &expected)?;
        let superblock = &superblocks[0];
        let no_data = || StoreError::Config {
            field: "devices",
            problem: "they carry a catalog without data; give those that hold the data".to_owned(),
        };
        let geometry = superblock.geometry().ok_or_else(no_data)?;
        let catalog = durable(&places[0], superblock, &options, progress)?;
        let drives = drives(&places, &superblocks, &options);
        if !drives.is_empty() {
            catalog.with(|catalog| catalog.watch_groups(geometry.group()));
        }
        let plane_devices = plane_devices(&places, &superblocks, devices);
        let self_test = options.self_test;
        let plane = Plane::open(PlaneConfig {
            devices: plane_devices,
            clock: clock.clone(),
            executor,
            shape,
            geometry,
            // One more than the catalog's: for the self-test.
            files: superblock.layout.files + 1,
            checksums: superblock.layout.words_per_file > 0,
            pool,
            gpu,
            options,
        })?;
        plane.with(|plane| {
            if !planted(PlantedBug::SealsApart) {
                plane.share(catalog.seal());
            }
            if plane.keeps_blocks() {
                // The plane tracks blocks from now on; freed files until here do not matter.
                catalog.with(Catalog::take_freed);
            }
            Ok(())
        })?;
        let namespace = catalog.with(|catalog| {
            let id = catalog.namespace(&namespace)?;
            catalog.keep(id)
        })?;
        let store = Self {
            inner: Arc::new(Inner {
                catalog,
                geometry,
                clock,
                drives: Mutex::new(drives),
                plane,
                jobs: Mutex::new(Jobs::default()),
            }),
            namespace,
            pool: PoolId::default(),
            is_cached: true,
        };
        let inner = Arc::downgrade(&store.inner);
        store.inner.plane.listen(move |plane| {
            if let Some(inner) = inner.upgrade() {
                inner.apply_reports(plane);
            }
        });
        if self_test {
            store.plane().self_test(None)?;
        }
        Ok(store)
    }

    /// Waits for everything in flight, makes everything permanent, stops the I/O kernel, takes the
    /// queues back and returns the controllers and the pool, which is still registered
    /// ([`KvPool::unregister`]). No stream uses memory of the store any more. Calls on other
    /// handles of the store fail from then on.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] if the kernel did not stop, a controller did not delete a
    /// queue, or a stream did not get past its operations for the store in time; memory is leaked
    /// then. Returns [`StoreError::JournalFailed`] if the journal could not be written: the store
    /// is closed all the same.
    pub fn close(self) -> Result<Closed, StoreError> {
        self.inner.plane.drain()?;
        let written = self.sync_journal();
        let noted = self.inner.catalog.close();
        lock(&self.inner.drives).clear();
        let why = "it was closed";
        let closed = self.inner.plane.close(why);
        self.inner.jobs().failed.get_or_insert_with(|| why.to_owned());
        let failed = || StoreError::Failed { cause: why.to_owned() };
        let closed = closed?.ok_or_else(failed)?;
        written.and(noted.map_err(StoreError::from))?;
        let controllers = closed.controllers.into_iter().map(unshare).collect::<Result<_, _>>()?;
        Ok(Closed { controllers, pool: closed.pool })
    }
}

impl StoreDevice {
    /// Returns the controller.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] if something else still shares it.
    pub fn into_controller(self) -> Result<Controller, StoreError> {
        unshare(self.controller)
    }

    /// Returns the device with its whole region as data, for a [`crate::RawRing`].
    ///
    /// # Errors
    /// Returns [`StoreError::Config`] if the controller has no such namespace or region.
    pub fn raw(self) -> Result<PlaneDevice, StoreError> {
        let Place { controller, nsid, region, .. } = Place::new(&self)?;
        let (data, scratch, queue_memory) = (region, region, self.queue_memory);
        Ok(PlaneDevice { controller, nsid, data, scratch, queue_memory })
    }
}

fn unshare(controller: SharedController) -> Result<Controller, StoreError> {
    controller.into_inner().ok_or_else(|| StoreError::Failed {
        cause: "something else still shares a controller".to_owned(),
    })
}

fn plan<'a>(format: &Format, devices: &'a [(DeviceIdentity, Region)]) -> Plan<'a> {
    let (rank, ranks, files_max) = match format.part {
        Part::Whole => (0, 1, None),
        Part::Catalog { ranks, files } => (0, ranks, Some(files)),
        Part::Rank { rank, ranks } => (rank, ranks, None),
    };
    Plan {
        store: format.store,
        rank,
        ranks,
        devices,
        shape: format.shape,
        catalog: !matches!(format.part, Part::Rank { .. }),
        data: !matches!(format.part, Part::Catalog { .. }),
        checksums: format.checksums,
        namespaces_max: format.namespaces_max,
        files_max,
        capacity_bytes: format.capacity_bytes,
        group: format.group,
    }
}

/// Refuses to overwrite data unless the caller allowed it.
fn check_overwrite(medium: &mut BlockDevice, allowed: Overwrite) -> Result<(), StoreError> {
    use kv_catalog::BlockIo as _;
    let found = Superblock::read(medium);
    let device = medium.name().to_owned();
    match (found, allowed) {
        (_, Overwrite::Anything) | (Ok(OnDevice::Blank), _) => Ok(()),
        (Ok(OnDevice::Ours(_)) | Err(FormatError::Copy { .. }), Overwrite::Store) => Ok(()),
        (Ok(OnDevice::Ours(found)), Overwrite::Nothing) => {
            Err(StoreError::Occupied { device, what: format!("store {}", found.store) })
        }
        (Ok(OnDevice::Foreign(what)), _) => {
            Err(StoreError::Occupied { device, what: what.to_owned() })
        }
        (Err(error), _) => Err(error.into()),
    }
}

/// Reads the superblocks of devices, and checks that they make up a store.
pub(super) fn read_superblocks(
    places: &[Place],
    expected: &Expected,
) -> Result<Vec<Superblock>, StoreError> {
    use kv_catalog::BlockIo as _;
    let mut members = Vec::with_capacity(places.len());
    for place in places {
        let mut medium = place.medium();
        members.push(Member {
            found: Superblock::read(&mut medium)?,
            name: medium.name().to_owned(),
            identity: place.identity.clone(),
            region: place.region,
        });
    }
    Ok(check_set(&members, expected)?)
}

/// Returns the devices that receive deallocate (TRIM) hints.
fn drives(places: &[Place], superblocks: &[Superblock], options: &StoreOptions) -> Vec<Drive> {
    if !options.deallocate {
        return Vec::new();
    }
    let drive = |(place, superblock): (&Place, _)| {
        Drive::new(&place.controller, place.nsid, data(superblock))
    };
    places.iter().zip(superblocks).filter_map(drive).collect()
}

pub(super) fn plane_devices(
    places: &[Place],
    superblocks: &[Superblock],
    devices: Vec<StoreDevice>,
) -> Vec<PlaneDevice> {
    let device = |((place, superblock), device): ((&Place, _), StoreDevice)| PlaneDevice {
        controller: place.controller.clone(),
        nsid: place.nsid,
        data: data(superblock),
        scratch: place.scratch(),
        queue_memory: device.queue_memory,
    };
    places.iter().zip(superblocks).zip(devices).map(device).collect()
}

fn data(superblock: &Superblock) -> Region {
    superblock.data_region().expect("all devices of a rank have the same areas")
}

/// Opens the catalog, restored from its journal.
pub(super) fn durable(
    place: &Place,
    superblock: &Superblock,
    options: &StoreOptions,
    progress: impl FnMut(u64, u64),
) -> Result<DurableCatalog, StoreError> {
    let (clock, seal) = (place.controller.lock().clock().clone(), Seal::default());
    let medium = Box::new(place.sealed(seal.clone()));
    let config = DurableConfig {
        policy: options.policy,
        write_budget: options.write_budget,
        // The low bits of nanoseconds.
        chance: clock.now().0,
        time: Time(Box::new(move || clock.now().0)),
        seal,
    };
    Ok(DurableCatalog::open(medium, superblock.clone(), config, progress)?)
}
