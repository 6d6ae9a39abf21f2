//! Controllers on PCIe, through the kernel's VFIO.
//!
//! # Architecture
//!
//! ```text
//!   VfioSpace     one address space of the IOMMU: a DmaSpace              space, container, iova
//!   VfioBus       one NVMe function: registers, doorbells, interrupts   bus, bar, mapping, device
//!   PeerBar       memory of another function as a DMA target              peer
//!   PciAddress    0000:65:00.0                                            nvme-pci
//!   VfioError     problem and suggested remedy                            error
//!   sys           the ioctls; capability parses their answers
//! ```
//!
//! Several functions are opened in one space, so that memory is mapped once for all of them:
//!
//! ```no_run
//! # use nvme_driver::{Controller, ControllerOptions, MonotonicClock};
//! # use nvme_driver::platform::vfio::{BusOptions, SpaceOptions, VfioBus, VfioSpace};
//! # use std::sync::Arc;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let space = VfioSpace::open("vfio", SpaceOptions::default())?;
//! let bus = VfioBus::open(&space, "0000:65:00.0".parse()?, &BusOptions::default())?;
//! let clock = Arc::new(MonotonicClock::default());
//! let controller = Controller::attach(bus, clock, ControllerOptions::default())?;
//! # Ok(()) }
//! ```
//!
//! This uses the type 1 container (`/dev/vfio/vfio`), not iommufd. Peer-to-peer DMA needs memory of
//! other devices, which iommufd rejects by address on every kernel (IOMMU_IOAS_MAP, EFAULT). Since
//! Linux 6.19 it accepts BARs of vfio-pci functions as dma-bufs (VFIO_DEVICE_FEATURE_DMA_BUF, then
//! IOMMU_IOAS_MAP_FILE), but no dma-buf of a GPU's own driver.
//!
//! # Invariants
//!
//! - Memory is unmapped from the IOMMU before its owner may free it, and leaked if that fails:
//!   mapped memory holds its owner.
//! - A mapping holds its container, a BAR mapping its function, a function its group, a group the
//!   container; so each is dropped before the things it needs.
//! - Dropping a bus first stops the function's DMA, then its interrupts, then closes it.
//! - Answers of the kernel are checked, and none leads to a panic. A revoked BAR reads as all ones,
//!   and its bus as gone; it does not kill the process (SIGBUS is handled for these mappings).
//! - Memory is requested on the NUMA node of the function that uses it. If the functions of a space
//!   are on several nodes, the kernel places memory that is for none in particular.
//! - A function has one bus in this process, and its group one process.
//!
//! # Not implemented
//!
//! MSI and INTx (poll if there is no MSI-X), groups without an IOMMU (`noiommu`). The GPU platform
//! maps doorbells for a GPU.

mod bar;
mod bus;
mod capability;
mod container;
mod device;
mod error;
mod iova;
mod mapping;
mod peer;
mod space;
mod sys;

pub use bus::{BusOptions, VfioBus};
pub use capability::IovaSpan;
pub use container::SpaceStatus;
pub use error::{Call, VfioError};
pub use nvme_pci::{AddressError, PciAddress};
pub use peer::PeerBar;
pub use space::{HugePages, SpaceOptions, VfioSpace};

#[cfg(test)]
mod tests {
    use super::*;

    /// Most machines have no VFIO; on those that do, a container without groups cannot map.
    #[test]
    fn a_machine_without_vfio_says_what_to_do() {
        match VfioSpace::open("test", SpaceOptions::default()) {
            Err(VfioError::Os { call: Call::OpenContainer, source, hint, .. }) => {
                let expected = if source.kind() == std::io::ErrorKind::NotFound {
                    "modprobe"
                } else {
                    "/dev/vfio"
                };
                assert!(hint.contains(expected), "{source}: {hint}");
            }
            Err(VfioError::Unsupported { hint, .. }) => assert!(hint.contains("modprobe")),
            Err(other) => panic!("{other}"),
            Ok(space) => {
                let error = crate::DmaSpace::alloc(&*space, 4096).unwrap_err();
                assert!(error.to_string().contains("open a function in this space first"));
                let nowhere = "ffffffff:ff:1f.7".parse().unwrap();
                let bus = VfioBus::open(&space, nowhere, &BusOptions::default());
                assert!(bus.unwrap_err().to_string().contains("no such PCI function"));
            }
        }
    }
}
