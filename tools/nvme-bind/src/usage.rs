//! Users of a function: everything that would break if the kernel's driver released it.

mod disks;
mod mounts;
mod signature;

use std::cell::RefCell;

use serde::Serialize;

use crate::drive::{self, Block};
use crate::paths;
use crate::pci::{self, DeviceNode, Function, OpenFile};
use crate::pci::{Claim, Root};

pub(crate) use mounts::Mount;

/// Kinds of use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    RootFilesystem,
    Mount,
    Swap,
    Md,
    Lvm,
    Crypt,
    DeviceMapper,
    Zfs,
    Btrfs,
    Bcachefs,
    Bcache,
    Loop,
    Zram,
    NvmeTarget,
    ScsiTarget,
    Holder,
    OpenFile,
    Claimed,
    Network,
    Display,
    /// A member of a RAID, volume group or pool that is not currently active.
    Member,
    /// Other data that is not in use: a filesystem, a partition table, something unknown.
    Data,
}

impl Kind {
    fn words(self) -> &'static str {
        match self {
            Kind::RootFilesystem => "the root filesystem",
            Kind::Mount => "mounted",
            Kind::Swap => "swap",
            Kind::Md => "md RAID",
            Kind::Lvm => "LVM",
            Kind::Crypt => "dm-crypt",
            Kind::DeviceMapper => "device mapper",
            Kind::Zfs => "ZFS pool",
            Kind::Btrfs => "btrfs",
            Kind::Bcache => "bcache",
            Kind::Bcachefs => "bcachefs",
            Kind::Loop => "loop device",
            Kind::Zram => "compressed memory",
            Kind::NvmeTarget => "NVMe target",
            Kind::ScsiTarget => "SCSI target",
            Kind::Holder => "held by",
            Kind::OpenFile => "open in",
            Kind::Claimed => "claimed",
            Kind::Network => "network",
            Kind::Display => "display",
            Kind::Member | Kind::Data => "holds",
        }
    }
}

/// One use of one device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Use {
    pub(crate) kind: Kind,
    /// The device in use: `nvme0n1p2`.
    pub(crate) device: String,
    /// Its user: a mount point, a process, an array.
    pub(crate) by: String,
}

impl Use {
    fn new(kind: Kind, device: impl Into<String>, by: impl Into<String>) -> Self {
        Self { kind, device: device.into(), by: by.into() }
    }

    /// Returns true if the use is current.
    pub(crate) fn is_active(&self) -> bool {
        !matches!(self.kind, Kind::Member | Kind::Data)
    }

    /// Describes it in one line.
    pub(crate) fn sentence(&self) -> String {
        let space = if self.by.is_empty() { "" } else { " " };
        format!("{}: {}{space}{}", self.device, self.kind.words(), self.by)
    }

    /// Describes it for a narrow column.
    pub(crate) fn short(&self) -> String {
        match self.kind {
            Kind::RootFilesystem => "/".into(),
            Kind::Mount => self.by.split(' ').next().unwrap_or_default().into(),
            Kind::Swap => "swap".into(),
            Kind::Claimed => self.kind.words().into(),
            Kind::Member => "inactive member".into(),
            Kind::Data => "holds data".into(),
            _ => format!("{} {}", self.kind.words(), self.by),
        }
    }
}

/// All uses of a function, and the limits of the check.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    pub(crate) uses: Vec<Use>,
    /// Reasons why further uses may be invisible.
    pub(crate) blind: Vec<String>,
    /// The open disks; no other process can claim them while these files are open.
    pub(crate) claims: Vec<std::fs::File>,
}

/// Search for the kernel's own users of a disk, which have no visible sign, such as mounts in
/// invisible namespaces: an exclusive claim fails then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claims {
    /// Claims the disks, and keeps the claims in the result: no new use can begin.
    Hold,
    /// As root, claims each disk for a moment, unless it is known to be in use.
    Try,
}

/// Data read once for all functions.
#[derive(Debug)]
pub(crate) struct Scene {
    mounts: Vec<Mount>,
    open: Vec<OpenFile>,
    hidden_processes: usize,
    /// Names of the disks whose claims are held.
    held: RefCell<Vec<String>>,
}

impl Scene {
    pub(crate) fn read(root: &Root) -> Self {
        let (open, hidden_processes) = pci::open_files(root);
        Self { mounts: mounts::read(root), open, hidden_processes, held: RefCell::default() }
    }

    /// Returns the users of a function through VFIO.
    pub(crate) fn vfio_users(&self, root: &Root, function: &Function) -> Vec<Use> {
        pci::vfio_files(root, function.bdf, &self.open).into_iter().map(user).collect()
    }

    /// Returns the processes that have one of the nodes open.
    fn users(&self, nodes: &[DeviceNode]) -> Vec<Use> {
        let is_open = |file: &&OpenFile| nodes.iter().any(|node| node.is_open_as(file));
        self.open.iter().filter(is_open).map(user).collect()
    }

    /// Returns a message if some processes could not be inspected.
    fn blind(&self) -> Option<String> {
        let hidden = self.hidden_processes;
        let text = || format!("the open files of {hidden} processes are visible only to root");
        (hidden > 0).then(text)
    }

    /// Returns the users of `function`.
    pub(crate) fn usage(&self, root: &Root, function: &Function, claims: Claims) -> Usage {
        let mut usage = Usage { blind: self.blind().into_iter().collect(), ..Usage::default() };
        let mut disks = drive::disks(root, function.bdf);
        usage.uses.extend(self.vfio_users(root, function));
        for controller in drive::controllers(root, function.bdf) {
            usage.uses.extend(self.controller_users(root, &controller));
        }
        // Nodes of other userspace drivers, on machines without an IOMMU.
        let folder = format!("{}/uio", pci::sysfs(function.bdf));
        let node =
            |name: &String| DeviceNode::of_characters(root, name, &format!("{folder}/{name}"));
        usage.uses.extend(self.users(&root.names(&folder).iter().map(node).collect::<Vec<_>>()));
        for disk in &disks {
            let stack = disks::stack(root, disk);
            usage.uses.extend(self.disk_users(root, &stack));
            for block in stack.iter().filter(|node| node.is_own) {
                let (found, blind) = signature::uses(root, &block.block);
                usage.uses.extend(found);
                usage.blind.extend(blind);
            }
        }
        for mut path in paths::others(root, function.bdf, &disks) {
            let mut uses: Vec<Use> = path
                .controller
                .iter()
                .flat_map(|controller| self.controller_users(root, controller))
                .collect();
            path.shared.retain(|other| disks.iter().all(|disk| disk.name != other.name));
            for disk in &path.shared {
                uses.extend(self.disk_users(root, &disks::stack(root, disk)));
            }
            let name = path.name();
            for found in &mut uses {
                found.by = format!("{} (another path, {name})", found.by).trim_start().to_owned();
            }
            usage.uses.extend(uses);
            disks.append(&mut path.shared);
        }
        usage.uses.extend(network(root, function));
        if function.is_display() && !function.is_vfio() {
            usage.uses.push(Use::new(Kind::Display, function.bdf.to_string(), ""));
        }
        self.claim(root, &disks, claims, &mut usage);
        usage.uses.sort();
        usage.uses.dedup();
        usage
    }

    /// Returns the users of a controller of the kernel's driver, apart from its disks.
    fn controller_users(&self, root: &Root, name: &str) -> Vec<Use> {
        let node = DeviceNode::of_characters(root, name, &format!("/sys/class/nvme/{name}"));
        let mut uses = self.users(&[node]);
        uses.extend(disks::passthru(root, name));
        uses
    }

    fn disk_users(&self, root: &Root, stack: &[disks::Node]) -> Vec<Use> {
        let mut nodes = Vec::new();
        for block in stack.iter().filter(|node| node.is_own).map(|node| &node.block) {
            let number = Some(format!("b{}", block.number));
            nodes.push(DeviceNode { path: format!("/dev/{}", block.name), number });
            // The generic character device of a namespace.
            let generic = block.name.replacen("nvme", "ng", 1);
            let class = format!("/sys/class/nvme-generic/{generic}");
            nodes.push(DeviceNode::of_characters(root, &generic, &class));
        }
        let mut uses = self.users(&nodes);
        uses.extend(disks::holders(root, stack));
        uses.extend(disks::mounted(root, stack, &self.mounts));
        uses.extend(disks::elsewhere(root, stack));
        uses
    }

    /// Tries to claim disks that have no visible user.
    fn claim(&self, root: &Root, disks: &[Block], claims: Claims, usage: &mut Usage) {
        let is_used = usage.uses.iter().any(Use::is_active);
        let may = !root.is_real() || rustix::process::geteuid().is_root();
        if claims == Claims::Try && (is_used || !may) {
            if !may && !is_used && !disks.is_empty() {
                usage.blind.push("what the kernel itself holds is visible only to root".into());
            }
            return;
        }
        let mut held = self.held.borrow_mut();
        // Two paths of one drive may be bound together.
        for disk in disks {
            if held.contains(&disk.name) {
                continue;
            }
            match root.claim(&format!("/dev/{}", disk.name)) {
                Claim::Held(file) if claims == Claims::Hold => {
                    usage.claims.push(file);
                    held.push(disk.name.clone());
                }
                Claim::Held(_) => {}
                Claim::Busy if is_used => {}
                Claim::Busy => {
                    let by = "by the kernel, for something that is not visible from here";
                    usage.uses.push(Use::new(Kind::Claimed, disk.name.clone(), by));
                }
                Claim::Unknown(why) => usage.blind.push(format!("not claimed: {why}")),
            }
        }
    }
}

/// Returns the users of a disk of the kernel's driver, each in one line, without this process and
/// those that hold only an exclusive claim. `generic` is its other device: `nvme0n1`, `ng0n1`.
#[must_use]
pub fn users_of_disk(disk: &str, generic: &str) -> Vec<String> {
    let root = Root::machine();
    let Some(block) = Block::read(&root, disk) else { return Vec::new() };
    let scene = Scene::read(&root);
    let mut uses = scene.disk_users(&root, &disks::stack(&root, &block));
    let folder = format!("/sys/class/nvme-generic/{generic}");
    uses.extend(scene.users(&[DeviceNode::of_characters(&root, generic, &folder)]));
    let controller = root.link_name(format!("/sys/class/block/{disk}/device"));
    uses.extend(controller.iter().flat_map(|name| disks::passthru(&root, name)));
    uses.iter().map(Use::sentence).collect()
}

/// Describes the process that has a device open.
fn user(file: &OpenFile) -> Use {
    let name = file.path.strip_prefix("/dev/").filter(|name| !name.contains('/'));
    Use::new(Kind::OpenFile, name.unwrap_or(&file.path), file.process())
}

/// Returns network interfaces of the function that are up.
fn network(root: &Root, function: &Function) -> Vec<Use> {
    let folder = format!("{}/net", pci::sysfs(function.bdf));
    let is_up = |name: &String| {
        let flags = root.text(format!("{folder}/{name}/flags")).unwrap_or_default();
        let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16).unwrap_or(0);
        let state = root.text(format!("{folder}/{name}/operstate")).unwrap_or_default();
        flags & 1 == 1 || state == "up"
    };
    let names = root.names(&folder).into_iter().filter(is_up);
    names.map(|name| Use::new(Kind::Network, name, "interface is up")).collect()
}
