//! Users of a disk: everything that would break if the kernel's driver released it.

mod mounts;
mod stack;

use serde::Serialize;

use crate::open::{DeviceNode, OpenFile, open_files, vfio_files};
use crate::{Block, PciAddress, Root};

use mounts::Mount;

/// Kinds of use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UseKind {
    /// Mounted as `/`.
    RootFilesystem,
    /// Mounted elsewhere.
    Mount,
    /// Swap space.
    Swap,
    /// Member of an md array.
    Md,
    /// Below a logical volume.
    Lvm,
    /// Below dm-crypt.
    Crypt,
    /// Below another device of the device mapper.
    DeviceMapper,
    /// Member of an imported pool.
    Zfs,
    /// Device of a mounted btrfs that no mount names.
    Btrfs,
    /// Device of a mounted bcachefs that no mount names.
    Bcachefs,
    /// Device of bcache.
    Bcache,
    /// Below a loop device.
    Loop,
    /// Backing device of compressed memory.
    Zram,
    /// Exported by the kernel's NVMe target.
    NvmeTarget,
    /// Exported by the kernel's SCSI target.
    ScsiTarget,
    /// Below a device of another kind.
    Holder,
    /// Open in a process.
    OpenFile,
    /// Held by the kernel for something invisible.
    Claimed,
    /// A network interface that is up.
    Network,
    /// Graphics.
    Display,
    /// A member of a RAID, volume group or pool that is not currently active.
    Member,
    /// Other data that is not in use: a filesystem, a partition table, something unknown.
    Data,
}

impl UseKind {
    fn words(self) -> &'static str {
        match self {
            UseKind::RootFilesystem => "the root filesystem",
            UseKind::Mount => "mounted",
            UseKind::Swap => "swap",
            UseKind::Md => "md RAID",
            UseKind::Lvm => "LVM",
            UseKind::Crypt => "dm-crypt",
            UseKind::DeviceMapper => "device mapper",
            UseKind::Zfs => "ZFS pool",
            UseKind::Btrfs => "btrfs",
            UseKind::Bcache => "bcache",
            UseKind::Bcachefs => "bcachefs",
            UseKind::Loop => "loop device",
            UseKind::Zram => "compressed memory",
            UseKind::NvmeTarget => "NVMe target",
            UseKind::ScsiTarget => "SCSI target",
            UseKind::Holder => "held by",
            UseKind::OpenFile => "open in",
            UseKind::Claimed => "claimed",
            UseKind::Network => "network",
            UseKind::Display => "display",
            UseKind::Member | UseKind::Data => "holds",
        }
    }
}

/// One use of one device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Use {
    /// Its kind.
    pub kind: UseKind,
    /// The device in use: `nvme0n1p2`.
    pub device: String,
    /// Its user: a mount point, a process, an array.
    pub by: String,
}

impl Use {
    /// Creates it.
    #[must_use]
    pub fn new(kind: UseKind, device: impl Into<String>, by: impl Into<String>) -> Self {
        Self { kind, device: device.into(), by: by.into() }
    }

    /// Returns true if the use is current.
    #[must_use]
    pub fn is_active(&self) -> bool {
        !matches!(self.kind, UseKind::Member | UseKind::Data)
    }

    /// Describes it in one line.
    #[must_use]
    pub fn sentence(&self) -> String {
        let space = if self.by.is_empty() { "" } else { " " };
        format!("{}: {}{space}{}", self.device, self.kind.words(), self.by)
    }

    /// Describes it for a narrow column.
    #[must_use]
    pub fn short(&self) -> String {
        match self.kind {
            UseKind::RootFilesystem => "/".into(),
            UseKind::Mount => self.by.split(' ').next().unwrap_or_default().into(),
            UseKind::Swap => "swap".into(),
            UseKind::Claimed => self.kind.words().into(),
            UseKind::Member => "inactive member".into(),
            UseKind::Data => "holds data".into(),
            _ => format!("{} {}", self.kind.words(), self.by),
        }
    }
}

/// Users of the disks and functions of a machine, read once for all of them.
#[derive(Debug)]
pub struct Users {
    mounts: Vec<Mount>,
    open: Vec<OpenFile>,
    /// The number of processes whose open files may not be read.
    pub hidden_processes: usize,
}

impl Users {
    /// Reads mounts, and the open devices of all other processes.
    #[must_use]
    pub fn read(root: &Root) -> Self {
        let (open, hidden_processes) = open_files(root);
        Self { mounts: mounts::read(root), open, hidden_processes }
    }

    /// Returns the processes that have a function by VFIO.
    #[must_use]
    pub fn of_function(&self, root: &Root, bdf: PciAddress) -> Vec<Use> {
        vfio_files(root, bdf, &self.open).into_iter().map(user).collect()
    }

    /// Returns the processes that have one of the nodes open.
    #[must_use]
    pub fn of_nodes(&self, nodes: &[DeviceNode]) -> Vec<Use> {
        let is_open = |file: &&OpenFile| nodes.iter().any(|node| node.is_open_as(file));
        self.open.iter().filter(is_open).map(user).collect()
    }

    /// Returns the users of a controller of the kernel's driver, `nvme0`, apart from its disks.
    #[must_use]
    pub fn of_controller(&self, root: &Root, name: &str) -> Vec<Use> {
        let node = DeviceNode::of_characters(root, name, &format!("/sys/class/nvme/{name}"));
        let mut uses = self.of_nodes(&[node]);
        uses.extend(stack::passthru(root, name));
        uses
    }

    /// Returns the users of a disk and of all devices built on it.
    #[must_use]
    pub fn of_disk(&self, root: &Root, disk: &Block) -> Vec<Use> {
        let stack = stack::read(root, disk);
        let mut nodes = Vec::new();
        for block in stack.iter().filter(|node| node.is_own).map(|node| &node.block) {
            let number = Some(format!("b{}", block.number));
            nodes.push(DeviceNode { path: format!("/dev/{}", block.name), number });
            nodes.push(generic(root, &block.name.replacen("nvme", "ng", 1)));
        }
        let mut uses = self.of_nodes(&nodes);
        uses.extend(stack::holders(root, &stack));
        uses.extend(stack::mounted(root, &stack, &self.mounts));
        uses.extend(stack::elsewhere(root, &stack));
        uses
    }
}

/// Returns the generic character device of a namespace: `ng0n1`.
fn generic(root: &Root, name: &str) -> DeviceNode {
    DeviceNode::of_characters(root, name, &format!("/sys/class/nvme-generic/{name}"))
}

/// Returns the users on this machine of a disk or partition, without this process and without those
/// that hold only an exclusive claim. `generic_name` is the other device of a namespace, `ng1n1` of
/// `nvme0n1`: the numbers in the two names may differ. Nothing uses what is no disk.
#[must_use]
pub fn users_of_disk(disk: &str, generic_name: &str) -> Vec<Use> {
    let root = Root::machine();
    let Some(block) = Block::read(&root, disk) else { return Vec::new() };
    let users = Users::read(&root);
    let mut uses = users.of_disk(&root, &block);
    uses.extend(users.of_nodes(&[generic(&root, generic_name)]));
    let controller = root.link_name(format!("/sys/class/block/{disk}/device"));
    uses.extend(controller.iter().flat_map(|name| stack::passthru(&root, name)));
    uses
}

/// Describes the process that has a device open.
fn user(file: &OpenFile) -> Use {
    let name = file.path.strip_prefix("/dev/").filter(|name| !name.contains('/'));
    Use::new(UseKind::OpenFile, name.unwrap_or(&file.path), file.process())
}
