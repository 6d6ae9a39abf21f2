//! `cargo xtask wheel`: builds the Python package for machines without a compiler.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::folder;
use crate::needs::{self, Need};
use crate::programs::succeeds;
use crate::pypi::{self, Packages};
use crate::step::Step;

const PACKAGES: &[&str] = &["maturin==1.16.0"];
const NEEDS: &[Need] = &[Need::Cxx, Need::GxxAarch64, Need::Python];
/// Architectures to build wheels for: the first part of the target's name.
const MACHINES: [&str; 2] = ["x86_64", "aarch64"];

fn packages(place: &Path) -> Packages {
    pypi::packages(place, PACKAGES.iter().copied(), "maturin (10 MB)")
}

pub fn run() -> Result<ExitCode> {
    needs::satisfy(NEEDS.iter().copied())?;
    // pip and maturin run in their own folders.
    let place = std::path::absolute(folder::target("wheel"))?;
    let packages = packages(&place);
    packages.fetch()?;
    let bin = packages.folder.join("bin");
    let mut said = Vec::new();
    for machine in MACHINES {
        let target = format!("{machine}-unknown-linux-gnu");
        if !has_library(&target) {
            said.push(format!("{machine}: not built: `rustup target add {target}` failed"));
            continue;
        }
        let wheels = place.join("wheels").join(machine);
        let built = build(&target, &bin, &wheels)?;
        if built != ExitCode::SUCCESS {
            return Ok(built);
        }
        let wheel = only_file(&wheels)?;
        if machine == env::consts::ARCH {
            let checked = check(&place, &wheel)?;
            if checked != ExitCode::SUCCESS {
                return Ok(checked);
            }
            said.push(format!("{}: installed, imported, stored and loaded", wheel.display()));
        } else {
            let here = env::consts::ARCH;
            said.push(format!("{}: NOT RUN: this machine is {here}", wheel.display()));
        }
    }
    println!("{}", said.join("\n"));
    Ok(ExitCode::SUCCESS)
}

/// Builds the wheel for a target, into an empty folder. maturin names it after the oldest glibc
/// that suffices: a wheel built on an older system runs on more systems.
fn build(target: &str, bin: &Path, wheels: &Path) -> Result<ExitCode> {
    // Built by an earlier version.
    let _ = fs::remove_dir_all(wheels);
    Step::new("wheel", bin.join("maturin").to_string_lossy())
        .args("build --release --locked --target".split(' '))
        .args([target, "--manifest-path"])
        .args([folder::workspace().join("python/Cargo.toml").to_string_lossy()])
        .args(["--out".into(), wheels.to_string_lossy()])
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc")
        .run_alone()
}

/// Returns true if Rust's library for a target is installed, or could be fetched.
fn has_library(target: &str) -> bool {
    let asked =
        Command::new("rustc").args(["--print", "target-libdir", "--target", target]).output();
    let is_there = asked.is_ok_and(|asked| {
        let folder = PathBuf::from(String::from_utf8_lossy(&asked.stdout).trim());
        fs::read_dir(folder).is_ok_and(|mut files| files.next().is_some())
    });
    is_there || succeeds(&format!("rustup target add {target}"))
}

fn only_file(folder: &Path) -> Result<PathBuf> {
    let files: Vec<_> = fs::read_dir(folder)
        .with_context(|| format!("maturin made no {}", folder.display()))?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    match <[PathBuf; 1]>::try_from(files) {
        Ok([file]) => Ok(file),
        Err(files) => bail!("{} has {} files, and not one wheel", folder.display(), files.len()),
    }
}

/// Installs the wheel into an otherwise empty environment, and stores and loads blocks there.
fn check(place: &Path, wheel: &Path) -> Result<ExitCode> {
    let words = [place, wheel].map(|path| path.display().to_string());
    Step::new("check", "sh")
        .args(["-euxc", include_str!("wheel.sh"), "sh"])
        .args(words)
        .args([include_str!("wheel.py")])
        .run_alone()
}
