//! Users of a disk: partitions, arrays, volumes, filesystems, swap.

use super::{Kind, Mount, Use};
use crate::drive::Block;
use crate::pci::Root;

/// A device in the stack on a disk.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) block: Block,
    /// True for the disk or a partition of it, false for devices built on top.
    pub(crate) is_own: bool,
    /// The disk or partition below it.
    own: String,
}

/// Returns the disk, its partitions, and all devices built on them.
pub(crate) fn stack(root: &Root, disk: &Block) -> Vec<Node> {
    let node = |block: Block| Node { own: block.name.clone(), block, is_own: true };
    let mut nodes = vec![node(disk.clone())];
    let folder = format!("/sys/block/{}", disk.name);
    let is_partition = |name: &String| root.exists(format!("{folder}/{name}/partition"));
    let partitions = root.names(&folder).into_iter().filter(is_partition);
    nodes.extend(partitions.filter_map(|name| Block::read(root, &name)).map(node));
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
pub(crate) fn holders(root: &Root, stack: &[Node]) -> Vec<Use> {
    let tops = stack.iter().filter(|node| !node.is_own);
    tops.map(|node| {
        let name = &node.block.name;
        let folder = format!("/sys/block/{name}");
        let uuid = root.text(format!("{folder}/dm/uuid")).unwrap_or_default();
        let label = root.text(format!("{folder}/dm/name"));
        let kind = match uuid.split('-').next() {
            Some("LVM") => Kind::Lvm,
            Some("CRYPT") => Kind::Crypt,
            _ if label.is_some() => Kind::DeviceMapper,
            _ if name.starts_with("md") => Kind::Md,
            _ if name.starts_with("bcache") => Kind::Bcache,
            _ => Kind::Holder,
        };
        let level = root.text(format!("{folder}/md/level"));
        let more = label.or(level).map(|text| format!(" ({text})")).unwrap_or_default();
        Use::new(kind, node.own.clone(), format!("{name}{more}"))
    })
    .collect()
}

/// Returns mounted filesystems and swap on the stack.
pub(crate) fn mounted(root: &Root, stack: &[Node], mounts: &[Mount]) -> Vec<Use> {
    let swaps = root.text("/proc/swaps").unwrap_or_default();
    let swaps: Vec<String> = swaps
        .lines()
        .skip(1)
        .filter_map(|line| device_name(root, line.split(' ').next()?))
        .collect();
    // A mount source of a multi-device btrfs names only one of its devices.
    let families = btrfs_families(root);
    let sources: Vec<Option<String>> =
        mounts.iter().map(|mount| device_name(root, &mount.source)).collect();
    let mut uses = Vec::new();
    for node in stack {
        let name = &node.block.name;
        let via = if node.is_own { String::new() } else { format!(" through {name}") };
        let family = families.iter().find(|family| family.contains(name));
        let same = |source: &String| {
            source == name || family.is_some_and(|family| family.contains(source))
        };
        let mut is_mounted = false;
        for (mount, source) in mounts.iter().zip(&sources) {
            if mount.number != node.block.number && !source.as_ref().is_some_and(same) {
                continue;
            }
            is_mounted = true;
            let kind = if mount.target == "/" && mount.pid.is_none() {
                Kind::RootFilesystem
            } else {
                Kind::Mount
            };
            let pid = mount.pid.map(|pid| format!(" in the namespace of pid {pid}"));
            let by = format!("{} ({}{via}){}", mount.target, mount.fs, pid.unwrap_or_default());
            uses.push(Use::new(kind, node.own.clone(), by));
        }
        if family.is_some() && !is_mounted {
            let by = format!("is mounted{via}, where is not visible");
            uses.push(Use::new(Kind::Btrfs, node.own.clone(), by));
        }
        if swaps.contains(name) {
            uses.push(Use::new(Kind::Swap, node.own.clone(), via.trim_start()));
        }
    }
    uses
}

/// Returns users without a holder entry: mdstat, loop devices and the NVMe target.
pub(crate) fn elsewhere(root: &Root, stack: &[Node]) -> Vec<Use> {
    let mdstat = root.text("/proc/mdstat").unwrap_or_default();
    let loops = root.names("/sys/block").into_iter().filter_map(|name| {
        let file = root.text(format!("/sys/block/{name}/loop/backing_file"))?;
        Some((Kind::Loop, device_name(root, &file)?, name))
    });
    let target = "/sys/kernel/config/nvmet/subsystems";
    let exported = root.names(target).into_iter().flat_map(|subsystem| {
        let folder = format!("{target}/{subsystem}/namespaces");
        let paths = root
            .names(&folder)
            .into_iter()
            .filter_map(move |namespace| root.text(format!("{folder}/{namespace}/device_path")));
        let subsystem = subsystem.clone();
        paths.filter_map(move |path| {
            Some((Kind::NvmeTarget, device_name(root, &path)?, subsystem.clone()))
        })
    });
    let users: Vec<(Kind, String, String)> = loops.chain(exported).collect();
    let mut uses = Vec::new();
    for node in stack {
        let name = &node.block.name;
        let member = format!("{name}[");
        for line in mdstat.lines().filter(|line| line.contains(" : ")) {
            if line.split(' ').any(|word| word.starts_with(&member)) {
                let array = line.split(' ').next().unwrap_or_default();
                uses.push(Use::new(Kind::Md, node.own.clone(), format!("{array} in mdstat")));
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

/// Returns the devices of each mounted btrfs.
fn btrfs_families(root: &Root) -> Vec<Vec<String>> {
    let ids = root.names("/sys/fs/btrfs");
    let families = ids.iter().map(|id| root.names(format!("/sys/fs/btrfs/{id}/devices")));
    families.filter(|devices| !devices.is_empty()).collect()
}
