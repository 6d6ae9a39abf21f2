//! `cargo xtask package`: builds a Debian package, an image of it for containers, and wheels of the
//! Python package.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::step::Step;
use crate::{RunArgs, folder, needs, report};

/// Packages, each with its needs. A wheel's name ends with the first part of its target's name.
const PACKAGES: [(&str, &[&str]); 4] = [
    ("deb", &["cxx", "dpkg-dev", "cargo-deb", "cargo-bundle-licenses"]),
    ("image", &["cxx", "dpkg-dev", "cargo-deb", "cargo-bundle-licenses", "mmdebstrap", "umoci"]),
    ("wheel-x86_64", &["cxx", "maturin", "cargo-bundle-licenses"]),
    ("wheel-aarch64", &["cxx", "gxx-aarch64", "maturin", "cargo-bundle-licenses"]),
];

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
    for (_, needs) in PACKAGES.iter().filter(|(package, _)| package == name) {
        needs::satisfy(needs)?;
    }
    let script = folder::workspace().join("xtask/src/command/package.sh");
    let out = std::path::absolute(folder::target("package"))?.join(name);
    Step::new(name, "bash")
        .args([script.to_string_lossy(), name.into(), out.to_string_lossy()])
        .run_alone()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

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
        let assets = deb["assets"].as_array().unwrap();
        let sources = assets.iter().map(|asset| asset[0].as_str().unwrap());
        let (mut built, files): (Vec<_>, Vec<_>) =
            sources.partition(|source| source.starts_with("target/release/"));
        built.sort_unstable();
        let made = ["THIRD-PARTY.yml", "bash/*", "fish/*", "man/*", "zsh/*"];
        let made = made.map(|file| format!("target/release/package/{file}"));
        let programs = ["nvme-bind", "ripieno"].map(|name| format!("target/release/{name}"));
        let mut wanted = [&programs[..], &made].concat();
        wanted.sort_unstable();
        assert_eq!(built, wanted);
        let license = deb["license-file"][0].as_str().unwrap();
        for file in files.into_iter().chain([license]) {
            assert!(tools.join(file).is_file(), "{file}");
        }
    }
}
