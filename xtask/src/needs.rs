//! What the steps of a run need from the machine, and how a machine gets it.
//!
//! Each step names its [`Need`]s, and [`satisfy`] gets all of them before the first step runs:
//! Debian's packages in one `apt-get install`, then what is kept below `target/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::OnceLock;

use anyhow::{Result, bail};

use crate::step::Step;
use crate::{abi, command, folder, ptx, vm};

/// Something that a step needs and that a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    /// A C++ compiler.
    Cxx,
    /// That of GNU.
    Gxx,
    /// `strip`.
    Binutils,
    Mmdebstrap,
    /// QEMU for x86-64.
    Qemu,
    /// The kernel and the busybox of the virtual machine, in `target/vm`.
    Guest,
    /// NVIDIA's compiler, in `target/ptx`.
    Nvcc,
    /// bindgen and the libclang that it asks, in `target/abi`.
    Bindgen,
    /// cargo-deny, in `target/tools`.
    CargoDeny,
}

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
            Self::Binutils if !is_installed("strip") => {
                package("strip", "programs are packed without their symbols", "binutils")
            }
            Self::Mmdebstrap if !is_installed("mmdebstrap") => {
                package("mmdebstrap", "it makes a minimal Debian", "mmdebstrap")
            }
            Self::Qemu if !is_installed(vm::QEMU) => {
                package(vm::QEMU, "tests run against its NVMe controllers", "qemu-system-x86")
            }
            Self::Nvcc if !ptx::packages().are_installed() && !python_makes_venvs() => {
                package("python3 with venv", "pip installs nvcc", "python3-venv")
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
            Self::Cxx | Self::Gxx | Self::Binutils | Self::Mmdebstrap | Self::Qemu => Ok(()),
            Self::Guest => vm::fetch(),
            Self::Nvcc => ptx::packages().fetch(),
            Self::Bindgen => abi::fetch(),
            Self::CargoDeny => cargo_install(command::lint::CARGO_DENY).map(drop),
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

/// Builds the program `NAME@VERSION` with `cargo install`, unless an earlier run did: a minute or
/// two. Returns where it is.
pub fn cargo_install(program: &str) -> Result<PathBuf> {
    let tools = folder::target("tools");
    let (name, _) = program.split_once('@').unwrap_or((program, ""));
    let installed = fs::read_to_string(tools.join(".crates.toml")).unwrap_or_default();
    let path = tools.join("bin").join(name.trim_end_matches("-cli"));
    if path.is_file() && installed.contains(&program.replace('@', " ")) {
        return Ok(path);
    }
    let install = format!("install --locked --debug --quiet {program} --root");
    let step = Step::cargo("get a program", &install).args([tools.to_string_lossy()]);
    if step.run_alone()? != ExitCode::SUCCESS {
        bail!("this machine lacks {program}, and `{step}` failed\n  hint: its output is above");
    }
    Ok(path)
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

/// Updates apt's package lists, once in a run, if we may.
pub fn update_package_lists() -> bool {
    static UPDATED: OnceLock<bool> = OnceLock::new();
    *UPDATED.get_or_init(|| is_debian_root() && succeeds("apt-get update"))
}

fn is_debian_root() -> bool {
    rustix::process::geteuid().is_root() && Path::new("/usr/bin/apt-get").exists()
}

/// Whether `program` is on the PATH.
pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Debian's python3 comes without these modules.
fn python_makes_venvs() -> bool {
    let python = Command::new("python3").args(["-c", "import venv, ensurepip"]).output();
    python.is_ok_and(|output| output.status.success())
}

/// Shows a command line of plain words, and runs it.
fn succeeds(line: &str) -> bool {
    eprintln!("    $ {line}");
    let mut words = line.split_whitespace();
    let program = words.next().unwrap_or("true");
    Command::new(program)
        .args(words)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .status()
        .is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_only_what_is_there() {
        assert!(is_installed("sh"));
        assert!(!is_installed("no-such-program-anywhere"));
    }

    #[test]
    fn a_failed_command_is_seen() {
        assert!(succeeds("true"));
        assert!(!succeeds("false"));
        assert!(!succeeds("no-such-program-anywhere"));
    }
}
