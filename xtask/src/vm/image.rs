//! File systems that the guest mounts: ext4, made from a folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::child;
use crate::vm::guest;

/// Returns the reason why this machine cannot make one.
pub fn lacks() -> Option<&'static str> {
    let works = mke2fs().arg("-V").output().is_ok_and(|done| done.status.success());
    (!works).then_some("this machine lacks mke2fs (Debian's e2fsprogs)")
}

/// Makes an empty folder.
pub fn empty(folder: &Path) -> Result<()> {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

/// Writes a file system with the files of `tree` into the file `drive`.
pub fn make(tree: &Path, drive: &Path, label: &str) -> Result<()> {
    for name in ["dev", "proc", "sys", "tmp"] {
        fs::create_dir_all(tree.join(name))?;
    }
    let mut make = mke2fs();
    make.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-L", label, "-d"]).arg(tree).arg(drive);
    child::output(&mut make).map(drop)
}

/// Copies a file to the same path below `root`.
pub fn copy(path: &Path, root: &Path) -> Result<()> {
    let to = root.join(path.strip_prefix("/")?);
    fs::create_dir_all(to.parent().unwrap_or(root))?;
    fs::copy(path, &to).with_context(|| format!("cannot copy {}", path.display()))?;
    Ok(())
}

/// Copies the libraries of a program or library.
pub fn copy_libraries(program: &PathBuf, root: &Path) -> Result<()> {
    guest::libraries(program)?.iter().try_for_each(|library| copy(library, root))
}

/// Returns a command for mke2fs, which may not be on the user's PATH.
fn mke2fs() -> Command {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("mke2fs");
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}
