//! The sources of the committed PTX, as text beside it. A test of `gio-kernels` reads it, without a
//! compiler, and reports sources that are newer than the PTX.

use std::fs;

use anyhow::{Context, Result};
use xxhash_rust::xxh3::xxh3_128;

use crate::ptx::compile::{Compiled, Source};
use crate::ptx::{COMMITTED, compile};

/// Returns a hash of the other lines; compiler and flags; hashes and paths of sources and PTX.
pub fn manifest(source: &Source<'_>, compiled: &Compiled) -> Result<String> {
    let flags = compile::FLAGS.join(" ");
    // Its version is in the list of what comes from PyPI.
    let nvcc = include_str!("../../setup.sh").split("nvidia-cuda-nvcc==").nth(1);
    let nvcc = nvcc.and_then(|rest| rest.split(' ').next()).context("setup.sh has no nvcc")?;
    let isa = compile::ISA;
    let mut lines = format!("nvcc {nvcc} {flags} -arch=compute_{COMMITTED}, as PTX {isa}\n");
    for path in &compiled.sources {
        let file = source.home.join(path);
        let bytes = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        lines += &format!("{:032x} {path}\n", xxh3_128(&bytes));
    }
    let (hash, ptx) = (xxh3_128(compiled.ptx.as_bytes()), source.module.file("ptx"));
    lines += &format!("{hash:032x} {ptx}\n");
    Ok(format!("{:032x}\n{lines}", xxh3_128(lines.as_bytes())))
}

/// Returns the hash of the whole manifest.
pub fn hash_of(manifest: &str) -> &str {
    manifest.lines().next().unwrap_or_default()
}
