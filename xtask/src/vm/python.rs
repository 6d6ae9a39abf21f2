//! A file system with Python, the package and a program that uses it, for the suite `python`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::vm::guest;
use crate::{child, folder};

/// Stores blocks, opens the store again, and loads them.
const STORE: &str = include_str!("../command/package.py");

/// Lists the loaded modules: the interpreter, the folder of packages, and files, one per line.
const LIST: &str = r#"
import sys
paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
executable = os.path.realpath(sys.executable)
print("LOADED", executable, os.path.dirname(os.path.dirname(ripieno.__file__)), sep="\n")
print(executable, *filter(None, paths), sep="\n")
"#;

/// Label that tests/vm/src/python.rs looks for.
const LABEL: &str = "ripieno";

fn python() -> PathBuf {
    folder::target("python").join("venv/bin/python")
}

/// Returns the reason why this machine cannot make it.
pub fn lacks() -> Option<&'static str> {
    let works = |command: &mut Command| command.output().is_ok_and(|done| done.status.success());
    if !works(Command::new(python()).args(["-c", "import ripieno"])) {
        return Some("`cargo xtask python` has not installed the package");
    }
    if !works(mke2fs().arg("-V")) {
        return Some("this machine lacks mke2fs (Debian's e2fsprogs)");
    }
    None
}

/// Writes the file system into the file `drive`; `folder` is for temporary files.
pub fn write(drive: &Path, folder: &Path) -> Result<()> {
    let (tree, here) = (folder.join("python"), folder.join("python-here"));
    for folder in [&tree, &here] {
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    // The modules loaded here are those needed there.
    let mut python = Command::new(std::path::absolute(python())?);
    python.args(["-c", &format!("{STORE}{LIST}")]).current_dir(&here);
    let said = child::text(&mut python).context("the program for the suite `python`")?;
    let mut lines = said.lines().skip_while(|line| *line != "LOADED").skip(1);
    for (name, text) in
        [("python", lines.next()), ("packages", lines.next()), ("store.py", Some(STORE))]
    {
        fs::write(tree.join(name), text.unwrap_or_default())?;
    }
    for path in lines.map(PathBuf::from).filter(|path| path.is_file()) {
        let is_library = path.extension().is_some_and(|end| end == "so");
        copy(&path, &tree)?;
        if is_library || path.extension().is_none_or(|end| end != "py") {
            guest::libraries(&path)?.iter().try_for_each(|library| copy(library, &tree))?;
        }
    }
    for name in ["dev", "proc", "tmp"] {
        fs::create_dir_all(tree.join(name))?;
    }
    let mut make = mke2fs();
    make.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-L", LABEL, "-d"]).arg(&tree).arg(drive);
    child::output(&mut make).map(drop)
}

/// Copies a file to the same path below `root`.
fn copy(path: &Path, root: &Path) -> Result<()> {
    let to = root.join(path.strip_prefix("/")?);
    fs::create_dir_all(to.parent().unwrap_or(root))?;
    fs::copy(path, &to).with_context(|| format!("cannot copy {}", path.display()))?;
    Ok(())
}

/// Returns a command for mke2fs, which may not be on the user's PATH.
fn mke2fs() -> Command {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("mke2fs");
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}
