//! This machine: free memory, disk space, and what a result says about it.

use std::path::Path;

use nvme_bind::VERSION;
use ripieno_stack::HostMemory;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};

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

/// Rejects files of `needed` bytes in `directory` if fewer are free in `at`, where it will be.
pub(crate) fn check_disk(
    directory: &Path,
    at: &Path,
    needed: u64,
    hint: &str,
) -> Result<(), Problem> {
    let wrong = |why: String| format!("--path {}: {why}", directory.display());
    let free = disk_available(at).map_err(|error| {
        let hint = "name a directory that exists and that you may write to";
        Problem::new(wrong(error.to_string()), hint)
    })?;
    if needed <= free {
        return Ok(());
    }
    let [needed, free] = [needed, free].map(Size);
    Err(Problem::new(wrong(format!("{needed} are needed, but {free} are free there")), hint))
}

/// Returns what makes a result, where and when, as JSON.
pub(crate) fn run() -> serde_json::Value {
    let mut date = String::new();
    // Writing to a string does not fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut date));
    let system = rustix::system::uname();
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    serde_json::json!({
        "commit": VERSION.split_once(" (").and_then(|(_, commit)| commit.strip_suffix(')')),
        "date": date,
        "host": system.nodename().to_string_lossy(),
        "kernel": system.release().to_string_lossy(),
        "cpu": model.map(|(_, name)| name),
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "command": std::env::args().collect::<Vec<_>>().join(" "),
    })
}

/// Returns the type of the file system of a path; `None` if the kernel does not list it.
pub(crate) fn file_system(path: &Path) -> Option<String> {
    let (path, mounts) =
        (path.canonicalize().ok()?, std::fs::read_to_string("/proc/self/mounts").ok()?);
    let of = |line: &str| {
        let mut words = line.split(' ').skip(1);
        Some((words.next()?.to_owned(), words.next()?.to_owned()))
    };
    let above = mounts.lines().filter_map(of).filter(|(place, _)| path.starts_with(place));
    above.max_by_key(|(place, _)| place.len()).map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_is_not_there_has_no_room() {
        assert!(disk_available(Path::new("/")).is_ok());
        assert!(disk_available(Path::new("/no/such/place")).is_err());
    }

    #[test]
    fn a_path_has_a_file_system_and_a_run_a_date() {
        assert_eq!(file_system(Path::new("/proc/self")).as_deref(), Some("proc"));
        let run = run();
        let date = run["date"].as_str().unwrap();
        assert!(date.starts_with("20") && date.ends_with('Z'), "{run}");
        assert!(run["kernel"].is_string() && run["command"] != "", "{run}");
    }
}
