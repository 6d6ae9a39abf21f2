//! A small virtual machine in which the VFIO path runs without hardware: two emulated NVMe
//! controllers behind an emulated IOMMU, and a device whose memory stands in for a GPU's.
//!
//! ```text
//!   guest       the programs under test, and their libraries
//!   initramfs   all of it in one archive
//!   image       file systems for the guest
//!   python      a drive with Python and the package
//!   vllm        a drive with vLLM, the package and its tests
//!   machine     QEMU's command line
//!   suite       one boot: console, host (requests of the guest), qmp
//! ```
//!
//! It uses only files below `target/vm` and two sockets of the host. The guest's tests are in
//! tests/vm; the two sides share only the protocols of [`console`] and [`host`].

pub mod console;
mod guest;
mod host;
mod image;
mod initramfs;
mod machine;
mod python;
mod qmp;
mod suite;
mod vllm;

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};

use crate::folder;

pub use suite::{SUITES, Suite, Wishes, shell};

/// Inputs of every boot, made once.
#[derive(Debug)]
pub struct Prepared {
    kernel: PathBuf,
    initrd: PathBuf,
    folder: PathBuf,
    /// Prevents two runs from writing to the same drives.
    _lock: File,
}

impl Prepared {
    /// Downloads and builds everything that is missing.
    ///
    /// # Errors
    /// Returns an error with what this machine lacks, and how to get it.
    pub fn new() -> Result<Self> {
        let folder = folder::target("vm");
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        let lock = lock(&folder)?;
        let programs = guest::build()?;
        let initrd = initramfs::pack(&folder, &programs)?;
        let kernel = folder::only_file(&folder.join("packages/kernel/boot"), "vmlinuz-")?;
        Ok(Self { kernel, initrd, folder, _lock: lock })
    }

    /// Returns the path of the console log of a suite's last boot.
    pub fn log(&self, suite: &str) -> PathBuf {
        self.folder.join("logs").join(format!("{suite}.log"))
    }
}

/// Waits for another run to end.
fn lock(folder: &Path) -> Result<File> {
    let path = folder.join("lock");
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        eprintln!("waiting for another `cargo xtask vm`, which has {}", path.display());
        flock(&file, FlockOperation::LockExclusive)?;
    }
    Ok(file)
}
