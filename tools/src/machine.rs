//! Free memory and disk space of this machine.

use std::fs;
use std::path::Path;

use crate::problem::Problem;
use crate::size::Size;

/// Returns the memory that can be used without swapping, in bytes, as the kernel estimates it, or
/// less if the process's control group has a lower limit. `None` if unknown.
fn memory_available() -> Option<u64> {
    let free = meminfo(&fs::read_to_string("/proc/meminfo").ok()?)?;
    Some(group_allows().map_or(free, |allowed| allowed.min(free)))
}

/// Rejects what needs more memory than is available: `what` says what that is, for the message.
///
/// # Errors
/// Returns a [`Problem`] with `hint`.
pub(crate) fn check_memory(
    needed: u64,
    what: impl FnOnce() -> String,
    hint: &str,
) -> Result<(), Problem> {
    match memory_available() {
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

fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Returns the control group's remaining memory: meminfo does not show a container's own limit.
fn group_allows() -> Option<u64> {
    let number = |name: &str| {
        let text = fs::read_to_string(Path::new("/sys/fs/cgroup").join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    Some(number("memory.max")?.saturating_sub(number("memory.current")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_found() {
        let text = "MemTotal:       24117248 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(meminfo(text), Some(1 << 20));
        assert_eq!(meminfo("MemTotal: 1 kB"), None);
    }

    #[test]
    fn this_machine_says_something() {
        assert!(memory_available().is_some_and(|bytes| bytes > 1 << 20));
        assert!(disk_available(Path::new("/")).is_ok());
        assert!(disk_available(Path::new("/no/such/place")).is_err());
    }
}
