//! Checks of real drives before a replay writes to them.

use anyhow::bail;
use objstore::Overwrite;
use ripieno_stack::{Drives, Holds};

use crate::problem::{Problem, user_error};
use crate::size::Size;

/// Rejects drives that are too small, and drives with data that is not left over from a replay.
/// Then marks them as scratch: from here on, their contents may be lost.
pub(crate) fn claim(
    drives: &mut Drives,
    bytes_each: u64,
    overwrite: Overwrite,
) -> anyhow::Result<()> {
    check_room(drives, bytes_each)?;
    drives.check_unowned().map_err(user_error)?;
    if overwrite != Overwrite::Anything {
        for (drive, found) in drives.holds().map_err(user_error)? {
            let word = match (found, overwrite) {
                (Holds::Data, _) => "anything",
                (Holds::Store, Overwrite::Nothing) => "store",
                _ => continue,
            };
            let message = format!(
                "vfio:{drive}: the drive is not empty ({found}), and a replay overwrites it"
            );
            bail!(Problem::new(message, lose(word)));
        }
    }
    drives.mark_as_scratch().map_err(user_error)
}

fn lose(word: &str) -> String {
    format!("if nothing on it is needed, say --overwrite {word}; it keeps no copy")
}

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

/// Returns true if the drives hold a store that may not be lost; else they are blank, scratch from
/// an earlier replay, or may be overwritten.
pub(crate) fn hold_store(drives: &mut Drives, overwrite: Overwrite) -> anyhow::Result<bool> {
    if overwrite == Overwrite::Anything {
        return Ok(false);
    }
    let mut without = None;
    let mut stores = 0;
    for (drive, found) in drives.holds().map_err(user_error)? {
        match found {
            Holds::Store => stores += 1,
            Holds::Nothing | Holds::Scratch => without = Some(drive),
            Holds::Data => {
                let message = format!("vfio:{drive}: the drive is not empty");
                bail!(Problem::new(message, lose("anything")));
            }
        }
    }
    match without {
        _ if overwrite == Overwrite::Store => Ok(false),
        Some(drive) if stores > 0 => bail!(Problem::new(
            format!("vfio:{drive}: there is no store on it, and on others of the drives is one"),
            "name the drives of one store, or say --overwrite store to make a new one of them all",
        )),
        without => Ok(without.is_none()),
    }
}
