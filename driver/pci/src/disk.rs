//! Block devices as sysfs shows them.

use crate::Root;

/// A disk, partition or stacked device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// `nvme0n1`.
    pub name: String,
    /// `major:minor`.
    pub number: String,
    /// Capacity.
    pub bytes: u64,
}

impl Block {
    /// Reads one device; None if it does not exist.
    #[must_use]
    pub fn read(root: &Root, name: &str) -> Option<Self> {
        let folder = format!("/sys/class/block/{name}");
        let number = root.text(format!("{folder}/dev"))?;
        let sectors: u64 = root.number(format!("{folder}/size")).unwrap_or(0);
        Some(Self { name: name.to_owned(), number, bytes: sectors.saturating_mul(512) })
    }

    /// Returns the disk and its partitions.
    #[must_use]
    pub fn with_partitions(self, root: &Root) -> Vec<Self> {
        let folder = format!("/sys/block/{}", self.name);
        let is_partition = |name: &String| root.exists(format!("{folder}/{name}/partition"));
        let partitions = root.names(&folder).into_iter().filter(is_partition);
        let partitions = partitions.filter_map(|name| Self::read(root, &name)).collect();
        [vec![self], partitions].concat()
    }
}
