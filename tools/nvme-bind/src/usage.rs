//! Users of a function: everything that would break if the kernel's driver released it.

mod signature;

use std::cell::RefCell;

use crate::drive;
use crate::paths;
use crate::pci::{self, Block, Claim, DeviceNode, Function, Root, Use, UseKind, Users};

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
    pub(crate) users: Users,
    /// Names of the disks whose claims are held.
    held: RefCell<Vec<String>>,
}

impl Scene {
    pub(crate) fn read(root: &Root) -> Self {
        Self { users: Users::read(root), held: RefCell::default() }
    }

    /// Returns a message if some processes could not be inspected.
    fn blind(&self) -> Option<String> {
        let hidden = self.users.hidden_processes;
        let text = || format!("the open files of {hidden} processes are visible only to root");
        (hidden > 0).then(text)
    }

    /// Returns the users of `function`.
    pub(crate) fn usage(&self, root: &Root, function: &Function, claims: Claims) -> Usage {
        let mut usage = Usage { blind: self.blind().into_iter().collect(), ..Usage::default() };
        let mut disks = drive::disks(root, function.bdf);
        usage.uses.extend(self.users.of_function(root, function.bdf));
        for controller in drive::controllers(root, function.bdf) {
            usage.uses.extend(self.users.of_controller(root, &controller));
        }
        // Nodes of other userspace drivers, on machines without an IOMMU.
        let folder = format!("{}/uio", pci::sysfs(function.bdf));
        let node =
            |name: &String| DeviceNode::of_characters(root, name, &format!("{folder}/{name}"));
        usage
            .uses
            .extend(self.users.of_nodes(&root.names(&folder).iter().map(node).collect::<Vec<_>>()));
        for disk in &disks {
            usage.uses.extend(self.users.of_disk(root, disk));
            for block in disk.clone().with_partitions(root) {
                let (found, blind) = signature::uses(root, &block);
                usage.uses.extend(found);
                usage.blind.extend(blind);
            }
        }
        for mut path in paths::others(root, function.bdf, &disks) {
            let mut uses: Vec<Use> = path
                .controller
                .iter()
                .flat_map(|controller| self.users.of_controller(root, controller))
                .collect();
            path.shared.retain(|other| disks.iter().all(|disk| disk.name != other.name));
            for disk in &path.shared {
                uses.extend(self.users.of_disk(root, disk));
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
            usage.uses.push(Use::new(UseKind::Display, function.bdf.to_string(), ""));
        }
        self.claim(root, &disks, claims, &mut usage);
        usage.uses.sort();
        usage.uses.dedup();
        usage
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
                    usage.uses.push(Use::new(UseKind::Claimed, disk.name.clone(), by));
                }
                Claim::Unknown(why) => usage.blind.push(format!("not claimed: {why}")),
            }
        }
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
    names.map(|name| Use::new(UseKind::Network, name, "interface is up")).collect()
}
