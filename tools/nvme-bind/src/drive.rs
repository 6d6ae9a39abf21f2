//! NVMe drives: their attributes in sysfs, and the names by which users refer to them.

use std::path::Path;

use crate::pci::{self, Block, Function, PciAddress, Root};
use crate::problem::{Problem, Result};

/// A function of class NVMe; its other attributes are known only while the kernel's driver owns it.
#[derive(Debug, Clone)]
pub(crate) struct Drive {
    pub(crate) function: Function,
    /// `nvme0`.
    pub(crate) controller: Option<String>,
    pub(crate) model: Option<String>,
    pub(crate) serial: Option<String>,
    pub(crate) disks: Vec<Block>,
}

impl Drive {
    pub(crate) fn read(root: &Root, function: Function) -> Self {
        let folder = format!("{}/nvme", pci::sysfs(function.bdf));
        let controller = root.names(&folder).into_iter().find(|name| name.starts_with("nvme"));
        let about = |what: &str| {
            let name = controller.as_ref()?;
            root.text(format!("{folder}/{name}/{what}")).filter(|text| !text.is_empty())
        };
        let (model, serial) = (about("model"), about("serial"));
        let disks = disks(root, function.bdf);
        Self { function, controller, model, serial, disks }
    }

    /// Returns the capacity; `None` while it has no block device.
    pub(crate) fn bytes(&self) -> Option<u64> {
        (!self.disks.is_empty()).then(|| self.disks.iter().map(|disk| disk.bytes).sum())
    }
}

/// Returns all NVMe drives on the PCI bus.
pub(crate) fn drives(root: &Root) -> Vec<Drive> {
    let functions = pci::functions(root).into_iter().filter(Function::is_nvme);
    functions.map(|function| Drive::read(root, function)).collect()
}

/// Returns the whole disks behind a function, for any kind of controller.
pub(crate) fn disks(root: &Root, bdf: PciAddress) -> Vec<Block> {
    let mut names: Vec<String> = root
        .names("/sys/block")
        .into_iter()
        .filter(|name| below(root, name).contains(&bdf))
        .collect();
    // With native multipath the function has a hidden path, and the disk is outside the PCI tree.
    for controller in controllers(root, bdf) {
        names.extend(disk_names(root, &controller));
    }
    blocks(root, names)
}

/// Returns the names of the kernel's NVMe controllers of a function.
pub(crate) fn controllers(root: &Root, bdf: PciAddress) -> Vec<String> {
    root.names(format!("{}/nvme", pci::sysfs(bdf)))
}

/// Returns the whole disks behind a controller, in the order of their namespaces.
pub(crate) fn disks_of_controller(root: &Root, controller: &str) -> Vec<Block> {
    blocks(root, disk_names(root, controller))
}

fn disk_names(root: &Root, controller: &str) -> Vec<String> {
    let inside = root.names(format!("/sys/class/nvme/{controller}"));
    let disk = |name: &String| {
        let is_disk = name.starts_with(&format!("{controller}n"));
        multipath_head(name).or_else(|| is_disk.then(|| name.clone()))
    };
    inside.iter().filter_map(disk).collect()
}

fn blocks(root: &Root, mut names: Vec<String>) -> Vec<Block> {
    // By number: namespace 3 before 17.
    let numbers = |name: &String| -> Vec<u64> {
        let digits = name.split(|letter: char| !letter.is_ascii_digit());
        digits.filter_map(|number| number.parse().ok()).collect()
    };
    names.sort_by_cached_key(|name| (numbers(name), name.clone()));
    names.dedup();
    names.iter().filter_map(|name| Block::read(root, name)).collect()
}

/// Returns the reason why a virtual function (SR-IOV) may have no controller.
pub(crate) fn offline(root: &Root, drive: &Drive) -> Option<String> {
    let parent = root.link_name(format!("{}/physfn", pci::sysfs(drive.function.bdf)))?;
    let is_unknown = drive.controller.is_none() && !drive.function.is_vfio();
    is_unknown.then(|| {
        format!(
            "{} is a virtual function of {parent}, and the kernel found no controller in it: its \
             secondary controller may be offline (nvme list-secondary, then nvme virt-mgmt with \
             action 9 on the controller of {parent})",
            drive.function.bdf
        )
    })
}

/// Returns the functions above a block device in the device tree.
fn below(root: &Root, block: &str) -> Vec<PciAddress> {
    let Some(path) = root.resolve(format!("/sys/class/block/{block}")) else { return Vec::new() };
    in_path(&path)
}

/// Returns the functions in a path of /sys, from the root port on.
pub(crate) fn in_path(path: &Path) -> Vec<PciAddress> {
    path.iter().filter_map(|part| part.to_str()).filter_map(pci::full_address).collect()
}

/// Maps path `nvme2c5n1` (controller 5) to the disk `nvme2n1` of subsystem 2.
fn multipath_head(path: &str) -> Option<String> {
    let (subsystem, rest) = path.strip_prefix("nvme")?.split_once('c')?;
    let (controller, namespace) = rest.split_once('n')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let all = digits(subsystem) && digits(controller) && digits(namespace);
    all.then(|| format!("nvme{subsystem}n{namespace}"))
}

/// Resolves a name to a function; with a note if the name was not a full address.
pub(crate) fn named(root: &Root, text: &str) -> Result<(Function, Option<String>)> {
    if let Ok(bdf) = text.parse::<PciAddress>() {
        return by_address(root, text, bdf);
    }
    let name = text.strip_prefix("/dev/").unwrap_or(text);
    // /dev/disk/by-id and similar names are links.
    let resolved = root.resolve(format!("/dev/{name}"));
    let name = resolved.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
    let name = name.unwrap_or_else(|| text.rsplit('/').next().unwrap_or(text));
    if let Some(whole) = whole_disk(root, name) {
        return Err(Problem::usage(
            format!("{text} is a name of a partition, and VFIO takes whole drives"),
            format!("name the drive, {whole}, if all that is on it may be handed over"),
        ));
    }
    let mut owners = ["/sys/class/block", "/sys/class/nvme"]
        .iter()
        .find_map(|class| root.resolve(format!("{class}/{name}")))
        .map(|path| in_path(&path).into_iter().next_back().into_iter().collect::<Vec<_>>())
        .unwrap_or_default();
    if owners.is_empty() && name.starts_with("nvme") {
        let nvme = pci::functions(root).into_iter().filter(Function::is_nvme);
        let behind = |bdf: PciAddress| disks(root, bdf).iter().any(|block| block.name == name);
        owners = nvme.map(|function| function.bdf).filter(|&bdf| behind(bdf)).collect();
    }
    match owners[..] {
        [bdf] => {
            let function = Function::read(root, bdf).ok_or_else(|| unknown(text))?;
            Ok((function, Some(format!("{text} is {bdf}"))))
        }
        [] => Err(unknown(text)),
        _ => {
            let list: Vec<String> = owners.iter().map(PciAddress::to_string).collect();
            let message =
                format!("{text} is reached through several functions: {}", list.join(", "));
            Err(Problem::usage(message, "name the functions themselves"))
        }
    }
}

/// Returns the disk of a partition, also for partition names that do not exist.
fn whole_disk(root: &Root, name: &str) -> Option<String> {
    let folder = format!("/sys/class/block/{name}");
    if root.exists(format!("{folder}/partition")) {
        let disk = root.resolve(folder)?.parent()?.file_name()?.to_str()?.to_owned();
        return Some(disk);
    }
    let (disk, number) = name.strip_prefix("nvme")?.rsplit_once('p')?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| format!("nvme{disk}"))
}

fn by_address(root: &Root, text: &str, bdf: PciAddress) -> Result<(Function, Option<String>)> {
    if let Some(function) = Function::read(root, bdf) {
        return Ok((function, None));
    }
    let short = text.matches(':').count() == 1;
    let same = |other: &Function| PciAddress { domain: 0, ..other.bdf } == bdf;
    let others: Vec<Function> =
        pci::functions(root).into_iter().filter(|other| short && same(other)).collect();
    match &others[..] {
        [one] => Ok((one.clone(), Some(format!("{text} is {}", one.bdf)))),
        [] => Err(unknown(text)),
        _ => Err(Problem::usage(
            format!("{text} is there in {} PCI domains", others.len()),
            "write the address in full, as `nvme-bind list` does",
        )),
    }
}

fn unknown(text: &str) -> Problem {
    Problem::usage(
        format!("no PCI function or NVMe disk `{text}` here"),
        "`nvme-bind list` shows the drives; addresses look like 65:00.0, disks like nvme0n1",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_partitions_are_told_from_those_of_disks() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::new(folder.path()).unwrap();
        assert_eq!(whole_disk(&root, "nvme0n1p12").as_deref(), Some("nvme0n1"));
        for other in ["nvme0n1", "nvme0", "nvme2c5n1", "nvme0n1p", "nvme0n1px", "sdp1", "p1"] {
            assert_eq!(whole_disk(&root, other), None, "{other}");
        }
    }

    #[test]
    fn paths_of_multipath_lead_to_their_disk() {
        assert_eq!(multipath_head("nvme2c5n1").as_deref(), Some("nvme2n1"));
        for other in ["nvme2n1", "nvme2", "hwmon3", "nvme2c5", "nvmecn"] {
            assert_eq!(multipath_head(other), None, "{other}");
        }
    }
}
