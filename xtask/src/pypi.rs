//! Packages from PyPI, in a virtual environment below `target/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::child;

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
        // Left by a run that was stopped, or with other versions.
        let _ = fs::remove_dir_all(&self.folder);
        self.run(Command::new("python3").args(["-m", "venv"]).arg(&self.folder))?;
        let mut pip = Command::new(self.folder.join("bin/python"));
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]);
        // Few retries, so that a machine without a network fails soon.
        pip.arg("--retries=2");
        // No builds; Python compiles modules on first use.
        pip.args(["--only-binary=:all:", "--no-compile"]);
        pip.args((!self.with_dependencies).then_some("--no-deps"));
        self.run(pip.args(&self.packages))?;
        finish(self)?;
        // Written last, to mark the rest as complete.
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

    fn run(&self, command: &mut Command) -> Result<()> {
        child::run(command).with_context(|| {
            format!(
                "{} could not be installed from PyPI\n  hint: pip's output is above; without a \
                 network, copy {} from a machine that has it at the same path",
                self.what,
                self.folder.display()
            )
        })
    }
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
