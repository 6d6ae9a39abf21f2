//! What the steps of a run need from the machine, and how a machine gets it.
//!
//! Each step names its [`Need`]s, and [`satisfy`] gets all of them before the first step runs:
//! Debian's packages in one `apt-get install`, then what is kept below `target/`.

use std::process::Command;

use anyhow::{Result, bail};

pub use crate::need::Need;
use crate::programs::{
    cargo_install, has_library, is_debian_root, is_installed, succeeds, update_package_lists,
};
use crate::{abi, engine, ptx, vm};

/// Pinned: another version may complain of other things.
pub const CARGO_DENY: &str = "cargo-deny@0.20.2";

/// A need that a package of Debian satisfies.
struct Package {
    missing: &'static str,
    why: &'static str,
    name: &'static str,
}

impl Need {
    /// The package that this machine lacks.
    fn missing_package(self) -> Option<Package> {
        let package = |missing, why, name| Some(Package { missing, why, name });
        match self {
            // The `cc` crate reads the variable, too.
            Self::Cxx if std::env::var_os("CXX").is_none() && !is_installed("c++") => {
                package("a C++ compiler", "every build compiles the I/O kernel for the host", "g++")
            }
            Self::Gxx if !is_installed("g++") => package("g++", "nvcc preprocesses with it", "g++"),
            Self::GxxAarch64 if !is_installed("aarch64-linux-gnu-g++") => {
                let name = "g++-aarch64-linux-gnu";
                package("a C++ compiler for 64-bit Arm", "a wheel is made for it", name)
            }
            Self::Binutils if !is_installed("strip") => {
                package("strip", "programs are packed without their symbols", "binutils")
            }
            Self::Mmdebstrap if !is_installed("mmdebstrap") => {
                package("mmdebstrap", "it makes a minimal Debian", "mmdebstrap")
            }
            Self::PkgConfig if !is_installed("pkg-config") => {
                package("pkg-config", "the C interface is found with it", "pkgconf")
            }
            Self::Qemu if !is_installed(vm::QEMU) => {
                package(vm::QEMU, "tests run against its NVMe controllers", "qemu-system-x86")
            }
            Self::Python if !python_makes_venvs() => {
                package("python3 with venv", "pip installs the Python package", "python3-venv")
            }
            Self::Nvcc if !ptx::packages().are_installed() && !python_makes_venvs() => {
                package("python3 with venv", "pip installs nvcc", "python3-venv")
            }
            Self::Numa if !has_library("libnuma.so.1") => {
                package("libnuma", "vLLM on the CPU is linked against it", "libnuma1")
            }
            Self::Vllm if !python_makes_venvs() => {
                package("python3 with venv", "pip installs vLLM", "python3-venv")
            }
            Self::Bindgen if !abi::packages().are_installed() && !python_makes_venvs() => {
                package("python3 with venv", "pip installs libclang", "python3-venv")
            }
            _ => None,
        }
    }

    /// Gets what no package installs; does nothing if an earlier run got it.
    fn fetch(self) -> Result<()> {
        match self {
            Self::Cxx
            | Self::Gxx
            | Self::GxxAarch64
            | Self::Binutils
            | Self::Mmdebstrap
            | Self::Numa
            | Self::PkgConfig
            | Self::Python
            | Self::Qemu => Ok(()),
            Self::Guest => vm::fetch(),
            Self::Nvcc => ptx::packages().fetch(),
            Self::Vllm => engine::fetch(),
            Self::Bindgen => abi::fetch(),
            Self::CargoDeny => cargo_install(CARGO_DENY).map(drop),
        }
    }
}

/// Gets everything in `needs` that this machine lacks.
///
/// # Errors
/// Says what is missing, what it is for and how to get it.
pub fn satisfy(needs: impl IntoIterator<Item = Need>) -> Result<()> {
    let mut needs: Vec<Need> = needs.into_iter().collect();
    needs.sort_unstable();
    needs.dedup();
    install_packages(&needs)?;
    needs.into_iter().try_for_each(Need::fetch)
}

fn install_packages(needs: &[Need]) -> Result<()> {
    let missing = || needs.iter().filter_map(|need| need.missing_package()).collect::<Vec<_>>();
    let packages = missing();
    if packages.is_empty() {
        return Ok(());
    }
    let mut names: Vec<&str> = packages.iter().map(|package| package.name).collect();
    names.dedup();
    let install = format!("apt-get install -y --no-install-recommends {}", names.join(" "));
    if !is_debian_root() {
        bail!("{}\n  hint: as root, run `{install}`, or install the same by hand", list(&packages));
    }
    eprintln!("{}", list(&packages));
    // A new machine has no package lists, and an old machine has lists of packages that are gone.
    update_package_lists();
    if !succeeds(&install) || !missing().is_empty() {
        bail!("{}\n  hint: `{install}` failed; its output is above", list(&missing()));
    }
    Ok(())
}

fn list(packages: &[Package]) -> String {
    let line = |Package { missing, why, name }: &Package| {
        format!("this machine lacks {missing} (Debian's {name}): {why}")
    };
    packages.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Debian's python3 comes without these modules.
fn python_makes_venvs() -> bool {
    let python = Command::new("python3").args(["-c", "import venv, ensurepip"]).output();
    python.is_ok_and(|output| output.status.success())
}
