//! `nvme-bind` hands NVMe drives to userspace drivers through VFIO, takes them back, and diagnoses
//! obstacles on a GPU server.
//!
//! # Architecture
//!
//! Reading and changing are separate. `nvme-pci` reads /sys, /proc, /dev and /etc below one
//! directory, `/` except in tests, and decodes PCI functions; `drive`, `paths`, `usage`,
//! `topology` and `gpu` derive facts from it; `doctor` judges them. `kv-catalog` has the list of
//! formats that a disk may hold. `plan` turns facts into steps, which are data; `execute` performs
//! steps through the trait of `machine` (this computer, or a recorder for dry runs), and writes
//! every intention to the `journal` first. `persist` has the files that survive a reboot.
//! `command` implements the subcommands, `report` formats their output.
//!
//! # Invariants
//!
//! - Nothing is changed except through `machine::Machine`, so a dry run lists every change.
//! - The journal of a drive is durable before its first step, and is removed only after its last. A
//!   release is planned from the current state of the machine, not from the journal's position: it
//!   is correct whether or not the last step of a crashed run took effect.
//! - A drive that the kernel uses (mount, swap, md, LVM, dm, ZFS, an open file) is never unbound;
//!   no option overrides this. Meanwhile its disks are held open exclusively, so that no new use
//!   can begin.
//! - No name is looked up through NSS: the program can be linked statically.
//!
//! # Not implemented
//!
//! - VFIO without an IOMMU (`enable_unsafe_noiommu_mode`).
//! - The per-device nodes of iommufd (`/dev/vfio/devices/*`): only the group node is handed over.
//!   Their users are users of the drive.
//! - Drives behind Intel VMD, which VFIO cannot take individually.
//! - Users of a disk that hold neither an exclusive claim nor a visible file, and that sysfs,
//!   configfs and procfs do not name.

mod cli;
mod command;
pub mod doctor;
mod drive;
mod execute;
mod gpu;
mod journal;
mod machine;
mod owner;
mod paths;
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

/// The version of the programs in this workspace: `0.1.0 (0123456789ab)` if built from a checkout.
pub const VERSION: &str = env!("RIPIENO_VERSION");
