//! `ripieno identify`: shows what devices report about themselves.

use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use nvme_driver::{Clock, Controller, ControllerOptions, DescriptorMode, Error, MonotonicClock};
use nvme_emu::{Emu, EmuConfig, EmuDomain, EmuRunner, MemoryMedia};
use nvme_spec::identify::IdentifyNamespace;
use nvme_spec::ids::Nsid;
use nvme_spec::log::SmartLog;
use ripieno_stack::{Devices, DriveAddress, open_drive, reset_subsystem, vfio_space};
use serde_json::{Value, json};

use crate::options::{StoreFlags, Takes};
use crate::problem::{EXIT_FAILED, EXIT_USAGE, Problem, none_of, one_line, user_error};
use crate::size::{Size, grouped};
use crate::table::grid;
use crate::terminal::{self, say};

/// Capacity of the software controller that is shown, in bytes.
const EMU_BYTES: u64 = 1 << 30;
/// 0 degrees Celsius in kelvins.
const FREEZING: i32 = 273;

/// Flags of `ripieno identify`.
#[derive(Debug, Args)]
pub(crate) struct IdentifyFlags {
    #[command(flatten)]
    options: StoreFlags<Self>,

    /// Reset the NVM subsystem of each device first (NSSR), for a drive that cannot be opened
    /// otherwise. All its controllers abort their commands, also those of other hosts
    #[arg(long)]
    reset_subsystem: bool,

    /// Print one JSON object on stdout instead of tables
    #[arg(long)]
    json: bool,

    /// Print more log messages; repeat for even more
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

impl Takes for IdentifyFlags {
    const OPTIONS: &'static [(&'static str, &'static str)] =
        &[("devices", "the drives that are bound to vfio-pci, or 1")];
}

/// A device: its JSON object, and the rows of its table.
#[derive(Debug)]
struct Device {
    json: Value,
    rows: Vec<Vec<String>>,
}

/// Shows each device. Continues with the next one if one does not respond.
pub(crate) fn run(flags: &IdentifyFlags) -> anyhow::Result<u8> {
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
    let mut found = Vec::new();
    let mut code = 0;
    let config = &flags.options.config;
    let devices = match config.files() {
        // A reset is only for drives that are named.
        None if config.drives().is_empty() && flags.reset_subsystem => vec![None],
        None if config.drives().is_empty() => bound(),
        Some(count) => vec![None; count as usize],
        None => config.drives().iter().cloned().map(Some).collect(),
    };
    for device in devices {
        match examine(device, flags.reset_subsystem, &clock) {
            Ok(device) => found.push(device),
            Err(error) => {
                say(format_args!("error: {}", one_line(&error)));
                // A device that does not respond outranks one that cannot be opened here.
                let problem = error.downcast_ref::<Problem>();
                if let Some(hint) = problem.map(Problem::hint).filter(|hint| !hint.is_empty()) {
                    say(format_args!(" hint: {hint}"));
                }
                let is_problem = problem.is_some() && code != EXIT_FAILED;
                code = if is_problem { EXIT_USAGE } else { EXIT_FAILED };
            }
        }
    }
    if flags.json {
        let found: Vec<_> = found.into_iter().map(|device| device.json).collect();
        terminal::print(json!({ "devices": found }))?;
    } else {
        let text = |device: Device| terminal::print_text(&grid(&[], device.rows, 2));
        found.into_iter().try_for_each(text)?;
    }
    Ok(code)
}

/// Returns the drives that are bound to VFIO; without any, a software controller.
fn bound() -> Vec<Option<DriveAddress>> {
    let all = nvme_pci::functions(&nvme_pci::Root::machine());
    let drives = all.iter().filter(|it| it.is_nvme() && it.is_vfio());
    let drives: Vec<_> = drives.map(|it| Some(DriveAddress::Vfio(it.bdf))).collect();
    if !drives.is_empty() {
        return drives;
    }
    say("note: no drive is bound to vfio-pci, so this is a software controller");
    say(" hint: nvme-bind list shows the drives of this machine");
    vec![None]
}

fn examine(
    device: Option<DriveAddress>,
    reset: bool,
    clock: &Arc<dyn Clock>,
) -> anyhow::Result<Device> {
    match device {
        None => {
            let domain = EmuDomain::new("identify");
            let media = MemoryMedia::new(EMU_BYTES)?;
            let config = EmuConfig { subsystem_reset: true, ..EmuConfig::new("emu0") };
            let emu = Emu::new(domain, config.namespace(media, 512))?;
            let _runner = EmuRunner::spawn(vec![emu.clone()], clock.clone())?;
            if reset {
                Controller::reset_subsystem(&*emu.bus(), &**clock)?;
            }
            let options = ControllerOptions::default();
            let mut controller = Controller::attach(emu.bus(), clock.clone(), options)?;
            describe("emu".to_owned(), &mut controller)
        }
        Some(ref drive @ DriveAddress::Ng(_)) => {
            none_of(
                &[("--reset-subsystem", reset)],
                "the kernel's driver uses the drive",
                "bind it to vfio-pci first (nvme-bind bind)",
            )?;
            let mut devices = Devices::drives(std::slice::from_ref(drive));
            devices.attach(&ControllerOptions::default(), None).map_err(user_error)?;
            describe(drive.to_string(), &mut devices.attached()[0].controller.lock())
        }
        Some(DriveAddress::Vfio(address)) => {
            let space = vfio_space().map_err(user_error)?;
            if reset {
                reset_subsystem(&space, address, clock).map_err(user_error)?;
            }
            let options = ControllerOptions::default();
            let mut drive = open_drive(&space, address, clock, options).map_err(user_error)?;
            describe(format!("vfio:{address}"), &mut drive)
        }
    }
}

fn describe(device: String, drive: &mut Controller) -> anyhow::Result<Device> {
    let info = drive.info().clone();
    let descriptors = match info.descriptor_mode {
        DescriptorMode::Sgl { .. } => "sgl",
        DescriptorMode::Prp { .. } => "prp",
    };
    let sgl = info.sgls.support().to_string().to_lowercase();
    let bucket = if info.sgls.bit_bucket() { ", bit bucket" } else { "" };
    let limit = match info.mdts_bytes {
        Some(bytes) => format!("up to {} a command (MDTS)", Size(bytes)),
        None => "without a limit of a command (MDTS 0)".to_owned(),
    };
    let queues = format!("{} to grant, {} entries each", info.io_queues, info.entries_max);
    let mut rows = vec![
        ["device".to_owned(), device.clone()],
        ["model".to_owned(), info.model.clone()],
        ["serial".to_owned(), info.serial.clone()],
        ["firmware".to_owned(), info.firmware.clone()],
        ["NVMe".to_owned(), info.version.to_string()],
        ["transfer".to_owned(), limit],
        ["descriptors".to_owned(), format!("{descriptors} in use; SGL support: {sgl}{bucket}")],
        ["queues".to_owned(), queues],
        ["write cache".to_owned(), if info.vwc { "yes" } else { "no" }.to_owned()],
    ];
    let usable: Vec<_> = drive.namespaces().iter().map(|space| (space.nsid, None)).collect();
    let refused = drive.refused_namespaces().iter();
    let refused = refused.map(|(nsid, why)| (*nsid, Some(why.to_string())));
    let all: Vec<_> = usable.into_iter().chain(refused).collect();
    let mut namespaces = Vec::new();
    for (nsid, refused) in all {
        let (json, text) = namespace(drive, nsid, refused)?;
        namespaces.push(json);
        rows.push([format!("namespace {}", nsid.0), text]);
    }
    // Remarks for its owner, in words.
    let remarks: Vec<String> = info.remarks.iter().map(ToString::to_string).collect();
    rows.extend(remarks.iter().map(|remark| ["note".to_owned(), remark.clone()]));
    // Controllers without a SMART log are shown without health.
    let health = match drive.smart_log() {
        Ok(log) => {
            let (json, text) = health(&log);
            rows.push(["health".to_owned(), text]);
            json
        }
        Err(error) => {
            tracing::warn!(%error, "no SMART log");
            Value::Null
        }
    };
    drive.shutdown().context("shutting the device down")?;
    let json = json!({
        "device": device,
        "model": info.model,
        "serial": info.serial,
        "firmware": info.firmware,
        "nvme_version": info.version.to_string(),
        // Null for no limit.
        "mdts_bytes": info.mdts_bytes,
        "sgl": sgl,
        "sgl_bit_bucket": info.sgls.bit_bucket(),
        "descriptors": descriptors,
        "volatile_write_cache": info.vwc,
        "io_queues": info.io_queues,
        "queue_entries_max": info.entries_max,
        "page_bytes": info.page_bytes,
        "namespaces": namespaces,
        "remarks": remarks,
        "health": health,
    });
    Ok(Device { json, rows: rows.into_iter().map(Vec::from).collect() })
}

/// Describes a namespace; `refused` is why it cannot be used.
fn namespace(
    drive: &mut Controller,
    nsid: Nsid,
    refused: Option<String>,
) -> anyhow::Result<(Value, String)> {
    let data = match drive.identify_namespace(nsid) {
        // Some are refused because of this.
        Err(Error::Command { .. }) if refused.is_some() => IdentifyNamespace::default(),
        data => data.context("identifying a namespace")?,
    };
    let listed = usize::from(data.nlbaf_z) + 1;
    // The current one first; with the index that a format command takes.
    let mut order: Vec<usize> = (0..listed.min(data.lbaf.len())).collect();
    order.sort_by_key(|index| *index != data.format_index());
    let formats = order.into_iter().map(|index| (index, data.lbaf[index]));
    let formats = formats.filter(|(_, format)| (9..=24).contains(&format.lbads()));
    let formats: Vec<(usize, u64, u16)> =
        formats.map(|(index, format)| (index, 1 << format.lbads(), format.ms())).collect();
    let placed = drive.namespaces().iter().find(|space| space.nsid == nsid);
    let lba_bytes = formats.first().map_or(0, |format| format.1);
    let bytes = data.nsze.saturating_mul(lba_bytes);
    let [nguid, eui64] = [digits(&data.nguid), digits(&data.eui64)];
    // Of Flexible Data Placement.
    let handles = placed.map_or(0, |space| space.placement_handles());
    let unit = placed.map_or(0, |space| space.reclaim_unit_bytes);

    let (size, lbas) = (Size(bytes), grouped(data.nsze));
    let words = formats.iter().map(|(index, lba_bytes, metadata)| match metadata {
        0 => format!("{lba_bytes} (index {index})"),
        metadata => format!("{lba_bytes}+{metadata} (index {index})"),
    });
    let words = words.collect::<Vec<_>>().join(", ");
    let mut lines = vec![format!("{size}, {lbas} LBAs of {lba_bytes} bytes; formats {words}")];
    lines.extend(nguid.as_ref().map(|id| format!("NGUID {id}")));
    lines.extend(eui64.as_ref().map(|id| format!("EUI-64 {id}")));
    if data.may_be_shared() {
        lines.push("shared: several controllers may have it".to_owned());
    }
    if handles > 0 {
        let unit = Size(unit);
        lines.push(format!("{handles} placement handles (FDP), reclaim units of {unit}"));
    }
    lines.extend(refused.as_ref().map(|why| format!("cannot be used: {why}")));
    let formats = formats.into_iter().map(|(index, lba_bytes, metadata_bytes)| {
        json!({ "index": index, "lba_bytes": lba_bytes, "metadata_bytes": metadata_bytes })
    });
    let json = json!({
        "nsid": nsid.0,
        "bytes": bytes,
        "lbas": data.nsze,
        "lba_bytes": lba_bytes,
        "formats": formats.collect::<Vec<_>>(),
        "nguid": nguid,
        "eui64": eui64,
        "shared": data.may_be_shared(),
        "placement_handles": handles,
        "reclaim_unit_bytes": unit,
        "refused": refused,
    });
    Ok((json, lines.join("\n")))
}

/// Returns an identifier in hexadecimal digits; zeros are none.
fn digits(id: &[u8]) -> Option<String> {
    let is_there = id.iter().any(|byte| *byte != 0);
    is_there.then(|| id.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn health(log: &SmartLog) -> (Value, String) {
    // JSON has no numbers of 128 bits, and a drive may report any.
    let count = |bytes| u64::try_from(u128::from_le_bytes(bytes)).unwrap_or(u64::MAX);
    // Data units are thousands of 512-byte units.
    let bytes = |units| count(units).saturating_mul(512_000);
    let names: Vec<&str> = log.warnings().iter_names().map(|(name, _)| name).collect();
    let warnings = match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(", ").to_lowercase(),
    };
    let celsius = i32::from(log.temperature_kelvin()) - FREEZING;
    let (spare, used) = (log.available_spare, log.percentage_used);
    let [read, written] = [log.data_units_read, log.data_units_written].map(bytes);
    let [hours, unsafe_shutdowns, errors] =
        [log.power_on_hours, log.unsafe_shutdowns, log.media_errors].map(count);
    let text = format!(
        "warnings {warnings}, {celsius} C, spare {spare} %, used {used} %, read {}, written {}, on \
         for {hours} h, unsafe shutdowns {unsafe_shutdowns}, media errors {errors}",
        Size(read),
        Size(written)
    );
    let json = json!({
        "critical_warning": warnings,
        "temperature_celsius": celsius,
        "available_spare_percent": spare,
        "percentage_used": used,
        "data_read_bytes": read,
        "data_written_bytes": written,
        "power_on_hours": hours,
        "unsafe_shutdowns": unsafe_shutdowns,
        "media_errors": errors,
    });
    (json, text)
}

#[cfg(test)]
mod tests {
    use nvme_emu::PlacementConfig;

    use super::*;

    #[test]
    fn counters_of_all_ones_are_the_largest_number() {
        let [data_units_read, media_errors] = [[0xff; 16]; 2];
        let log = SmartLog { data_units_read, media_errors, ..SmartLog::default() };
        let (json, text) = health(&log);
        assert_eq!(json["media_errors"], u64::MAX);
        assert_eq!(json["data_read_bytes"], u64::MAX);
        assert!(text.contains(&format!("media errors {}", u64::MAX)), "{text}");
    }

    #[test]
    fn a_namespace_is_described_by_what_a_buyer_compares() {
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::default());
        let placement = Some(PlacementConfig { handles: 4, reclaim_unit_bytes: 64 << 20 });
        let media = MemoryMedia::new(EMU_BYTES).unwrap();
        let config = EmuConfig { placement, mdts_bytes: None, ..EmuConfig::new("emu0") };
        let emu = Emu::new(EmuDomain::new("identify"), config.namespace(media, 4096)).unwrap();
        let _runner = EmuRunner::spawn(vec![emu.clone()], clock.clone()).unwrap();
        let mut drive = Controller::attach(emu.bus(), clock, ControllerOptions::default()).unwrap();
        let nguid = digits(&drive.namespaces()[0].nguid);
        let device = describe("emu".to_owned(), &mut drive).unwrap();
        let spaces = device.json["namespaces"].as_array().unwrap();
        let [space] = &spaces[..] else { panic!("{device:?}") };
        assert_eq!(space["nguid"].as_str(), nguid.as_deref());
        let text = grid(&[], device.rows.clone(), 2);
        for part in [
            "without a limit of a command (MDTS 0)",
            "4 placement handles (FDP), reclaim units of 64 MiB",
            &format!("4096 (index {})", space["formats"][0]["index"]),
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert_eq!(digits(&[0; 8]), None);
        assert_eq!(digits(&[0, 0xAB]).as_deref(), Some("00ab"));
    }
}
