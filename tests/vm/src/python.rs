//! The Python package on a file system on drive B: the kernel's own driver, direct I/O, io_uring.

use std::fs;

use anyhow::{Context, Result};

use crate::program;
use crate::runner::{SECONDS_MAX, Suite, tests};

pub const SUITE: Suite = Suite {
    name: "python",
    seconds_max: SECONDS_MAX,
    tests: tests![the_package_is_imported, a_store_is_made_and_loaded],
};

/// Label and paths on the file system that xtask/src/vm/files.sh makes.
const LABEL: &str = "ripieno";
const PYTHON: &str = "python";
const PACKAGES: &str = "packages";
const PROGRAM: &str = "/store.py";

const ROOT: &str = "/mnt";

fn the_package_is_imported() -> Result<()> {
    python(&["-c", "import ripieno"])
}

/// Runs with this machine's minimal CPU, which `smoke` checks.
fn a_store_is_made_and_loaded() -> Result<()> {
    python(&[PROGRAM])
}

/// Runs Python in its own root.
fn python(arguments: &[&str]) -> Result<()> {
    let read = |name: &str| {
        let path = format!("{ROOT}/{name}");
        fs::read_to_string(&path).with_context(|| format!("no {path}"))
    };
    if read(PYTHON).is_err() {
        let found = program::run("findfs", &[&format!("LABEL={LABEL}")])?.success()?;
        program::run("mount", &["-t", "ext4", found.out.trim(), ROOT])?.success()?;
        for (kind, folder) in [("devtmpfs", "dev"), ("proc", "proc")] {
            program::run("mount", &["-t", kind, kind, &format!("{ROOT}/{folder}")])?.success()?;
        }
    }
    let (python, packages) = (read(PYTHON)?, format!("PYTHONPATH={}", read(PACKAGES)?));
    let start = [&packages, "chroot", ROOT, &python, "-S"];
    program::run("env", &[&start, arguments].concat())?.success()?;
    Ok(())
}
