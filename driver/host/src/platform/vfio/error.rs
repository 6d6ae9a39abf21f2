//! VFIO errors with suggested remedies.

use std::{fmt, io};

use nvme_pci::PciAddress;
use rustix::io::Errno;

use crate::{dma::DmaError, error::remedy};

/// A kernel request, as named in errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Call {
    /// Open `/dev/vfio/vfio`.
    OpenContainer,
    /// Open `/dev/vfio/GROUP`.
    OpenGroup,
    /// `VFIO_GROUP_GET_STATUS`.
    GroupStatus,
    /// `VFIO_GROUP_SET_CONTAINER`.
    SetContainer,
    /// `VFIO_SET_IOMMU`.
    SetIommu,
    /// `VFIO_IOMMU_GET_INFO`.
    IommuInfo,
    /// `VFIO_GROUP_GET_DEVICE_FD`.
    DeviceFd,
    /// `VFIO_DEVICE_GET_INFO`.
    DeviceInfo,
    /// `VFIO_DEVICE_GET_REGION_INFO`.
    RegionInfo,
    /// `VFIO_DEVICE_GET_IRQ_INFO`.
    IrqInfo,
    /// `VFIO_DEVICE_SET_IRQS`.
    SetIrqs,
    /// Read or write configuration space.
    Config,
    /// Map a BAR into this process.
    MapBar,
    /// Create an eventfd.
    EventFd,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OpenContainer => "opening /dev/vfio/vfio",
            Self::OpenGroup => "opening its IOMMU group",
            Self::GroupStatus => "asking for the state of its IOMMU group",
            Self::SetContainer => "joining its IOMMU group to the container",
            Self::SetIommu => "choosing the type 1 IOMMU driver",
            Self::IommuInfo => "asking which I/O virtual addresses there are",
            Self::DeviceFd => "opening the function in its IOMMU group",
            Self::DeviceInfo => "asking about the function",
            Self::RegionInfo => "asking about a BAR",
            Self::IrqInfo => "asking about interrupts",
            Self::SetIrqs => "setting up interrupts",
            Self::Config => "accessing configuration space",
            Self::MapBar => "mapping a BAR into this process",
            Self::EventFd => "making an eventfd",
        })
    }
}

/// Failure to open or use a PCI function through VFIO.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VfioError {
    /// The kernel rejected a request.
    #[error("{subject}: {call} failed: {source}; {hint}")]
    Os {
        /// The function or address space.
        subject: String,
        /// The request.
        call: Call,
        /// The cause.
        source: io::Error,
        /// Suggested remedy.
        hint: &'static str,
    },
    /// The function is bound to another driver, or to none.
    #[error(
        "{address}: {} has it and not vfio-pci; nvme-bind can hand it over, after checking that \
         nothing uses it",
        driver.as_ref().map_or_else(|| "no driver".into(), |name| format!("driver {name}"))
    )]
    NotBound {
        /// The function.
        address: PciAddress,
        /// The driver it is bound to.
        driver: Option<String>,
    },
    /// Kernel drivers use other devices of its group.
    #[error(
        "{address}: its IOMMU group {group} cannot be used while the kernel drives other devices \
         of it: {}; hand those over as well or unbind their drivers, because the IOMMU cannot \
         keep devices of one group apart",
        list(blockers)
    )]
    NotViable {
        /// The function.
        address: PciAddress,
        /// The group.
        group: u32,
        /// These devices with their drivers; empty if unknown.
        blockers: Vec<String>,
    },
    /// Another process has the group open.
    #[error(
        "{address}: its IOMMU group {group} is in use by {}; a group can be open only once",
        list(holders)
    )]
    Busy {
        /// The function.
        address: PciAddress,
        /// The group.
        group: u32,
        /// The processes that have it open; empty if not visible from here.
        holders: Vec<String>,
    },
    /// This process has already opened the function.
    #[error("{address}: this process has it open already; share the bus it has")]
    Claimed {
        /// The function.
        address: PciAddress,
    },
    /// The function, one of its BARs, or the kernel's VFIO is not what this driver needs.
    #[error("{subject}: {what}; {hint}")]
    Unsupported {
        /// The function or address space.
        subject: String,
        /// The missing or incompatible part.
        what: String,
        /// Suggested remedy.
        hint: &'static str,
    },
    /// The function does not answer, not even in configuration space.
    #[error("{address}: it does not answer on its bus (configuration space reads all ones)")]
    Gone {
        /// The function.
        address: PciAddress,
    },
    /// Memory could not be mapped.
    #[error("{0}")]
    Dma(#[from] DmaError),
}

impl VfioError {
    pub(super) fn unsupported(
        subject: impl fmt::Display,
        what: impl Into<String>,
        hint: &'static str,
    ) -> Self {
        Self::Unsupported { subject: subject.to_string(), what: what.into(), hint }
    }

    pub(super) fn os(subject: impl fmt::Display, call: Call, source: io::Error) -> Self {
        let hint = hint(call, &source);
        Self::Os { subject: subject.to_string(), call, source, hint }
    }
}

fn list(items: &[String]) -> String {
    match items {
        [] => "something that cannot be seen from here (try as root)".into(),
        items => items.join(", "),
    }
}

fn errno(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().map(Errno::from_raw_os_error)
}

const DMESG: &str = "the kernel's log (dmesg) may say more";

/// Returns the remedy for a failure of `call`.
fn hint(call: Call, error: &io::Error) -> &'static str {
    let Some(errno) = errno(error) else { return DMESG };
    match (call, errno) {
        (Call::OpenContainer, Errno::NOENT | Errno::NODEV) => {
            "load the modules: modprobe -a vfio-pci vfio_iommu_type1; inside a container also pass \
             /dev/vfio into it"
        }
        (Call::OpenGroup, Errno::NOENT) => {
            "the function is not bound to vfio-pci (nvme-bind does that); inside a container also \
             pass /dev/vfio into it"
        }
        (Call::OpenContainer | Call::OpenGroup, Errno::ACCESS | Errno::PERM) => {
            "give this user the device nodes of /dev/vfio (chown; nvme-bind does that), and inside \
             a container allow them in its device list"
        }
        (Call::SetContainer | Call::SetIommu, Errno::PERM) => {
            "the IOMMU does not remap interrupts, which would let the function forge any of them: \
             switch interrupt remapping on in the firmware (where every device is trusted: \
             vfio_iommu_type1.allow_unsafe_interrupts=1)"
        }
        (Call::SetContainer | Call::SetIommu, Errno::INVAL) => {
            "the group is in another container, or it reserves addresses where memory of this \
             space is mapped already: open all functions before mapping memory"
        }
        (Call::SetContainer | Call::SetIommu, Errno::BUSY) => {
            "a driver of the kernel or iommufd uses a device of the group"
        }
        (Call::SetIommu, Errno::NODEV) => "load the module: modprobe vfio_iommu_type1",
        (Call::DeviceFd, Errno::NODEV | Errno::INVAL | Errno::NOENT) => {
            "the function is not bound to vfio-pci, though its group is usable"
        }
        (Call::DeviceFd, Errno::BUSY | Errno::TIMEDOUT) => {
            "the function did not leave its reset, or another process has it; try again"
        }
        (Call::SetIrqs, Errno::NOSPC | Errno::NOMEM) => "ask for fewer interrupt vectors, or poll",
        (Call::MapBar, Errno::INVAL | Errno::NODEV) => {
            "this kernel does not let this part of the BAR be mapped"
        }
        _ => remedy(error).unwrap_or(DMESG),
    }
}

/// Returns the remedy if memory could not be mapped for DMA. `memlock` is RLIMIT_MEMLOCK in bytes
/// (`None`: no limit) and `mapped` the bytes that the space has mapped already.
pub(super) fn map_hint(error: &io::Error, memlock: Option<u64>, mapped: u64) -> String {
    match errno(error) {
        Some(Errno::NOMEM) => match memlock {
            Some(limit) => format!(
                "this process may lock {limit} bytes (RLIMIT_MEMLOCK) and this space has mapped \
                 {mapped} already: raise it with ulimit -l or LimitMEMLOCK=, or give the process \
                 CAP_IPC_LOCK"
            ),
            None => format!("the machine has no memory left to pin ({mapped} bytes are mapped)"),
        },
        Some(Errno::FAULT) => "a part of it is not mapped in this process, or is of a kind that \
                               cannot be pinned; a BAR needs memory decoding switched on, and \
                               VFIO's own type 1 driver: that of iommufd maps no BARs"
            .into(),
        Some(Errno::NOSPC) => "the container has no DMA entries left (module parameter \
                               vfio_iommu_type1.dma_entry_limit); map fewer, larger pieces"
            .into(),
        Some(Errno::INVAL) => "address or length is not what this IOMMU takes, or a group of the \
                               space reserves the range"
            .into(),
        Some(Errno::EXIST) => "the range is mapped already; something else maps memory in this \
                               container"
            .into(),
        Some(Errno::PERM | Errno::ACCESS) => "the memory is read-only, or a security module \
                                              forbids pinning it"
            .into(),
        Some(Errno::BUSY) => "the container is being changed by somebody else; try again".into(),
        _ => DMESG.into(),
    }
}

#[cfg(test)]
mod tests;
