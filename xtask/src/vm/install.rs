//! The guest's kernel and busybox, unpacked and not installed.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{debian, folder};

/// Depends on the current kernel without hardware drivers, which is sufficient.
const KERNEL: &str = "linux-image-cloud-amd64";

/// Files of packages, in `target/vm/packages`.
#[derive(Debug)]
pub struct Packages {
    /// The compressed kernel.
    pub kernel: PathBuf,
    /// `/lib/modules/VERSION` of that kernel.
    pub modules: PathBuf,
    /// A static busybox; the host uses it, too, so that no other tools are needed.
    pub busybox: PathBuf,
}

/// Downloads and unpacks missing packages.
pub fn packages(folder: &Path) -> Result<Packages> {
    let folder = folder.join("packages");
    let kernel = match unpacked(&folder, "linux-image-") {
        Some(tree) => tree,
        None => unpack(&folder, &kernel_package()?)?,
    };
    let busybox = match unpacked(&folder, "busybox-static") {
        Some(tree) => tree,
        None => unpack(&folder, "busybox-static")?,
    };
    let busybox = first(&[busybox.join("bin/busybox"), busybox.join("usr/bin/busybox")])?;
    let modules = first(&[kernel.join("lib/modules"), kernel.join("usr/lib/modules")])?;
    Ok(Packages {
        kernel: folder::only_file(&kernel.join("boot"), "vmlinuz-")?,
        modules: folder::only_file(&modules, "")?,
        busybox,
    })
}

/// Returns a package unpacked by an earlier run; its folder is renamed last.
fn unpacked(folder: &Path, prefix: &str) -> Option<PathBuf> {
    let names = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.file_name());
    let tree = |name: &OsStr| {
        let name = name.to_string_lossy();
        name.starts_with(prefix) && !name.ends_with(".part")
    };
    let mut trees: Vec<PathBuf> =
        names.filter(|name| tree(name)).map(|name| folder.join(name)).collect();
    trees.sort();
    trees.pop()
}

/// Returns the kernel's package. Not pinned: security updates change its name in the archive.
fn kernel_package() -> Result<String> {
    let ask = || -> Result<Option<String>> {
        let output = Command::new("apt-cache").args(["depends", KERNEL]).output();
        let output =
            output.context("cannot run apt-cache; the guest's kernel comes from Debian")?;
        Ok(dependency(&String::from_utf8_lossy(&output.stdout)))
    };
    if let Some(name) = ask()? {
        return Ok(name);
    }
    // A new machine has no package lists.
    debian::update_package_lists();
    match ask()? {
        Some(name) => Ok(name),
        None => bail!(
            "apt knows no kernel `{KERNEL}`\n  \
             hint: it is a package of Debian for amd64; run `apt-get update` as root"
        ),
    }
}

fn dependency(depends: &str) -> Option<String> {
    let names = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    names.map(str::trim).find(|name| name.starts_with("linux-image-")).map(str::to_owned)
}

/// Unpacks a package without its dependencies, which are for booting an installed machine.
fn unpack(folder: &Path, package: &str) -> Result<PathBuf> {
    debian::unpack(folder, package, &[package.to_owned()])
        .with_context(|| format!("the guest needs the package {package}"))
}

fn first(paths: &[PathBuf]) -> Result<PathBuf> {
    match paths.iter().find(|path| path.exists()) {
        Some(path) => Ok(path.clone()),
        None => bail!("the package has no {}", paths[0].display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_what_the_package_depends_on() {
        let text = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-48-cloud-amd64\n";
        assert_eq!(dependency(text).unwrap(), "linux-image-6.1.0-48-cloud-amd64");
        assert_eq!(dependency("linux-image-cloud-amd64\n"), None);
    }

    #[test]
    fn an_unfinished_download_is_not_taken_for_a_package() {
        let folder = std::env::temp_dir().join(format!("xtask-install-{}", std::process::id()));
        fs::create_dir_all(folder.join("linux-image-1.part")).unwrap();
        assert_eq!(unpacked(&folder, "linux-image-"), None);
        fs::create_dir_all(folder.join("linux-image-1")).unwrap();
        assert_eq!(unpacked(&folder, "linux-image-"), Some(folder.join("linux-image-1")));
        fs::remove_dir_all(folder).unwrap();
    }
}
