//! Formatting, opening and closing a store.

use std::sync::{Arc, Mutex};

use kv_catalog::{
    BlockIo, Catalog, DeviceIdentity, DurableCatalog, DurableConfig, Expected, Fenced, FormatError,
    Member, OnDevice, Owner, Plan, Region, SCRATCH, Seal, Superblock, Time, check_set,
};
use nvme_driver::{Clock, Controller};
use nvme_spec::ids::{Lba, Nsid};

use super::{
    Inner, Jobs, Store,
    block_device::{BlockDevice, Unwritten},
    deallocation::Drive,
    lock,
    owner::{Ownership, living, settle},
};
use crate::{
    config::{Format, OWNER_TIMEOUT, Overwrite, Part, StoreConfig, StoreDevice, StoreOptions},
    device::{Below, SharedController},
    error::StoreError,
    ids::PoolId,
    plane::{Plane, PlaneDevice},
    registration::KvPool,
};

/// The parts of a closed store. Fields are dropped in this order.
#[derive(Debug)]
pub struct Closed {
    /// The controllers, in the order of the configuration.
    pub controllers: Vec<Controller>,
    /// The engine's pool, still registered.
    pub pool: KvPool,
    /// Resources of the controllers.
    _below: Vec<Below>,
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
    /// Name of the NVM subsystem; may be empty.
    subsystem: String,
    /// Set if other controllers may reach the namespace.
    pub(super) is_shared: bool,
}

impl Place {
    pub(super) fn new(device: &StoreDevice) -> Result<Self, StoreError> {
        let controller = device.controller.lock();
        let wrong = |problem| StoreError::Config { field: "devices", problem };
        let first = || controller.namespaces().first().map(|space| space.nsid);
        let nsid = device.nsid.or_else(first).ok_or_else(|| wrong(no_namespace(&controller)))?;
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
        let (subsystem, is_shared) =
            (info.subsystem.clone(), info.may_have_peers && space.may_be_shared);
        let controller = device.controller.clone();
        Ok(Self { controller, nsid, region, identity, subsystem, is_shared })
    }

    /// Returns true if both have LBAs in common. Identifiers that are not of the subsystem count
    /// only if it can have other controllers: those of some drives are the same for all of a kind.
    fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (&self.identity, &other.identity);
        let is_subsystem = (&a.model, &a.serial) == (&b.model, &b.serial)
            || (!self.subsystem.is_empty() && self.subsystem == other.subsystem);
        let is_same = match is_subsystem {
            true => a.nsid == b.nsid,
            false => self.is_shared && other.is_shared && a.is_same(b),
        };
        let end = |region: &Region| region.first.0.saturating_add(region.lbas);
        is_same
            && self.region.first.0 < end(&other.region)
            && other.region.first.0 < end(&self.region)
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

    /// Returns the devices that other controllers may reach.
    fn shared(places: &[Self]) -> Vec<BlockDevice> {
        places.iter().filter(|place| place.is_shared).map(Self::medium).collect()
    }

    /// Returns an owner of the devices that is alive, and its device.
    fn living(places: &[Self]) -> Result<Option<(String, Owner)>, StoreError> {
        let Some(first) = places.first() else { return Ok(None) };
        let clock = first.controller.lock().clock().clone();
        let mut shared = Self::shared(places);
        let found = living(&mut shared, &Owner::default(), OWNER_TIMEOUT, &*clock);
        Ok(found.map_err(FormatError::from)?)
    }

    /// Claims the devices that other controllers may reach.
    pub(super) fn claim(
        places: &[Self],
        options: &StoreOptions,
        clock: &Arc<dyn Clock>,
    ) -> Result<Option<Ownership>, StoreError> {
        let StoreOptions { owner, owner_timeout, virtual_time, .. } = options;
        if options.read_only {
            return Ok(None);
        }
        Ownership::take(Self::shared(places), owner, *owner_timeout, clock, *virtual_time)
    }

    fn scratch(&self) -> Region {
        let shift = self.region.lba_shift;
        let first = Lba(self.region.first.0 + (SCRATCH.start >> shift));
        Region { first, lbas: (SCRATCH.end - SCRATCH.start) >> shift, lba_shift: shift }
    }
}

/// The devices of a store or of a rank of one, which this process has claimed.
pub(super) struct Claimed {
    places: Vec<Place>,
    pub(super) superblocks: Vec<Superblock>,
    owner: Option<Ownership>,
}

impl Claimed {
    /// Claims the devices, and checks that they hold the data of a store.
    pub(super) fn take(config: &StoreConfig, expected: &Expected) -> Result<Self, StoreError> {
        let places = Place::all(&config.devices)?;
        // Before the claims: nothing is written to a device without a store.
        read_superblocks(&places, expected)?;
        let owner = Place::claim(&places, &config.options, &config.clock)?;
        let superblocks = read_superblocks(&places, expected)?;
        if superblocks[0].geometry().is_none() {
            let problem = "they carry a catalog without data; give those that hold the data";
            return Err(StoreError::Config { field: "devices", problem: problem.to_owned() });
        }
        Ok(Self { places, superblocks, owner })
    }

    /// Opens their plane.
    pub(super) fn plane(self, mut config: StoreConfig) -> Result<Plane, StoreError> {
        let Self { places, superblocks, owner } = self;
        let given = std::mem::take(&mut config.devices);
        // The scratch region is written to by a plane beside this one.
        let read_only = config.options.read_only;
        let device = |((place, superblock), given): ((Place, _), StoreDevice)| PlaneDevice {
            scratch: if read_only { place.region } else { place.scratch() },
            controller: place.controller,
            nsid: place.nsid,
            data: data(superblock),
            queue_memory: given.queue_memory,
        };
        let devices = places.into_iter().zip(&superblocks).zip(given).map(device).collect();
        let self_test = config.options.self_test;
        let plane = Plane::open(config, devices, &superblocks[0], owner)?;
        if self_test {
            plane.self_test(None)?;
        }
        Ok(plane)
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
        check_distinct(&places)?;
        if let Some((device, owner)) = Place::living(&places)? {
            return Err(StoreError::Owned { device, owner });
        }
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

    /// Returns the process that has one of the devices open through another controller, and the
    /// device. Waits a few seconds if one that was not closed may be alive. Writes nothing.
    ///
    /// # Errors
    /// Returns [`StoreError::Format`] if a device fails, and the errors of [`Store::media`].
    pub fn living_owner(devices: &[StoreDevice]) -> Result<Option<(String, Owner)>, StoreError> {
        Place::living(&Place::all(devices)?)
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
    /// [`Plane::self_test`]; [`StoreError::Route`] if a device does not reach the pool, the I/O
    /// kernel does not reach a device, or the GPU does not move objects to a staged pool;
    /// [`StoreError::Config`] if the configuration is inconsistent; [`StoreError::Driver`],
    /// [`StoreError::Ring`] or [`StoreError::Executor`] if a lower layer fails.
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
        let (shape, codec) = (Some(config.shape), config.options.codec);
        let expected = Expected { shape, codec, ..Expected::default() };
        let claimed = Claimed::take(&config, &expected)?;
        let Claimed { places, superblocks, .. } = &claimed;
        let catalog = durable(&places[0], &superblocks[0], &config.options, progress)?;
        let drives = drives(places, superblocks, &config.options);
        let geometry = superblocks[0].geometry().expect("the devices hold data");
        if !drives.is_empty() {
            catalog.with(|catalog| catalog.watch_groups(geometry.group));
        }
        let (clock, namespace) = (config.clock.clone(), config.namespace.clone());
        let plane = claimed.plane(config)?;
        plane.with(|plane| {
            plane.share(catalog.seal());
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
                queued: Mutex::default(),
                committed: Mutex::default(),
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
        // A failure does not keep the rest from being closed.
        let drained = self.inner.plane.drain();
        let written = self.sync_journal();
        let noted = self.inner.catalog.close();
        lock(&self.inner.drives).clear();
        let why = "it was closed";
        let closed = self.inner.plane.close(why);
        lock(&self.inner.jobs).failed.get_or_insert_with(|| why.to_owned());
        let failed = || StoreError::Failed { cause: why.to_owned() };
        drained?;
        let closed = closed?.ok_or_else(failed)?;
        written.and(noted.map_err(StoreError::from))?;
        let unshared =
            closed.controllers.into_iter().map(unshare).collect::<Result<Vec<_>, _>>()?;
        let (controllers, below): (_, Vec<_>) = unshared.into_iter().unzip();
        let below = below.into_iter().flatten().collect();
        Ok(Closed { controllers, pool: closed.pool, _below: below })
    }
}

impl StoreDevice {
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

fn unshare(shared: SharedController) -> Result<(Controller, Option<Below>), StoreError> {
    shared.into_inner().ok_or_else(|| StoreError::Failed {
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
        codec: format.codec,
        catalog: !matches!(format.part, Part::Rank { .. }),
        data: !matches!(format.part, Part::Catalog { .. }),
        checksums: format.checksums,
        namespaces_max: format.namespaces_max,
        files_max,
        capacity_bytes: format.capacity_bytes,
        group: format.group,
    }
}

/// Refuses devices that are the same one under two addresses: one of a superblock's devices would
/// be written over the other.
fn check_distinct(places: &[Place]) -> Result<(), StoreError> {
    for (at, place) in places.iter().enumerate() {
        if let Some(other) = places[..at].iter().find(|other| other.overlaps(place)) {
            let [a, b] = [other, place].map(|place| place.controller.lock().id().to_owned());
            let identity = &place.identity;
            let problem = format!("{a} and {b} are the same namespace ({identity}): give it once");
            return Err(StoreError::Config { field: "devices", problem });
        }
    }
    Ok(())
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
    let medium = place.sealed(seal.clone());
    let config = DurableConfig {
        policy: options.policy,
        write_budget: options.write_budget,
        // The low bits of nanoseconds.
        chance: clock.now().0,
        time: Time(Box::new(move || clock.now().0)),
        seal,
    };
    let io: Box<dyn BlockIo> = match place.is_shared {
        _ if options.read_only => Box::new(Unwritten::new(medium)),
        true => {
            let (clock, owner) = (place.controller.lock().clock().clone(), options.owner.clone());
            let time = Time(Box::new(move || clock.now().0));
            Box::new(Fenced::new(medium, owner, time, settle(options.owner_timeout).0))
        }
        false => Box::new(medium),
    };
    Ok(DurableCatalog::open(io, superblock.clone(), config, progress)?)
}
