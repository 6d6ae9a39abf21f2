//! `bind`: hands drives to VFIO.

use serde_json::json;

use super::{Host, Reply};
use crate::drive::{self, Drive};
use crate::execute::half_done;
use crate::journal::{Phase, Record};
use crate::owner::Owner;
use crate::paths;
use crate::pci::{self, Function, PciAddress, Use, UseKind};
use crate::persist::{self, Boot};
use crate::plan::{self, Former, Step};
use crate::problem::{Kind, Problem, Result};
use crate::usage::{Claims, Scene, Usage};

/// Arguments of `bind`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Request {
    /// Addresses (0000:65:00.0, 65:00.0) or disks (nvme0n1, /dev/disk/by-id/...)
    #[arg(required = true, value_name = "DEVICE")]
    pub(crate) devices: Vec<String>,
    /// Let this user, by name or number, open the VFIO group
    #[arg(long, short)]
    pub(crate) user: Option<String>,
    /// Let the members of this group, by name or number, open the VFIO group
    #[arg(long, short)]
    pub(crate) group: Option<String>,
    /// Bind the other functions of the IOMMU group, too, after the same checks
    #[arg(long)]
    pub(crate) whole_group: bool,
    /// Bind the drives again at each boot, if they have the same serial numbers then (a systemd
    /// unit, a udev rule, the modules). Only root may be able to change this program, and the
    /// folders that it is in
    #[arg(long)]
    pub(crate) persist: bool,
    /// Take a drive that is a member of a RAID, volume group or pool which is not active
    #[arg(long)]
    pub(crate) ignore_members: bool,
    /// Take a drive even if a check of its uses could not be made (the checks that find a use still
    /// refuse it)
    #[arg(long)]
    pub(crate) allow_unchecked: bool,
    /// Refuse if the drive has another serial number; what --persist uses at boot
    #[arg(long, value_name = "SERIAL")]
    pub(crate) expect_serial: Option<String>,
    /// Make all checks, then print what would be written instead of writing it
    #[arg(long, short = 'n')]
    pub(crate) dry_run: bool,
}

pub(crate) fn run(host: &Host<'_>, request: &Request) -> Result<Reply> {
    let owner = Owner::named(host.root, request.user.as_deref(), request.group.as_deref())?;
    if request.persist {
        persist::check_program(host.root, &host.exe)?;
    }
    let lock = host.lock(request.dry_run)?;
    let drives = chosen(host, request)?;
    let others = companions(host, &drives, request.whole_group)?;
    let functions: Vec<Function> =
        drives.iter().map(|drive| drive.function.clone()).chain(others).collect();
    functions.iter().try_for_each(|function| is_alone(host, function))?;
    // Held until the drivers have changed: prevents new mounts in between.
    let usages = unused(host, request, &functions)?;
    let records = records(host, request, &functions, owner)?;
    let reply = if request.dry_run {
        host.rehearse(|site| site.bind(records))?
    } else {
        host.site().bind(records.clone())?;
        report(&records)
    };
    drop((usages, lock));
    Ok(reply)
}

/// Returns the named drives.
fn chosen(host: &Host<'_>, request: &Request) -> Result<Vec<Drive>> {
    let mut drives: Vec<Drive> = Vec::new();
    for name in &request.devices {
        let (function, note) = drive::named(host.root, name)?;
        let is_disk = note.is_some();
        note.into_iter().for_each(|note| host.note(note));
        if !function.is_nvme() {
            let message = format!("{} is a {}, not an NVMe drive", function.bdf, function.kind());
            return Err(Problem::usage(message, "`nvme-bind list` shows the drives"));
        }
        if !drives.iter().any(|drive| drive.function.bdf == function.bdf) {
            let drive = Drive::read(host.root, function);
            about(host, &drive, is_disk);
            drives.push(drive);
        }
    }
    let Some(wanted) = &request.expect_serial else { return Ok(drives) };
    let [drive] = &drives[..] else {
        return Err(Problem::usage("--expect-serial goes with one drive", ""));
    };
    match &drive.serial {
        Some(found) if found != wanted => {
            let message = format!("{} has serial {found}, not {wanted}", drive.function.bdf);
            Err(Problem::usage(message, "the drives have moved; look at `nvme-bind list`"))
        }
        Some(_) => Ok(drives),
        None if known_serial(host, &drive.function).as_ref() == Some(wanted) => Ok(drives),
        None => {
            let message = format!("the serial of {} cannot be read now", drive.function.bdf);
            Err(Problem::usage(message, "the kernel's nvme driver must have it for that"))
        }
    }
}

/// Notes what the name of a drive does not tell. `is_disk` is true if it was named by a disk.
fn about(host: &Host<'_>, drive: &Drive, is_disk: bool) {
    let (root, bdf) = (host.root, drive.function.bdf);
    if is_disk && drive.disks.len() > 1 {
        let names: Vec<&str> = drive.disks.iter().map(|disk| disk.name.as_str()).collect();
        host.note(format!("{bdf} is taken with all its disks: {}", names.join(", ")));
    }
    for path in paths::others(root, bdf, &drive.disks) {
        host.note(format!(
            "{bdf} is one path to its disks, and {} is another: only one process may use the store \
             on them",
            path.name()
        ));
    }
    let (records, _) = host.journal.read(root);
    for path in paths::on_vfio(root, &records, drive) {
        host.note(format!(
            "{} is bound to {}, and has the serial number of {bdf}: if both have a namespace in \
             common, only one process may use it",
            path.name(),
            pci::VFIO
        ));
    }
    drive::offline(root, drive).into_iter().for_each(|why| host.note(why));
}

/// Returns the serial number recorded when a drive was bound, since this boot.
fn known_serial(host: &Host<'_>, function: &Function) -> Option<String> {
    let record = host.journal.find(host.root, function.bdf)?;
    let is_it = function.is_vfio() && record.is_current(host.root) && record.ids == function.ids();
    record.serial.filter(|_| is_it)
}

/// Returns the other functions that must be bound to make the drives' groups usable.
fn companions(host: &Host<'_>, drives: &[Drive], whole_group: bool) -> Result<Vec<Function>> {
    let mut others: Vec<Function> = Vec::new();
    for drive in drives {
        let function = &drive.function;
        let Some(group) = function.group else {
            let link = format!("{}/iommu_group", pci::sysfs(function.bdf));
            let why = match host.root.link_name(link) {
                Some(_) => {
                    "is bound in VFIO's no-IOMMU mode, in which nothing confines its DMA; that is \
                     not supported"
                }
                None => "is in no IOMMU group: the IOMMU is off, or there is none",
            };
            let hint = "`nvme-bind doctor` says how to turn the IOMMU on";
            return Err(Problem::new(Kind::NotViable, format!("{} {why}", function.bdf), hint));
        };
        let is_chosen = |bdf: PciAddress| drives.iter().any(|drive| drive.function.bdf == bdf);
        let members = pci::group_members(host.root, group).into_iter();
        let blocking: Vec<Function> =
            members.filter(|other| !is_chosen(other.bdf) && !other.is_viable()).collect();
        if let Some(bridge) = blocking.iter().find(|other| other.is_bridge()) {
            let driver = bridge.driver.clone().unwrap_or_default();
            let message = format!("bridge {} in group {group} has driver {driver}", bridge.bdf);
            let hint = "VFIO shares a group only with bridges of pcieport or without a driver";
            return Err(Problem::new(Kind::NotViable, message, hint));
        }
        if !blocking.is_empty() && !whole_group {
            return Err(not_viable(function.bdf, group, &blocking));
        }
        for other in blocking {
            if !others.iter().any(|known| known.bdf == other.bdf) {
                host.note(format!("{} ({}) is bound with group {group}", other.bdf, other.kind()));
                others.push(other);
            }
        }
    }
    Ok(others)
}

fn not_viable(bdf: PciAddress, group: u32, blocking: &[Function]) -> Problem {
    let list: Vec<String> = blocking
        .iter()
        .map(|other| {
            let driver = other.driver.as_deref().unwrap_or("none");
            format!("{} ({}, driver {driver})", other.bdf, other.kind())
        })
        .collect();
    Problem::new(
        Kind::NotViable,
        format!(
            "{bdf} shares IOMMU group {group} with {}: VFIO hands out whole groups, because \
             functions of one can reach each other past the IOMMU",
            list.join(", ")
        ),
        "--whole-group binds them all; or put the drive into a slot with ACS above it",
    )
}

/// Checks that a function has no virtual ones, which end when it is reset.
fn is_alone(host: &Host<'_>, function: &Function) -> Result<()> {
    let path = format!("{}/{}/sriov_numvfs", pci::DEVICES, function.bdf);
    let text = host.root.text(&path).unwrap_or_default();
    match text.trim() {
        "" | "0" => Ok(()),
        count => {
            let message = format!("{} has {count} virtual functions (SR-IOV)", function.bdf);
            let hint = format!("bind those; or end them: echo 0 > {path}");
            Err(Problem::new(Kind::InUse, message, hint))
        }
    }
}

/// Checks that none of `functions` is in use. A function that cannot be checked counts as in use,
/// unless the request allows it.
fn unused(host: &Host<'_>, request: &Request, functions: &[Function]) -> Result<Vec<Usage>> {
    let scene = Scene::read(host.root);
    let mut usages = Vec::new();
    let (mut refused, mut unchecked): (Vec<Use>, Vec<String>) = Default::default();
    for function in functions {
        let usage = scene.usage(host.root, function, Claims::Hold);
        for found in &usage.uses {
            match found.kind {
                UseKind::Data => host.note(format!("{}; it stays untouched", found.sentence())),
                UseKind::Member if request.ignore_members => host.note(found.sentence()),
                _ => refused.push(found.clone()),
            }
        }
        unchecked.extend(usage.blind.iter().map(|why| format!("not checked: {why}")));
        usages.push(usage);
    }
    if refused.is_empty() && (unchecked.is_empty() || request.allow_unchecked || request.dry_run) {
        unchecked.into_iter().for_each(|why| host.note(why));
        return Ok(usages);
    }
    if refused.is_empty() {
        unchecked.dedup();
        let message = format!("it may be in use; {}", unchecked.join("; "));
        let hint = "make that readable; or, if you know that nothing uses it: --allow-unchecked";
        return Err(Problem::new(Kind::InUse, message, hint));
    }
    let list: Vec<String> = refused.iter().map(Use::sentence).collect();
    let hint = if refused.iter().any(Use::is_active) {
        "unmount, swapoff, stop or close what uses it; there is no option to override this"
    } else {
        "if the array, group or pool is given up: wipefs, or --ignore-members"
    };
    Err(Problem::new(Kind::InUse, format!("in use: {}", list.join("; ")), hint))
}

/// Returns the records, with all steps.
fn records(
    host: &Host<'_>,
    request: &Request,
    functions: &[Function],
    owner: Option<Owner>,
) -> Result<Vec<Record>> {
    let root = host.root;
    let (known, wrong) = host.journal.read(root);
    host.warn_about(&wrong);
    // Includes drives of the same group: they belong to the same bind.
    let concerns = |record: &&Record| {
        let same_group = |function: &Function| function.group == record.group;
        record.is_half_done(root)
            && functions.iter().any(|other| other.bdf == record.bdf || same_group(other))
    };
    if let Some(record) = known.iter().find(concerns) {
        return Err(half_done(format!("an earlier run left {} half-done", record.bdf)));
    }
    let mut modules = plan::modules(root);
    let mut records = Vec::new();
    for function in functions {
        let bdf = function.bdf;
        let same = |record: &&Record| record.bdf == bdf && record.ids == function.ids();
        let before = known.iter().find(same);
        let drive = Drive::read(root, function.clone());
        let mut record = Record::new(root, bdf, function.ids());
        record.steps = std::mem::take(&mut modules);
        if function.is_vfio() {
            host.note(format!("{bdf} has a VFIO driver already"));
            record.former = before.and_then(|record| record.former.clone());
        } else {
            record.former = Some(Former::read(root, function));
            record.steps.extend(plan::bind(function));
        }
        record.group = function.group;
        record.owner = owner.or(before.and_then(|record| record.owner));
        record.model = drive.model.clone().or(before.and_then(|record| record.model.clone()));
        record.serial = drive.serial.clone().or(before.and_then(|record| record.serial.clone()));
        record.bytes = drive.bytes().or(before.and_then(|record| record.bytes));
        record.persist = before.map(|record| record.persist.clone()).unwrap_or_default();
        if request.persist && function.is_nvme() {
            let serial = record.serial.clone().ok_or_else(|| {
                let message = format!("--persist: the serial of {bdf} is not known");
                let hint = "give it back to the kernel's driver (nvme-bind unbind), then bind it";
                Problem::usage(message, hint)
            })?;
            let boot = Boot {
                exe: &host.exe,
                state_dir: host.journal.chosen(),
                serial: &serial,
                owner,
                whole_group: request.whole_group,
            };
            record.persist = persist::files(&drive, &boot);
        }
        records.push(record);
    }
    // The group nodes exist only once the drives are bound.
    if let Some(last) = records.len().checked_sub(1) {
        let nodes = owner.into_iter().flat_map(|owner| nodes(functions, owner));
        let nodes: Vec<Step> = nodes.collect();
        records[last].steps.extend(nodes);
    }
    if request.persist {
        for record in &mut records {
            record.steps.extend(record.persist.clone());
        }
    }
    Ok(records)
}

fn nodes(functions: &[Function], owner: Owner) -> Vec<Step> {
    let mut groups: Vec<u32> = functions.iter().filter_map(|function| function.group).collect();
    groups.sort_unstable();
    groups.dedup();
    groups.iter().map(|group| Step::Own { path: format!("/dev/vfio/{group}"), owner }).collect()
}

fn report(records: &[Record]) -> Reply {
    let lines: Vec<String> = records
        .iter()
        .map(|record| {
            let node = record.group.map(|group| format!(", /dev/vfio/{group}")).unwrap_or_default();
            let again = if record.persist.is_empty() { "" } else { ", again at each boot" };
            format!("{} is bound to {}{node}{again}", record.bdf, pci::VFIO)
        })
        .collect();
    let bound: Vec<_> = records
        .iter()
        .map(|record| {
            json!({
                "bdf": record.bdf,
                "group": record.group,
                "node": record.group.map(|group| format!("/dev/vfio/{group}")),
                "former": record.former,
                "persist": record.kept(),
                "phase": Phase::Bound,
            })
        })
        .collect();
    Reply::new(lines.join("\n"), json!({ "bound": bound }))
}
