//! A small virtual machine in which the VFIO path runs without hardware: two emulated NVMe
//! controllers behind an emulated IOMMU, and a device whose memory stands in for a GPU's.
//!
//! ```text
//!   files.sh   the archive that the guest boots from, and file systems for it
//!   machine    QEMU's command line
//!   suite      one boot: console, host (requests of the guest), qmp
//! ```
//!
//! It uses only files below `target/vm` and two sockets of the host. The guest's tests are in
//! tests/vm; the two sides share only the protocols of [`console`] and [`host`].

pub mod console;
mod host;
mod machine;
mod qmp;
mod suite;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};

use crate::child;
use crate::command::test::lean;
use crate::folder::{self, IN_DEBUG};
use crate::step::Step;

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
        // With the same options as the workspace's tests, so that CI compiles everything once.
        // `--tests` although no test is run: without them dependencies have other features, and
        // half of the workspace is compiled once more.
        lean(Step::cargo("guest", &format!("build {IN_DEBUG} --bins --tests"))).demand()?;
        child::run(files("initramfs").args(["vm-tests", "nvme-bind", "ripieno"]))?;
        let initrd = folder.join("initramfs.cpio");
        let kernel = folder::only_file(&folder.join("packages/kernel/boot"), "vmlinuz-")?;
        Ok(Self { kernel, initrd, folder, _lock: lock })
    }

    /// Returns the path of the console log of a suite's last boot.
    pub fn log(&self, suite: &str) -> PathBuf {
        self.folder.join("logs").join(format!("{suite}.log"))
    }
}

/// Returns a command that makes files for the guest.
fn files(what: &str) -> Command {
    let script = folder::workspace().join("xtask/src/vm/files.sh");
    let mut command = Command::new("bash");
    command.args([script, folder::target("")]).arg(what);
    command
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
