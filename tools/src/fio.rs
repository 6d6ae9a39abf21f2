//! fio, which measurements are compared with.

use std::io;
use std::process::Command;

use anyhow::{Context as _, ensure};

/// The program, and Debian's package.
pub const FIO: &str = "fio";
/// The most that fio does for its speed with io_uring: registered buffers and files, and blocks
/// that are submitted and reaped in batches.
pub const TUNED: [&str; 5] = [
    "--registerfiles=1",
    "--fixedbufs=1",
    "--iodepth_batch=32",
    "--iodepth_batch_complete_min=1",
    "--iodepth_batch_complete_max=64",
];

/// fio is not on this machine.
#[derive(Debug, thiserror::Error)]
#[error(
    "fio is compared with, and this machine has none that works ({0}); hint: as root, apt-get \
     install -y --no-install-recommends fio"
)]
pub struct Missing(pub io::Error);

/// Returns fio's version.
///
/// # Errors
/// Returns [`Missing`] if fio does not run.
pub fn version() -> Result<String, Missing> {
    let output = Command::new(FIO).arg("--version").output().map_err(Missing)?;
    if !output.status.success() {
        return Err(Missing(io::Error::other(format!("it ended with {}", output.status))));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Totals of a report, reads and writes together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moved {
    /// Bytes.
    pub bytes: f64,
    /// Reads and writes a second.
    pub iops: f64,
    /// Seconds from the first to the last, if all of it was read, or all written.
    pub seconds: f64,
    /// CPU time of all its threads.
    pub cpu_seconds: f64,
}

impl Moved {
    /// Reads the report of fio 3 on one group, in JSON.
    ///
    /// # Errors
    /// Returns an error if it is no such report, or fio moved nothing, or failed.
    pub fn read(report: &str) -> anyhow::Result<Self> {
        // Warnings precede the object.
        let start = report.find('{').context("it is no JSON object")?;
        let output: serde_json::Value = serde_json::from_str(&report[start..])?;
        let jobs = output["jobs"].as_array().map_or(0, Vec::len);
        ensure!(jobs == 1, "it has {jobs} jobs instead of 1");
        let number = |name: &str| {
            let found = output.pointer(&format!("/jobs/0/{name}")).and_then(|it| it.as_f64());
            found.with_context(|| format!("it has no number {name}"))
        };
        let both = |name: &str| -> anyhow::Result<f64> {
            Ok(number(&format!("read/{name}"))? + number(&format!("write/{name}"))?)
        };
        let (bytes, iops, seconds) = (both("io_bytes")?, both("iops")?, both("runtime")? / 1e3);
        let percent = number("usr_cpu")? + number("sys_cpu")?;
        let cpu_seconds = percent / 100.0 * number("job_runtime")? / 1e3;
        let (found, error) = (Self { bytes, iops, seconds, cpu_seconds }, number("error")?);
        let has_any = found.bytes > 0.0 && found.iops > 0.0 && found.seconds > 0.0;
        ensure!(error == 0.0 && has_any, "error {error}: {found:?}");
        Ok(found)
    }
}

/// Says what `bench raw` has for a parameter of fio.
pub(crate) fn word(name: &str) -> Option<&'static str> {
    Some(match name {
        "blocksize" => "it is --bs here",
        "bsrange" | "bssplit" => "it is --bs here: sizes, each of which is measured by itself",
        "filename" | "directory" => "it is --path DIR, --block /dev/nvme1n1 or --devices here",
        "filesize" | "io_size" => "it is --size here: what is used of each device",
        "loops" | "number_ios" => "it is --runtime here: a measurement ends by time",
        "nrfiles" => "it is --devices here: a number of files",
        "numjobs" => "it is --queues here: queue pairs of each device, all used by one thread",
        "output" => "results are on stdout: write > FILE",
        "output_format" => "it is --json here",
        "rwmixwrite" => "it is --rwmixread here, the part that is read: 100 less this",
        "offset" => "leave it out: the area begins at the device's start; --size says how much",
        "invalidate" => "leave it out: direct transfers have no cache to invalidate",
        "iodepth_batch" | "iodepth_batch_submit" | "iodepth_batch_complete" => {
            "leave it out: all that fits in --iodepth is submitted together"
        }
        "ramp_time" => "it is --ramp here",
        "randseed" => "it is --seed here",
        "readwrite" => "it is --rw here",
        "direct" | "group_reporting" | "norandommap" | "percentile_list" | "randrepeat"
        | "registerfiles" | "thread" | "time_based" | "verify" => "leave it out: it is always on",
        "fixedbufs" => "leave it out: the executor registers buffers, or does not",
        "refill_buffers" => "leave it out: buffers are filled once, with random bytes",
        "buffered" | "end_fsync" | "fsync" | "latency_target" | "rate" | "rate_iops" | "sync"
        | "thinktime" | "zero_buffers" => {
            "leave it out: here are direct transfers of random bytes, as many as fit in --iodepth"
        }
        "eta" | "status_interval" | "write_bw_log" | "write_lat_log" => {
            "leave it out: a measurement has one result, a row"
        }
        "ioengine" => "leave it out: --executor file is io_uring, the others are NVMe queues",
        "name" => "leave it out: each measurement has a row",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_bytes_and_times() {
        let report = r#"note: both iodepth_batch_complete_min and max
            {"jobs": [{"error": 0, "job_runtime": 2000, "usr_cpu": 25.0, "sys_cpu": 50.0,
             "read": {"io_bytes": 4096, "runtime": 500, "iops": 2.0},
             "write": {"io_bytes": 0, "runtime": 0, "iops": 0.0}}]}"#;
        let found = Moved { bytes: 4096.0, iops: 2.0, seconds: 0.5, cpu_seconds: 1.5 };
        assert_eq!(Moved::read(report).unwrap(), found);
        for (old, new) in [("4096", "0"), (r#""error": 0"#, r#""error": 28"#), ("usr_cpu", "x")] {
            assert!(Moved::read(&report.replace(old, new)).is_err(), "{old}");
        }
    }
}
