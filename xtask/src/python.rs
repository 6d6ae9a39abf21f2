//! The Python package: its tools, and its installation into an environment.

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::folder;
use crate::pypi::Packages;
use crate::step::Step;

/// The part of pyproject.toml that names packages.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Declared {
    build_system: BuildSystem,
    project: Project,
}

#[derive(Deserialize)]
struct BuildSystem {
    requires: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Project {
    optional_dependencies: Extras,
}

#[derive(Deserialize)]
struct Extras {
    test: Vec<String>,
}

/// Returns the packages that pyproject.toml names for builds and tests, in a persistent
/// environment: later runs need no network.
pub fn tools() -> Result<Packages> {
    let path = source().join("pyproject.toml");
    let text = fs::read_to_string(&path).with_context(|| format!("no {}", path.display()))?;
    Ok(Packages {
        folder: folder::target("python").join("venv"),
        packages: declared(&text).with_context(|| format!("in {}", path.display()))?,
        with_dependencies: true,
        what: "maturin, numpy, pytest and mypy (60 MB)",
    })
}

fn declared(pyproject: &str) -> Result<Vec<String>> {
    let Declared { build_system, project } = basic_toml::from_str(pyproject)?;
    let mut packages = build_system.requires;
    packages.extend(project.optional_dependencies.test);
    Ok(packages)
}

fn source() -> PathBuf {
    folder::workspace().join("python")
}

/// Builds the package and installs it into the environment `venv`, which has maturin.
pub fn install(venv: &Path) -> Result<()> {
    let bin = venv.join("bin");
    let old = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths([bin.clone()].into_iter().chain(env::split_paths(&old)))?;
    Step::new("install", bin.join("python").to_string_lossy())
        .args("-m pip install --quiet --disable-pip-version-check --no-index --no-deps".split(' '))
        .args(["--no-build-isolation", "--force-reinstall"])
        .args([source().to_string_lossy()])
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_what_the_package_declares() {
        let text = "[build-system]\nrequires = ['a>=1', 'b']\nbuild-backend = 'a'\n\
                    [project]\nname = 'n'\n[project.optional-dependencies]\ntest = ['c==2']\n";
        assert_eq!(declared(text).unwrap(), ["a>=1", "b", "c==2"]);
        assert!(tools().unwrap().packages.iter().any(|name| name.starts_with("maturin")));
    }
}
