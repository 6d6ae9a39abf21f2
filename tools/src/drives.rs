//! Drives before a replay writes to them: opened, checked and claimed.

use anyhow::bail;
use objstore::{Overwrite, Store, StoreDevice, StoreError};
use ripieno_stack::{Gpu, Held, drive_name};

use crate::config::StoreArgs;
use crate::devices::Devices;
use crate::problem::{Problem, user_error};
use crate::size::Size;

/// Opens the drives; `None` for software controllers.
pub(crate) fn open(
    args: &StoreArgs,
    gpu: Option<&Gpu>,
) -> anyhow::Result<Option<ripieno_stack::Devices>> {
    let Devices::Drives(addresses) = &args.devices else { return Ok(None) };
    let mut drives = ripieno_stack::Devices::drives(addresses).memory(args.flags.path.memory);
    drives.attach(&args.controller_options(), gpu).map_err(user_error)?;
    Ok(Some(drives))
}

/// Refuses devices with a store that another process has open, through another controller of the
/// namespace.
pub(crate) fn check_unowned(devices: &[StoreDevice]) -> anyhow::Result<()> {
    match Store::living_owner(devices)? {
        Some((device, owner)) => {
            bail!(Problem::new(StoreError::Owned { device, owner }.to_string(), ""))
        }
        None => Ok(()),
    }
}

/// Returns the largest LBA size of attached devices, in bytes.
pub(crate) fn lba_bytes(devices: &[StoreDevice]) -> u32 {
    devices.iter().map(|device| 1 << lba_shift(device)).max().unwrap_or(512)
}

fn lba_shift(device: &StoreDevice) -> u8 {
    device.controller.lock().namespaces().first().map_or(9, |space| space.lba_shift)
}

/// Rejects drives that are too small, and drives with data that is not left over from a replay.
/// Then marks them as scratch: from here on, their contents may be lost.
pub(crate) fn claim(
    drives: &mut ripieno_stack::Devices,
    bytes_each: u64,
    overwrite: Overwrite,
) -> anyhow::Result<()> {
    check_room(drives.attached(), bytes_each)?;
    check_unowned(drives.attached())?;
    if let Some(held) = held(drives, overwrite)?.iter().find(|held| held.loss > overwrite) {
        let (drive, what) = (drive_name(&held.device), &held.what);
        let message =
            format!("{drive}: the drive is not empty ({what}), and a replay overwrites it");
        bail!(Problem::new(message, lose(held)));
    }
    drives.mark_as_scratch().map_err(user_error)
}

/// Claims drives for a store that is kept. Returns true if it is there.
pub(crate) fn claim_to_keep(
    drives: &ripieno_stack::Devices,
    bytes_each: u64,
    overwrite: Overwrite,
) -> anyhow::Result<bool> {
    let found = hold_store(drives, overwrite)?;
    if !found {
        check_room(drives.attached(), bytes_each)?;
        check_unowned(drives.attached())?;
    }
    Ok(found)
}

/// Returns what is on the drives, unless anything may be lost.
fn held(drives: &ripieno_stack::Devices, overwrite: Overwrite) -> anyhow::Result<Vec<Held>> {
    match overwrite {
        Overwrite::Anything => Ok(Vec::new()),
        _ => Held::on(drives.attached()).map_err(user_error),
    }
}

fn lose(held: &Held) -> String {
    let word = held.overwrite();
    format!("if nothing on it is needed, say --overwrite {word}; it keeps no copy")
}

/// Rejects drives that are too small.
fn check_room(drives: &[StoreDevice], bytes_each: u64) -> Result<(), Problem> {
    for drive in drives {
        let lbas = drive.region.map_or(0, |(_, lbas)| lbas);
        let found = lbas << lba_shift(drive);
        if found < bytes_each {
            return Err(Problem::new(
                format!(
                    "{}: the store needs {} on each drive, this one has room for {}",
                    drive_name(drive.controller.lock().id()),
                    Size(bytes_each),
                    Size(found)
                ),
                "set --capacity or --requests, or use more drives",
            ));
        }
    }
    Ok(())
}

/// Returns true if the drives hold a store that may not be lost; else they are blank, scratch from
/// an earlier replay, or may be overwritten.
fn hold_store(drives: &ripieno_stack::Devices, overwrite: Overwrite) -> anyhow::Result<bool> {
    let mut without = None;
    let mut stores = 0;
    for held in held(drives, overwrite)? {
        let drive = drive_name(&held.device);
        match held.loss {
            Overwrite::Store => stores += 1,
            Overwrite::Nothing => without = Some(drive),
            Overwrite::Anything => {
                let message = format!("{drive}: the drive is not empty ({})", held.what);
                bail!(Problem::new(message, lose(&held)));
            }
        }
    }
    match without {
        _ if overwrite > Overwrite::Nothing => Ok(false),
        Some(drive) if stores > 0 => bail!(Problem::new(
            format!("{drive}: there is no store on it, and on others of the drives is one"),
            "name the drives of one store, or say --overwrite store to make a new one of them all",
        )),
        without => Ok(without.is_none()),
    }
}
