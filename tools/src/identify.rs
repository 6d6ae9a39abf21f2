//! `ripieno identify`: shows what devices report about themselves.

use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use nvme_driver::{Clock, Controller, ControllerOptions, DescriptorMode, Error, MonotonicClock};
use nvme_emu::{Emu, EmuConfig, EmuDomain, EmuRunner, MemoryMedia};
use nvme_spec::identify::IdentifyNamespace;
use ripieno_stack::{Devices, DriveAddress, open_drive, reset_subsystem, vfio_space};
use serde::Serialize;

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

/// A device. Field names are the JSON keys.
#[derive(Debug, Serialize)]
struct Device {
    device: String,
    model: String,
    serial: String,
    firmware: String,
    nvme_version: String,
    /// Largest transfer of one command in bytes; null for no limit.
    mdts_bytes: Option<u64>,
    sgl: String,
    sgl_bit_bucket: bool,
    descriptors: &'static str,
    volatile_write_cache: bool,
    /// Queue pairs that the controller grants.
    io_queues: u16,
    queue_entries_max: u32,
    page_bytes: u32,
    namespaces: Vec<Namespace>,
    /// Remarks for its owner, in words.
    remarks: Vec<String>,
    health: Option<Health>,
}

#[derive(Debug, Serialize)]
struct Namespace {
    nsid: u32,
    bytes: u64,
    lbas: u64,
    lba_bytes: u64,
    /// All supported formats, the current one first.
    formats: Vec<Format>,
    /// Hexadecimal digits; null if there is none.
    nguid: Option<String>,
    eui64: Option<String>,
    /// Several controllers may have it.
    shared: bool,
    /// Of Flexible Data Placement, and the bytes of a reclaim unit; 0 without.
    placement_handles: u16,
    reclaim_unit_bytes: u64,
    /// Reason why the namespace cannot be used; null if it can.
    refused: Option<String>,
}

#[derive(Debug, Serialize)]
struct Format {
    /// As a format command takes it.
    index: usize,
    lba_bytes: u64,
    metadata_bytes: u16,
}

#[derive(Debug, Serialize)]
struct Health {
    critical_warning: String,
    temperature_celsius: i32,
    available_spare_percent: u8,
    percentage_used: u8,
    data_read_bytes: u128,
    data_written_bytes: u128,
    power_on_hours: u128,
    unsafe_shutdowns: u128,
    media_errors: u128,
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
        terminal::print(serde_json::json!({ "devices": found }))?;
    } else {
        found.iter().try_for_each(|device| terminal::print_text(&device.text()))?;
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
    let usable: Vec<_> = drive.namespaces().iter().map(|space| (space.nsid, None)).collect();
    let refused = drive.refused_namespaces().iter();
    let refused = refused.map(|(nsid, why)| (*nsid, Some(why.to_string())));
    let all: Vec<_> = usable.into_iter().chain(refused).collect();
    let mut namespaces = Vec::new();
    for (nsid, refused) in all {
        let data = match drive.identify_namespace(nsid) {
            // Some are refused because of this.
            Err(Error::Command { .. }) if refused.is_some() => IdentifyNamespace::default(),
            data => data.context("identifying a namespace")?,
        };
        let listed = usize::from(data.nlbaf_z) + 1;
        let mut order: Vec<usize> = (0..listed.min(data.lbaf.len())).collect();
        order.sort_by_key(|index| *index != data.format_index());
        let formats = order.into_iter().map(|index| (index, data.lbaf[index]));
        let formats: Vec<Format> = formats
            .filter(|(_, format)| (9..=24).contains(&format.lbads()))
            .map(|(index, format)| {
                let (lba_bytes, metadata_bytes) = (1 << format.lbads(), format.ms());
                Format { index, lba_bytes, metadata_bytes }
            })
            .collect();
        let placed = drive.namespaces().iter().find(|space| space.nsid == nsid);
        let lba_bytes = formats.first().map_or(0, |format| format.lba_bytes);
        namespaces.push(Namespace {
            nsid: nsid.0,
            bytes: data.nsze.saturating_mul(lba_bytes),
            lbas: data.nsze,
            lba_bytes,
            formats,
            nguid: digits(&data.nguid),
            eui64: digits(&data.eui64),
            shared: data.may_be_shared(),
            placement_handles: placed.map_or(0, |space| space.placement_handles()),
            reclaim_unit_bytes: placed.map_or(0, |space| space.reclaim_unit_bytes),
            refused,
        });
    }
    // Controllers without a SMART log are shown without health.
    let health = match drive.smart_log() {
        Ok(log) => Some(Health::new(&log)),
        Err(error) => {
            tracing::warn!(%error, "no SMART log");
            None
        }
    };
    drive.shutdown().context("shutting the device down")?;
    Ok(Device {
        device,
        model: info.model,
        serial: info.serial,
        firmware: info.firmware,
        nvme_version: info.version.to_string(),
        mdts_bytes: info.mdts_bytes,
        sgl: info.sgls.support().to_string().to_lowercase(),
        sgl_bit_bucket: info.sgls.bit_bucket(),
        descriptors: match info.descriptor_mode {
            DescriptorMode::Sgl { .. } => "sgl",
            DescriptorMode::Prp { .. } => "prp",
        },
        volatile_write_cache: info.vwc,
        io_queues: info.io_queues,
        queue_entries_max: info.entries_max,
        page_bytes: info.page_bytes,
        remarks: info.remarks.iter().map(ToString::to_string).collect(),
        namespaces,
        health,
    })
}

/// Returns an identifier in hexadecimal digits; zeros are none.
fn digits(id: &[u8]) -> Option<String> {
    let is_there = id.iter().any(|byte| *byte != 0);
    is_there.then(|| id.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl Health {
    fn new(log: &nvme_spec::log::SmartLog) -> Self {
        let count = u128::from_le_bytes;
        // Data units are thousands of 512-byte units.
        let bytes = |units: [u8; 16]| count(units).saturating_mul(512_000);
        let warnings = log.warnings();
        Self {
            critical_warning: if warnings.is_empty() {
                "none".to_owned()
            } else {
                let names: Vec<&str> = warnings.iter_names().map(|(name, _)| name).collect();
                names.join(", ").to_lowercase()
            },
            temperature_celsius: i32::from(log.temperature_kelvin()) - FREEZING,
            available_spare_percent: log.available_spare,
            percentage_used: log.percentage_used,
            data_read_bytes: bytes(log.data_units_read),
            data_written_bytes: bytes(log.data_units_written),
            power_on_hours: count(log.power_on_hours),
            unsafe_shutdowns: count(log.unsafe_shutdowns),
            media_errors: count(log.media_errors),
        }
    }

    fn text(&self) -> String {
        let size = |bytes: u128| Size(u64::try_from(bytes).unwrap_or(u64::MAX)).to_string();
        format!(
            "warnings {}, {} C, spare {} %, used {} %, read {}, written {}, on for {} h, unsafe \
             shutdowns {}, media errors {}",
            self.critical_warning,
            self.temperature_celsius,
            self.available_spare_percent,
            self.percentage_used,
            size(self.data_read_bytes),
            size(self.data_written_bytes),
            self.power_on_hours,
            self.unsafe_shutdowns,
            self.media_errors
        )
    }
}

impl Namespace {
    fn text(&self) -> String {
        let formats: Vec<String> = self
            .formats
            .iter()
            .map(|Format { index, lba_bytes, metadata_bytes }| match metadata_bytes {
                0 => format!("{lba_bytes} (index {index})"),
                metadata => format!("{lba_bytes}+{metadata} (index {index})"),
            })
            .collect();
        let mut text = format!(
            "{}, {} LBAs of {} bytes; formats {}",
            Size(self.bytes),
            grouped(self.lbas),
            self.lba_bytes,
            formats.join(", ")
        );
        for (name, id) in [("NGUID", &self.nguid), ("EUI-64", &self.eui64)] {
            text += &id.as_ref().map(|id| format!("\n{name} {id}")).unwrap_or_default();
        }
        if self.shared {
            text += "\nshared: several controllers may have it";
        }
        if self.placement_handles > 0 {
            let unit = Size(self.reclaim_unit_bytes);
            let handles = self.placement_handles;
            text += &format!("\n{handles} placement handles (FDP), reclaim units of {unit}");
        }
        if let Some(why) = &self.refused {
            text += &format!("\ncannot be used: {why}");
        }
        text
    }
}

impl Device {
    fn text(&self) -> String {
        let limit = match self.mdts_bytes {
            Some(bytes) => format!("up to {} a command (MDTS)", Size(bytes)),
            None => "without a limit of a command (MDTS 0)".to_owned(),
        };
        let bucket = if self.sgl_bit_bucket { ", bit bucket" } else { "" };
        let cache = if self.volatile_write_cache { "yes" } else { "no" };
        let rows = [
            ("device", self.device.clone()),
            ("model", self.model.clone()),
            ("serial", self.serial.clone()),
            ("firmware", self.firmware.clone()),
            ("NVMe", self.nvme_version.clone()),
            ("transfer", limit),
            (
                "descriptors",
                format!("{} in use; SGL support: {}{bucket}", self.descriptors, self.sgl),
            ),
            (
                "queues",
                format!("{} to grant, {} entries each", self.io_queues, self.queue_entries_max),
            ),
            ("write cache", cache.to_owned()),
        ];
        let spaces = self.namespaces.iter();
        let spaces = spaces.map(|space| (format!("namespace {}", space.nsid), space.text()));
        let health = self.health.iter().map(|health| ("health".to_owned(), health.text()));
        let rows = rows.map(|(name, value)| (name.to_owned(), value)).into_iter();
        let remarks = self.remarks.iter().map(|remark| ("note".to_owned(), remark.clone()));
        let all =
            rows.chain(spaces).chain(remarks).chain(health).map(|(name, value)| vec![name, value]);
        grid(&[], all.collect(), 2)
    }
}

#[cfg(test)]
mod tests {
    use nvme_emu::PlacementConfig;

    use super::*;

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
        let [space] = &*device.namespaces else { panic!("{device:?}") };
        assert_eq!(space.nguid, nguid);
        let text = device.text();
        for part in [
            "without a limit of a command (MDTS 0)",
            "4 placement handles (FDP), reclaim units of 64 MiB",
            &format!("4096 (index {})", space.formats[0].index),
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert_eq!(digits(&[0; 8]), None);
        assert_eq!(digits(&[0, 0xAB]).as_deref(), Some("00ab"));
    }
}
