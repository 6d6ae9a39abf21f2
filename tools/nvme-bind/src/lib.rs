//! `nvme-bind` hands NVMe drives to userspace drivers through VFIO, gives them back, and says what
//! stands in the way on a GPU server.
//!
//! # Architecture
//!
//! What is read and what is changed are apart. `nvme-pci` reads /sys, /proc, /dev and /etc below
//! one folder, `/` unless a test says otherwise, and knows PCI functions; `drive`, `usage`,
//! `topology` and `gpu` make facts of it; `doctor` judges them. `plan` turns facts into steps,
//! which are data; `execute` carries steps out through the trait of `machine` (this computer, or a
//! recorder for dry runs), and writes every intention into the `journal` first. `persist` has the
//! files that survive a reboot. `command` is what the subcommands do, `report` what they print.
//!
//! # Invariants
//!
//! - Nothing is changed except through `machine::Machine`, so a dry run lists all there is.
//! - The journal of a drive is durable before its first step, and is removed only after its last.
//!   A release is planned from what the machine looks like, not from where the journal stopped: it
//!   is right whether or not the last step of a crashed run took effect.
//! - A drive that the kernel uses (mount, swap, md, LVM, dm, ZFS, an open file) is never unbound;
//!   there is no option that overrides this. On the way, its disks are held open exclusively, so
//!   that nothing can start to use them in between.
//! - No name is looked up through NSS: the program can be linked statically.
//!
//! # Not implemented
//!
//! - VFIO without an IOMMU (`enable_unsafe_noiommu_mode`).
//! - The per-device nodes of iommufd (`/dev/vfio/devices/*`): only the group node is handed over.
//! - Drives behind Intel VMD, which VFIO cannot take one by one.
//! - Users of a disk that hold neither an exclusive claim nor a visible file, such as an iSCSI
//!   target of the kernel that shares it.

mod cli;
mod command;
pub mod doctor;
mod drive;
mod execute;
mod gpu;
mod journal;
mod machine;
mod owner;
mod persist;
mod plan;
mod problem;
mod report;
#[cfg(test)]
mod tests;
mod topology;
mod usage;

use nvme_pci as pci;

pub use cli::{command, run};
pub use report::Paint;
