//! Device nodes that processes have open.

use crate::{PciAddress, Root, full_address, sysfs};

/// A device that a process has open, or has mapped.
#[derive(Debug, Clone)]
pub struct OpenFile {
    /// The process.
    pub pid: u32,
    /// The name of that process.
    pub command: String,
    /// Path of the node; of a VFIO device that was opened through its group, the folder of the
    /// function in /sys.
    pub path: String,
    /// Its number, as [`Root::device_number`] writes it.
    pub number: Option<String>,
}

impl OpenFile {
    /// Returns name and number of the process: `fio (pid 88)`.
    #[must_use]
    pub fn process(&self) -> String {
        format!("{} (pid {})", self.command, self.pid)
    }
}

/// A device node.
#[derive(Debug, Clone)]
pub struct DeviceNode {
    /// Its path.
    pub path: String,
    /// Its number, as [`Root::device_number`] writes it.
    pub number: Option<String>,
}

impl DeviceNode {
    /// Returns the character device with this name in /dev. `folder`, in /sys, has its number.
    #[must_use]
    pub fn of_characters(root: &Root, name: &str, folder: &str) -> Self {
        let number = root.text(format!("{folder}/dev")).map(|number| format!("c{number}"));
        Self { path: format!("/dev/{name}"), number }
    }

    /// Returns true if this node is open there, under any name.
    #[must_use]
    pub fn is_open_as(&self, file: &OpenFile) -> bool {
        file.path == self.path || file.number.is_some() && file.number == self.number
    }
}

/// Returns those of `files` through which a process has a function by VFIO: its group, which is one
/// for all its functions; its own node; or the device that it got through the group.
#[must_use]
pub fn vfio_files<'a>(root: &Root, bdf: PciAddress, files: &'a [OpenFile]) -> Vec<&'a OpenFile> {
    let folder = sysfs(bdf);
    let mut nodes = Vec::new();
    // Also a group of the no-IOMMU mode.
    if let Some(group) = root.link_name(format!("{folder}/iommu_group")) {
        for name in [group.clone(), format!("noiommu-{group}")] {
            let class = format!("/sys/class/vfio/{name}");
            nodes.push(DeviceNode::of_characters(root, &format!("vfio/{name}"), &class));
        }
    }
    for name in root.names(format!("{folder}/vfio-dev")) {
        let class = format!("{folder}/vfio-dev/{name}");
        nodes.push(DeviceNode::of_characters(root, &format!("vfio/devices/{name}"), &class));
    }
    let is_device = |file: &OpenFile| {
        let inside = file.path.strip_prefix("/sys/").and_then(|path| path.rsplit('/').next());
        inside.and_then(full_address) == Some(bdf)
    };
    let is_open =
        |file: &&OpenFile| is_device(file) || nodes.iter().any(|node| node.is_open_as(file));
    files.iter().filter(is_open).collect()
}

/// Returns the open devices of all other processes, and the number of processes whose descriptors
/// may not be read.
#[must_use]
pub fn open_files(root: &Root) -> (Vec<OpenFile>, usize) {
    let (mut found, mut hidden) = (Vec::new(), 0);
    let own = std::process::id();
    for pid in root.names("/proc").iter().filter_map(|name| name.parse::<u32>().ok()) {
        if root.is_real() && pid == own {
            continue;
        }
        let names = match root.try_names(format!("/proc/{pid}/fd")) {
            Ok(names) => names,
            Err(error) => {
                // Any other error: the process has just ended.
                hidden += usize::from(error.kind() == std::io::ErrorKind::PermissionDenied);
                continue;
            }
        };
        let mut files: Vec<(String, Option<String>)> =
            names.iter().filter_map(|name| descriptor(root, pid, name)).collect();
        files.extend(mapped(root, pid).into_iter().map(|path| (path, None)));
        let command = || root.text(format!("/proc/{pid}/comm")).unwrap_or_default();
        let file = |(path, number)| OpenFile { pid, command: command(), path, number };
        found.extend(files.into_iter().map(file));
    }
    (found, hidden)
}

/// Returns path and number of the device of a descriptor.
fn descriptor(root: &Root, pid: u32, name: &str) -> Option<(String, Option<String>)> {
    let file = format!("/proc/{pid}/fd/{name}");
    let path = root.link(&file)?;
    if path.contains("[vfio-device]") {
        // It outlives the descriptor of the group, and recent kernels say whose it is.
        let about = root.text(format!("/proc/{pid}/fdinfo/{name}"))?;
        let line = about.lines().find_map(|line| line.strip_prefix("vfio-device-syspath:"))?;
        return Some((line.trim().to_owned(), None));
    }
    // The number, because a container may have the device under another name, also outside /dev. In
    // a copy of a machine the link would lead out of it.
    let is_path = root.is_real() && path.starts_with('/');
    let number = is_path.then(|| root.device_number(&file)).flatten();
    (number.is_some() || path.starts_with("/dev/")).then_some((path, number))
}

/// Returns the devices that a process has mapped; it may have closed their descriptors.
fn mapped(root: &Root, pid: u32) -> Vec<String> {
    let maps = root.text(format!("/proc/{pid}/maps")).unwrap_or_default();
    // `7f0-7f1 rw-s 00000000 00:05 372  /dev/nvme0n1`
    let paths = maps.lines().filter_map(|line| Some(format!("/{}", line.split_once(" /")?.1)));
    let is_device = |path: &String| path.starts_with("/dev/") && !path.starts_with("/dev/shm/");
    let mut paths: Vec<String> = paths.filter(is_device).collect();
    paths.sort();
    paths.dedup();
    paths
}
