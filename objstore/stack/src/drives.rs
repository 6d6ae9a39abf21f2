//! Real drives: opened through VFIO, shown to reach the memory they are given, and what is on them.

use std::{fmt, sync::Arc};

use nvme_driver::{
    Clock, Controller, ControllerOptions, DmaSlice, NamespaceInfo, QueueMemory,
    platform::{
        p2p,
        vfio::{BusOptions, PciAddress, PeerBar, SpaceOptions, VfioBus, VfioSpace},
    },
};
use nvme_spec::ids::Lba;
use objstore::StoreDevice;

use crate::{arena::Arena, error::StackError, place::DriveIdentity};

/// Kept free at both ends of a namespace: where partition tables, file systems and volume managers
/// have their signatures, which is how a drive in use is told from an empty one.
const EDGE_BYTES: u64 = 1 << 20;
/// Written to the first LBA of a drive that a replay used: the next one may overwrite it.
pub(crate) const MARK: &[u8] = b"ripieno replay: scratch data, may be overwritten\n";

/// Where queues and descriptors of drives are, and a KV pool that is allocated for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryPlace {
    /// Memory of this process.
    #[default]
    Host,
    /// A BAR of another function.
    Peer {
        /// The function.
        address: PciAddress,
        /// The BAR's number.
        bar: u8,
    },
}

impl fmt::Display for MemoryPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Peer { address, bar } => write!(f, "peer:{address}/{bar}"),
        }
    }
}

/// Drives that have been opened, and the memory they share.
#[derive(Debug)]
pub struct Drives {
    controllers: Vec<Controller>,
    peer: Option<Peer>,
    space: Arc<VfioSpace>,
}

/// Memory of another function, handed out from its beginning.
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

    /// The next `bytes` bytes.
    ///
    /// # Errors
    /// [`StackError::PeerFull`].
    pub(crate) fn take(&mut self, bytes: usize) -> Result<DmaSlice, StackError> {
        let left = self.arena.left();
        self.arena.take(bytes).map_err(|_| self.full(bytes, left))
    }

    /// Memory for a queue pair of `depth` entries.
    ///
    /// # Errors
    /// As for [`Peer::take`].
    pub(crate) fn queue(&mut self, depth: u32) -> Result<QueueMemory, StackError> {
        let left = self.arena.left();
        let queue = self.arena.queue(depth);
        queue.map_err(|_| self.full(Arena::queue_bytes(depth), left))
    }

    fn full(&self, wanted: usize, left: usize) -> StackError {
        StackError::PeerFull { place: self.place, wanted, left, all: self.bar.len() }
    }
}

/// The address space that drives share.
///
/// # Errors
/// [`StackError::Vfio`] when this machine has no VFIO, or this user may not use it.
pub fn vfio_space() -> Result<Arc<VfioSpace>, StackError> {
    let space = VfioSpace::open("vfio", SpaceOptions::default());
    space.map_err(|source| StackError::Vfio { what: "VFIO".to_owned(), source })
}

/// Opens one drive without writing to it.
///
/// # Errors
/// [`StackError::Vfio`], [`StackError::Attach`].
pub fn open_drive(
    space: &Arc<VfioSpace>,
    address: PciAddress,
    clock: &Arc<dyn Clock>,
    options: ControllerOptions,
) -> Result<Controller, StackError> {
    let device = || format!("vfio:{address}");
    let bus = VfioBus::open(space, address, &BusOptions::default())
        .map_err(|source| StackError::Vfio { what: device(), source })?;
    let attached = Controller::attach(bus, clock.clone(), options);
    attached.map_err(|source| StackError::Attach { device: device(), source })
}

/// Resets the NVM subsystem of a drive that cannot be opened otherwise: see
/// [`Controller::reset_subsystem`]. The drive can be opened afterwards.
///
/// # Errors
/// [`StackError::Vfio`], [`StackError::Attach`].
pub fn reset_subsystem(
    space: &Arc<VfioSpace>,
    address: PciAddress,
    clock: &Arc<dyn Clock>,
) -> Result<(), StackError> {
    let device = || format!("vfio:{address}");
    // The kernel restores configuration space when the function is closed.
    let bus = VfioBus::open(space, address, &BusOptions::default())
        .map_err(|source| StackError::Vfio { what: device(), source })?;
    let reset = Controller::reset_subsystem(&*bus, &**clock);
    reset.map_err(|source| StackError::Attach { device: device(), source })
}

impl Drives {
    /// Opens the drives, and proves that each reaches the memory chosen. Nothing is written to
    /// them.
    ///
    /// # Errors
    /// As for [`open_drive`] and [`check_drive`], and [`StackError::Unreached`].
    pub fn open(
        addresses: &[PciAddress],
        memory: MemoryPlace,
        clock: &Arc<dyn Clock>,
        options: &ControllerOptions,
    ) -> Result<Self, StackError> {
        let space = vfio_space()?;
        let mut controllers = Vec::new();
        for address in addresses {
            let controller = open_drive(&space, *address, clock, options.clone())?;
            check_drive(&controller)?;
            controllers.push(controller);
        }
        let peer = match memory {
            MemoryPlace::Host => None,
            MemoryPlace::Peer { address, bar } => {
                let opened = PeerBar::open(&space, address, bar, None);
                let bar = opened
                    .map_err(|source| StackError::Vfio { what: memory.to_string(), source })?;
                prove_peer(&bar, memory, &mut controllers)?;
                Some(Peer::new(bar, memory))
            }
        };
        Ok(Self { controllers, peer, space })
    }

    /// The controllers, in their order.
    #[must_use]
    pub fn controllers(&self) -> &[Controller] {
        &self.controllers
    }

    /// Bytes of the largest LBA of any of them.
    #[must_use]
    pub fn lba_bytes(&self) -> u32 {
        let shifts = self.controllers.iter().map(|drive| namespace(drive).lba_shift);
        1 << shifts.max().unwrap_or(9)
    }

    /// The smallest limit that any of them has for one command.
    #[must_use]
    pub fn mdts_bytes(&self) -> Option<u64> {
        self.controllers.iter().filter_map(|drive| drive.info().mdts_bytes).min()
    }

    /// Of each: its address, and how many bytes a store can have on it.
    pub fn room(&self) -> impl Iterator<Item = (&str, u64)> {
        self.controllers.iter().map(|drive| {
            let (_, lbas) = region(namespace(drive));
            (drive.id(), lbas << namespace(drive).lba_shift)
        })
    }

    /// Of each: its address, and what it holds.
    ///
    /// # Errors
    /// [`StackError::DriveIo`].
    pub fn holds(&mut self) -> Result<Vec<(String, Holds)>, StackError> {
        let held = |drive: &mut Controller| Ok((drive.id().to_owned(), holds(drive)?));
        self.controllers.iter_mut().map(held).collect()
    }

    /// Marks them as scratch: from here on, what they hold may be lost.
    ///
    /// # Errors
    /// [`StackError::DriveIo`].
    pub fn mark_as_scratch(&mut self) -> Result<(), StackError> {
        for drive in &mut self.controllers {
            let space = namespace(drive).clone();
            let mut block = vec![0; 1 << space.lba_shift];
            block[..MARK.len()].copy_from_slice(MARK);
            let marked = drive.write(space.nsid, Lba(0), &block, true);
            marked.map_err(|source| failed("marking a drive as scratch", source))?;
        }
        Ok(())
    }

    /// Removes what partition tables, other formats and replays left at the drives' edges.
    ///
    /// # Errors
    /// [`StackError::DriveIo`].
    pub fn clear_edges(&mut self) -> Result<(), StackError> {
        self.controllers.iter_mut().try_for_each(clear_edges)
    }

    /// What tells each from all others.
    pub(crate) fn identities(&self) -> impl Iterator<Item = DriveIdentity> {
        self.controllers.iter().map(identity)
    }

    /// The drives as a store takes them, the peer, and the address space.
    pub(crate) fn into_parts(self) -> (Vec<StoreDevice>, Option<Peer>, Arc<VfioSpace>) {
        let device = |controller: Controller| {
            let space = namespace(&controller);
            let (nsid, region) = (Some(space.nsid), Some(region(space)));
            StoreDevice { nsid, region, ..StoreDevice::new(controller) }
        };
        (self.controllers.into_iter().map(device).collect(), self.peer, self.space)
    }
}

/// What tells a drive from all others.
pub(crate) fn identity(drive: &Controller) -> DriveIdentity {
    DriveIdentity { serial: drive.info().serial.clone(), nsid: namespace(drive).nsid.0 }
}

/// As [`Drives::clear_edges`], of one.
pub(crate) fn clear_edges(drive: &mut Controller) -> Result<(), StackError> {
    let space = namespace(drive).clone();
    for lba in edges(&space) {
        let cleared = drive.write(space.nsid, lba, &vec![0; EDGE_BYTES as usize], true);
        cleared.map_err(|source| failed("clearing a drive's edges", source))?;
    }
    Ok(())
}

fn failed(what: &'static str, source: nvme_driver::Error) -> StackError {
    StackError::DriveIo { what, source }
}

/// Every drive has to reach the peer's memory, in every way it will be used.
fn prove_peer(
    bar: &PeerBar,
    place: MemoryPlace,
    controllers: &mut [Controller],
) -> Result<(), StackError> {
    for drive in controllers {
        let scratch = DmaSlice::new(bar.memory().clone(), 0, p2p::scratch_bytes(drive))?;
        if let Some(why) = prove_reach(drive, &scratch)? {
            let (drive, place) = (drive.id().to_owned(), format!("the memory of {place}"));
            return Err(StackError::Unreached { drive, place, why });
        }
    }
    Ok(())
}

/// Whether a drive reaches `scratch`, of at least [`p2p::scratch_bytes`], in every way it will be
/// used: `None`, or why not. Nothing is written to the drive, and it is ready afterwards.
///
/// # Errors
/// [`StackError::DriveIo`] when the drive cannot be used any more.
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
        // What was tried may be in flight still.
        drive.reset().map_err(|source| failed("resetting a drive", source))?;
    }
    Ok(why)
}

/// Whether a store fits on it.
///
/// # Errors
/// [`StackError::Drive`].
pub fn check_drive(drive: &Controller) -> Result<(), StackError> {
    let refused = |why, hint| StackError::Drive { drive: drive.id().to_owned(), why, hint };
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

/// The namespace that is used: the first. [`check_drive`] saw that there is one.
fn namespace(drive: &Controller) -> &NamespaceInfo {
    &drive.namespaces()[0]
}

/// First LBA and number of LBAs between the edges.
fn region(space: &NamespaceInfo) -> (Lba, u64) {
    let edge = EDGE_BYTES >> space.lba_shift;
    (Lba(edge), space.lbas - 2 * edge)
}

/// The first LBAs of the edges.
fn edges(space: &NamespaceInfo) -> [Lba; 2] {
    [Lba(0), Lba(space.lbas - (EDGE_BYTES >> space.lba_shift))]
}

/// Whether a drive that begins like this was used by a replay that kept nothing.
#[must_use]
pub fn is_scratch(first: &[u8]) -> bool {
    first.starts_with(MARK)
}

/// What a drive holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// Nothing, where stores and other formats have something.
    Nothing,
    /// What a replay left that kept nothing.
    Scratch,
    /// Something that begins where a store does.
    Store,
    /// Something else.
    Data,
}

impl fmt::Display for Holds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nothing => "nothing is on it",
            Self::Scratch => "a replay used it",
            Self::Store => "a store is on it",
            Self::Data => "data is on it",
        })
    }
}

impl Holds {
    /// By the two edges, and what follows the first one.
    fn of(first: &[u8], last: &[u8], region: &[u8]) -> Self {
        let is_blank = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        if is_scratch(first) {
            Self::Scratch
        } else if !is_blank(first) || !is_blank(last) {
            Self::Data
        } else if !is_blank(region) {
            Self::Store
        } else {
            Self::Nothing
        }
    }
}

/// What a drive holds.
///
/// # Errors
/// [`StackError::DriveIo`].
pub(crate) fn holds(drive: &mut Controller) -> Result<Holds, StackError> {
    let space = namespace(drive).clone();
    let mut read = |lba: Lba| {
        let mut bytes = vec![0; EDGE_BYTES as usize];
        let read = drive.read(space.nsid, lba, &mut bytes);
        read.map_err(|source| failed("checking whether a drive is empty", source)).map(|()| bytes)
    };
    let [first, last] = edges(&space);
    let (first, last, region) = (read(first)?, read(last)?, read(region(&space).0)?);
    Ok(Holds::of(&first, &last, &region))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_drive_holds_is_told_by_its_edges_and_the_stores_beginning() {
        let (blank, mut used) = ([0; 512], [0; 512]);
        used[9] = 1;
        let mut mark = [0; 512];
        mark[..MARK.len()].copy_from_slice(MARK);
        for (first, last, region, wanted) in [
            (&blank, &blank, &blank, Holds::Nothing),
            (&mark, &blank, &blank, Holds::Scratch),
            // A replay's store that was not kept.
            (&mark, &blank, &used, Holds::Scratch),
            (&blank, &blank, &used, Holds::Store),
            (&used, &blank, &used, Holds::Data),
            (&blank, &used, &blank, Holds::Data),
        ] {
            assert_eq!(Holds::of(first, last, region), wanted);
        }
    }
}
