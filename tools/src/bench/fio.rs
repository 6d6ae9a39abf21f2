//! The same load by fio, in turns with ours and on the same files.

use std::io::{Read as _, Seek as _};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::RawFlags;
use super::load::Load;
use super::report::Row;
use crate::fio::{FIO, Missing, Moved, TUNED};
use crate::interrupt::Interrupt;
use crate::outcome::Value;
use crate::problem::Problem;

/// Turns of each side. The row is that of the median ratio.
pub(super) const TURNS: usize = 3;
/// Time for fio to start and to end, beside the ramp and the measured time.
const LONG: Duration = Duration::from_secs(120);

/// Returns fio's version; how to install it if this machine has none.
pub(super) fn version() -> Result<String, Problem> {
    crate::fio::version().map_err(|Missing(why)| {
        let hint = "install it (Debian: apt-get install -y --no-install-recommends fio)";
        Problem::new(format!("--against fio: {why}"), hint)
    })
}

/// Returns the command for a load in `files`, one for each device.
pub(super) fn command(files: &[String], load: &Load, flags: &RawFlags) -> Vec<String> {
    let [ramp, runtime] = [flags.ramp, flags.runtime].map(|time| time.as_millis());
    // Any place is moved again, as ours does. A time with a point is cut there: 1.5 is 1 s.
    let mut line = format!(
        "{FIO} --output-format=json --name=global --group_reporting --ioengine=io_uring --direct=1 \
         {} --norandommap=1 --time_based --runtime={runtime}ms --ramp_time={ramp}ms --rw={} \
         --rwmixread={} --bs={} --iodepth={} --numjobs={}",
        TUNED.join(" "),
        load.rw.name(),
        flags.rwmixread,
        load.bytes,
        load.depth,
        flags.queues(),
    );
    line += &flags.size.map(|bytes| format!(" --size={bytes}")).unwrap_or_default();
    let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
    for (at, file) in files.iter().enumerate() {
        // fio takes /dev/disk/by-path/pci-0000:65:00.0-nvme-1 for three files.
        let file = file.replace(':', "\\:");
        words.extend([format!("--name=device{at}"), format!("--filename={file}")]);
    }
    words
}

/// Runs a command, and adds its figures to `ours`. Returns false if the user ended it.
pub(super) fn measure(
    command: &[String],
    flags: &RawFlags,
    ours: &mut Row,
    interrupt: &mut Interrupt,
) -> anyhow::Result<bool> {
    // Files: nobody empties a pipe meanwhile.
    let [mut out, mut err] = [tempfile::tempfile()?, tempfile::tempfile()?];
    let mut child = Command::new(&command[0])
        .args(&command[1..])
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(err.try_clone()?)
        .spawn()
        .context("starting fio")?;
    let deadline = Instant::now() + flags.ramp + flags.runtime + LONG;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let is_late = Instant::now() > deadline;
        if is_late || interrupt.asked() {
            child.kill()?;
            child.wait()?;
            anyhow::ensure!(!is_late, "fio did not end {} s after its time", LONG.as_secs());
            return Ok(false);
        }
        thread::sleep(Duration::from_millis(10));
    };
    let [mut report, mut said] = [String::new(), String::new()];
    for (file, text) in [(&mut out, &mut report), (&mut err, &mut said)] {
        file.rewind()?;
        file.read_to_string(text)?;
    }
    if !status.success() {
        bail!("fio ended with {status}: {}{}", said.trim(), report.trim());
    }
    let Moved { bytes, iops, cpu_seconds, .. } =
        Moved::read(&report).context("reading the report of fio")?;
    let ratio = ours.number("iops").map_or(0.0, |ours| ours / iops);
    ours.figures.extend([
        ("fio_iops", "fio IOPS", Value::Whole(iops)),
        ("against_fio", "x fio", Value::Ratio(ratio)),
        ("fio_cpu_s_gb", "", Value::Ratio(cpu_seconds / bytes * 1e9)),
    ]);
    Ok(true)
}

/// Returns the turn of the median ratio, or one that did not pass its checks.
pub(super) fn median(mut turns: Vec<Row>) -> Option<Row> {
    let ratio = |row: &Row| row.number("against_fio").unwrap_or(0.0);
    turns.sort_by(|a, b| ratio(a).total_cmp(&ratio(b)));
    let bad = turns.iter().position(|row| !row.is_good());
    let at = bad.unwrap_or(turns.len() / 2);
    (at < turns.len()).then(|| turns.swap_remove(at))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::super::{Pattern, Rw};
    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        flags: RawFlags,
    }

    #[test]
    fn a_path_with_colons_is_one_file() {
        let flags = Line::parse_from(["raw"]).flags;
        let load = Load { rw: Rw { pattern: Pattern::Read, mix: 50 }, bytes: 4096, depth: 1 };
        let words = command(&["/dev/disk/by-path/pci-0000:65".to_owned()], &load, &flags);
        assert_eq!(words.last().unwrap(), r"--filename=/dev/disk/by-path/pci-0000\:65");
    }
}
