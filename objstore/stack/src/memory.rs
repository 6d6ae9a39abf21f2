//! Host memory that this process may use: that of the machine, or of its control groups.

use std::{fs, path::Path};

use crate::{StackError, size::Size};

/// Host memory in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostMemory {
    /// All of the machine's, or the lowest limit of the control groups.
    pub all: u64,
    /// Bytes that can be used without swapping; file pages count: the kernel gives them back.
    pub available: u64,
}

/// The names of a control group's files by version.
struct GroupFiles {
    /// Where the groups are.
    root: &'static str,
    /// The controllers of its line in /proc/self/cgroup.
    controller: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Before the names of a group's sums over all below it.
    total: &'static str,
}

/// Version 2, and version 1.
const GROUPS: [GroupFiles; 2] = [
    GroupFiles {
        root: "sys/fs/cgroup",
        controller: "",
        limit: "memory.max",
        used: "memory.current",
        total: "",
    },
    GroupFiles {
        root: "sys/fs/cgroup/memory",
        controller: "memory",
        limit: "memory.limit_in_bytes",
        used: "memory.usage_in_bytes",
        total: "total_",
    },
];

impl HostMemory {
    /// Returns the memory of this machine; `None` if the kernel does not tell.
    #[must_use]
    pub fn of_machine() -> Option<Self> {
        Self::below(Path::new("/"))
    }

    /// Checks that a DRAM cache of `bytes` bytes has room, and `workers` of them together.
    ///
    /// # Errors
    /// Returns [`StackError::Config`] for the option `dram` if they have not.
    pub fn check_dram(bytes: u64, workers: u32) -> Result<(), StackError> {
        if bytes == 0 {
            return Ok(());
        }
        Self::of_machine().map_or(Ok(()), |memory| memory.has_room(bytes, workers))
    }

    fn has_room(self, bytes: u64, workers: u32) -> Result<(), StackError> {
        let Self { all, available } = self;
        if bytes <= available && bytes.saturating_mul(workers.into()) <= all {
            return Ok(());
        }
        let [asked, all, available] = [bytes, all, available].map(Size);
        let each = match workers {
            0 | 1 => String::new(),
            _ => format!(" for each of {workers} workers"),
        };
        let problem = format!(
            "{asked}{each} were asked for; {all} of memory are there, of which {available} are \
             available; give less"
        );
        Err(StackError::Config { field: "dram", problem })
    }

    fn below(root: &Path) -> Option<Self> {
        let info = fs::read_to_string(root.join("proc/meminfo")).ok()?;
        let kib = |name| field(&info, name).map(|kib| kib << 10);
        let mut memory = Self { all: kib("MemTotal:")?, available: kib("MemAvailable:")? };
        let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        for files in &GROUPS {
            let dir = root.join(files.root);
            let path = groups.lines().find_map(|line| files.path(line)).unwrap_or_default();
            // Each group above limits it, too. In a container a path may be one of the host's,
            // which is not there; its own group is then the root.
            for group in Path::new(path).ancestors() {
                memory.limit(&dir.join(group), files);
            }
        }
        Some(memory)
    }

    /// Lowers it to what a control group has.
    fn limit(&mut self, group: &Path, files: &GroupFiles) {
        let read = |name: &str| fs::read_to_string(group.join(name)).ok();
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        // Without a limit it is "max", or more than any machine has.
        let Some(limit) = number(files.limit) else { return };
        let stat = read("memory.stat").unwrap_or_default();
        let pages = |kind| field(&stat, &format!("{}{kind}_file", files.total)).unwrap_or(0);
        let file_pages = pages("inactive").saturating_add(pages("active"));
        let used = number(files.used).unwrap_or(0).saturating_sub(file_pages);
        self.all = self.all.min(limit);
        self.available = self.available.min(limit.saturating_sub(used));
    }
}

impl GroupFiles {
    /// Returns the group in a line of /proc/self/cgroup, `number:controllers:/path`, relative to
    /// the root.
    fn path<'a>(&self, line: &'a str) -> Option<&'a str> {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let is_it = controllers.split(',').any(|name| name == self.controller);
        // Outside of its own namespace of groups, a path leads upwards.
        is_it.then(|| path.trim_start_matches("/..").trim_start_matches('/'))
    }
}

/// Returns the number behind a name at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut words = text.lines().map(str::split_ascii_whitespace);
    words.find_map(|mut words| (words.next()? == name).then(|| words.next()?.parse().ok())?)
}

#[cfg(test)]
mod tests;
