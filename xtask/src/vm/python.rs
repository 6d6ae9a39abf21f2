//! A file system with Python, the package and a program that uses it, for the suite `python`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::vm::image;
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
    image::lacks()
}

/// Writes the file system into the file `drive`; `folder` is for temporary files.
pub fn write(drive: &Path, folder: &Path) -> Result<()> {
    let (tree, here) = (folder.join("python"), folder.join("python-here"));
    image::empty(&tree)?;
    image::empty(&here)?;
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
        image::copy(&path, &tree)?;
        if is_library || path.extension().is_none_or(|end| end != "py") {
            image::copy_libraries(&path, &tree)?;
        }
    }
    image::make(&tree, drive, LABEL)
}
