//! Queue pairs that are not driven by the driver itself.

use anyhow::{Result, ensure};
use nvme_driver::platform::ring::Doorbell;
use nvme_driver::{ControllerOptions, DescriptorPreference, IovaRange};
use nvme_spec::ids::Lba;
use nvme_spec::nvm::NvmOpcode;

use super::{dyn_bus, reported};
use crate::drive::{FIRST, alone, bytes_of, fill, memory, options, pattern, range, same};
use crate::hardware::{DRIVE_A, DRIVE_B};
use crate::queue::{Queue, own_memory, quiesced};
use crate::runner::until;

const BLOCK: usize = 4096;

/// A full queue, one doorbell, all completions in one poll.
pub fn many_commands_for_one_doorbell() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_B, options())?;
    let queue_memory = own_memory(&drive, 64)?;
    let mut queue = Queue::make(&mut drive, queue_memory, FIRST)?;
    let full = queue.depth() as usize - 1;
    let data = memory(&*dyn_bus(&drive), full * BLOCK)?;
    let expected = pattern(400, full * BLOCK);
    fill(&data, &expected)?;
    for opcode in [NvmOpcode::WRITE, NvmOpcode::READ] {
        for index in 0..full {
            let part = range(&data.slice(index * BLOCK, BLOCK)?);
            queue.post(opcode, FIRST, (1000 + index as u64, 1), &[part], index as u64)?;
        }
        let part = range(&data.slice(0, BLOCK)?);
        let over = queue.post(opcode, FIRST, (0, 1), &[part], 0);
        ensure!(over.is_err(), "a full queue takes one more");
        queue.ring();
        let done = queue.wait(full)?;
        let mut seen: Vec<u64> = done.iter().map(|completion| completion.user).collect();
        seen.sort_unstable();
        ensure!(seen == (0..full as u64).collect::<Vec<_>>(), "{opcode:?}: {seen:?}");
        ensure!(done.iter().all(|completion| completion.status.is_success()), "{done:?}");
        if opcode == NvmOpcode::WRITE {
            fill(&data, &vec![0; full * BLOCK])?;
        }
    }
    same("read back", &bytes_of(&data)?, &expected)?;
    queue.give_back(&mut drive)
}

/// Phases, wrapped heads and tails, and reused CIDs.
pub fn a_queue_goes_round() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, options())?;
    let queue_memory = own_memory(&drive, 8)?;
    let mut queue = Queue::make(&mut drive, queue_memory, FIRST)?;
    let data = memory(&*dyn_bus(&drive), 8 * BLOCK)?;
    for round in 0..100_u64 {
        // A different number of commands each time, so that batches begin at any entry.
        let number = 1 + round % 7;
        for index in 0..number {
            let part = data.slice(index as usize * BLOCK, 512)?;
            fill(&part, &pattern(round * 10 + index, 512))?;
            queue.post(NvmOpcode::WRITE, FIRST, (70_000 + index, 1), &[range(&part)], index)?;
        }
        queue.ring();
        let done = queue.wait(number as usize)?;
        ensure!(done.iter().all(|completion| completion.status.is_success() && !completion.late));
        let mut found = vec![0; 512];
        drive.read(FIRST, Lba(70_000 + number - 1), &mut found)?;
        same("the last one", &found, &pattern(round * 10 + number - 1, 512))?;
    }
    queue.give_back(&mut drive)
}

pub fn queues_of_many_depths() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_B, options())?;
    for depth in [2, 4, 32, 256] {
        let queue_memory = own_memory(&drive, depth)?;
        let mut queue = Queue::make(&mut drive, queue_memory, FIRST)?;
        let data = memory(&*dyn_bus(&drive), BLOCK)?;
        for _ in 0..2 * depth.min(8) {
            queue.run(NvmOpcode::READ, FIRST, (0, 1), &[range(&data)])?;
        }
        queue.give_back(&mut drive)?;
    }
    // All of them at the same time.
    let mut queues = Vec::new();
    for _ in 0..drive.info().io_queues {
        let queue_memory = own_memory(&drive, 4)?;
        queues.push(Queue::make(&mut drive, queue_memory, FIRST)?);
    }
    ensure!(queues.len() >= 2, "the drive gave {} queues", queues.len());
    let data = memory(&*dyn_bus(&drive), BLOCK * queues.len())?;
    for (index, queue) in queues.iter_mut().enumerate() {
        let part = range(&data.slice(index * BLOCK, BLOCK)?);
        queue.post(NvmOpcode::READ, FIRST, (index as u64, 1), &[part], 0)?;
        queue.ring();
    }
    for mut queue in queues {
        ensure!(queue.wait(1)?[0].status.is_success());
        queue.give_back(&mut drive)?;
    }
    Ok(())
}

/// The drive detects an invalid tail and reports it to the driver.
pub fn a_wrong_doorbell_is_reported() -> Result<()> {
    let (_space, mut drive) = alone(DRIVE_A, options())?;
    let queue_memory = own_memory(&drive, 16)?;
    let queue = Queue::make(&mut drive, queue_memory, FIRST)?;
    ensure!(!reported(&mut drive)?, "an error before there was one");
    let doorbell = Doorbell::new(&dyn_bus(&drive), u32::from(queue.qid().0) * 2);
    doorbell.ok_or_else(|| anyhow::anyhow!("no doorbell"))?.ring(9999);
    until("it is reported", || reported(&mut drive))?;
    drive.read(FIRST, Lba(0), &mut [0; 512])?;
    queue.give_back(&mut drive)
}

/// An executor ends with commands in flight: its queue is recreated in the same memory.
pub fn commands_in_flight_are_recovered() -> Result<()> {
    let descriptors = DescriptorPreference::Prp;
    let (_space, mut drive) = alone(DRIVE_B, ControllerOptions { descriptors, ..options() })?;
    let data = memory(&*dyn_bus(&drive), 512 << 10)?;
    for round in 0..5 {
        let queue_memory = own_memory(&drive, 32)?;
        let mut queue = Queue::make(&mut drive, queue_memory, FIRST)?;
        let part: [IovaRange; 1] = [range(&data)];
        for index in 0..31 {
            queue.post(NvmOpcode::READ, FIRST, (index * 128, 128), &part, index)?;
        }
        queue.ring();
        let qid = queue.qid();
        drop(queue);
        let proof = quiesced(&drive);
        let recovered = drive.recover(&proof)?;
        ensure!(recovered.queues == [qid], "round {round}: {recovered:?}");
        drive.grant(qid, FIRST)?;
        let proof = quiesced(&drive);
        drop(drive.reclaim(qid, &proof)?);
        let mut found = vec![0; 4096];
        drive.read(FIRST, Lba(5), &mut found)?;
    }
    Ok(())
}
