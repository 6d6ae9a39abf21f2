//! A file system with vLLM, the package and its tests, for the suite `vllm`: all files have the
//! paths that they have on this machine.

use std::collections::BTreeSet;
use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::command::engine;
use crate::vm::{guest, image};
use crate::{child, folder, needs};

/// Prints the folder of Python's library.
const STDLIB: &str = "import sysconfig; print(sysconfig.get_path('stdlib'))";
/// Parts of the library that nothing imports, by the beginnings of their names.
const UNUSED: &[&str] = &["site-packages", "dist-packages", "test", "config-"];

/// vLLM's cache of what its models are, in the user's home.
const MODELS: &str = ".cache/vllm/modelinfos";

/// Label that tests/vm/src/vllm.rs looks for.
const LABEL: &str = "ripieno-vllm";
/// Size of the file system. Its file is sparse.
const BYTES: u64 = 6 << 30;
/// Bytes that the files take.
const DISK_BYTES: u64 = 4 << 30;
/// Memory of the machine, and of QEMU.
const MEMORY_BYTES: u64 = 9 << 30;

fn venv() -> PathBuf {
    engine::place().join("venv")
}

/// Returns the reason why this machine cannot make it, or run it.
pub fn lacks() -> Option<&'static str> {
    if needs::package("engine", "ripieno").is_err() {
        return Some("`cargo xtask engine` has not installed vLLM and the package");
    }
    if memory().is_some_and(|bytes| bytes < MEMORY_BYTES) {
        return Some("this machine has less than 9 GiB of free memory");
    }
    if folder::free_bytes().is_some_and(|bytes| bytes < DISK_BYTES) {
        return Some("less than 4 GiB of the disk are free");
    }
    image::lacks()
}

/// Returns the bytes of memory that are available.
fn memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

/// Writes the file system into the file `drive`; `folder` is for temporary files.
pub fn write(drive: &Path, folder: &Path) -> Result<()> {
    let (tree, venv) = (folder.join("vllm"), fs::canonicalize(venv())?);
    image::empty(&tree)?;
    let python = venv.join("bin/python");
    let library = child::text(Command::new(&python).args(["-c", STDLIB]))?;
    let library = PathBuf::from(library.trim());
    // Links, and not copies, of 3 GB.
    duplicate("-al", std::slice::from_ref(&venv), &tree)?;
    let tests = folder::workspace().join("python");
    let mut parts = vec![tests.join("tests"), tests.join("examples"), tests.join("pyproject.toml")];
    let is_used = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        !UNUSED.iter().any(|unused| name.starts_with(unused))
    };
    parts.extend(fs::read_dir(&library)?.flatten().map(|entry| entry.path()).filter(is_used));
    // The interpreter of the environment is a chain of links.
    let mut link = python.clone();
    while let Ok(to) = fs::read_link(&link) {
        link = link.parent().unwrap_or(&venv).join(to);
        parts.extend((!link.starts_with(&venv)).then(|| link.clone()));
    }
    // Without it, vLLM imports itself again, for minutes.
    let models = PathBuf::from(env::var_os("HOME").unwrap_or_default()).join(MODELS);
    parts.extend(models.is_dir().then(|| models.clone()));
    duplicate("-a", &parts, &tree)?;
    // vLLM asks them for the CPUs.
    let mut tools = vec![PathBuf::from("/bin/sh")];
    tools.extend(needs::find("lscpu"));
    tools.iter().try_for_each(|tool| image::copy(tool, &tree))?;
    let mut libraries = BTreeSet::new();
    let mut find = Command::new("find");
    find.arg(&venv).arg(library.join("lib-dynload")).args(["-name", "*.so*", "-type", "f"]);
    let found = child::text(&mut find)?;
    let found = found.lines().map(PathBuf::from).chain(tools).chain([link]);
    for path in found {
        // Some are for machines with other libraries, and not loaded here.
        libraries.extend(guest::libraries(&path).unwrap_or_default());
    }
    let mut others = libraries.iter().filter(|path| !path.starts_with(&venv));
    others.try_for_each(|library| image::copy(library, &tree))?;
    for (name, text) in [
        ("python", python.display().to_string()),
        ("tests", tests.join("tests").display().to_string()),
        ("models", models.display().to_string()),
        ("etc/hosts", "127.0.0.1 localhost\n".to_owned()),
    ] {
        let path = tree.join(name);
        fs::create_dir_all(path.parent().unwrap_or(&tree))?;
        fs::write(path, text)?;
    }
    File::create(drive)?.set_len(BYTES)?;
    image::make(&tree, drive, LABEL)?;
    Ok(fs::remove_dir_all(&tree)?)
}

/// Copies files and folders to the same paths below `root`.
fn duplicate(how: &str, paths: &[PathBuf], root: &Path) -> Result<()> {
    let mut copy = Command::new("cp");
    copy.args([how, "--parents", "-t"]).arg(fs::canonicalize(root)?).current_dir("/");
    copy.args(paths.iter().flat_map(|path| path.strip_prefix("/")));
    child::output(&mut copy).map(drop)
}
