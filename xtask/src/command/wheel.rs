//! `cargo xtask wheel`: builds the Python package for machines without a compiler.

use std::env;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use crate::folder;
use crate::needs::{self, Need};
use crate::programs::{rust_library, succeeds};
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
        build(&target, &bin, &wheels)?;
        let wheel = folder::only_file(&wheels, "")?;
        if machine == env::consts::ARCH {
            check(&place, &wheel)?;
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
fn build(target: &str, bin: &Path, wheels: &Path) -> Result<()> {
    // Built by an earlier version.
    let _ = fs::remove_dir_all(wheels);
    Step::new("wheel", bin.join("maturin").to_string_lossy())
        .args("build --release --locked --target".split(' '))
        .args([target, "--manifest-path"])
        .args([folder::workspace().join("python/Cargo.toml").to_string_lossy()])
        .args(["--out".into(), wheels.to_string_lossy()])
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc")
        .demand()
}

/// Returns true if Rust's library for a target is installed, or could be fetched.
fn has_library(target: &str) -> bool {
    let is_there = rust_library(Some(target)).is_ok_and(|files| !files.is_empty());
    is_there || succeeds(&format!("rustup target add {target}"))
}

/// Installs the wheel into an otherwise empty environment, and stores and loads blocks there.
fn check(place: &Path, wheel: &Path) -> Result<()> {
    let words = [place, wheel].map(|path| path.display().to_string());
    Step::new("check", "sh")
        .args(["-euxc", include_str!("wheel.sh"), "sh"])
        .args(words)
        .args([include_str!("wheel.py")])
        .demand()
}
