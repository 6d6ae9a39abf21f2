//! Descriptions of GPUs and partitions, for people and programs.

use std::fmt;

/// Ordering guarantee, towards kernels, of a NIC's or NVMe device's writes to GPU memory
/// (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WritesOrdering {
    /// Unordered: a flush is needed before a kernel may read.
    None,
    /// Ordered for kernels of the GPU that owns the memory.
    Owner,
    /// Ordered for kernels of every GPU.
    AllDevices,
    /// The driver does not report it, or reports an unknown value.
    Unknown(i32),
}

impl WritesOrdering {
    pub(super) fn new(attribute: i32) -> Self {
        match attribute {
            0 => Self::None,
            100 => Self::Owner,
            200 => Self::AllDevices,
            other => Self::Unknown(other),
        }
    }

    /// Returns true if a kernel that has seen a completion also sees the data in its GPU's memory.
    /// Host memory is always ordered.
    #[must_use]
    pub fn is_ordered(self) -> bool {
        matches!(self, Self::Owner | Self::AllDevices)
    }
}

impl fmt::Display for WritesOrdering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Owner => f.write_str("owner"),
            Self::AllDevices => f.write_str("all devices"),
            Self::Unknown(value) => write!(f, "unknown ({value})"),
        }
    }
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceReport {
    /// Ordinal among the GPUs visible under `CUDA_VISIBLE_DEVICES`, from 0.
    pub ordinal: u32,
    /// Product name.
    pub name: String,
    /// PCI address: `0000:65:00`.
    pub pci: String,
    /// CUDA version that the driver implements: 13000 is CUDA 13.0.
    pub driver_version: i32,
    /// Major and minor compute capability.
    pub capability: (i32, i32),
    /// Number of streaming multiprocessors.
    pub sms: u32,
    /// True when host memory can be registered, which doorbells require.
    pub host_register: bool,
    /// Ordering of peers' writes to its memory.
    pub writes_ordering: WritesOrdering,
    /// True when a stream's wait for a word can flush peers' writes to its memory.
    pub flush_remote_writes: bool,
    /// True when the GPU uses the host's page tables (GH200, GB200). Its memory can then be reached
    /// over the link to the processor and over PCIe, and writes on different paths are unordered,
    /// whatever `writes_ordering` says.
    pub is_coherent: bool,
}

impl fmt::Display for DeviceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.capability;
        write!(
            f,
            "GPU {} {} at {}, compute capability {major}.{minor}, {} SMs, driver {}, peers' writes \
             ordered for: {}",
            self.ordinal,
            self.name,
            self.pci,
            self.sms,
            super::api::version_text(self.driver_version),
            self.writes_ordering
        )
    }
}

/// Kind of the stream that runs the I/O kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamKind {
    /// On dedicated SMs, in a green context.
    Green,
    /// On any SM, scheduled ahead of other streams.
    Priority {
        /// Lower values have higher priority.
        priority: i32,
        /// Reason why a requested green context was not created.
        instead: Option<String>,
    },
}

/// The part of the GPU that a stream uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionReport {
    /// Requested SMs; `None` if no partition was requested.
    pub asked: Option<u32>,
    /// SMs that its kernels may run on.
    pub granted: u32,
    /// SMs left for a green context of other users.
    pub remaining: u32,
    /// Granularity of the SM count, if the driver reports it.
    pub granularity: Option<u32>,
    /// Kind of partition.
    pub kind: StreamKind,
}

impl fmt::Display for PartitionReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.kind, self.asked) {
            (StreamKind::Green, asked) => {
                let asked = asked.unwrap_or(self.granted);
                write!(f, "green context of {} SMs ({asked} asked for", self.granted)?;
                if let Some(granularity) = self.granularity {
                    write!(f, ", multiples of {granularity}")?;
                }
                write!(f, "; {} remain)", self.remaining)
            }
            (StreamKind::Priority { priority, instead }, asked) => {
                write!(f, "stream of priority {priority} on all {} SMs", self.granted)?;
                match (instead, asked) {
                    (Some(why), Some(asked)) => write!(f, ", NOT on {asked} of its own: {why}"),
                    _ => Ok(()),
                }
            }
        }
    }
}
