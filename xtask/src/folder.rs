//! Paths and packages of the workspace, its build folder, and committed files that are generated.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The packages whose tests run in a debug build. The simulator's run in a release build, and so do
/// those of the engine on candle, whose crates take a tenth of a debug build.
pub const IN_DEBUG: &str =
    "--workspace --exclude ripieno-sim --exclude ripieno-candle --all-features";

/// Returns the workspace's root.
pub fn workspace() -> &'static Path {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask)
}

/// Returns the part `name` of the build folder, which `cargo clean` removes.
pub fn target(name: &str) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| workspace().join("target")).join(name)
}

/// Returns the free bytes of the build folder's disk.
pub fn free_bytes() -> Option<u64> {
    // The folder may not exist yet; the workspace does, and is nearly always on the same disk.
    let disk = target("").canonicalize().unwrap_or_else(|_| workspace().into());
    rustix::fs::statvfs(&disk).ok().map(|stat| stat.f_bavail * stat.f_frsize)
}

/// Replaces the committed file `path` by `text`, unless it is the same or `check_only` is set.
/// Returns false if it stays another one.
pub fn update(path: &str, text: &str, check_only: bool) -> Result<bool> {
    let file = workspace().join(path);
    let is_same = fs::read_to_string(&file).is_ok_and(|found| found == text);
    if !is_same && !check_only {
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
        eprintln!("wrote {path}");
    }
    Ok(is_same || !check_only)
}

/// Returns the only entry of `folder` whose name begins with `prefix`.
pub fn only_file(folder: &Path, prefix: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))?;
    let names = entries.flatten().map(|entry| entry.file_name());
    let found: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with(prefix)).collect();
    match &found[..] {
        [name] => Ok(folder.join(name)),
        _ => bail!("{} has {} files `{prefix}*`, not one", folder.display(), found.len()),
    }
}
