//! Users of a function: everything that would break if the kernel's driver released it.

mod disks;
mod mounts;
mod signature;

use serde::Serialize;

use crate::drive::{self, Block};
use crate::pci::{self, Function, OpenFile};
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
    Bcache,
    Loop,
    NvmeTarget,
    Holder,
    OpenFile,
    Claimed,
    Network,
    Display,
    /// A RAID, LVM or ZFS member that is not currently active.
    Member,
    /// A filesystem or partition table that is not in use.
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
            Kind::Loop => "loop device",
            Kind::NvmeTarget => "NVMe target",
            Kind::Holder => "held by",
            Kind::OpenFile => "open in",
            Kind::Claimed => "claimed",
            Kind::Network => "network",
            Kind::Display => "display",
            Kind::Member => "inactive member",
            Kind::Data => "holds data",
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
            Kind::Claimed | Kind::Member | Kind::Data => self.kind.words().into(),
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

/// Data read once for all functions.
#[derive(Debug)]
pub(crate) struct Scene {
    mounts: Vec<Mount>,
    open: Vec<OpenFile>,
    hidden_processes: usize,
}

impl Scene {
    pub(crate) fn read(root: &Root) -> Self {
        let (open, hidden_processes) = pci::open_files(root);
        Self { mounts: mounts::read(root), open, hidden_processes }
    }

    /// Returns the users of the VFIO group.
    pub(crate) fn group_users(&self, group: u32) -> Vec<Use> {
        let node = format!("/dev/vfio/{group}");
        let users = self.open.iter().filter(|file| file.path == node);
        users.map(|file| Use::new(Kind::OpenFile, node.clone(), file.process())).collect()
    }

    /// Returns a message if some processes could not be inspected.
    fn blind(&self) -> Option<String> {
        let hidden = self.hidden_processes;
        let text = || format!("the open files of {hidden} processes are visible only to root");
        (hidden > 0).then(text)
    }

    /// Returns the users of `function`. With `claim`, the result holds claims on its disks.
    pub(crate) fn usage(&self, root: &Root, function: &Function, claim: bool) -> Usage {
        let mut usage = Usage { blind: self.blind().into_iter().collect(), ..Usage::default() };
        let disks = drive::disks(root, function.bdf);
        usage.uses.extend(self.nodes_in_use(root, function, &disks));
        for disk in &disks {
            let stack = disks::stack(root, disk);
            usage.uses.extend(disks::holders(root, &stack));
            usage.uses.extend(disks::mounted(root, &stack, &self.mounts));
            usage.uses.extend(disks::elsewhere(root, &stack));
            for block in stack.iter().filter(|node| node.is_own) {
                let (found, blind) = signature::uses(root, &block.block);
                usage.uses.extend(found);
                usage.blind.extend(blind);
            }
            if claim {
                self.claim(root, disk, &mut usage);
            }
        }
        usage.uses.extend(network(root, function));
        if function.is_display() {
            usage.uses.push(Use::new(Kind::Display, function.bdf.to_string(), ""));
        }
        usage.uses.sort();
        usage.uses.dedup();
        usage
    }

    fn claim(&self, root: &Root, disk: &Block, usage: &mut Usage) {
        match root.claim(&format!("/dev/{}", disk.name)) {
            Claim::Held(file) => usage.claims.push(file),
            // Mounts in invisible namespaces, ZFS, and other kernel users without a visible sign.
            Claim::Busy if usage.uses.iter().any(Use::is_active) => {}
            Claim::Busy => {
                let by = "by the kernel, for something that is not visible from here";
                usage.uses.push(Use::new(Kind::Claimed, disk.name.clone(), by));
            }
            Claim::Unknown(why) => usage.blind.push(format!("not claimed: {why}")),
        }
    }

    fn nodes_in_use(&self, root: &Root, function: &Function, disks: &[Block]) -> Vec<Use> {
        let folder = pci::sysfs(function.bdf);
        let mut names = root.names(format!("{folder}/nvme"));
        // Nodes of other userspace drivers, on machines without an IOMMU.
        names.extend(root.names(format!("{folder}/uio")));
        let mut numbers = Vec::new();
        for disk in disks {
            for node in disks::stack(root, disk).into_iter().filter(|node| node.is_own) {
                // The generic character device of a namespace.
                names.push(node.block.name.replacen("nvme", "ng", 1));
                numbers.push(node.block.number);
                names.push(node.block.name);
            }
        }
        let users = self.open.iter().filter_map(|file| {
            let name = file.path.strip_prefix("/dev/").unwrap_or(&file.path);
            let same_name = names.iter().any(|own| own == name);
            let same_number = file.number.as_ref().is_some_and(|number| numbers.contains(number));
            let by = || Use::new(Kind::OpenFile, name, file.process());
            (same_name || same_number).then(by)
        });
        users.collect()
    }
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
