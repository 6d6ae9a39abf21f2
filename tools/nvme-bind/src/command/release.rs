//! `unbind` and `restore`: return drives to the kernel.

use serde_json::json;

use super::{Host, Reply};
use crate::drive;
use crate::execute::{Site, half_done};
use crate::journal::Record;
use crate::pci::{Function, PciAddress, Use};
use crate::plan::Former;
use crate::problem::{Kind, Problem, Result};
use crate::usage::Scene;

/// Arguments of `unbind`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Request {
    /// Addresses (0000:65:00.0, 65:00.0) or disks
    #[arg(required = true, value_name = "DEVICE")]
    pub(crate) devices: Vec<String>,
    /// Give it to this driver instead of the former one; `none` leaves it without
    #[arg(long)]
    pub(crate) driver: Option<String>,
    /// Also remove what binds it at boot
    #[arg(long)]
    pub(crate) persist: bool,
    /// Print what would be written instead of writing it
    #[arg(long, short = 'n')]
    pub(crate) dry_run: bool,
}

/// Arguments of `restore`.
#[derive(Debug, clap::Args)]
pub(crate) struct Restore {
    /// Only these drives [default: all that the journal knows of]
    #[arg(value_name = "DEVICE")]
    devices: Vec<String>,
    /// Also remove what binds them at boot
    #[arg(long)]
    persist: bool,
    /// Print what would be written instead of writing it
    #[arg(long, short = 'n')]
    dry_run: bool,
}

impl From<Restore> for Request {
    fn from(Restore { devices, persist, dry_run }: Restore) -> Self {
        Self { devices, driver: None, persist, dry_run }
    }
}

/// Releases the named drives, recorded or not.
pub(crate) fn unbind(host: &Host<'_>, request: &Request) -> Result<Reply> {
    let _lock = host.lock(request.dry_run)?;
    let mut records = Vec::new();
    for name in &request.devices {
        let (function, note) = drive::named(host.root, name)?;
        note.into_iter().for_each(|note| host.note(note));
        let known = host.journal.find(host.root, function.bdf);
        let record = match known.filter(|record| record.ids == function.ids()) {
            Some(record) => record,
            None if function.is_vfio() => {
                host.note(format!("{} was not bound by nvme-bind", function.bdf));
                Record::new(host.root, function.bdf, function.ids())
            }
            None => {
                let driver = function.driver.as_deref().unwrap_or("no driver");
                host.note(format!("nothing to do: {} has {driver}", function.bdf));
                continue;
            }
        };
        records.push(record);
    }
    run(host, request, records)
}

/// Releases drives from the journal: the named ones, or all.
pub(crate) fn restore(host: &Host<'_>, request: &Request) -> Result<Reply> {
    let _lock = host.lock(request.dry_run)?;
    let (all, wrong) = host.journal.read(host.root);
    host.warn_about(&wrong);
    if request.devices.is_empty() {
        return run(host, request, all);
    }
    let mut records = Vec::new();
    for name in &request.devices {
        // A drive that was removed still has its record.
        let bdf = match drive::named(host.root, name) {
            Ok((function, note)) => {
                note.into_iter().for_each(|note| host.note(note));
                function.bdf
            }
            Err(problem) => name.parse::<PciAddress>().map_err(|_| problem)?,
        };
        let record = all.iter().find(|record| record.bdf == bdf).ok_or_else(|| {
            let hint = "`nvme-bind status` shows the records, `unbind` works without one";
            Problem::usage(format!("there is no record of {bdf}"), hint)
        })?;
        records.push(record.clone());
    }
    run(host, request, records)
}

fn run(host: &Host<'_>, request: &Request, mut records: Vec<Record>) -> Result<Reply> {
    if let Some(driver) = &request.driver {
        let driver = Some(driver.clone()).filter(|driver| driver != "none");
        for record in &mut records {
            record.former = Some(Former { driver: driver.clone(), ..Former::default() });
        }
    }
    unused(host, &records)?;
    if request.dry_run {
        return host.rehearse(|site| {
            records.iter().try_for_each(|record| site.release(record, request.persist, false))
        });
    }
    if records.is_empty() {
        return Ok(Reply::new("nothing to give back", json!({ "released": [] })));
    }
    let (mut released, mut failed) = (Vec::new(), Vec::new());
    for record in &records {
        match one(host, &host.site(), record, request.persist) {
            Ok(driver) => released.push((record.bdf, driver)),
            Err(problem) => failed.push(problem.message),
        }
    }
    if !failed.is_empty() {
        return Err(half_done(failed.join("; ")));
    }
    let lines: Vec<String> = released
        .iter()
        .map(|(bdf, driver)| format!("{bdf} has {}", driver.as_deref().unwrap_or("no driver")))
        .collect();
    let json: Vec<_> =
        released.iter().map(|(bdf, driver)| json!({ "bdf": bdf, "driver": driver })).collect();
    Ok(Reply::new(lines.join("\n"), json!({ "released": json })))
}

/// Releases one drive; returns its driver afterwards.
fn one(host: &Host<'_>, site: &Site<'_>, record: &Record, forget: bool) -> Result<Option<String>> {
    site.release(record, forget, false)?;
    if !forget && host.journal.find(host.root, record.bdf).is_some() {
        let bdf = record.bdf;
        host.note(format!("the next boot binds {bdf} again; --persist ends that"));
    }
    let function = Function::read(host.root, record.bdf);
    match &function {
        None => host.note(format!("{} is no longer there; its record is closed", record.bdf)),
        Some(function) if function.ids() != record.ids => {
            host.note(format!("another card is at {} now; it was left alone", record.bdf));
        }
        Some(_) => {}
    }
    Ok(function.and_then(|function| function.driver))
}

/// Rejects drives in use by a process: the kernel would wait for it forever.
fn unused(host: &Host<'_>, records: &[Record]) -> Result<()> {
    let scene = Scene::read(host.root);
    let mut users: Vec<Use> = Vec::new();
    for record in records {
        if Function::read(host.root, record.bdf).is_some_and(|function| function.is_vfio()) {
            users.extend(scene.users.of_function(host.root, record.bdf));
        }
    }
    users.dedup();
    if users.is_empty() {
        return Ok(());
    }
    let list: Vec<String> = users.iter().map(Use::sentence).collect();
    let hint = "stop the programs that drive the drive, then try again";
    Err(Problem::new(Kind::InUse, format!("in use: {}", list.join("; ")), hint))
}
