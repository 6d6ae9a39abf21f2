//! Free memory and disk space of this machine.

use std::path::Path;

use ripieno_stack::HostMemory;

use crate::problem::Problem;
use crate::size::Size;

/// Rejects what needs more memory than is available: `what` says what that is, for the message.
pub(crate) fn check_memory(
    needed: u64,
    what: impl FnOnce() -> String,
    hint: &str,
) -> Result<(), Problem> {
    match HostMemory::of_machine().map(|memory| memory.available) {
        Some(free) if free < needed => {
            Err(Problem::new(format!("{}, but {} are available", what(), Size(free)), hint))
        }
        _ => Ok(()),
    }
}

/// Returns the free bytes for this user on the file system of `directory`.
pub(crate) fn disk_available(directory: &Path) -> std::io::Result<u64> {
    let stat = rustix::fs::statvfs(directory)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_is_not_there_has_no_room() {
        assert!(disk_available(Path::new("/")).is_ok());
        assert!(disk_available(Path::new("/no/such/place")).is_err());
    }
}
