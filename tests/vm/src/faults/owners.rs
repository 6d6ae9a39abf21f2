//! Processes that compete for a drive, lack permissions, or die with commands in flight.

use std::fs;
use std::os::unix::fs::chown;
use std::process::Child;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nvme_driver::platform::vfio::{SpaceOptions, VfioError, VfioSpace};
use nvme_driver::{ControllerOptions, WaitMode};
use nvme_spec::ids::Lba;
use nvme_spec::nvm::NvmOpcode;
use rustix::fs::{Gid, Uid};
use rustix::thread::{set_thread_gid, set_thread_uid};

use super::wait_for_file;
use crate::drive::{self, FIRST, alone, attach, bus, options, pattern, range, same, space};
use crate::hardware::{DRIVE_A, DRIVE_B};
use crate::kmsg::Kmsg;
use crate::pci;
use crate::program::{self, ROLE, Ran};
use crate::queue::{Queue, own_memory};
use crate::runner::WATCHDOG;

/// Created by a process in a role once it is ready.
const MARK: &str = "/tmp/ready";
const USER: u32 = 1234;

fn play(part: &str, bdf: &str) -> Result<Child> {
    let _ = fs::remove_file(MARK);
    let child = program::start("vm-tests", &[ROLE, part, bdf])?;
    wait_for_file(MARK)?;
    Ok(child)
}

/// Plays a process that has a drive open and idle.
pub fn hold(bdf: &str) -> Result<()> {
    let space = space()?;
    let _bus = bus(&space, bdf)?;
    fs::write(MARK, "")?;
    thread::sleep(WATCHDOG);
    Ok(())
}

/// A group can be opened only once; a second process gets an error that names the first.
pub fn one_drive_has_one_owner() -> Result<()> {
    let mut other = play("hold", DRIVE_A)?;
    let tried = (|| -> Result<()> {
        let refused = bus(&space()?, DRIVE_A).err().context("two processes have one drive")?;
        let Some(VfioError::Busy { holders, .. }) = refused.downcast_ref() else { bail!(refused) };
        let known = holders.iter().any(|holder| holder.contains(&format!("(pid {})", other.id())));
        ensure!(known, "process {} is not among {holders:?}", other.id());
        // nvme-bind does not take it away either.
        let refused = program::run("nvme-bind", &["unbind", DRIVE_A])?.with_code(3)?;
        ensure!(refused.err.contains(&other.id().to_string()), "{}", refused.err);
        // Another drive is not affected.
        alone(DRIVE_B, options())?;
        Ok(())
    })();
    other.kill()?;
    other.wait()?;
    tried?;
    let space = space()?;
    let first = bus(&space, DRIVE_A)?;
    let second = bus(&space, DRIVE_A).err().context("two buses for one drive")?;
    ensure!(matches!(second.downcast_ref(), Some(VfioError::Claimed { .. })), "{second}");
    drop(first);
    bus(&space, DRIVE_A)?;
    Ok(())
}

/// Plays a process of an ordinary user that reads one LBA.
pub fn read_one(bdf: &str) -> Result<()> {
    // This is the process's only thread, and the privileges are dropped for good.
    set_thread_gid(Gid::from_raw(USER))?;
    set_thread_uid(Uid::from_raw(USER))?;
    let bus = bus(&VfioSpace::open("user", SpaceOptions::default())?, bdf)?;
    let mut drive = attach(&bus, options())?;
    let mut block = vec![0; drive.namespace(FIRST)?.lba_bytes() as usize];
    drive.read(FIRST, Lba(0), &mut block)?;
    Ok(())
}

/// Runs the role as a user, with this limit of locked memory in KiB.
fn as_user(bdf: &str, lock_kib: u32) -> Result<Ran> {
    let line = format!("ulimit -l {lock_kib}; exec vm-tests {ROLE} read-one {bdf}");
    program::run("sh", &["-c", &line])
}

fn with_node_of_user(run: impl FnOnce() -> Result<()>) -> Result<()> {
    space()?;
    let node = format!("/dev/vfio/{}", pci::group(DRIVE_B)?);
    chown(&node, Some(USER), Some(USER))?;
    let done = run();
    chown(&node, Some(0), Some(0))?;
    done
}

pub fn a_user_without_rights_drives_a_drive() -> Result<()> {
    with_node_of_user(|| {
        as_user(DRIVE_B, 16 << 10)?.success()?;
        // The user does not own the other drive's node.
        let refused = as_user(DRIVE_A, 16 << 10)?.with_code(2)?;
        ensure!(refused.err.contains("/dev/vfio"), "{}", refused.err);
        Ok(())
    })
}

pub fn a_lock_limit_is_explained() -> Result<()> {
    with_node_of_user(|| {
        let refused = as_user(DRIVE_B, 64)?.with_code(2)?;
        for word in ["RLIMIT_MEMLOCK", "65536", "ulimit -l"] {
            ensure!(refused.err.contains(word), "`{word}` is not in: {}", refused.err);
        }
        Ok(())
    })
}

/// Plays a process that writes at full speed until it is killed.
pub fn hammer(bdf: &str) -> Result<()> {
    let space = space()?;
    let mut drive =
        attach(&bus(&space, bdf)?, ControllerOptions { wait: WaitMode::Interrupt, ..options() })?;
    let queue_memory = own_memory(&drive, 32)?;
    let mut queue = Queue::make(&mut drive, queue_memory, FIRST)?;
    let data = drive::memory(&**drive.bus(), 128 << 10)?;
    for round in 0_u64.. {
        while queue
            .post(NvmOpcode::WRITE, FIRST, (round % 64 * 256, 256), &[range(&data)], 0)
            .is_ok()
        {}
        queue.ring();
        queue.wait(8)?;
        if round == 2 {
            fs::write(MARK, "")?;
        }
    }
    Ok(())
}

/// Kills a process with a full queue, repeatedly. The kernel stops the drive before it frees the
/// memory, and the next process finds a working drive.
pub fn a_killed_process_leaves_a_usable_drive() -> Result<()> {
    let mut log = Kmsg::from_now()?;
    for round in 0..5_u64 {
        let mut other = play("hammer", DRIVE_A)?;
        thread::sleep(Duration::from_millis(round * 7));
        ensure!(other.try_wait()?.is_none(), "it ended by itself");
        other.kill()?;
        other.wait()?;
        let (_space, mut drive) =
            alone(DRIVE_A, options()).context("after a process was killed")?;
        let expected = pattern(500 + round, 64 << 10);
        drive.write(FIRST, Lba(300_000), &expected, true)?;
        let mut found = vec![0; expected.len()];
        drive.read(FIRST, Lba(300_000), &mut found)?;
        same("after a process was killed", &found, &expected)?;
    }
    let stray = log.lines().into_iter().find(|line| line.contains("DMAR: [DMA"));
    ensure!(stray.is_none(), "the drive was still at work: {stray:?}");
    Ok(())
}
