//! Real drives: opened through VFIO, shown to reach the memory they are given, and guarded against
//! losing what is on them by accident.

use std::fmt;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use nvme_driver::platform::p2p;
use nvme_driver::platform::vfio::{
    BusOptions, PciAddress, PeerBar, SpaceOptions, VfioBus, VfioSpace,
};
use nvme_driver::{Clock, Controller, ControllerOptions, DmaSlice, NamespaceInfo, QueueMemory};
use nvme_spec::ids::Lba;
use objstore::StoreDevice;

use crate::devices::MemoryChoice;
use crate::memory::Arena;
use crate::problem::Problem;
use crate::size::Size;

/// Kept free at both ends of a namespace: where partition tables, file systems and volume managers
/// have their signatures, which is how a drive in use is told from an empty one.
const EDGE_BYTES: u64 = 1 << 20;
/// Written to the first LBA of a drive that a replay used: the next one may overwrite it.
const MARK: &[u8] = b"ripieno replay: scratch data, may be overwritten\n";

/// Drives that have been opened, and the memory they share.
#[derive(Debug)]
pub(crate) struct Drives {
    controllers: Vec<Controller>,
    peer: Option<Peer>,
    space: Arc<VfioSpace>,
}

/// Memory of another function, handed out from its beginning.
#[derive(Debug)]
pub(crate) struct Peer {
    bar: PeerBar,
    arena: Arena,
}

impl Peer {
    fn new(bar: PeerBar) -> Self {
        let arena = Arena::new(bar.memory().clone());
        Self { bar, arena }
    }

    /// The next `bytes` bytes.
    ///
    /// # Errors
    /// When there are no more so many.
    pub(crate) fn take(&mut self, bytes: usize) -> anyhow::Result<DmaSlice> {
        let left = self.arena.left();
        self.arena.take(bytes).with_context(|| self.too_small(bytes, left))
    }

    /// Memory for a queue pair of `depth` entries.
    ///
    /// # Errors
    /// As for [`Peer::take`].
    pub(crate) fn queue(&mut self, depth: u32) -> anyhow::Result<QueueMemory> {
        let left = self.arena.left();
        let queue = self.arena.queue(depth);
        queue.with_context(|| self.too_small(Arena::queue_bytes(depth), left))
    }

    fn too_small(&self, wanted: usize, left: usize) -> String {
        let (wanted, all) = (Size(wanted as u64), Size(self.bar.len() as u64));
        format!(
            "--memory {}: {wanted} more are needed, {} of its {all} are left; set --pool-blocks",
            self.bar.address(),
            Size(left as u64)
        )
    }
}

/// Opens one drive without writing to it.
///
/// # Errors
/// What is in the way, in words.
pub(crate) fn open(
    space: &Arc<VfioSpace>,
    address: PciAddress,
    clock: &Arc<dyn Clock>,
    options: ControllerOptions,
) -> anyhow::Result<Controller> {
    let bus = VfioBus::open(space, address, &BusOptions::default())
        .with_context(|| format!("opening vfio:{address}"))?;
    Controller::attach(bus, clock.clone(), options)
        .with_context(|| format!("attaching to vfio:{address}"))
}

/// The address space that drives share.
///
/// # Errors
/// When this machine has no VFIO, or this user may not use it.
pub(crate) fn space() -> anyhow::Result<Arc<VfioSpace>> {
    VfioSpace::open("vfio", SpaceOptions::default()).context("opening VFIO")
}

impl Drives {
    /// Opens the drives, and proves that each reaches the memory chosen. Nothing is written to
    /// them.
    ///
    /// # Errors
    /// [`Problem`] for a drive that cannot hold a store; else what is in the way.
    pub(crate) fn open(
        addresses: &[PciAddress],
        memory: MemoryChoice,
        clock: &Arc<dyn Clock>,
        options: &ControllerOptions,
    ) -> anyhow::Result<Self> {
        let space = space()?;
        let mut controllers = Vec::new();
        for address in addresses {
            let controller = open(&space, *address, clock, options.clone())?;
            usable(&controller)?;
            controllers.push(controller);
        }
        let peer = match memory {
            MemoryChoice::Host => None,
            MemoryChoice::Peer { address, bar } => {
                let bar = PeerBar::open(&space, address, bar, None)
                    .with_context(|| format!("opening --memory {memory}"))?;
                prove_peer(&bar, &mut controllers)?;
                Some(Peer::new(bar))
            }
        };
        Ok(Self { controllers, peer, space })
    }

    /// Bytes of the largest LBA of any of them.
    pub(crate) fn lba_bytes(&self) -> u32 {
        let shifts = self.controllers.iter().map(|drive| namespace(drive).lba_shift);
        1 << shifts.max().unwrap_or(9)
    }

    /// The smallest limit that any of them has for one command.
    pub(crate) fn mdts_bytes(&self) -> Option<u64> {
        self.controllers.iter().filter_map(|drive| drive.info().mdts_bytes).min()
    }

    /// Refuses drives that are too small, and those that hold anything but what a replay left.
    /// Then marks them as scratch: from here on, what they hold may be lost.
    ///
    /// # Errors
    /// [`Problem`] with the drive; nothing has been written to any of them then.
    pub(crate) fn claim(&mut self, bytes_each: u64, overwrite: bool) -> anyhow::Result<()> {
        self.check_room(bytes_each)?;
        for drive in &mut self.controllers {
            let found = if overwrite { Holds::Nothing } else { holds(drive)? };
            if let Holds::Store | Holds::Data = found {
                let message = format!(
                    "vfio:{}: the drive is not empty ({found}), and a replay overwrites it",
                    drive.id()
                );
                let hint = "if nothing on it is needed, say --overwrite; it keeps no copy";
                bail!(Problem::new(message, hint));
            }
        }
        for drive in &mut self.controllers {
            let space = namespace(drive).clone();
            let mut block = vec![0; 1 << space.lba_shift];
            block[..MARK.len()].copy_from_slice(MARK);
            drive.write(space.nsid, Lba(0), &block, true).context("marking a drive as scratch")?;
        }
        Ok(())
    }

    /// Refuses drives that are too small.
    ///
    /// # Errors
    /// [`Problem`] with the drive.
    pub(crate) fn check_room(&self, bytes_each: u64) -> Result<(), Problem> {
        for drive in &self.controllers {
            let (_, lbas) = region(namespace(drive));
            let found = lbas << namespace(drive).lba_shift;
            if found < bytes_each {
                let message = format!(
                    "vfio:{}: the store needs {} on each drive, this one has room for {}",
                    drive.id(),
                    Size(bytes_each),
                    Size(found)
                );
                let hint = "set --capacity or --requests, or use more drives";
                return Err(Problem::new(message, hint));
            }
        }
        Ok(())
    }

    /// Whether the drives hold a store; if not, they are empty, or a replay's that kept nothing.
    ///
    /// # Errors
    /// [`Problem`] with a drive that holds something else, or has no part in the others' store.
    pub(crate) fn hold_store(&mut self) -> anyhow::Result<bool> {
        let mut without = None;
        let mut stores = 0;
        for drive in &mut self.controllers {
            match holds(drive)? {
                Holds::Store => stores += 1,
                Holds::Nothing | Holds::Scratch => without = Some(drive.id().to_owned()),
                Holds::Data => {
                    let hint = "if nothing on it is needed, say --overwrite; it keeps no copy";
                    let message = format!("vfio:{}: the drive is not empty", drive.id());
                    bail!(Problem::new(message, hint));
                }
            }
        }
        match without {
            Some(drive) if stores > 0 => bail!(Problem::new(
                format!(
                    "vfio:{drive}: there is no store on it, and on others of the drives is one"
                ),
                "name the drives of one store, or say --overwrite to make a new one of them all",
            )),
            without => Ok(without.is_none()),
        }
    }

    /// Removes what partition tables, other formats and replays left at the drives' edges.
    ///
    /// # Errors
    /// When a drive cannot be written.
    pub(crate) fn clear_edges(&mut self) -> anyhow::Result<()> {
        for drive in &mut self.controllers {
            let space = namespace(drive).clone();
            for lba in edges(&space) {
                let zeroes = vec![0; EDGE_BYTES as usize];
                drive.write(space.nsid, lba, &zeroes, true).context("clearing a drive's edges")?;
            }
        }
        Ok(())
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

/// Every drive has to reach the peer's memory, in every way it will be used.
fn prove_peer(bar: &PeerBar, controllers: &mut [Controller]) -> anyhow::Result<()> {
    for drive in controllers {
        let bytes = p2p::scratch_bytes(drive);
        let scratch = DmaSlice::new(bar.memory().clone(), 0, bytes)
            .context("the peer's memory is too small to be tried")?;
        if let Some(why) = prove(drive, &scratch)? {
            bail!("vfio:{} does not reach the memory of {}: {why}", drive.id(), bar.address());
        }
    }
    Ok(())
}

/// Whether a drive reaches `scratch`, of at least [`p2p::scratch_bytes`], in every way it will be
/// used: `None`, or why not. Nothing is written to the drive, and it is ready afterwards.
///
/// # Errors
/// When the drive cannot be used any more.
pub(crate) fn prove(drive: &mut Controller, scratch: &DmaSlice) -> anyhow::Result<Option<String>> {
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
        drive.reset().with_context(|| format!("vfio:{}: resetting it", drive.id()))?;
    }
    Ok(why)
}

/// Whether a store fits on it.
///
/// # Errors
/// What is in the way.
pub(crate) fn usable(drive: &Controller) -> Result<(), Problem> {
    let Some(space) = drive.namespaces().first() else {
        let why: Vec<String> = drive
            .refused_namespaces()
            .iter()
            .map(|(nsid, error)| format!("{nsid}: {error}"))
            .collect();
        return Err(Problem::new(
            format!(
                "vfio:{}: it has no namespace that can be used ({})",
                drive.id(),
                why.join("; ")
            ),
            "create or format one with nvme-cli, then bind the drive again",
        ));
    };
    if space.lbas << space.lba_shift <= 3 * EDGE_BYTES {
        return Err(Problem::new(
            format!("vfio:{}: namespace {} is too small for a store", drive.id(), space.nsid),
            "use a drive of 16 MiB or more",
        ));
    }
    Ok(())
}

/// The namespace that is used: the first. [`usable`] saw that there is one.
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
pub(crate) fn is_scratch(first: &[u8]) -> bool {
    first.starts_with(MARK)
}

/// What a drive holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
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

fn holds(drive: &mut Controller) -> anyhow::Result<Holds> {
    let space = namespace(drive).clone();
    let mut read = |lba: Lba| {
        let mut bytes = vec![0; EDGE_BYTES as usize];
        let read = drive.read(space.nsid, lba, &mut bytes);
        read.context("checking whether a drive is empty").map(|()| bytes)
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
