//! Devices of a store, or of one of its ranks.

use std::{
    mem,
    sync::{Arc, Mutex, PoisonError},
};

use gio_kernels::{Ends, FileExecutor, FileTarget, Reach};
use nvme_driver::{Clock, Controller, ControllerOptions, DmaSpace};
use nvme_emu::{Emu, EmuConfig, SimClock};
use objstore::{ExecutorFactory, Format, Overwrite, Store, StoreDevice};

use crate::{
    chosen::MemoryPlace,
    config::StackConfig,
    controllers::Controllers,
    drives::{self, Drive, DriveAddress, drive_name},
    emulation::{Emulation, Time},
    error::StackError,
    gpu::Gpu,
    held::{Held, clear_edges},
    store_dir::StoreDir,
};

/// Devices: where they are, and once attached, their controllers. They run in real time, unless
/// another clock is given. Fields are dropped in this order.
#[derive(Debug)]
pub struct Devices {
    attached: Option<Controllers>,
    /// Made when they are first attached.
    emulation: Option<Arc<Emulation>>,
    /// The files behind them, for the file executor. Then, too.
    files: Vec<FileTarget>,
    location: Location,
    time: Time,
}

/// Location of devices.
#[derive(Debug)]
enum Location {
    /// Files, or block devices, behind software controllers, and the largest transfer of these.
    StoreDir(StoreDir, Option<u32>),
    /// Software controllers, until they are made. Media are not `Sync`.
    Emulated(Mutex<Vec<EmuConfig>>),
    /// Drives, in the store's order: all bound to vfio-pci, or all of the kernel's driver. A drive
    /// belongs to one process at a time.
    Drives {
        drives: Vec<Drive>,
        memory: MemoryPlace,
        /// True if they are marked as scratch, and stay so when they are formatted.
        is_scratch: bool,
    },
}

impl From<StoreDir> for Devices {
    fn from(dir: StoreDir) -> Self {
        Self::at(Location::StoreDir(dir, None))
    }
}

impl From<Vec<Drive>> for Devices {
    fn from(drives: Vec<Drive>) -> Self {
        let memory = MemoryPlace::Host;
        Self::at(Location::Drives { drives, memory, is_scratch: false })
    }
}

/// Software controllers with other media than those of a store directory.
impl From<Vec<EmuConfig>> for Devices {
    fn from(configs: Vec<EmuConfig>) -> Self {
        Self::at(Location::Emulated(Mutex::new(configs)))
    }
}

/// The same over files, whose data the file executor can move.
impl From<(Vec<EmuConfig>, Vec<FileTarget>)> for Devices {
    fn from((configs, files): (Vec<EmuConfig>, Vec<FileTarget>)) -> Self {
        Self { files, ..configs.into() }
    }
}

impl Devices {
    fn at(location: Location) -> Self {
        Self { attached: None, emulation: None, files: Vec::new(), location, time: Time::default() }
    }

    /// Returns the drives at these addresses.
    #[must_use]
    pub fn drives(addresses: &[DriveAddress]) -> Self {
        let drive = |address: &DriveAddress| Drive { address: address.clone(), identity: None };
        addresses.iter().map(drive).collect::<Vec<_>>().into()
    }

    /// Finds the devices of a store that is there.
    ///
    /// # Errors
    /// Returns an error of [`StoreDir::open`], or [`StackError::Config`] if the options are those
    /// of another store.
    pub fn find(config: &StackConfig) -> Result<Self, StackError> {
        if !config.drives().is_empty() {
            return Ok(Self::drives(config.drives()));
        }
        let dir = StoreDir::open(config.dir()?)?;
        config.check_dir(&dir)?;
        Ok(dir.into())
    }

    /// Sets the clock of the devices, and of the store on them.
    #[must_use]
    pub fn clocked(mut self, clock: Arc<dyn Clock>) -> Self {
        self.time = Time::Real(clock);
        self
    }

    /// Has software controllers run in virtual time: waiting on `clock` runs them.
    #[must_use]
    pub fn simulated(mut self, clock: Arc<SimClock>) -> Self {
        self.time = Time::Simulated(clock);
        self
    }

    /// Sets the location of queues and KV pool of drives.
    #[must_use]
    pub fn memory(mut self, place: MemoryPlace) -> Self {
        if let Location::Drives { memory, .. } = &mut self.location {
            *memory = place;
        }
        self
    }

    /// Sets the largest transfer of a store directory's software controllers, in bytes.
    #[must_use]
    pub fn mdts(mut self, bytes: u32) -> Self {
        if let Location::StoreDir(_, mdts) = &mut self.location {
            *mdts = Some(bytes);
        }
        self
    }

    /// Attaches the driver to the controllers. Writes nothing.
    ///
    /// # Errors
    /// Returns [`StackError::StoreDir`], [`StackError::Drive`] if a drive is not the expected one,
    /// [`StackError::Failed`], or the error of making or opening a controller.
    pub fn attach(
        &mut self,
        options: &ControllerOptions,
        gpu: Option<&Gpu>,
    ) -> Result<(), StackError> {
        let clock = self.clock();
        let configs = match &mut self.location {
            Location::Drives { drives, memory, .. } if !is_passthrough(drives) => {
                let (drives, peer, space) = drives::open(drives, *memory, &clock, options)?;
                self.attached = Some(Controllers::of_drives(drives, peer, space));
                return Ok(());
            }
            _ if self.emulation.is_some() => Vec::new(),
            Location::Drives { drives, memory, .. } => {
                let open = |drive: &Drive| drives::open_passthrough(&drive.address, *memory);
                let opened = drives.iter().map(open).collect::<Result<Vec<_>, _>>()?;
                let configs;
                (configs, self.files) = opened.into_iter().unzip();
                configs
            }
            Location::Emulated(configs) => {
                mem::take(configs.get_mut().unwrap_or_else(PoisonError::into_inner))
            }
            Location::StoreDir(dir, mdts) => {
                let (mut configs, files) = dir.controllers()?;
                self.files = files;
                configs.iter_mut().for_each(|it| it.mdts_bytes = mdts.or(it.mdts_bytes));
                configs
            }
        };
        let emulation = match self.emulation.take() {
            Some(emulation) => emulation,
            None => Arc::new(Emulation::new(configs, self.name(), &self.time, gpu)?),
        };
        let attached = Controllers::emulated(&emulation, options);
        self.emulation = Some(emulation);
        let mut attached = attached?;
        if let Location::Drives { drives, .. } = &self.location {
            for (drive, device) in drives.iter().zip(&mut attached.devices) {
                let controller = device.controller.lock();
                drives::check_drive(&controller)?;
                drive.check(&drives::identity(&controller))?;
                drop(controller);
                drives::take_region(device);
            }
        }
        self.attached = Some(attached);
        Ok(())
    }

    /// Returns the controllers; attaches to them if that was not done.
    pub(crate) fn controllers(
        &mut self,
        options: &ControllerOptions,
        gpu: Option<&Gpu>,
    ) -> Result<&mut Controllers, StackError> {
        if self.attached.is_none() {
            self.attach(options, gpu)?;
        }
        Ok(self.attached.as_mut().expect("they were attached"))
    }

    /// Returns the attached controllers, in order.
    #[must_use]
    pub fn attached(&self) -> &[StoreDevice] {
        self.attached.as_ref().map_or(&[], |attached| &attached.devices)
    }

    /// Takes the attached controllers, in order, and their address space. Threads run those in
    /// software from now on: an I/O kernel on them waits elsewhere.
    ///
    /// # Errors
    /// Returns [`StackError::Failed`] without threads.
    ///
    /// # Panics
    /// Panics if none are attached.
    pub fn take_attached(&mut self) -> Result<(Vec<StoreDevice>, Arc<dyn DmaSpace>), StackError> {
        let taken = self.take_controllers();
        taken.run()?;
        Ok((taken.devices, taken.space))
    }

    /// Same as [`Devices::take_attached`], without threads.
    pub(crate) fn take_controllers(&mut self) -> Controllers {
        self.attached.take().expect("they are attached")
    }

    /// Returns the software controllers, for tests; none before they are attached, and for drives.
    #[must_use]
    pub fn emus(&self) -> &[Arc<Emu>] {
        self.emulation.as_ref().map_or(&[], |emulation| &emulation.emus)
    }

    /// Returns true if the file executor can move the data: the devices are files, or block
    /// devices, of full speed, in real time.
    pub(crate) fn has_files(&self) -> bool {
        let has_files = match &self.location {
            Location::StoreDir(dir, _) => !dir.is_slowed(),
            Location::Drives { drives, .. } => is_passthrough(drives),
            Location::Emulated(_) => !self.files.is_empty(),
        };
        has_files && matches!(self.time, Time::Real(_))
    }

    /// Returns a factory of file executors, for a pool that the attached controllers reach, or that
    /// of the GPU.
    pub(crate) fn file_executors(
        &self,
        ends: &Arc<Ends>,
        clock: &Arc<dyn Clock>,
        gpu: Option<&Gpu>,
    ) -> ExecutorFactory {
        let gpu = gpu.map(|gpu| gpu.device().clone());
        let (files, ends, clock) = (self.files.clone(), ends.clone(), clock.clone());
        let domain = self.emulation.as_ref().map(|emulation| emulation.domain.clone());
        let reach: Reach =
            Arc::new(move |iova, bytes| domain.as_ref()?.access().resolve(iova, bytes).ok()?.host);
        Box::new(move || {
            let (files, ends) = (files.clone(), ends.clone());
            let executor = FileExecutor::new(files, reach.clone(), ends, clock.clone());
            Ok(Box::new(match gpu.clone() {
                Some(gpu) => executor.beside(gpu),
                None => executor,
            }))
        })
    }

    /// Returns the clock.
    #[must_use]
    pub fn clock(&self) -> Arc<dyn Clock> {
        self.time.clock()
    }

    fn name(&self) -> String {
        match &self.location {
            Location::StoreDir(dir, _) => dir.dir().display().to_string(),
            Location::Emulated(_) | Location::Drives { .. } => "emulated".to_owned(),
        }
    }

    /// Marks attached drives as scratch: from here on, their contents may be lost.
    ///
    /// # Errors
    /// Returns [`StackError::Failed`] if a drive fails.
    pub fn mark_as_scratch(&mut self) -> Result<(), StackError> {
        self.each(drives::mark_as_scratch)?;
        if let Location::Drives { is_scratch, .. } = &mut self.location {
            *is_scratch = true;
        }
        Ok(())
    }

    fn each<T>(
        &self,
        act: impl Fn(&mut Controller) -> Result<T, StackError>,
    ) -> Result<Vec<T>, StackError> {
        self.attached().iter().map(|device| act(&mut device.controller.lock())).collect()
    }

    /// Returns true when the devices are files of a store directory, which keep their space.
    pub(crate) fn is_on_files(&self) -> bool {
        match &self.location {
            Location::StoreDir(dir, _) => {
                dir.devices().any(|device| device.path.starts_with(dir.dir()))
            }
            Location::Emulated(_) | Location::Drives { .. } => false,
        }
    }

    /// Returns true if nothing can be written to the devices.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        matches!(&self.location, Location::StoreDir(dir, _) if dir.is_read_only())
    }

    /// Formats a store on the devices, which were attached. A drive must be blank, or have only
    /// remains of a replay or a part of this store, unless `format` allows more. A directory was
    /// made for the store.
    ///
    /// # Errors
    /// Returns [`StackError::NotEmpty`], with nothing written, or an error of [`Store::format`].
    pub(crate) fn format(
        &self,
        devices: &[StoreDevice],
        format: &Format,
    ) -> Result<(), StackError> {
        if !matches!(self.location, Location::Drives { is_scratch: false, .. }) {
            return Store::format(devices, format).map_err(StackError::of_format);
        }
        let is_lost =
            |held: &Held| held.loss > format.overwrite && held.store != Some(format.store);
        if let Some(held) = Held::on(devices)?.into_iter().find(is_lost) {
            let (drive, found) = (drive_name(&held.device), held.what);
            return Err(StackError::NotEmpty { drive, found });
        }
        let format = Format { overwrite: Overwrite::Anything, ..format.clone() };
        Store::format(devices, &format).map_err(StackError::of_format)?;
        // Comes last: the mark at the edge allows the contents to be overwritten.
        clear_edges(devices)
    }

    /// Marks the devices as formatted.
    ///
    /// # Errors
    /// Returns [`StackError::StoreDir`] if the mark cannot be written.
    pub fn set_ready(&mut self) -> Result<(), StackError> {
        match &mut self.location {
            Location::StoreDir(dir, _) => Ok(dir.set_ready()?),
            // The superblocks on the drives record it.
            Location::Emulated(_) | Location::Drives { .. } => Ok(()),
        }
    }

    /// Shuts attached devices down.
    ///
    /// # Errors
    /// Returns [`StackError::Failed`].
    pub fn shut_down(&self) -> Result<(), StackError> {
        self.each(shut_down).map(|_| ())
    }
}

pub(crate) fn shut_down(controller: &mut Controller) -> Result<(), StackError> {
    let device = controller.id().to_owned();
    let shut = controller.shutdown();
    shut.map_err(|error| StackError::failed(format!("shutting {device} down"), error))
}

/// Returns true if the kernel's driver has the drives.
fn is_passthrough(drives: &[Drive]) -> bool {
    matches!(drives.first(), Some(Drive { address: DriveAddress::Ng(_), .. }))
}

#[cfg(test)]
mod tests {
    use nvme_emu::MemoryMedia;
    use nvme_spec::ids::Lba;
    use objstore::{KvShape, StoreId};

    use super::*;
    use crate::held::MARK;
    use crate::store_dir::{StoreDirMedia, StoreDirOptions};

    const MIB: u64 = 1 << 20;
    const BYTES: u64 = 16 * MIB;
    const SHAPE: KvShape = KvShape { layers: 2, segments: 2, object_bytes: 1024, block_tokens: 16 };

    /// Makes a drive whose store leaves its first and last MiB free, and its medium.
    fn drive() -> (MemoryMedia, Devices) {
        let media = MemoryMedia::new(BYTES).unwrap();
        let config = EmuConfig::new("drive").namespace(media.clone(), 512);
        let mut devices = Devices::from(vec![config]);
        devices.attach(&ControllerOptions::default(), None).unwrap();
        let attached = &mut devices.attached.as_mut().unwrap().devices;
        attached[0].region = Some((Lba(MIB >> 9), (BYTES - 2 * MIB) >> 9));
        (media, devices)
    }

    fn format(on: &Devices, store: u8, overwrite: Overwrite) -> Result<(), StackError> {
        let format = Format { overwrite, ..Format::new(StoreId([store; 16]), SHAPE) };
        Devices::drives(&[]).format(on.attached(), &format)
    }

    fn loss(devices: &Devices) -> Overwrite {
        Held::on(devices.attached()).unwrap()[0].loss
    }

    #[test]
    fn a_drive_is_formatted_only_where_nothing_is_lost() {
        let (_, controllers) = drive();
        format(&controllers, 1, Overwrite::Nothing).unwrap();
        // Like after a crash while the store was made.
        format(&controllers, 1, Overwrite::Nothing).unwrap();
        let error = format(&controllers, 2, Overwrite::Nothing).unwrap_err();
        assert!(error.to_string().contains("not empty (store 0101"), "{error}");
        assert_eq!(error.kind(), crate::ErrorKind::Occupied);
        format(&controllers, 2, Overwrite::Store).unwrap();
        format(&controllers, 2, Overwrite::Nothing).unwrap();
        assert_eq!(loss(&controllers), Overwrite::Store);
    }

    /// Nothing polls doorbells while a store in files is idle.
    #[test]
    fn files_need_threads_for_an_io_kernel_only() {
        let place = tempfile::tempdir_in("/var/tmp").unwrap();
        let media = StoreDirMedia::Files { count: 2, bytes: 2 * BYTES };
        let options = StoreDirOptions { id: 1, media, lba_bytes: 4096 };
        let dir = StoreDir::create(&place.path().join("store"), &options).unwrap();
        let mut devices = Devices::from(dir);
        let controllers = devices.controllers(&ControllerOptions::default(), None).unwrap();
        for device in &controllers.devices {
            let drive = &mut *device.controller.lock();
            let nsid = drive.namespaces()[0].nsid;
            drive.write(nsid, Lba(3), &[7; 4096], true).unwrap();
            drive.flush(nsid).unwrap();
            let mut found = [0; 4096];
            drive.read(nsid, Lba(3), &mut found).unwrap();
            assert_eq!(found, [7; 4096]);
        }
        let emulation = devices.emulation.clone().unwrap();
        assert!(!emulation.has_threads());
        emulation.run().unwrap();
        assert!(emulation.has_threads());
        devices.shut_down().unwrap();
    }

    #[test]
    fn what_is_beside_a_store_is_guarded_and_then_cleared() {
        let (media, controllers) = drive();
        media.poke(BYTES - 512, b"EFI PART").unwrap();
        for allowed in [Overwrite::Nothing, Overwrite::Store] {
            let error = format(&controllers, 1, allowed).unwrap_err();
            assert!(matches!(error, StackError::NotEmpty { .. }), "{error}");
            assert_eq!(loss(&controllers), Overwrite::Anything);
        }
        format(&controllers, 1, Overwrite::Anything).unwrap();
        assert_eq!(loss(&controllers), Overwrite::Store);
    }

    #[test]
    fn what_a_replay_left_may_be_lost() {
        let (media, controllers) = drive();
        media.poke(0, MARK).unwrap();
        media.poke(MIB, b"a store that was not kept").unwrap();
        format(&controllers, 1, Overwrite::Nothing).unwrap();
        assert_eq!(loss(&controllers), Overwrite::Store);
    }

    #[test]
    fn scratch_stays_scratch_when_it_is_formatted() {
        let (_, mut devices) = drive();
        devices.mark_as_scratch().unwrap();
        let mut scratch = Devices::drives(&[]);
        scratch.mark_as_scratch().unwrap();
        let format = Format::new(StoreId([1; 16]), SHAPE);
        scratch.format(devices.attached(), &format).unwrap();
        assert_eq!(loss(&devices), Overwrite::Nothing);
    }
}
