//! Packages of Debian: installed with apt, or unpacked below `target/`.
//!
//! # Invariants
//!
//! No package of the machine is removed. apt's installations are printed first.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};

use crate::child;
use crate::programs::{is_installed, succeeds};

/// Recommended packages are numerous and not needed.
const INSTALL: &str = "install --no-install-recommends";

/// The changes that apt would make on this machine.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    installs: Vec<String>,
    removes: Vec<String>,
}

/// Installs `package` and its dependencies.
///
/// # Errors
/// Returns an error with the command for root if this is no Debian or we are not root, with the
/// packages that apt would remove, or if apt failed.
pub fn install(package: &str) -> Result<()> {
    let line = format!("apt-get {INSTALL} --no-remove -y {package}");
    ensure!(is_debian_root(), "not installed\n  hint: as root on Debian, run `{line}`");
    // A new machine has no package lists, and old lists have packages that no longer exist.
    update_package_lists();
    let plan = plan(package)?;
    plan.removes_nothing(package)?;
    eprintln!("installing with apt: {}", plan.installs.join(" "));
    ensure!(succeeds(&line), "`{line}` failed; its output is above");
    Ok(())
}

/// Unpacks `package` and its missing dependencies into the folder `folder/PACKAGE`, unless an
/// earlier run did.
pub fn unpack_with_dependencies(folder: &Path, package: &str) -> Result<PathBuf> {
    let tree = folder.join(package);
    if tree.exists() {
        return Ok(tree);
    }
    let asked = plan(package).or_else(|_| {
        update_package_lists();
        plan(package)
    })?;
    let mut names = asked.installs;
    // apt omits installed packages, which may be missing from the PATH.
    if !names.iter().any(|name| name == package) {
        names.push(package.to_owned());
    }
    unpack(folder, package, &names)
}

/// Unpacks `packages` into the folder `folder/NAME`. An unfinished one ends with `.part`.
pub fn unpack(folder: &Path, name: &str, packages: &[String]) -> Result<PathBuf> {
    let part = folder.join(format!("{name}.part"));
    // Left by a run that was stopped.
    let _ = fs::remove_dir_all(&part);
    fs::create_dir_all(&part).with_context(|| format!("cannot make {}", part.display()))?;
    eprintln!("unpacking into {}: {}", folder.join(name).display(), packages.join(" "));
    // As root, apt would download as a user without write access here.
    let mut get = vec!["-q", "-o", "APT::Sandbox::User=root", "download"];
    get.extend(packages.iter().map(String::as_str));
    if let Err(error) = run(&part, "apt-get", &get) {
        eprintln!("{error:#}; perhaps the package lists are old:");
        update_package_lists();
        let failed = || format!("apt could not download Debian's {name} and what it needs");
        run(&part, "apt-get", &get).with_context(failed)?;
    }
    for entry in fs::read_dir(&part)?.flatten() {
        if entry.path().extension().is_some_and(|end| end == "deb") {
            run(&part, "dpkg", &["-x", &entry.file_name().to_string_lossy(), "."])?;
            fs::remove_file(entry.path())?;
        }
    }
    let tree = folder.join(name);
    fs::rename(&part, &tree)
        .with_context(|| format!("cannot rename {} to {}", part.display(), tree.display()))?;
    Ok(tree)
}

/// Updates apt's package lists, once per run, if permitted.
pub fn update_package_lists() -> bool {
    static UPDATED: OnceLock<bool> = OnceLock::new();
    *UPDATED.get_or_init(|| is_debian_root() && succeeds("apt-get update"))
}

pub fn is_debian_root() -> bool {
    rustix::process::geteuid().is_root() && is_installed("apt-get")
}

impl Plan {
    fn removes_nothing(&self, package: &str) -> Result<()> {
        ensure!(
            self.removes.is_empty(),
            "Debian's {package} would remove {} from this machine\n  hint: install it by hand",
            self.removes.join(", ")
        );
        Ok(())
    }
}

fn plan(package: &str) -> Result<Plan> {
    let line = format!("apt-get -s {INSTALL} {package}");
    let output = Command::new("apt-get").args(line.split(' ').skip(1)).output();
    let output = output.context("cannot run apt-get: this is no Debian")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{line}` failed: {}", said.lines().last().unwrap_or_default());
    }
    Ok(planned(&String::from_utf8_lossy(&output.stdout)))
}

/// Parses the output of `apt-get -s`: lines like `Inst NAME [OLD] (NEW ...)`.
fn planned(simulated: &str) -> Plan {
    let mut plan = Plan::default();
    for line in simulated.lines() {
        let mut words = line.split(' ');
        match (words.next(), words.next()) {
            (Some("Inst"), Some(name)) => plan.installs.push(name.to_owned()),
            (Some("Remv"), Some(name)) => plan.removes.push(name.to_owned()),
            _ => {}
        }
    }
    plan
}

fn run(folder: &Path, program: &str, args: &[&str]) -> Result<()> {
    child::run(Command::new(program).args(args).current_dir(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_apt_would_remove_is_seen() {
        let simulated = "NOTE: This is only a simulation!\n\
                         The following packages will be REMOVED:\n  qemu-utils\n\
                         Remv qemu-utils [1:10.0.2] [qemu-block-extra:amd64 ]\n\
                         Inst libfdt1 (1.6.1-4+b1 Debian:12.14/oldstable [amd64])\n\
                         Inst libc6 [2.36-8] (2.36-9 Debian:12.14/oldstable [amd64])\n\
                         Conf libfdt1 (1.6.1-4+b1 Debian:12.14/oldstable [amd64])\n";
        let installs = ["libfdt1", "libc6"].map(str::to_owned).to_vec();
        let plan = planned(simulated);
        assert_eq!(plan, Plan { installs, removes: vec!["qemu-utils".into()] });
        let refused = plan.removes_nothing("qemu-system-x86").unwrap_err().to_string();
        assert!(refused.contains("would remove qemu-utils"), "{refused}");
        planned("Inst a (1 Debian)\n").removes_nothing("a").unwrap();
    }
}
