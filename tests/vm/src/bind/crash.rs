//! `nvme-bind` killed in the middle, and two concurrent runs of it.

use std::process::Child;
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, Result, ensure};

use super::{NVME, VFIO, as_at_boot, entry, journals, nvme_bind};
use crate::hardware::{DRIVE_A, DRIVE_B};
use crate::pci;
use crate::program;

/// Runs to kill, at times spread over the part of a run that changes something, as often as it
/// takes until so many of them were half-done, but not more often than this.
const MOMENTS: u32 = 16;
const ENOUGH: u32 = 3;
const TURNS_MAX: u32 = 20;

/// Kills a bind, and then an unbind, at many points. `status` must report the true state, and one
/// `restore` must undo everything.
pub fn killed_at_any_moment() -> Result<()> {
    as_at_boot()?;
    let bind = duration_of_changes(&["bind", DRIVE_A])?;
    let unbind = duration_of_changes(&["unbind", DRIVE_A])?;
    let (mut half_done, mut bound, mut killed) = (0, 0, 0);
    while killed < MOMENTS || half_done < ENOUGH && killed < TURNS_MAX * MOMENTS {
        let moment = killed % MOMENTS;
        killed += 1;
        let is_bind = moment.is_multiple_of(2);
        let (command, whole) = if is_bind { ("bind", bind) } else { ("unbind", unbind) };
        if !is_bind {
            nvme_bind(&["bind", DRIVE_A])?.success()?;
        }
        // The steps come first, and checks last.
        let share = f64::from(moment / 2) / f64::from(MOMENTS / 2);
        let delay = whole.mul_f64(share * share);
        kill_after(&[command, DRIVE_A], delay)?;
        let what = format!("{command} killed after {delay:?} of {whole:?}");
        // A write that waits for a driver's removal ends after its process.
        thread::sleep(Duration::from_millis(50));
        let status = nvme_bind(&["status", "--json"])?;
        let answer = status.json().with_context(|| what.clone())?;
        if answer["half_done"] == true {
            half_done += 1;
            ensure!(status.code == Some(5), "{what}: {status:?}");
            let refused = nvme_bind(&["bind", DRIVE_A])?.with_code(5)?;
            ensure!(refused.err.contains("restore"), "{what}: {}", refused.err);
        } else {
            ensure!(status.code == Some(0), "{what}: {status:?}");
            bound += u32::from(pci::driver(DRIVE_A).as_deref() == VFIO);
        }
        println!("{what}: half-done: {}, {:?}", answer["half_done"], pci::driver(DRIVE_A));
        nvme_bind(&["restore"])?.success().with_context(|| what.clone())?;
        as_at_boot().with_context(|| what)?;
    }
    println!("of {killed} killed runs {half_done} were half-done and {bound} left it bound");
    ensure!(half_done >= ENOUGH, "only {half_done} of {killed} were killed in the middle");
    Ok(())
}

/// Runs a command to its end. Returns how long it took from its first change on.
fn duration_of_changes(arguments: &[&str]) -> Result<Duration> {
    let mut child = start_until_it_changes(arguments)?;
    let start = Instant::now();
    let status = child.wait()?;
    ensure!(status.success(), "{arguments:?}: {status}");
    Ok(start.elapsed())
}

/// Kills a command at this time after its first change.
fn kill_after(arguments: &[&str], delay: Duration) -> Result<()> {
    let mut child = start_until_it_changes(arguments)?;
    thread::sleep(delay);
    child.kill()?;
    child.wait()?;
    Ok(())
}

/// Starts a command, and returns after it has changed something, or has ended.
fn start_until_it_changes(arguments: &[&str]) -> Result<Child> {
    let state = || {
        let forced = pci::attribute(DRIVE_A, "driver_override").ok();
        (journals(), pci::driver(DRIVE_A), forced)
    };
    let before = state();
    let mut child = program::start("nvme-bind", arguments)?;
    while state() == before && child.try_wait()?.is_none() {
        thread::sleep(Duration::from_millis(1));
    }
    Ok(child)
}

/// One of two concurrent runs does it. The other one reports that, or finds it done.
pub fn two_at_once_on_one_drive() -> Result<()> {
    as_at_boot()?;
    for round in 0..4 {
        let runs = at_once(&["bind", DRIVE_A], &["bind", DRIVE_A])?;
        ensure!(runs.contains(&Some(0)), "round {round}: neither did it: {runs:?}");
        for code in runs {
            ensure!(code == Some(0) || code == Some(1), "round {round}: {code:?}");
        }
        ensure!(pci::driver(DRIVE_A).as_deref() == VFIO);
        let status = nvme_bind(&["status", "--json"])?.success()?.json()?;
        ensure!(entry(&status, DRIVE_A)?["state"] == "bound", "{status}");
        ensure!(entry(&status, DRIVE_A)?["former"] == "nvme", "{status}");
        // And back, with two concurrent runs again.
        let runs = at_once(&["restore"], &["unbind", DRIVE_A])?;
        ensure!(runs.contains(&Some(0)), "round {round}: neither gave it back: {runs:?}");
        as_at_boot().with_context(|| format!("round {round}: {runs:?}"))?;
    }
    Ok(())
}

pub fn two_at_once_on_two_drives() -> Result<()> {
    as_at_boot()?;
    let runs = at_once(&["bind", DRIVE_A], &["bind", DRIVE_B])?;
    for (bdf, code) in [DRIVE_A, DRIVE_B].into_iter().zip(runs) {
        let wanted = if code == Some(0) { VFIO } else { NVME };
        ensure!(pci::driver(bdf).as_deref() == wanted, "{bdf}: {code:?}");
    }
    ensure!(runs.contains(&Some(0)), "{runs:?}");
    let records = journals().len();
    ensure!(records == runs.iter().filter(|code| **code == Some(0)).count(), "{records} journals");
    nvme_bind(&["restore"])?.success()?;
    let lock = fs::metadata("/run/nvme-bind/lock");
    ensure!(lock.is_ok(), "nothing was locked");
    as_at_boot()
}

/// Returns the exit codes of two runs that start together.
fn at_once(first: &[&str], second: &[&str]) -> Result<[Option<i32>; 2]> {
    let mut first = program::start("nvme-bind", first)?;
    let mut second = program::start("nvme-bind", second)?;
    Ok([first.wait()?.code(), second.wait()?.code()])
}
