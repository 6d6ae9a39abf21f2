//! Needs of steps: names in `setup.sh`, which gets them.
//!
//! [`provide`] gets the needs of all steps before the first one runs, and returns those that cannot
//! be had: their steps are skipped. [`satisfy`] is for a command requested by name, which fails
//! without them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail};

use crate::folder;

/// Needs of every step. Steps are skipped without their other needs.
const ESSENTIAL: [&str; 2] = ["cxx", "crates"];

/// Needs that cannot be had, each with a one-line reason.
pub type Lacking = BTreeMap<&'static str, String>;

/// Gets everything in `needs` that this machine lacks.
///
/// # Errors
/// Returns an error with the missing program, its purpose, and how to get it.
pub fn satisfy(needs: &[&str]) -> Result<()> {
    needs.iter().try_for_each(|need| get(need))
}

/// Gets everything in `needs` that this machine lacks. Returns the unavailable needs.
///
/// # Errors
/// Returns an error only for an essential need: the missing program and how to get it.
pub fn provide(needs: impl IntoIterator<Item = &'static str>) -> Result<Lacking> {
    let (essential, mut others): (BTreeSet<_>, BTreeSet<_>) =
        needs.into_iter().partition(|need| ESSENTIAL.contains(need));
    essential.into_iter().try_for_each(get)?;
    // It takes longest, mostly on one processor, so the rest is got meanwhile.
    let vllm = others.take("vllm");
    let got = |need| (need, get(need));
    let got: Vec<_> = thread::scope(|scope| {
        let vllm = vllm.map(|need| scope.spawn(move || got(need)));
        let mut all: Vec<_> = others.into_iter().map(got).collect();
        all.extend(vllm.map(|vllm| vllm.join().expect("it does not panic")));
        all
    });
    let mut lacking = Lacking::new();
    for (need, result) in got {
        let Err(error) = result else { continue };
        let why = format!("{error:#}");
        eprintln!("==> not there, and what needs it will be skipped: {why}");
        lacking.insert(need, why.lines().next().unwrap_or_default().to_owned());
    }
    Ok(lacking)
}

fn get(need: &str) -> Result<()> {
    let setup = folder::workspace().join("xtask/setup.sh");
    let mut command = Command::new("bash");
    let output = command.arg(setup).arg(need).stderr(Stdio::inherit()).output();
    let output = output.context("cannot run bash")?;
    let said = String::from_utf8_lossy(&output.stdout);
    match said.trim() {
        _ if output.status.success() => Ok(()),
        "" => bail!("`xtask/setup.sh {need}` failed; its output is above"),
        why => bail!("{why}"),
    }
}

/// Returns the path of `program` on the PATH.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Returns the path at which `setup.sh` unpacks `program`, unless this machine has one.
pub fn unpacked(program: &str) -> Option<PathBuf> {
    find(program).is_none().then(|| folder::target("unpacked").join(program))
}

/// Returns the path of a program that this machine has, or that is unpacked.
pub fn program(program: &str) -> Result<PathBuf> {
    let path = unpacked(program).or_else(|| find(program)).context("a path")?;
    Ok(std::path::absolute(path)?)
}

/// Returns the first folder `name` in a package of the environment `target/PLACE/venv`.
pub fn package(place: &str, name: &str) -> Result<PathBuf> {
    let lib = folder::target(place).join("venv/lib");
    let found = folder::only_file(&lib, "python3").map(|it| it.join("site-packages").join(name));
    let found = found.ok().filter(|path| path.exists());
    found.with_context(|| {
        let (name, lib) = (Path::new(name).display(), lib.display());
        format!("{lib} has no {name}\n  hint: remove that folder, and run this again")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_only_what_is_there() {
        assert!(find("sh").is_some() && unpacked("sh").is_none());
        assert!(find("no-such-program-anywhere").is_none());
        assert!(unpacked("no-such-program-anywhere").is_some());
    }
}
