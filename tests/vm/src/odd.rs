//! Drives that a store is not made for: a namespace that two controllers have, and a zoned one.

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::hardware::{DRIVE_S, DRIVE_Z};
use crate::pci;
use crate::program::{self, Ran};
use crate::runner::{SECONDS_MAX, Suite, tests};

pub const SUITE: Suite = Suite {
    name: "odd",
    // Two processes share the processor, and one of them waits for the other.
    seconds_max: 5 * SECONDS_MAX,
    tests: tests![
        a_zoned_namespace_is_refused_in_words,
        one_namespace_is_not_formatted_as_two_devices,
        a_living_owner_keeps_others_out_and_a_dead_one_does_not,
        an_owner_that_was_stopped_does_no_harm,
    ],
};

/// Exit code of `ripieno` for what the user can change.
const REFUSED: i32 = 2;

/// Output of the owner that [`start`] makes.
const COMPLAINTS: &str = "/tmp/older";

fn ripieno(words: &str) -> Result<Ran> {
    pci::give_to_vfio(&[DRIVE_S[0], DRIVE_S[1], DRIVE_Z])?;
    program::run("ripieno", &words.split(' ').collect::<Vec<_>>())
}

fn path(number: usize) -> String {
    format!("vfio:{}", DRIVE_S[number])
}

fn a_zoned_namespace_is_refused_in_words() -> Result<()> {
    let device = format!("vfio:{DRIVE_Z}");
    let before = ripieno(&format!("identify --json --devices {device}"))?.success()?.json()?;
    ensure!(before.to_string().contains("it is a zoned namespace"), "{before}");
    for words in [
        "format --model tiny --no-undo",
        "replay --model tiny",
        "bench raw --rw randwrite --overwrite anything",
    ] {
        let ran = ripieno(&format!("{words} --devices {device}"))?.with_code(REFUSED)?;
        ensure!(ran.err.contains("zoned"), "{ran:?}");
    }
    Ok(())
}

fn one_namespace_is_not_formatted_as_two_devices() -> Result<()> {
    let format = format!("format --model tiny --no-undo --devices {},{}", path(0), path(1));
    let ran = ripieno(&format)?.with_code(REFUSED)?;
    ensure!(ran.err.contains("are the same namespace"), "{ran:?}");
    Ok(())
}

const REPLAY: &str = "replay --model tiny --keep --capacity 8MiB --pool-blocks 2048 --verify full";

/// Starts a replay that takes far longer than the test, and waits until the other controller shows
/// that it has the store.
fn start(number: usize) -> Result<Child> {
    let words = format!("{REPLAY} --requests 100000 --devices {}", path(number));
    let said = File::create(COMPLAINTS)?;
    let mut command = Command::new("ripieno");
    command.args(words.split(' ')).stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
    let mut child = command.spawn().context("cannot run ripieno")?;
    let pid = format!("process {} on", child.id());
    // The suite's watchdog ends this.
    loop {
        ensure!(child.try_wait()?.is_none(), "it ended: {}", std::fs::read_to_string(COMPLAINTS)?);
        let seen = ripieno(&format!("inspect --json --devices {}", path(1 - number)))?;
        let owner = seen.json().ok().map(|found| found["owner"].to_string());
        if owner.is_some_and(|owner| owner.contains(&pid)) {
            return Ok(child);
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn signal(child: &Child, signal: Signal) -> Result<()> {
    Ok(kill_process(Pid::from_child(child), signal)?)
}

/// Makes a store without blocks on the namespace.
fn format() -> Result<()> {
    let words = "format --model tiny --no-undo --overwrite anything --capacity 8MiB";
    ripieno(&format!("{words} --devices {}", path(0)))?.success()?;
    Ok(())
}

/// Replays through a controller, with all bytes checked. Returns the report.
fn replay(number: usize) -> Result<Value> {
    let words = format!("{REPLAY} --requests 40 --json --devices {}", path(number));
    let report = ripieno(&words)?.success()?.json()?;
    ensure!(report["store"] == "opened" && report["mismatches"] == 0, "{report}");
    Ok(report)
}

fn fsck(number: usize) -> Result<()> {
    let words = format!("fsck --json --devices {}", path(number));
    let report = ripieno(&words)?.success()?.json()?;
    ensure!(report["damage"] == serde_json::json!([]), "{report}");
    Ok(())
}

fn a_living_owner_keeps_others_out_and_a_dead_one_does_not() -> Result<()> {
    format()?;
    let mut child = start(0)?;
    let device = path(1);
    for words in [
        format!("{REPLAY} --requests 40 --devices {device}"),
        format!("format --model tiny --no-undo --overwrite anything --devices {device}"),
        format!("fsck --repair --devices {device}"),
        format!("replay --model tiny --overwrite anything --devices {device}"),
        format!("bench raw --devices {device}"),
        format!("bench raw --rw randwrite --overwrite anything --devices {device}"),
    ] {
        let ran = ripieno(&words)?.with_code(REFUSED)?;
        let all = ["is alive", &format!("process {} on", child.id())];
        ensure!(all.iter().all(|part| ran.err.contains(part)), "{ran:?}");
    }
    ensure!(child.try_wait()?.is_none(), "{}", std::fs::read_to_string(COMPLAINTS)?);
    child.kill()?;
    child.wait()?;
    replay(1)?;
    fsck(0)
}

fn an_owner_that_was_stopped_does_no_harm() -> Result<()> {
    format()?;
    let mut older = start(1)?;
    signal(&older, Signal::STOP)?;
    replay(0)?;
    signal(&older, Signal::CONT)?;
    let code = older.wait()?.code();
    let said = std::fs::read_to_string(COMPLAINTS)?;
    ensure!(code == Some(1), "it ended with {code:?}: {said}");
    ensure!(said.contains("another process took the store over"), "{said}");
    fsck(1)?;
    replay(1)?;
    Ok(())
}
