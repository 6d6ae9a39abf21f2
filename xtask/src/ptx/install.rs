//! nvcc, the assembler and a disassembler, from PyPI into their own virtual environment.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::pypi::{self, Packages};

/// Version of the compiler, which the committed PTX records.
pub const NVCC: &str = "13.0.88";

/// Pinned together: a newer nvvm emits PTX that this ptxas rejects. Their declared dependencies are
/// not needed to compile a kernel.
const PACKAGES: &[&str] = &[
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cuobjdump==13.2.78",
    "nvidia-cuda-nvdisasm==13.2.78",
];

/// Returns its packages.
pub fn packages(folder: &Path) -> Packages {
    pypi::packages(folder, PACKAGES.iter().copied(), "nvcc (100 MB)")
}

/// An installed CUDA compiler.
#[derive(Debug)]
pub struct Toolkit {
    home: PathBuf,
}

impl Toolkit {
    /// Installs it, unless an earlier run did.
    pub fn new(folder: &Path) -> Result<Self> {
        let packages = packages(folder);
        packages.fetch()?;
        Ok(Self { home: packages.find("nvidia/cu13")? })
    }

    /// Returns a command for one of its programs, which find each other on the PATH.
    pub fn program(&self, name: &str) -> Command {
        let folder = self.home.join("bin");
        let mut command = Command::new(folder.join(name));
        let old = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(std::iter::once(folder).chain(std::env::split_paths(&old)));
        command.env("PATH", path.unwrap_or(old));
        command
    }
}
