//! Other paths to a drive: further controllers of its NVM subsystem that have namespaces in common
//! with it. The ports of a dual-port drive, and functions of SR-IOV.

use serde::Serialize;

use crate::drive::{self, Drive};
use crate::journal::Record;
use crate::pci::{Block, Function, PciAddress, Root};

/// Another path.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct OtherPath {
    /// `nvme1`; `None` while VFIO has it.
    pub(crate) controller: Option<String>,
    /// Its function; `None` for a controller that is not on PCI.
    pub(crate) bdf: Option<PciAddress>,
    /// The disks that both have, by the other path's names.
    #[serde(skip)]
    pub(crate) shared: Vec<Block>,
}

impl OtherPath {
    /// Returns a name for it.
    pub(crate) fn name(&self) -> String {
        let parts = [self.controller.clone(), self.bdf.map(|bdf| bdf.to_string())];
        parts.into_iter().flatten().collect::<Vec<_>>().join(" at ")
    }
}

/// Returns the other paths that the kernel has to the disks of a function.
pub(crate) fn others(root: &Root, bdf: PciAddress, disks: &[Block]) -> Vec<OtherPath> {
    let subsystem = |name: &String| {
        let text = root.text(format!("/sys/class/nvme/{name}/subsysnqn"));
        text.filter(|text| !text.is_empty())
    };
    let own = drive::controllers(root, bdf);
    let subsystems: Vec<String> = own.iter().filter_map(subsystem).collect();
    let names = root.names("/sys/class/nvme").into_iter().filter(|name| !own.contains(name));
    let siblings =
        names.filter(|name| subsystem(name).is_some_and(|nqn| subsystems.contains(&nqn)));
    let path = |name: String| {
        let mut shared = drive::disks_of_controller(root, &name);
        shared.retain(|block| disks.iter().any(|own| is_same(root, own, block)));
        let path = root.resolve(format!("/sys/class/nvme/{name}"));
        let bdf = path.and_then(|path| drive::in_path(&path).into_iter().next_back());
        OtherPath { controller: Some(name), bdf, shared }
    };
    siblings.map(path).filter(|path| !path.shared.is_empty()).collect()
}

/// Returns functions bound to VFIO that have the model and serial number of `drive`: other paths to
/// it, or functions of it with other namespaces, which only their user knows.
pub(crate) fn on_vfio(root: &Root, records: &[Record], drive: &Drive) -> Vec<OtherPath> {
    let bdf = drive.function.bdf;
    let same = |record: &&Record| {
        let is_it = record.serial == drive.serial && record.model == drive.model;
        record.bdf != bdf && is_it && drive.serial.is_some()
    };
    let is_bound = |record: &&Record| {
        let function = Function::read(root, record.bdf);
        function.is_some_and(|found| found.is_vfio() && found.ids() == record.ids)
    };
    let path =
        |record: &Record| OtherPath { controller: None, bdf: Some(record.bdf), shared: Vec::new() };
    records.iter().filter(same).filter(is_bound).map(path).collect()
}

/// Returns true if both disks are one namespace. Without native multipath it has a disk for each
/// path.
fn is_same(root: &Root, own: &Block, other: &Block) -> bool {
    if own.name == other.name {
        return true;
    }
    for what in ["wwid", "nguid", "eui", "uuid"] {
        let about = |block: &Block| {
            let text = root.text(format!("/sys/class/block/{}/{what}", block.name))?;
            // Zeroes mean that it has none.
            text.chars().any(|letter| !"0- ".contains(letter)).then_some(text)
        };
        if let (Some(own), Some(other)) = (about(own), about(other)) {
            return own == other;
        }
    }
    // In one subsystem, namespaces that are not shared have different numbers.
    let number = |block: &Block| {
        let number = root.number::<u32>(format!("/sys/class/block/{}/nsid", block.name));
        number.or_else(|| block.name.rsplit_once('n')?.1.parse().ok())
    };
    number(own) == number(other)
}
