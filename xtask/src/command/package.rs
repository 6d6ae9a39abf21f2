//! `cargo xtask package`: builds a Debian package, and wheels of the Python package.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use anyhow::{Context, Result};
use clap::Args;

use crate::needs;
use crate::step::Step;
use crate::{RunArgs, child, folder, report};

/// Completions of the Debian package: the shell, and what is before and after the program's name in
/// a file's name.
const COMPLETIONS: [[&str; 3]; 3] = [["bash", "", ""], ["zsh", "_", ""], ["fish", "", ".fish"]];

/// Packages, each with its needs. A wheel's name ends with the first part of its target's name.
const PACKAGES: [(&str, &[&str]); 3] = [
    ("deb", &["cxx", "dpkg-dev", "cargo-deb", "cargo-bundle-licenses"]),
    ("wheel-x86_64", &["cxx", "maturin", "cargo-bundle-licenses"]),
    ("wheel-aarch64", &["cxx", "gxx-aarch64", "maturin", "cargo-bundle-licenses"]),
];

/// Licences of the crates, in each package.
const NOTICES: &str = "THIRD-PARTY.yml";

/// Start of a wheel's name if it fits other systems than this one.
const MANYLINUX: &str = concat!("ripieno-", env!("CARGO_PKG_VERSION"), "-cp310-abi3-manylinux_");

#[derive(Args)]
pub struct PackageArgs {
    /// Make only this package
    #[arg(long, value_parser = PACKAGES.map(|(name, _)| name))]
    only: Option<String>,
    #[command(flatten)]
    run: RunArgs,
}

pub fn run(args: &PackageArgs) -> Result<ExitCode> {
    let Some(name) = &args.only else {
        let step =
            |(name, needs)| Step::cargo(name, "xtask package --only").args([name]).needs(needs);
        return report::run_all(PACKAGES.map(step).into(), args.run);
    };
    let found = PACKAGES.iter().filter(|(package, _)| package == name);
    for (_, needs) in found {
        needs::satisfy(needs)?;
    }
    // pip, maturin and cargo-deb run in folders of their own.
    let out = std::path::absolute(folder::target("package"))?.join(name);
    // Built by an earlier version.
    let _ = fs::remove_dir_all(&out);
    let package = match name.strip_prefix("wheel-") {
        Some(machine) => wheel(machine, &out)?,
        None => deb(&out)?,
    };
    println!("{}", package.display());
    Ok(ExitCode::SUCCESS)
}

/// Builds the Debian package; `[package.metadata.deb]` in tools/Cargo.toml says what it contains.
fn deb(out: &Path) -> Result<PathBuf> {
    Step::cargo("build", "build --release --locked --package ripieno --package nvme-bind")
        .demand()?;
    let release = std::path::absolute(folder::target("release"))?;
    let (ripieno, made) = (release.join("ripieno"), release.join("package"));
    // A command or an option may be gone.
    let _ = fs::remove_dir_all(&made);
    child::run(Command::new(&ripieno).arg("man").arg(made.join("man")))?;
    // cargo-deb compresses nothing that comes from the build folder.
    child::run(Command::new("gzip").arg("-9nr").arg(made.join("man")))?;
    for [shell, before, after] in COMPLETIONS {
        let place = made.join(shell);
        fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
        for program in ["ripieno", "nvme-bind"] {
            let script = child::text(Command::new(&ripieno).args(["completions", shell, program]))?;
            fs::write(place.join(format!("{before}{program}{after}")), script)?;
        }
    }
    notices("tools", &made)?;
    fs::create_dir_all(out)?;
    Step::new("deb", folder::target("tools/bin/cargo-deb").to_string_lossy())
        .args("--no-build --no-strip --locked --offline --manifest-path".split(' '))
        .args([folder::workspace().join("tools/Cargo.toml").to_string_lossy()])
        .args(["--output".into(), out.to_string_lossy()])
        .args(["--maintainer", &maintainer()?])
        .demand()?;
    folder::only_file(out, "ripieno_")
}

/// Returns who makes the package: by Debian's variables, or git's configuration.
fn maintainer() -> Result<String> {
    let known = |variable: &str, key: &str| {
        let git = || child::text(Command::new("git").args(["config", key])).ok();
        let found = env::var(variable).ok().or_else(git)?;
        Some(found.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let unknown = "no maintainer of the package is known\n  hint: set DEBFULLNAME and DEBEMAIL";
    let name = known("DEBFULLNAME", "user.name").context(unknown)?;
    let address = known("DEBEMAIL", "user.email").context(unknown)?;
    Ok(format!("{name} <{address}>"))
}

/// Writes the licences of all crates that a package of the workspace is built from into `place`,
/// with their texts; those of the MIT licence if there is a choice, as they name the authors.
fn notices(package: &str, place: &Path) -> Result<()> {
    let mut bundle =
        Command::new(std::path::absolute(folder::target("tools/bin/cargo-bundle-licenses"))?);
    bundle.current_dir(folder::workspace().join(package)).env("CARGO_NET_OFFLINE", "true");
    bundle.args(["--format", "yaml", "--prefer", "MIT", "--output"]).arg(place.join(NOTICES));
    // One message for each file that it looks into.
    child::run(bundle.env("RUST_LOG", "error"))
}

/// Builds the wheel for an architecture. maturin names it after the oldest glibc that suffices: a
/// wheel built on an older system runs on more systems.
fn wheel(machine: &str, out: &Path) -> Result<PathBuf> {
    let place = std::path::absolute(folder::target("wheel"))?;
    notices("python", &folder::workspace().join("python/ripieno"))?;
    Step::new("wheel", place.join("venv/bin/maturin").to_string_lossy())
        .args("build --release --locked --auditwheel check --target".split(' '))
        .args([&format!("{machine}-unknown-linux-gnu"), "--manifest-path"])
        .args([folder::workspace().join("python/Cargo.toml").to_string_lossy()])
        .args(["--out".into(), out.to_string_lossy()])
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc")
        .demand()?;
    let made = folder::only_file(out, MANYLINUX)?;
    if machine != env::consts::ARCH {
        println!("NOT RUN: this machine is {}", env::consts::ARCH);
        return Ok(made);
    }
    // In an otherwise empty environment, which stores and loads blocks.
    let words = [&place, &made].map(|path| path.display().to_string());
    Step::new("check", "sh")
        .args(["-euxc", include_str!("package.sh"), "sh"])
        .args(words)
        .args([include_str!("package.py")])
        .demand()?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Manifest {
        package: BTreeMap<String, serde_json::Value>,
    }

    #[test]
    fn the_debian_package_has_what_is_built_and_what_is_committed() {
        let tools = folder::workspace().join("tools");
        let text = fs::read_to_string(tools.join("Cargo.toml")).unwrap();
        let manifest: Manifest = basic_toml::from_str(&text).unwrap();
        let deb = &manifest.package["metadata"]["deb"];
        let mut built: Vec<_> = ["ripieno", "nvme-bind", "package/man/*"].map(String::from).into();
        built.push(format!("package/{NOTICES}"));
        built.extend(COMPLETIONS.map(|[shell, ..]| format!("package/{shell}/*")));
        let assets = deb["assets"].as_array().unwrap();
        let sources = assets.iter().map(|asset| asset[0].as_str().unwrap());
        let (found, files): (Vec<_>, Vec<_>) =
            sources.partition(|source| source.starts_with("target/release/"));
        let found: Vec<_> = found.iter().map(|it| &it["target/release/".len()..]).collect();
        assert_eq!(found, built);
        let license = deb["license-file"][0].as_str().unwrap();
        for file in files.into_iter().chain([license]) {
            assert!(tools.join(file).is_file(), "{file}");
        }
    }
}
