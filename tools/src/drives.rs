//! What a replay may do to real drives, in the words of the command line.

use anyhow::bail;
use ripieno_stack::{Drives, Holds};

use crate::problem::{Problem, told};
use crate::size::Size;

/// Refuses drives that are too small, and those that hold anything but what a replay left. Then
/// marks them as scratch: from here on, what they hold may be lost.
///
/// # Errors
/// [`Problem`] with the drive; nothing has been written to any of them then.
pub(crate) fn claim(drives: &mut Drives, bytes_each: u64, overwrite: bool) -> anyhow::Result<()> {
    check_room(drives, bytes_each)?;
    let held = if overwrite { Vec::new() } else { drives.holds().map_err(told)? };
    for (drive, found) in held {
        if let Holds::Store | Holds::Data = found {
            let message = format!(
                "vfio:{drive}: the drive is not empty ({found}), and a replay overwrites it"
            );
            bail!(Problem::new(message, OVERWRITE));
        }
    }
    drives.mark_as_scratch().map_err(told)
}

const OVERWRITE: &str = "if nothing on it is needed, say --overwrite; it keeps no copy";

/// Refuses drives that are too small.
///
/// # Errors
/// [`Problem`] with the drive.
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

/// Whether the drives hold a store; if not, they are empty, or a replay's that kept nothing.
///
/// # Errors
/// [`Problem`] with a drive that holds something else, or has no part in the others' store.
pub(crate) fn hold_store(drives: &mut Drives) -> anyhow::Result<bool> {
    let mut without = None;
    let mut stores = 0;
    for (drive, found) in drives.holds().map_err(told)? {
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
