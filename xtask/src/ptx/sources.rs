//! What the committed PTX was made from, as text beside it. A test of `gio-kernels` reads it, with
//! no compiler at hand, and says which source is newer than the PTX.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use xxhash_rust::xxh3::xxh3_128;

use crate::ptx::{COMMITTED, PTX, compile, install};

/// Where everything that `gio_kernel.cu` includes is.
const HEADERS: &str = "include/gio";

/// A hash of all the other lines; compiler and flags; hash and path of each source and of the PTX.
pub fn manifest(kernels: &Path, ptx: &str) -> Result<String> {
    let headers = kernels.join(HEADERS);
    let entries =
        fs::read_dir(&headers).with_context(|| format!("cannot list {}", headers.display()))?;
    let mut paths: Vec<String> = entries
        .flatten()
        .map(|entry| format!("{HEADERS}/{}", entry.file_name().to_string_lossy()))
        .collect();
    paths.sort();
    paths.push("ptx/gio_kernel.cu".into());
    let flags = compile::FLAGS.join(" ");
    let mut lines = format!("nvcc {} {flags} -arch=compute_{COMMITTED}\n", install::NVCC);
    for path in paths {
        let file = kernels.join(&path);
        let bytes = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        lines += &format!("{:032x} {path}\n", xxh3_128(&bytes));
    }
    lines += &format!("{:032x} {PTX}\n", xxh3_128(ptx.as_bytes()));
    Ok(format!("{:032x}\n{lines}", xxh3_128(lines.as_bytes())))
}

/// The hash that names them all.
pub fn hash_of(manifest: &str) -> &str {
    manifest.lines().next().unwrap_or_default()
}
