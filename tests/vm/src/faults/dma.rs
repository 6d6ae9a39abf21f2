//! DMA to unmapped addresses. The drive itself reports success: only the IOMMU detects it, and the
//! kernel logs it.

use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use nvme_driver::{DmaSlice, DmaSpace, Error, QueueMemory, Quiesced, State};
use nvme_spec::ids::Lba;
use nvme_spec::nvm::NvmOpcode;

use super::wait_until_fatal;
use crate::drive::{
    FIRST, alone, attach, bus, bytes_of, fill, memory, options, pattern, range, same, space,
};
use crate::hardware::{DRIVE_A, FILE_A};
use crate::host::{self, Host};
use crate::kmsg::Kmsg;
use crate::queue::{Queue, own_memory, quiesced};
use crate::runner::until;
use crate::stray::{NOWHERE, Stray};

/// Repeats DMA of drive A that the IOMMU must block, until the kernel logs it: the kernel logs only
/// ten faults in five seconds.
fn is_stopped(direction: &str, mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
    until("the kernel logs it", || {
        let mut log = Kmsg::from_now()?;
        attempt()?;
        let Ok(line) = log.wait(&format!("DMAR: [DMA {direction}"), Duration::from_secs(1)) else {
            thread::sleep(Duration::from_secs(5));
            return Ok(false);
        };
        ensure!(line.contains("[01:00.0]"), "somebody else was stopped: {line}");
        Ok(true)
    })
}

pub fn stray_reads_are_stopped() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, options())?;
    drive.write(FIRST, Lba(10), &pattern(1, 4096), true)?;
    let stray = Stray::new(4096, NOWHERE)?;
    // A read from the medium is a write to memory.
    is_stopped("Write", || Ok(drive.read_dma(FIRST, Lba(10), &[stray.slice()?])?))?;
    same("memory that only claimed to be there", &bytes_of(&stray.slice()?)?, &[0; 4096])
}

pub fn stray_writes_are_stopped() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, options())?;
    let stray = Stray::new(4096, NOWHERE)?;
    let secret = pattern(2, 4096);
    fill(&stray.slice()?, &secret)?;
    is_stopped("Read", || Ok(drive.write_dma(FIRST, Lba(20), &[stray.slice()?], true)?))?;
    let found = Host::open()?.hash(FILE_A, 20 * 512, secret.len())?;
    ensure!(found != host::hash(&secret), "bytes that nobody mapped are on the drive");
    // The drive still works.
    let mut found = vec![0; 512];
    Ok(drive.read(FIRST, Lba(20), &mut found)?)
}

/// Use-after-free by DMA, which IOMMUs prevent: a command uses the address of freed memory. The
/// memory's next owner loses nothing.
pub fn freed_memory_is_out_of_reach() -> Result<()> {
    let space = space()?;
    let bus_a = bus(&space, DRIVE_A)?;
    let mut drive = attach(&bus_a, options())?;
    drive.write(FIRST, Lba(30), &pattern(3, 8192), true)?;
    // The bounce buffer exists by now, so a later allocation leaves a hole when it is freed.
    let old = memory(&*bus_a, 8192)?;
    let (iova, before) = (old.iova(), space.status().mappings);
    drop(old);
    ensure!(space.status().mappings == before - 1, "the memory is still mapped");
    let stray = Stray::new(8192, iova)?;
    is_stopped("Write", || Ok(drive.read_dma(FIRST, Lba(30), &[stray.slice()?])?))?;
    // The next allocation may get the address, which is mapped again.
    let next = DmaSlice::whole(space.alloc(8192)?)?;
    ensure!(next.iova() == iova, "{} was expected to be free", iova);
    drive.read_dma(FIRST, Lba(30), std::slice::from_ref(&next))?;
    same("the next owner's", &bytes_of(&next)?, &pattern(3, 8192))
}

pub fn a_lost_completion_queue_is_recovered() -> Result<()> {
    lost_queue(|memory, stray| QueueMemory { cq: stray, ..memory })
}

pub fn a_lost_submission_queue_is_recovered() -> Result<()> {
    lost_queue(|memory, stray| QueueMemory { sq: stray, ..memory })
}

/// Tests a queue whose memory the drive cannot reach, which is fatal for the drive (CSTS.CFS).
fn lost_queue(lose: impl Fn(QueueMemory, DmaSlice) -> QueueMemory) -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, options())?;
    let expected = pattern(4, 4096);
    drive.write(FIRST, Lba(40), &expected, true)?;
    let whole = own_memory(&drive, 64)?;
    let stray = Stray::new(4096, NOWHERE)?;
    let memory_of_queue = lose(whole, stray.slice()?);
    let mut queue = Queue::make(&mut drive, memory_of_queue, FIRST)?;
    let data = memory(&**drive.bus(), 4096)?;
    queue.post(NvmOpcode::READ, FIRST, (40, 8), &[range(&data)], 0)?;
    queue.ring();
    wait_until_fatal(&mut drive)?;
    ensure!(matches!(drive.state(), State::Failed(_)), "{:?}", drive.state());
    let refused = drive.read(FIRST, Lba(40), &mut [0; 512]);
    ensure!(matches!(refused, Err(Error::Failed { .. })), "{refused:?}");
    // The executor stops; its queues are recreated, and this one is deleted.
    let qid = queue.qid();
    drop(queue);
    let proof = quiesced(&drive);
    drive.recover(&proof)?;
    ensure!(drive.state() == State::Ready, "{:?}", drive.state());
    drop(drive.reclaim(qid, &Quiesced::default())?);
    let mut found = vec![0; expected.len()];
    drive.read(FIRST, Lba(40), &mut found)?;
    same("after the recovery", &found, &expected)
}
