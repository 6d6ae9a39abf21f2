//! Paths of the workspace and its build folder.

use std::path::{Path, PathBuf};

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
