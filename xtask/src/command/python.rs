//! `cargo xtask python`: installs the Python package with pip, and runs its tests.

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;

use crate::step::Step;
use crate::{folder, needs};

pub const NEEDS: &[&str] = &["cxx", "python-tools"];

pub fn run() -> Result<ExitCode> {
    needs::satisfy(NEEDS)?;
    let (place, package) = (folder::target("python"), folder::workspace().join("python"));
    install(&place.join("venv"))?;
    let program = program()?;
    Step::new("pytest", "sh")
        .args(["-euxc", include_str!("python.sh"), "sh"])
        .args([place, package].map(|path| path.display().to_string()))
        .env(PROGRAM, program.display().to_string())
        .run_alone()
}

/// Builds the package and installs it into the environment `venv`, which has maturin.
pub fn install(venv: &Path) -> Result<()> {
    let bin = venv.join("bin");
    let old = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths([bin.clone()].into_iter().chain(env::split_paths(&old)))?;
    Step::new("install", bin.join("python").to_string_lossy())
        .args("-m pip install --quiet --disable-pip-version-check --no-index --no-deps".split(' '))
        .args(["--no-build-isolation", "--force-reinstall"])
        .args([folder::workspace().join("python").to_string_lossy()])
        .env("PATH", path.to_string_lossy())
        .demand()
}

/// Variable that names the program whose server the tests start.
pub const PROGRAM: &str = "RIPIENO_PROGRAM";

/// Builds the program for [`PROGRAM`], and returns its path.
pub fn program() -> Result<PathBuf> {
    // In CI the replay has built it so.
    Step::cargo("build", "build --release --bin ripieno").demand()?;
    // Absolute, because the tests run in another folder.
    Ok(std::path::absolute(folder::target("release").join("ripieno"))?)
}
