//! Users of a disk: partitions, arrays, volumes, filesystems, swap.

use super::{Mount, Use, UseKind};
use crate::{Block, Root};

/// A device in the stack on a disk.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) block: Block,
    /// True for the disk or a partition of it, false for devices built on top.
    pub(super) is_own: bool,
    /// The disk or partition below it.
    own: String,
}

/// Returns the disk, its partitions, and all devices built on them.
pub(super) fn read(root: &Root, disk: &Block) -> Vec<Node> {
    let node = |block: Block| Node { own: block.name.clone(), block, is_own: true };
    let mut nodes: Vec<Node> = disk.clone().with_partitions(root).into_iter().map(node).collect();
    let mut next = 0;
    while next < nodes.len() {
        let Node { block, own, .. } = nodes[next].clone();
        next += 1;
        for name in root.names(format!("/sys/class/block/{}/holders", block.name)) {
            let known = nodes.iter().any(|node| node.block.name == name && node.own == own);
            let block = Block::read(root, &name).filter(|_| !known);
            nodes.extend(block.map(|block| Node { block, is_own: false, own: own.clone() }));
        }
    }
    nodes
}

/// Returns the devices built on the disk.
pub(super) fn holders(root: &Root, stack: &[Node]) -> Vec<Use> {
    let tops = stack.iter().filter(|node| !node.is_own);
    tops.map(|node| {
        let name = &node.block.name;
        let folder = format!("/sys/block/{name}");
        let uuid = root.text(format!("{folder}/dm/uuid")).unwrap_or_default();
        let label = root.text(format!("{folder}/dm/name"));
        let kind = match uuid.split('-').next() {
            Some("LVM") => UseKind::Lvm,
            Some("CRYPT") => UseKind::Crypt,
            _ if label.is_some() => UseKind::DeviceMapper,
            _ if name.starts_with("md") => UseKind::Md,
            _ if name.starts_with("bcache") => UseKind::Bcache,
            _ => UseKind::Holder,
        };
        let level = root.text(format!("{folder}/md/level"));
        let more = label.or(level).map(|text| format!(" ({text})")).unwrap_or_default();
        Use::new(kind, node.own.clone(), format!("{name}{more}"))
    })
    .collect()
}

/// Returns mounted filesystems and swap on the stack.
pub(super) fn mounted(root: &Root, stack: &[Node], mounts: &[Mount]) -> Vec<Use> {
    let swaps = root.text("/proc/swaps").unwrap_or_default();
    let swaps: Vec<String> = swaps
        .lines()
        .skip(1)
        .filter_map(|line| device_name(root, line.split(' ').next()?))
        .collect();
    // A mount source of a multi-device btrfs names only one of its devices.
    let families = families(root);
    let names =
        |mount: &Mount| mount.devices().filter_map(|path| device_name(root, &path)).collect();
    let sources: Vec<Vec<String>> = mounts.iter().map(names).collect();
    let mut uses = Vec::new();
    for node in stack {
        let name = &node.block.name;
        let via = if node.is_own { String::new() } else { format!(" through {name}") };
        let family = families.iter().find(|(_, family)| family.contains(name));
        let same = |source: &String| {
            source == name || family.is_some_and(|(_, family)| family.contains(source))
        };
        let mut is_mounted = false;
        for (mount, sources) in mounts.iter().zip(&sources) {
            if mount.number != node.block.number && !sources.iter().any(same) {
                continue;
            }
            is_mounted = true;
            let kind = if mount.target == "/" && mount.pid.is_none() {
                UseKind::RootFilesystem
            } else {
                UseKind::Mount
            };
            let pid = mount.pid.map(|pid| format!(" in the namespace of pid {pid}"));
            let by = format!("{} ({}{via}){}", mount.target, mount.fs, pid.unwrap_or_default());
            uses.push(Use::new(kind, node.own.clone(), by));
        }
        if let Some((kind, _)) = family.filter(|_| !is_mounted) {
            let by = format!("is mounted{via}, where is not visible");
            uses.push(Use::new(*kind, node.own.clone(), by));
        }
        if swaps.contains(name) {
            uses.push(Use::new(UseKind::Swap, node.own.clone(), via.trim_start()));
        }
    }
    uses
}

/// Returns users without a holder entry: mdstat, loop devices, zram, and targets that export it.
pub(super) fn elsewhere(root: &Root, stack: &[Node]) -> Vec<Use> {
    let mdstat = root.text("/proc/mdstat").unwrap_or_default();
    let backed = [("loop/backing_file", UseKind::Loop), ("backing_dev", UseKind::Zram)];
    let mut users: Vec<(UseKind, String, String)> = Vec::new();
    for name in root.names("/sys/block") {
        for (file, kind) in backed {
            let path = root.text(format!("/sys/block/{name}/{file}"));
            let device = path.and_then(|path| device_name(root, &path));
            users.extend(device.map(|device| (kind, device, name.clone())));
        }
    }
    users.extend(nvme_targets(root));
    users.extend(scsi_targets(root));
    let mut uses = Vec::new();
    for node in stack {
        let name = &node.block.name;
        let member = format!("{name}[");
        for line in mdstat.lines().filter(|line| line.contains(" : ")) {
            if line.split(' ').any(|word| word.starts_with(&member)) {
                let array = line.split(' ').next().unwrap_or_default();
                uses.push(Use::new(UseKind::Md, node.own.clone(), format!("{array} in mdstat")));
            }
        }
        let own = users.iter().filter(|(_, device, _)| device == name);
        uses.extend(own.map(|(kind, _, by)| Use::new(*kind, node.own.clone(), by.clone())));
    }
    uses
}

/// Maps `/dev/mapper/vg-root` to `dm-0`, and `/dev/nvme0n1` to `nvme0n1`.
fn device_name(root: &Root, path: &str) -> Option<String> {
    let path = super::mounts::unescaped(path);
    let path = path.strip_prefix("/dev/")?.to_owned();
    let resolved = root.resolve(format!("/dev/{path}"));
    let name = resolved.as_deref().and_then(|path| path.strip_prefix("/dev").ok());
    // The node does not exist, or this is a copy of a machine without its /dev.
    Some(name.map_or(path, |name| name.to_string_lossy().into_owned()))
}

const NVME_TARGET: &str = "/sys/kernel/config/nvmet/subsystems";

/// Returns the devices that the kernel's NVMe target exports, and the names of its subsystems.
fn nvme_targets(root: &Root) -> Vec<(UseKind, String, String)> {
    let mut users = Vec::new();
    for subsystem in root.names(NVME_TARGET) {
        let folder = format!("{NVME_TARGET}/{subsystem}/namespaces");
        let namespaces = root.names(&folder).into_iter().map(|name| format!("{folder}/{name}"));
        // A whole controller: the target holds it, and none of its disks.
        for export in namespaces.chain([format!("{NVME_TARGET}/{subsystem}/passthru")]) {
            let path = root.text(format!("{export}/device_path")).filter(|_| is_on(root, &export));
            let device = path.and_then(|path| device_name(root, &path));
            users.extend(device.map(|device| (UseKind::NvmeTarget, device, subsystem.clone())));
        }
    }
    users
}

/// Returns the uses of a controller that go around its disks.
pub(super) fn passthru(root: &Root, controller: &str) -> Vec<Use> {
    let users = nvme_targets(root).into_iter().filter(|(_, device, _)| device == controller);
    users.map(|(kind, device, by)| Use::new(kind, device, by)).collect()
}

/// Returns the devices that the kernel's SCSI target (iSCSI, Fibre Channel) exports.
fn scsi_targets(root: &Root) -> Vec<(UseKind, String, String)> {
    const TARGET: &str = "/sys/kernel/config/target/core";
    let mut users = Vec::new();
    for adapter in root.names(TARGET) {
        for name in root.names(format!("{TARGET}/{adapter}")) {
            let folder = format!("{TARGET}/{adapter}/{name}");
            // `... File: /dev/nvme0n1  Size: ...`; the other one is what its administrator wrote.
            let about = root.text(format!("{folder}/info")).unwrap_or_default();
            let words = about.split_whitespace().map(str::to_owned);
            let paths = words.chain(root.text(format!("{folder}/udev_path")));
            let devices = paths.filter_map(|path| device_name(root, &path));
            let is_on = is_on(root, &folder);
            users.extend(
                devices
                    .filter(|_| is_on)
                    .map(|device| (UseKind::ScsiTarget, device, format!("{adapter}/{name}"))),
            );
        }
    }
    users
}

/// Returns false for an export that is configured and not enabled: it holds nothing.
fn is_on(root: &Root, folder: &str) -> bool {
    root.text(format!("{folder}/enable")).as_deref() != Some("0")
}

/// Returns the devices of each mounted filesystem that says which it has.
fn families(root: &Root) -> Vec<(UseKind, Vec<String>)> {
    let names = |folder: &str| {
        let ids = root.names(folder).into_iter();
        ids.map(|id| format!("{folder}/{id}")).collect::<Vec<_>>()
    };
    let btrfs = names("/sys/fs/btrfs").into_iter();
    let btrfs = btrfs.map(|folder| (UseKind::Btrfs, root.names(format!("{folder}/devices"))));
    let bcachefs = names("/sys/fs/bcachefs").into_iter().map(|folder| {
        let devices = root.names(&folder).into_iter();
        let block = |device| root.link_name(format!("{folder}/{device}/block"));
        (UseKind::Bcachefs, devices.filter_map(block).collect())
    });
    btrfs.chain(bcachefs).filter(|(_, devices)| !devices.is_empty()).collect()
}
