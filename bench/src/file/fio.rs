//! The baseline: fio, with one job per device.

use std::{path::Path, process::Command};

use anyhow::{Context as _, Result, bail};
use ripieno::fio::{FIO, Missing, Moved, TUNED};

use super::{Direction, Load, Pass};

/// Moves all bytes of `load` once, using fio's own files in `folder`, which it creates. By default
/// each block is submitted by its own system call.
pub fn pass(folder: &Path, load: &Load<'_>, direction: Direction, is_tuned: bool) -> Result<Pass> {
    let bytes = load.bytes() / u64::from(load.args.devices);
    let rw = match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    };
    let output = Command::new(FIO)
        .args(["--name=bench", "--ioengine=io_uring", "--direct=1", "--output-format=json"])
        .args(["--group_reporting", "--allow_file_create=1", "--filename_format=fio-$jobnum"])
        .args(TUNED.iter().filter(|_| is_tuned))
        // Puts its buffers on huge pages, if available, like our KV pool.
        .env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        .arg(format!("--directory={}", folder.display()))
        .arg(format!("--rw={rw}"))
        .arg(format!("--bs={}", load.object_bytes))
        .arg(format!("--iodepth={}", load.args.depth))
        .arg(format!("--numjobs={}", load.args.devices))
        .arg(format!("--size={bytes}"))
        .output()
        .map_err(Missing)?;
    if !output.status.success() {
        bail!("{FIO} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    let report = String::from_utf8_lossy(&output.stdout);
    let Moved { bytes, seconds, cpu_seconds, .. } =
        Moved::read(&report).context("reading what fio reports")?;
    Ok(Pass { bytes: bytes as u64, seconds, cpu_seconds })
}
