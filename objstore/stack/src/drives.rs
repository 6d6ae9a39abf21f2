//! Real drives: opened through VFIO or the kernel's driver, tested for access to their memory, and
//! checked for contents.

use std::{fmt, path::PathBuf, str::FromStr, sync::Arc};

use gio_kernels::FileTarget;
use nvme_driver::{
    Clock, Controller, ControllerOptions, DmaSlice, NamespaceInfo, QueueMemory,
    platform::{
        p2p,
        passthrough::Passthrough,
        vfio::{BusOptions, PciAddress, PeerBar, SpaceOptions, VfioBus, VfioSpace},
    },
};
use nvme_emu::{EmuConfig, FileMedia};
use nvme_spec::ids::Lba;
use objstore::StoreDevice;

use crate::{
    arena::Arena,
    chosen::MemoryPlace,
    error::{StackError, StoreDirError},
    held::MARK,
    size::Size,
    store_dir::{file_target, until_released},
};

/// Identity of a drive, independent of its address.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DriveIdentity {
    /// Serial number.
    pub serial: String,
    /// The namespace in use.
    pub nsid: u32,
}

/// Bytes kept free at both ends of a namespace: partition tables, file systems and volume managers
/// keep their signatures there, which tell a drive in use from an empty one.
const EDGE_BYTES: u64 = 1 << 20;
/// Where a drive is.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum DriveAddress {
    /// Bound to vfio-pci.
    Vfio(PciAddress),
    /// A namespace that the kernel's driver has: its generic device, `/dev/ng0n1`.
    Ng(PathBuf),
}

impl fmt::Display for DriveAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vfio(address) => write!(f, "vfio:{address}"),
            Self::Ng(path) => write!(f, "ng:{}", path.display()),
        }
    }
}

impl FromStr for DriveAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(path) = text.strip_prefix("ng:") else {
            let address = text.strip_prefix("vfio:").unwrap_or(text);
            return Ok(Self::Vfio(address.parse().map_err(|why| format!("{why}"))?));
        };
        match path.starts_with('/') {
            true => Ok(Self::Ng(path.into())),
            false => Err(format!("{path:?} is no path from / on")),
        }
    }
}

impl From<DriveAddress> for String {
    fn from(address: DriveAddress) -> Self {
        address.to_string()
    }
}

impl TryFrom<String> for DriveAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Returns the name of a drive for users, by that of its controller.
#[must_use]
pub fn drive_name(id: &str) -> String {
    if id.starts_with("ng:") { id.to_owned() } else { format!("vfio:{id}") }
}

/// A drive and its expected identity.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Drive {
    /// Its address.
    pub address: DriveAddress,
    /// The expected drive; with `None`, only the store's own check applies.
    #[serde(flatten)]
    pub identity: Option<DriveIdentity>,
}

impl Drive {
    pub(crate) fn check(&self, found: &DriveIdentity) -> Result<(), StackError> {
        match &self.identity {
            Some(expected) if expected != found => Err(StackError::Drive {
                drive: self.address.to_string(),
                why: format!(
                    "namespace {} of drive {} is there, and namespace {} of drive {} was expected",
                    found.nsid, found.serial, expected.nsid, expected.serial
                ),
                hint: "name the drives where they are now, in the same order",
            }),
            _ => Ok(()),
        }
    }
}

/// Memory of another PCI function, with a bump allocator.
#[derive(Debug)]
pub(crate) struct Peer {
    bar: PeerBar,
    /// Its name.
    pub(crate) place: MemoryPlace,
    arena: Arena,
}

impl Peer {
    fn new(bar: PeerBar, place: MemoryPlace) -> Self {
        let arena = Arena::new(bar.memory().clone());
        Self { bar, place, arena }
    }

    /// Takes the next `bytes` bytes.
    ///
    /// # Errors
    /// Returns [`StackError::Drive`] if fewer bytes are left.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<DmaSlice, StackError> {
        let left = self.arena.left();
        self.arena.take(bytes).map_err(|_| self.full(bytes, left))
    }

    /// Takes memory for a queue pair of `depth` entries.
    ///
    /// # Errors
    /// Same as [`Peer::take`].
    pub(crate) fn queue(&mut self, depth: u32) -> Result<QueueMemory, StackError> {
        let left = self.arena.left();
        let queue = self.arena.queue(depth);
        queue.map_err(|_| self.full(Arena::queue_bytes(depth), left))
    }

    fn full(&self, wanted: usize, left: usize) -> StackError {
        let [wanted, left, all] = [wanted, left, self.bar.len()].map(|bytes| Size(bytes as u64));
        StackError::Drive {
            drive: self.place.to_string(),
            why: format!("{wanted} more are needed, {left} of its {all} are left"),
            hint: "use fewer blocks of the KV pool",
        }
    }
}

/// Opens the DMA address space that drives share.
///
/// # Errors
/// Returns [`StackError::Vfio`] if this machine has no VFIO, or this user may not use it.
pub fn vfio_space() -> Result<Arc<VfioSpace>, StackError> {
    let space = VfioSpace::open("vfio", SpaceOptions::default());
    space.map_err(|source| StackError::Vfio { what: "VFIO".to_owned(), source })
}

/// Opens one drive without writing to it.
///
/// # Errors
/// Returns [`StackError::Vfio`] or [`StackError::Failed`].
pub fn open_drive(
    space: &Arc<VfioSpace>,
    address: PciAddress,
    clock: &Arc<dyn Clock>,
    options: ControllerOptions,
) -> Result<Controller, StackError> {
    let attached = Controller::attach(open_bus(space, address)?, clock.clone(), options);
    attached.map_err(|error| StackError::failed(format!("attaching to vfio:{address}"), error))
}

/// Resets the NVM subsystem of a drive that cannot be opened otherwise; see
/// [`Controller::reset_subsystem`]. The drive can be opened afterwards.
///
/// # Errors
/// Returns [`StackError::Vfio`] or [`StackError::Failed`].
pub fn reset_subsystem(
    space: &Arc<VfioSpace>,
    address: PciAddress,
    clock: &Arc<dyn Clock>,
) -> Result<(), StackError> {
    // The kernel restores configuration space when the function is closed.
    let reset = Controller::reset_subsystem(&*open_bus(space, address)?, &**clock);
    reset.map_err(|error| StackError::failed(format!("resetting vfio:{address}"), error))
}

fn open_bus(space: &Arc<VfioSpace>, address: PciAddress) -> Result<Arc<VfioBus>, StackError> {
    let bus = VfioBus::open(space, address, &BusOptions::default());
    bus.map_err(|source| StackError::Vfio { what: format!("vfio:{address}"), source })
}

/// Drives in the form that a store takes, memory for them, and their address space.
type Opened = (Vec<StoreDevice>, Option<Peer>, Arc<VfioSpace>);

/// Opens drives that share an address space, and proves that each reaches the chosen memory. Writes
/// nothing to them.
///
/// # Errors
/// Returns [`StackError::Drive`] if one is not the expected one, [`StackError::Failed`], or an
/// error of [`open_drive`] or [`check_drive`].
pub(crate) fn open(
    expected: &[Drive],
    memory: MemoryPlace,
    clock: &Arc<dyn Clock>,
    options: &ControllerOptions,
) -> Result<Opened, StackError> {
    let space = vfio_space()?;
    let mut controllers = Vec::new();
    for drive in expected {
        let DriveAddress::Vfio(address) = drive.address else {
            return Err(StackError::config("devices", "name drives of one kind, vfio: or ng:"));
        };
        let controller = open_drive(&space, address, clock, options.clone())?;
        check_drive(&controller)?;
        controllers.push(controller);
    }
    let peer = match memory {
        MemoryPlace::Host => None,
        MemoryPlace::Peer { address, bar } => {
            let opened = PeerBar::open(&space, address, bar, None);
            let bar =
                opened.map_err(|source| StackError::Vfio { what: memory.to_string(), source })?;
            prove_peer(&bar, memory, &mut controllers)?;
            Some(Peer::new(bar, memory))
        }
    };
    for (drive, controller) in expected.iter().zip(&controllers) {
        drive.check(&identity(controller))?;
    }
    let mut devices: Vec<_> = controllers.into_iter().map(StoreDevice::new).collect();
    devices.iter_mut().for_each(take_region);
    Ok((devices, peer, space))
}

/// Gives the store what is between the edges of a drive's namespace.
pub(crate) fn take_region(device: &mut StoreDevice) {
    let controller = device.controller.lock();
    let space = namespace(&controller);
    (device.nsid, device.region) = (Some(space.nsid), Some(region(space)));
}

/// Claims a namespace that the kernel's driver has. Returns a software controller for it, which
/// asks the drive what it is, and the namespace for the file executor. Writes nothing.
///
/// # Errors
/// Returns [`StackError::Drive`] if it is in use or cannot be used, or [`StackError::StoreDir`].
pub(crate) fn open_passthrough(
    address: &DriveAddress,
    memory: MemoryPlace,
) -> Result<(EmuConfig, FileTarget), StackError> {
    let DriveAddress::Ng(path) = address else {
        return Err(StackError::config("devices", "name drives of one kind, vfio: or ng:"));
    };
    let refused = |why, hint| StackError::Drive { drive: address.to_string(), why, hint };
    if memory != MemoryPlace::Host {
        let why = "the kernel's driver reaches host memory only".to_owned();
        return Err(refused(why, "leave the memory out, or name the drive as vfio:"));
    }
    let opened = until_released(|| Passthrough::open(path), |error| error.is_busy);
    let drive = Arc::new(opened.map_err(|error| refused(error.why, error.hint))?);
    let media = FileMedia::of_namespace(drive.clone(), path).map_err(StoreDirError::Media)?;
    let target = file_target(&media);
    let config = EmuConfig {
        id: address.to_string(),
        mdts_bytes: Some(drive.transfer_bytes_max as u32),
        pci_id: drive.pci_id,
        drive: Some(drive.clone()),
        ..EmuConfig::default()
    };
    Ok((config.namespace(media, drive.namespace.lba_bytes() as u32), target))
}

/// Returns the identity of a drive.
pub(crate) fn identity(drive: &Controller) -> DriveIdentity {
    DriveIdentity { serial: drive.info().serial.clone(), nsid: namespace(drive).nsid.0 }
}

/// Marks a drive as scratch: from here on, its contents may be lost.
pub(crate) fn mark_as_scratch(drive: &mut Controller) -> Result<(), StackError> {
    let space = namespace(drive).clone();
    let mut block = vec![0; 1 << space.lba_shift];
    block[..MARK.len()].copy_from_slice(MARK);
    let marked = drive.write(space.nsid, Lba(0), &block, true);
    marked.map_err(|error| StackError::failed("marking a drive as scratch", error))
}

/// Proves that every drive reaches the peer's memory, for every kind of access it will do.
fn prove_peer(
    bar: &PeerBar,
    place: MemoryPlace,
    controllers: &mut [Controller],
) -> Result<(), StackError> {
    for drive in controllers {
        let scratch = DmaSlice::new(bar.memory().clone(), 0, p2p::scratch_bytes(drive))?;
        if let Some(why) = prove_reach(drive, &scratch)? {
            let drive = drive_name(drive.id());
            let what = format!("{drive} does not reach the memory of {place}");
            return Err(StackError::failed(what, why));
        }
    }
    Ok(())
}

/// Returns why a drive does not reach `scratch`, of at least [`p2p::scratch_bytes`], for every kind
/// of access; `None` if it does. Writes nothing to the drive, and leaves it ready.
///
/// # Errors
/// Returns [`StackError::Failed`] if the drive can no longer be used.
pub fn prove_reach(
    drive: &mut Controller,
    scratch: &DmaSlice,
) -> Result<Option<String>, StackError> {
    let nsid = namespace(drive).nsid;
    let why = match p2p::prove(drive, nsid, scratch) {
        Ok(report) => {
            tracing::info!(ctrl = drive.id(), %report, "route tried");
            report.why()
        }
        Err(error) => Some(error.to_string()),
    };
    if why.is_some() {
        // Commands of the test may still be in flight.
        drive.reset().map_err(|error| StackError::failed("resetting a drive", error))?;
    }
    Ok(why)
}

/// Checks that a store fits on the drive.
///
/// # Errors
/// Returns [`StackError::Drive`] if it does not.
pub fn check_drive(drive: &Controller) -> Result<(), StackError> {
    let refused = |why, hint| StackError::Drive { drive: drive_name(drive.id()), why, hint };
    let Some(space) = drive.namespaces().first() else {
        let why: Vec<String> = drive
            .refused_namespaces()
            .iter()
            .map(|(nsid, error)| format!("{nsid}: {error}"))
            .collect();
        return Err(refused(
            format!("it has no namespace that can be used ({})", why.join("; ")),
            "create or format one with nvme-cli, then bind the drive again",
        ));
    };
    if space.lbas << space.lba_shift <= 3 * EDGE_BYTES {
        return Err(refused(
            format!("namespace {} is too small for a store", space.nsid),
            "use a drive of 16 MiB or more",
        ));
    }
    Ok(())
}

/// Returns the namespace in use: the first. [`check_drive`] has checked that it exists.
fn namespace(drive: &Controller) -> &NamespaceInfo {
    &drive.namespaces()[0]
}

/// Returns the first LBA and the number of LBAs between the edges.
fn region(space: &NamespaceInfo) -> (Lba, u64) {
    let edge = EDGE_BYTES >> space.lba_shift;
    (Lba(edge), space.lbas - 2 * edge)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_drive_than_expected_is_named() {
        let identity = |serial: &str| DriveIdentity { serial: serial.to_owned(), nsid: 1 };
        let address: DriveAddress = "0000:65:00.0".parse().unwrap();
        let drive = |identity| Drive { address: address.clone(), identity };
        let found = identity("S1");
        drive(None).check(&found).unwrap();
        drive(Some(found.clone())).check(&found).unwrap();
        let error = drive(Some(identity("S2"))).check(&found).unwrap_err().to_string();
        assert!(error.contains("namespace 1 of drive S2 was expected"), "{error}");
    }
}
