//! Checks of real drives before a replay writes to them.

use anyhow::bail;
use ripieno_stack::{Drives, Holds};

use crate::problem::{Problem, user_error};
use crate::size::Size;

/// Rejects drives that are too small, and drives with data that is not left over from a replay.
/// Then marks them as scratch: from here on, their contents may be lost.
///
/// # Errors
/// Returns a [`Problem`] that names the drive. No drive has been written to in that case.
pub(crate) fn claim(drives: &mut Drives, bytes_each: u64, overwrite: bool) -> anyhow::Result<()> {
    check_room(drives, bytes_each)?;
    drives.check_unowned().map_err(user_error)?;
    let held = if overwrite { Vec::new() } else { drives.holds().map_err(user_error)? };
    for (drive, found) in held {
        if let Holds::Store | Holds::Data = found {
            let message = format!(
                "vfio:{drive}: the drive is not empty ({found}), and a replay overwrites it"
            );
            bail!(Problem::new(message, OVERWRITE));
        }
    }
    drives.mark_as_scratch().map_err(user_error)
}

const OVERWRITE: &str = "if nothing on it is needed, say --overwrite; it keeps no copy";

/// Rejects drives that are too small.
pub(crate) fn check_room(drives: &Drives, bytes_each: u64) -> Result<(), Problem> {
    match drives.room().find(|(_, found)| *found < bytes_each) {
        None => Ok(()),
        Some((drive, found)) => Err(Problem::new(
            format!(
                "vfio:{drive}: the store needs {} on each drive, this one has room for {}",
                Size(bytes_each),
                Size(found)
            ),
            "set --capacity or --requests, or use more drives",
        )),
    }
}

/// Returns true if the drives hold a store; else they are blank, or scratch from an earlier replay.
pub(crate) fn hold_store(drives: &mut Drives) -> anyhow::Result<bool> {
    let mut without = None;
    let mut stores = 0;
    for (drive, found) in drives.holds().map_err(user_error)? {
        match found {
            Holds::Store => stores += 1,
            Holds::Nothing | Holds::Scratch => without = Some(drive),
            Holds::Data => {
                bail!(Problem::new(format!("vfio:{drive}: the drive is not empty"), OVERWRITE));
            }
        }
    }
    match without {
        Some(drive) if stores > 0 => bail!(Problem::new(
            format!("vfio:{drive}: there is no store on it, and on others of the drives is one"),
            "name the drives of one store, or say --overwrite to make a new one of them all",
        )),
        without => Ok(without.is_none()),
    }
}
