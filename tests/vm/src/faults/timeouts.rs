//! Commands that miss their deadline.
//!
//! A command that QEMU holds (`break`) must be resumed before its queue is deleted: QEMU waits for
//! it and is blocked meanwhile. A drive that never completes a command is tested with the software
//! controller.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nvme_driver::{ControllerOptions, Error, Nanos, TimeoutOutcome};
use nvme_spec::ids::Lba;
use nvme_spec::nvm::NvmOpcode;

use crate::drive::{FIRST, alone, bytes_of, memory, options, pattern, range, same};
use crate::hardware::DRIVE_A;
use crate::host::Host;
use crate::queue::{Queue, own_memory};

/// Makes the next read wait until `let_go`.
fn hold(host: &mut Host) -> Result<()> {
    let said = host.monitor("qemu-io -d nv0 \"break read_aio held\"")?;
    ensure!(said.is_empty(), "QEMU says {said}");
    Ok(())
}

fn let_go(host: &mut Host) -> Result<()> {
    let said = host.monitor("qemu-io -d nv0 \"resume held\"")?;
    ensure!(said.is_empty() || said.contains("resum"), "QEMU says {said}");
    Ok(())
}

/// The deadline passes, the command is aborted, and completes before its memory is freed.
pub fn a_held_command_is_aborted() -> Result<()> {
    let expected = pattern(7, 4096);
    let options = ControllerOptions {
        command_timeout: Nanos::from_millis(2_000),
        abort_grace: Nanos::from_millis(600_000),
        ..options()
    };
    let (_space, mut drive) = alone(DRIVE_A, options)?;
    drive.write(FIRST, Lba(50), &expected, true)?;
    let data = memory(&**drive.bus(), 4096)?;
    let mut host = Host::open()?;
    hold(&mut host)?;
    let start = Instant::now();
    let helper = thread::spawn(move || -> Result<()> {
        thread::sleep(Duration::from_millis(5_000));
        let_go(&mut host)
    });
    let late = drive.read_dma(FIRST, Lba(50), std::slice::from_ref(&data));
    let took = start.elapsed();
    helper.join().map_err(|_| anyhow::anyhow!("the other thread panicked"))??;
    let Err(Error::Timeout { command, outcome, .. }) = &late else {
        anyhow::bail!("a command that was held for 5 s ended with {late:?}");
    };
    ensure!(*outcome == TimeoutOutcome::Aborted, "{outcome:?}");
    ensure!(command.range == Some((Lba(50), 8)), "{command}");
    ensure!(
        took >= Duration::from_millis(5_000),
        "it returned after {took:?}, while the drive could still write into the memory"
    );
    // It did write: this is why the memory had to stay allocated.
    same("written after the deadline", &bytes_of(&data)?, &expected)?;
    let mut found = vec![0; 4096];
    drive.read(FIRST, Lba(50), &mut found)?;
    same("afterwards", &found, &expected)
}

/// An abandoned command does not block the others. Its CID is reused only after its completion,
/// which is marked as late.
pub fn an_abandoned_command_stays_away() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, options())?;
    let expected = pattern(8, 4096);
    drive.write(FIRST, Lba(60), &expected, true)?;
    let queue_memory = own_memory(&drive, 4)?;
    let mut queue = Queue::make(&mut drive, queue_memory, FIRST)?;
    let data = memory(&**drive.bus(), 8192)?;
    let (kept, other) = (data.slice(0, 4096)?, data.slice(4096, 4096)?);
    let mut host = Host::open()?;
    hold(&mut host)?;
    let held = queue.post(NvmOpcode::READ, FIRST, (60, 8), &[range(&kept)], 77)?;
    queue.ring();
    thread::sleep(Duration::from_millis(300));
    ensure!(queue.reap()?.is_empty(), "it was not held");
    ensure!(queue.abandon(held), "it is not known as outstanding");
    // More commands than the queue has entries, all in the remaining slots.
    for index in 0..10 {
        let cid = queue.post(NvmOpcode::READ, FIRST, (60, 8), &[range(&other)], index)?;
        ensure!(cid != held, "the identifier of a command in flight was used again");
        queue.ring();
        let done = queue.wait(1)?;
        ensure!(done[0].user == index && !done[0].late, "{done:?}");
    }
    same("not yet there", &bytes_of(&kept)?, &[0; 4096])?;
    let_go(&mut host)?;
    let done = queue.wait(1)?;
    ensure!(done[0].late && done[0].user == 77 && done[0].cid == held, "{done:?}");
    same("there in the end", &bytes_of(&kept)?, &expected)?;
    queue.give_back(&mut drive)
}

/// A drive that works far too slowly: an abort fails, deleting the queue succeeds.
pub fn a_slow_command_costs_its_queue() -> Result<()> {
    let options = ControllerOptions {
        command_timeout: Nanos::from_millis(300),
        abort_grace: Nanos::from_millis(100),
        ..options()
    };
    let (_space, mut drive) = alone(DRIVE_A, options)?;
    let expected = pattern(9, 4096);
    drive.write(FIRST, Lba(70), &expected, true)?;
    let mut host = Host::open()?;
    throttle(&mut host, 1)?;
    let mut outcome = None;
    for _ in 0..5 {
        if let Err(error) = drive.read(FIRST, Lba(70), &mut [0; 4096]) {
            outcome = Some(error);
            break;
        }
    }
    throttle(&mut host, 0)?;
    let error = outcome.ok_or_else(|| anyhow::anyhow!("one command a second was fast enough"))?;
    let Error::Timeout { outcome: TimeoutOutcome::QueueRecreated, .. } = error else {
        anyhow::bail!("{error}");
    };
    let mut found = vec![0; 4096];
    drive.read(FIRST, Lba(70), &mut found)?;
    same("afterwards", &found, &expected)
}

/// Limits the commands a second; 0 means no limit.
fn throttle(host: &mut Host, iops: u32) -> Result<()> {
    let rest = "\"bps\": 0, \"bps_rd\": 0, \"bps_wr\": 0, \"iops_rd\": 0, \"iops_wr\": 0";
    host.ask(&format!(
        "qmp {{\"execute\": \"block_set_io_throttle\", \"arguments\": {{\"id\": \"nv0\", \
         \"iops\": {iops}, {rest}}}}}"
    ))?;
    Ok(())
}
