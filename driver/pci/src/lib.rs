//! PCI functions as Linux shows them in sysfs: addresses, classes, drivers, IOMMU groups, the disks
//! behind them, and what uses these. Shared by the driver, `nvme-bind` and the tests in the virtual
//! machine.
//!
//! # Architecture
//!
//! ```text
//!   PciAddress    0000:65:00.0                               address
//!   Function      a function as sysfs describes it           function
//!   OpenFile      a device node that a process has open      open
//!   Block         a disk, a partition, a device on top       disk
//!   Users         what uses disks: mounts, arrays, targets   users
//!   Root          file access below / or a copy of it        root
//! ```
//!
//! # Invariants
//!
//! - Nothing is written. An unreadable file gives `None` or an error, never a panic.
//!
//! # Not implemented
//!
//! Configuration space beyond what sysfs names, and devices of a group that are not on PCI.

mod address;
mod disk;
mod function;
mod open;
mod root;
mod users;

pub use address::{AddressError, PciAddress};
pub use disk::Block;
pub use function::{
    CLASS_NVME, DEVICES, DRIVERS, Function, GROUPS, PROBE, VFIO, full_address, functions,
    group_members, groups, is_no_iommu, sysfs,
};
pub use open::{DeviceNode, OpenFile, open_files, vfio_files};
pub use root::{Claim, Root};
pub use users::{Use, UseKind, Users, users_of_disk};
