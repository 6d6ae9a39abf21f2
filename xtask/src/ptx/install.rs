//! nvcc, the assembler and a disassembler, from PyPI into a virtual environment of their own.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The compiler's version, a part of what the committed PTX is made from.
pub const NVCC: &str = "13.0.88";

/// Pinned together: a newer nvvm emits PTX that this ptxas rejects. None of the dependencies that
/// they name is needed to compile a kernel.
const PACKAGES: &[&str] = &[
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cuobjdump==13.2.78",
    "nvidia-cuda-nvdisasm==13.2.78",
];

const HINT: &str = "hint: the compiler comes from PyPI (about 100 MB, once); without a network, \
                    copy target/ptx/venv from a machine that has it at the same path";

/// Whether an earlier run installed all of it.
pub fn is_installed(folder: &Path) -> bool {
    fs::read_to_string(stamp(folder)).is_ok_and(|found| found == PACKAGES.join("\n"))
}

fn stamp(folder: &Path) -> PathBuf {
    folder.join("venv/ripieno-packages")
}

/// An installed CUDA compiler.
#[derive(Debug)]
pub struct Toolkit {
    home: PathBuf,
}

impl Toolkit {
    /// Installs it, unless an earlier run did.
    pub fn new(folder: &Path) -> Result<Self> {
        let venv = folder.join("venv");
        if is_installed(folder) {
            return Self::in_venv(&venv);
        }
        eprintln!("nvcc {NVCC} from PyPI, 100 MB, into {}:", venv.display());
        // Of a run that was stopped, or of other versions.
        let _ = fs::remove_dir_all(&venv);
        run(Command::new("python3").args(["-m", "venv"]).arg(&venv), HINT)?;
        let mut pip = Command::new(venv.join("bin/python"));
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]);
        run(pip.args(PACKAGES), HINT)?;
        let toolkit = Self::in_venv(&venv)?;
        // Last of all: it says that the rest is there.
        let stamp = stamp(folder);
        fs::write(&stamp, PACKAGES.join("\n"))
            .with_context(|| format!("cannot write {}", stamp.display()))?;
        Ok(toolkit)
    }

    fn in_venv(venv: &Path) -> Result<Self> {
        let lib = venv.join("lib");
        let pythons = fs::read_dir(&lib).with_context(|| format!("no {}", lib.display()))?;
        let mut homes =
            pythons.flatten().map(|python| python.path().join("site-packages/nvidia/cu13"));
        match homes.find(|home| home.join("bin/nvcc").is_file()) {
            Some(home) => Ok(Self { home }),
            None => bail!(
                "{} has no nvcc\n  hint: remove that folder, and run this again",
                venv.display()
            ),
        }
    }

    /// One of its programs, which find each other on the PATH.
    pub fn program(&self, name: &str) -> Command {
        let folder = self.home.join("bin");
        let mut command = Command::new(folder.join(name));
        let old = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(std::iter::once(folder).chain(std::env::split_paths(&old)));
        command.env("PATH", path.unwrap_or(old));
        command
    }
}

fn run(command: &mut Command, hint: &str) -> Result<()> {
    let line = shown(command);
    eprintln!("    $ {line}");
    let status = command.status().with_context(|| format!("cannot run `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed ({status}); its output is above\n  {hint}");
    }
    Ok(())
}

/// A command line of plain words.
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}
