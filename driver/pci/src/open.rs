//! Device nodes that processes have open.

use crate::Root;

/// An open file descriptor of a file in /dev.
#[derive(Debug, Clone)]
pub struct OpenFile {
    /// The process that has it open.
    pub pid: u32,
    /// The name of that process.
    pub command: String,
    /// Path of the node.
    pub path: String,
    /// `major:minor`, if it is a block device.
    pub number: Option<String>,
}

impl OpenFile {
    /// Returns name and number of the process: `fio (pid 88)`.
    #[must_use]
    pub fn process(&self) -> String {
        format!("{} (pid {})", self.command, self.pid)
    }
}

/// Returns the open device nodes of all other processes, and the number of processes whose
/// descriptors may not be read.
#[must_use]
pub fn open_files(root: &Root) -> (Vec<OpenFile>, usize) {
    let (mut found, mut hidden) = (Vec::new(), 0);
    let own = std::process::id();
    for pid in root.names("/proc").iter().filter_map(|name| name.parse::<u32>().ok()) {
        if root.is_real() && pid == own {
            continue;
        }
        let folder = format!("/proc/{pid}/fd");
        let names = match root.try_names(&folder) {
            Ok(names) => names,
            Err(error) => {
                // Any other error: the process has just ended.
                hidden += usize::from(error.kind() == std::io::ErrorKind::PermissionDenied);
                continue;
            }
        };
        for name in names {
            let file = format!("{folder}/{name}");
            let Some(path) = root.link(&file).filter(|path| path.starts_with("/dev/")) else {
                continue;
            };
            // The number, because a container may have the disk under another name. In a copy of a
            // machine the link would lead out of it.
            let number = root.is_real().then(|| root.block_device(&file)).flatten();
            let command = root.text(format!("/proc/{pid}/comm")).unwrap_or_default();
            found.push(OpenFile { pid, command, path, number });
        }
    }
    (found, hidden)
}
