//! The baseline: fio, with one job per device.

use std::{fmt, io, path::Path, process::Command};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use super::{Direction, Load, Pass};

/// The program, also the name of Debian's package.
const FIO: &str = "fio";

/// fio is not on this machine.
#[derive(Debug)]
pub struct Missing(io::Error);

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the benchmark runs {FIO}, and this machine has none that works ({}); hint: as root, \
             apt-get install -y --no-install-recommends {FIO}",
            self.0
        )
    }
}

impl std::error::Error for Missing {}

/// Returns fio's version.
///
/// # Errors
/// Returns [`Missing`] if fio does not run.
pub fn version() -> Result<String, Missing> {
    let output = Command::new(FIO).arg("--version").output().map_err(Missing)?;
    if !output.status.success() {
        let text = format!("{FIO} --version ended with {}", output.status);
        return Err(Missing(io::Error::other(text)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The parts of fio's report that are used.
#[derive(Deserialize)]
struct Output {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: i32,
    job_runtime: f64,
    usr_cpu: f64,
    sys_cpu: f64,
    read: Moved,
    write: Moved,
}

#[derive(Deserialize)]
struct Moved {
    io_bytes: u64,
    runtime: f64,
}

/// Configuration of fio.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// Default: each block is submitted by its own system call.
    Plain,
    /// With registered buffers and files, and blocks submitted and reaped in batches.
    Tuned,
}

impl Setting {
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Plain => &[],
            Self::Tuned => &[
                "--registerfiles=1",
                "--fixedbufs=1",
                "--iodepth_batch=32",
                "--iodepth_batch_complete_min=1",
                "--iodepth_batch_complete_max=64",
            ],
        }
    }
}

/// Moves all bytes of `load` once, using fio's own files in `folder`, which it creates.
pub fn pass(folder: &Path, load: &Load, direction: Direction, setting: Setting) -> Result<Pass> {
    let bytes = load.bytes() / u64::from(load.devices);
    let rw = match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    };
    let output = Command::new(FIO)
        .args(["--name=bench", "--ioengine=io_uring", "--direct=1", "--output-format=json"])
        .args(["--group_reporting", "--allow_file_create=1", "--filename_format=fio-$jobnum"])
        .args(setting.arguments())
        // Puts its buffers on huge pages, if available, like our KV pool.
        .env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        .arg(format!("--directory={}", folder.display()))
        .arg(format!("--rw={rw}"))
        .arg(format!("--bs={}", load.object_bytes))
        .arg(format!("--iodepth={}", load.depth))
        .arg(format!("--numjobs={}", load.devices))
        .arg(format!("--size={bytes}"))
        .output()
        .map_err(Missing)?;
    if !output.status.success() {
        bail!("{FIO} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    parse(&output.stdout, direction).context("reading what fio reports")
}

fn parse(report: &[u8], direction: Direction) -> Result<Pass> {
    // Warnings precede the JSON object.
    let start = report.iter().position(|byte| *byte == b'{').context("it is no JSON object")?;
    let output: Output = serde_json::from_slice(&report[start..])?;
    let [job] = &output.jobs[..] else { bail!("it has {} jobs instead of 1", output.jobs.len()) };
    let moved = match direction {
        Direction::Read => &job.read,
        Direction::Write => &job.write,
    };
    if job.error != 0 || moved.io_bytes == 0 || moved.runtime <= 0.0 {
        let error = io::Error::from_raw_os_error(job.error);
        bail!("{} bytes in {} ms, and: {error}", moved.io_bytes, moved.runtime);
    }
    let cpu = (job.usr_cpu + job.sys_cpu) / 100.0 * job.job_runtime / 1000.0;
    Ok(Pass { bytes: moved.io_bytes, seconds: moved.runtime / 1000.0, cpu_seconds: cpu })
}

#[cfg(test)]
mod tests;
