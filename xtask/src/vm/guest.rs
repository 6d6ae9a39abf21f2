//! The programs that run in the guest, which has no libraries to link with.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::step::SaidNo;

/// Not what `cargo build` picks by itself: with RUSTFLAGS and no `--target`, build scripts and
/// procedural macros would be linked statically, too, and the latter cannot be.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Packages, and the programs they make.
const PROGRAMS: &[(&str, &str)] =
    &[("ripieno-vm-tests", "vm-tests"), ("nvme-bind", "nvme-bind"), ("ripieno", "ripieno")];

/// The guest runs translated code: optimized enough to be quick there, and quick to build here.
const PROFILE: &[&str] = &[
    "profile.vm.inherits=\"release\"",
    "profile.vm.opt-level=1",
    "profile.vm.debug-assertions=true",
    "profile.vm.overflow-checks=true",
    "profile.vm.debug=false",
    "profile.vm.strip=true",
];

/// Builds the programs, `ripieno` only if it is wanted: it takes the longest, and most suites do
/// without. Where they are.
pub fn build(folder: &Path, with_ripieno: bool) -> Result<Vec<PathBuf>> {
    let programs = &PROGRAMS[..PROGRAMS.len() - usize::from(!with_ripieno)];
    let target = folder.join("build");
    let mut command = Command::new("cargo");
    command.args(["build", "--profile", "vm", "--target", TARGET]);
    command.args(PROFILE.iter().flat_map(|setting| ["--config", setting]));
    command.args(programs.iter().flat_map(|(package, _)| ["--package", package]));
    command.arg("--target-dir").arg(&target).env("RUSTFLAGS", "-C target-feature=+crt-static");
    let names: Vec<&str> = programs.iter().map(|&(_, program)| program).collect();
    eprintln!("building for the guest, linked statically: {}", names.join(", "));
    let status = command.status().context("cannot run cargo")?;
    if !status.success() {
        bail!(SaidNo("cargo build --profile vm".into()));
    }
    let built = target.join(TARGET).join("vm");
    Ok(names.iter().map(|name| built.join(name)).collect())
}
