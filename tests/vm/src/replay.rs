//! The whole stack on the two drives: store, I/O kernel on host threads, driver, VFIO.

use std::process::Child;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nvme_spec::ids::Lba;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::drive::{FIRST, alone, options, pattern, same};
use crate::hardware::{BAD_READ_LBA, DRIVE_A, DRIVE_B, PEER, SERIAL_A, SERIAL_B};
use crate::kmsg::Kmsg;
use crate::pci;
use crate::program::{self, Ran};
use crate::runner::{SECONDS_MAX, Suite, tests, until};
use crate::serve::{
    a_server_keeps_blocks_of_both_drives_in_memory, clients_of_a_server_share_both_drives,
};

pub const SUITE: Suite = Suite {
    name: "replay",
    seconds_max: SECONDS_MAX,
    tests: tests![
        both_drives_are_identified,
        the_doctor_tries_both_drives_and_writes_to_none,
        both_drives_with_every_byte_checked,
        one_drive_with_prps_and_one_thread,
        too_little_room_evicts,
        everything_in_peer_memory,
        a_drive_with_data_is_refused,
        an_lba_that_fails_is_no_wrong_byte,
        interrupted,
        killed_and_run_again,
        what_was_kept_is_found,
        a_store_survives_a_kill,
        clients_of_a_server_share_both_drives,
        a_server_keeps_blocks_of_both_drives_in_memory,
    ],
};

/// Exit codes of `ripieno`, as in its help.
const FAILED: i32 = 1;
const REFUSED: i32 = 2;
const INTERRUPTED: i32 = 130;

fn both() -> String {
    format!("vfio:{DRIVE_A},vfio:{DRIVE_B}")
}

fn ripieno(arguments: &[&str]) -> Result<Ran> {
    pci::give_to_vfio(&[DRIVE_A, DRIVE_B, PEER])?;
    program::run("ripieno", arguments)
}

/// Runs a replay that checks all bytes and must find no error. Returns its report.
fn replay(device: &str, more: &[&str]) -> Result<Value> {
    let mut log = Kmsg::from_now()?;
    // A small pool: allocating, pinning and mapping a large one would take longer than the replay.
    let all = [
        "replay",
        "--model",
        "tiny",
        "--devices",
        device,
        "--verify",
        "full",
        "--json",
        "--pool-blocks",
        "2048",
    ];
    let report = ripieno(&[&all, more].concat())?.success()?.json()?;
    let count = |name: &str| -> Result<u64> {
        report[name].as_u64().with_context(|| format!("no `{name}` in {report}"))
    };
    for nothing in ["mismatches", "io_errors", "recoveries"] {
        ensure!(count(nothing)? == 0, "{nothing}: {report}");
    }
    let (retrieved, last) = (count("retrieved_bytes")?, count("final_check_bytes")?);
    ensure!(retrieved > 1 << 20, "only {retrieved} bytes came back");
    ensure!(count("verified_bytes")? == retrieved + last, "unchecked bytes: {report}");
    let (commands, doorbells) = (count("commands")?, count("sq_doorbells")?);
    ensure!(commands > doorbells, "{doorbells} doorbells for {commands} commands");
    let stray = log.lines().into_iter().find(|line| line.contains("DMAR: [DMA"));
    ensure!(stray.is_none(), "{stray:?}");
    Ok(report)
}

fn both_drives_are_identified() -> Result<()> {
    let report = ripieno(&["identify", "--json", "--devices", &both()])?.success()?.json()?;
    let text = report.to_string();
    for part in [SERIAL_A, SERIAL_B, DRIVE_A, DRIVE_B] {
        ensure!(text.contains(part), "{part} is not in {text}");
    }
    Ok(())
}

/// Without a GPU, the host route is the only one, and both drives take it.
fn the_doctor_tries_both_drives_and_writes_to_none() -> Result<()> {
    let text = pattern(701, 1 << 16);
    let zeroes = vec![0; text.len()];
    let write = |bytes: &[u8]| -> Result<()> {
        alone(DRIVE_B, options())?.1.write(FIRST, Lba(0), bytes, true)?;
        Ok(())
    };
    write(&text)?;
    let device = both();
    let doctor = ["doctor", "--json", "--devices", &device];
    let report = ripieno(&doctor)?.success()?.json()?;
    ensure!(report["works"] == serde_json::json!(["host"]), "{report}");
    let checks = report["checks"].as_array().context("no checks")?;
    let check = |id: &str| checks.iter().find(|check| check["id"] == id);
    for (id, verdict) in [("driver", "fail"), ("direct", "fail"), ("host", "ok"), ("iommu", "ok")] {
        ensure!(check(id).is_some_and(|check| check["verdict"] == verdict), "{id}: {report}");
    }
    ripieno(&[&doctor[..], &["--route", "direct"]].concat())?.with_code(FAILED)?;
    let mut found = vec![0; text.len()];
    alone(DRIVE_B, options())?.1.read(FIRST, Lba(0), &mut found)?;
    same("what the drive held", &found, &text)?;
    write(&zeroes)
}

fn both_drives_with_every_byte_checked() -> Result<()> {
    let report = replay(&both(), &["--requests", "150"])?;
    ensure!(report["devices"] == 2 && report["evicted_files"] == 0, "{report}");
    Ok(())
}

fn one_drive_with_prps_and_one_thread() -> Result<()> {
    // A drive with 512-byte LBAs: PRPs cannot pad objects.
    let one = format!("vfio:{DRIVE_A}");
    let more = ["--requests", "60", "--descriptors", "prp", "--executor", "inline"];
    replay(&one, &more)?;
    Ok(())
}

fn too_little_room_evicts() -> Result<()> {
    let report = replay(&both(), &["--requests", "150", "--capacity", "2MiB"])?;
    ensure!(report["evicted_files"].as_u64() > Some(0), "{report}");
    Ok(())
}

/// Queues, descriptors and the KV pool: drives access nothing in main memory.
fn everything_in_peer_memory() -> Result<()> {
    let peer = format!("peer:{PEER}/2");
    let more = ["--memory", &peer, "--requests", "100"];
    let report = replay(&both(), &more)?;
    ensure!(report["memory"].as_str().is_some_and(|place| place.contains(PEER)), "{report}");
    Ok(())
}

/// A drive with data is not written to without --overwrite.
fn a_drive_with_data_is_refused() -> Result<()> {
    let text = pattern(700, 4096);
    let write = |bytes: &[u8]| -> Result<()> {
        alone(DRIVE_B, options())?.1.write(FIRST, Lba(0), bytes, true)?;
        Ok(())
    };
    write(&text)?;
    let device = both();
    let all =
        ["replay", "--model", "tiny", "--devices", &device, "--requests", "20", "--verify", "full"];
    let refused = ripieno(&all)?.with_code(REFUSED)?;
    ensure!(refused.err.contains(DRIVE_B) && refused.err.contains("--overwrite"), "{refused:?}");
    let mut found = vec![0; text.len()];
    alone(DRIVE_B, options())?.1.read(FIRST, Lba(0), &mut found)?;
    same("what the drive held", &found, &text)?;
    // It leaves its scratch mark, so the next replay needs no --overwrite.
    ripieno(&[&all[..], &["--overwrite", "anything"]].concat())?.success()?;
    Ok(())
}

/// The region of drive A includes an LBA that can be written but not read.
fn an_lba_that_fails_is_no_wrong_byte() -> Result<()> {
    let device = both();
    let more = ["--requests", "450", "--verify", "full", "--json"];
    let ran = ripieno(&[&["replay", "--model", "tiny", "--devices", &device], &more[..]].concat())?;
    let report = ran.with_code(FAILED)?.json()?;
    ensure!(report["mismatches"] == 0, "{report}");
    ensure!(report["io_errors"].as_u64() > Some(0), "LBA {BAD_READ_LBA} was not read: {report}");
    Ok(())
}

/// Starts a replay that takes far longer than the test, and waits until it has the drives.
fn start(more: &[&str]) -> Result<Child> {
    pci::give_to_vfio(&[DRIVE_A, DRIVE_B])?;
    let device = both();
    let all = [
        "replay",
        "--model",
        "tiny",
        "--devices",
        &device,
        "--requests",
        "3000",
        "--pool-blocks",
        "2048",
    ];
    let child = program::start("ripieno", &[&all, more].concat())?;
    until("the replay has opened the drives", || Ok(has_drives(&child)))?;
    // Continue in the middle of its I/O.
    thread::sleep(Duration::from_millis(1_000));
    Ok(child)
}

fn has_drives(child: &Child) -> bool {
    let files = std::fs::read_dir(format!("/proc/{}/fd", child.id())).into_iter().flatten();
    let targets = files.flatten().filter_map(|file| std::fs::read_link(file.path()).ok());
    targets.filter(|target| target.to_string_lossy().contains("vfio-device")).count() == 2
}

fn interrupted() -> Result<()> {
    let mut child = start(&["--capacity", "8MiB"])?;
    ensure!(child.try_wait()?.is_none(), "it was over before it could be interrupted");
    kill_process(Pid::from_child(&child), Signal::INT)?;
    let code = child.wait()?.code();
    ensure!(code == Some(INTERRUPTED), "it ended with {code:?}");
    replay(&both(), &["--requests", "60"])?;
    Ok(())
}

fn killed_and_run_again() -> Result<()> {
    let mut log = Kmsg::from_now()?;
    let mut child = start(&["--capacity", "8MiB"])?;
    ensure!(child.try_wait()?.is_none(), "it was over before it could be killed");
    child.kill()?;
    child.wait()?;
    replay(&both(), &["--requests", "60"])?;
    let stray = log.lines().into_iter().find(|line| line.contains("DMAR: [DMA"));
    ensure!(stray.is_none(), "{stray:?}");
    Ok(())
}

/// A process finds the blocks that another one stored, and writes nothing.
fn what_was_kept_is_found() -> Result<()> {
    let keep = ["--keep", "--requests", "60"];
    let first = replay(&both(), &[&keep[..], &["--overwrite", "anything"]].concat())?;
    let again = replay(&both(), &keep)?;
    ensure!(first["store"] == "made" && again["store"] == "opened", "{first} {again}");
    let all = [("trace_blocks_hit", "trace_blocks"), ("files_found", "final_check_blocks")];
    for (found, wanted) in all {
        ensure!(again[found] == again[wanted], "{found}: {again}");
    }
    ensure!(again["stored_bytes"] == 0, "{again}");
    let marked = ripieno(&["replay", "--model", "tiny", "--devices", &both(), "--requests", "20"])?
        .with_code(REFUSED)?;
    ensure!(marked.err.contains("the drive is not empty (store "), "{marked:?}");
    Ok(())
}

/// Kills a replay that evicts: the store opens, and all its data is right.
fn a_store_survives_a_kill() -> Result<()> {
    let room = ["--keep", "--capacity", "5MiB"];
    replay(&both(), &[&room[..], &["--requests", "60", "--overwrite", "anything"]].concat())?;
    for _ in 0..3 {
        let mut child = start(&room)?;
        ensure!(child.try_wait()?.is_none(), "it was over before it could be killed");
        child.kill()?;
        child.wait()?;
        let again = replay(&both(), &[&room[..], &["--requests", "60"]].concat())?;
        ensure!(again["store"] == "opened", "{again}");
        ensure!(again["files_found"].as_u64() > Some(0), "{again}");
    }
    // The next tests need no --overwrite.
    replay(&both(), &["--requests", "60", "--overwrite", "anything"])?;
    Ok(())
}
