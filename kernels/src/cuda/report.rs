//! What there is and what was granted, for people and for programs.

use std::fmt;

/// Whether what a NIC or an NVMe device wrote into GPU memory is in order for kernels
/// (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WritesOrdering {
    /// No: a flush is needed before a kernel may read.
    None,
    /// For kernels of the GPU that owns the memory.
    Owner,
    /// For kernels of every GPU.
    AllDevices,
    /// The driver does not say, or says something new.
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

    /// Whether a completion that a kernel saw means that it can see the data in its GPU's memory,
    /// too. Memory of the host is in order in any case.
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
    /// Its number, from 0 on, as `CUDA_VISIBLE_DEVICES` leaves them.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Where it is: `0000:65:00`.
    pub pci: String,
    /// What the driver implements: 13000 is CUDA 13.0.
    pub driver_version: i32,
    /// Major and minor compute capability.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Whether memory can be registered: without that no doorbell can be reached.
    pub host_register: bool,
    /// Order of peers' writes into its memory.
    pub writes_ordering: WritesOrdering,
    /// Whether a stream can flush peers' writes into its memory when it waits for a word.
    pub flush_remote_writes: bool,
    /// True if it uses the host's page tables (GH200, GB200). Then its memory can be reached over
    /// the link to the processor and over PCIe, and writes that go different ways are in no order,
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

/// What kind of stream the I/O kernel runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamKind {
    /// On SMs of its own choice, in a green context.
    Green,
    /// On any SM, ahead of other streams where there is a choice.
    Priority {
        /// Lower goes first.
        priority: i32,
        /// Why it is not a green context, where one was asked for.
        instead: Option<String>,
    },
}

/// Which part of the GPU a stream uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionReport {
    /// SMs that were asked for; `None` asks for no partition.
    pub asked: Option<u32>,
    /// SMs that its kernels may run on.
    pub granted: u32,
    /// SMs that others could have for themselves in a green context of their own.
    pub remaining: u32,
    /// SMs come in multiples of this, where the driver says so.
    pub granularity: Option<u32>,
    /// How it was done.
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
