//! A queue pair that a test drives itself, like an executor.
#![allow(unsafe_code, reason = "a test that owns a queue says itself that nobody else uses it")]

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nvme_driver::descriptor::{BufferArea, describe};
use nvme_driver::platform::buffer::Buffer;
use nvme_driver::queue::{Completion, QueuePair};
use nvme_driver::{Controller, DescriptorMode, DmaSlice, IovaRange, QueueMemory, Quiesced};
use nvme_spec::ids::{Cid, Lba, Lbas, Nsid, QueueId};
use nvme_spec::nvm::{BlockRange, NvmOpcode};
use nvme_spec::sqe::Sqe;

use crate::runner::WATCHDOG;

/// Bytes per entry for descriptors: more than 255 SGL entries make a chain.
const AREA_BYTES: usize = 16 << 10;
/// Bytes per segment in it.
const SEGMENT_BYTES: u32 = 4096;

/// A queue pair and the descriptor areas of its entries.
pub struct Queue {
    pair: QueuePair,
    areas: Buffer,
    mode: DescriptorMode,
    qid: QueueId,
    next: u64,
}

/// Returns proof that the queues of a test are idle. Its threads have ended before every call.
pub fn quiesced(controller: &Controller) -> Quiesced {
    // SAFETY: queues are driven only by the calling thread of the test.
    unsafe { Quiesced::assert(controller.grants().map(|grant| grant.epoch)) }
}

/// Returns the memory needed by a queue of `depth`, including descriptor areas.
pub fn queue_bytes(depth: u32) -> usize {
    let pages = |bytes: usize| bytes.next_multiple_of(4096);
    let depth = depth as usize;
    pages(depth * 64) + pages(depth * 16) + depth * AREA_BYTES
}

/// Divides one piece of memory into a queue pair's parts.
pub fn queue_memory(memory: &DmaSlice, depth: u32) -> Result<QueueMemory> {
    let entries = depth as usize;
    let (sq, cq) = (entries * 64, entries * 16);
    let at_cq = sq.next_multiple_of(4096);
    let at_areas = at_cq + cq.next_multiple_of(4096);
    Ok(QueueMemory {
        sq: memory.slice(0, sq)?,
        cq: memory.slice(at_cq, cq)?,
        descriptors: memory.slice(at_areas, entries * AREA_BYTES)?,
    })
}

impl Queue {
    /// Creates a queue pair on the controller and takes it over.
    pub fn make(controller: &mut Controller, memory: QueueMemory, nsid: Nsid) -> Result<Self> {
        let qid = controller.create_queue_pair_in(memory.clone())?;
        let grant = controller.grant(qid, nsid)?;
        let QueueMemory { sq, cq, descriptors } = memory;
        let pair = QueuePair::new(&controller.bus().clone(), qid, grant.depth, sq, cq)?;
        let areas = Buffer::new(descriptors).context("descriptors that the CPU does not reach")?;
        Ok(Self { pair, areas, mode: grant.descriptor_mode, qid, next: 0 })
    }

    pub fn qid(&self) -> QueueId {
        self.qid
    }

    pub fn depth(&self) -> u32 {
        self.pair.depth()
    }

    /// Posts a command; its completion returns `user`.
    pub fn post(
        &mut self,
        opcode: NvmOpcode,
        nsid: Nsid,
        (lba, lbas): (u64, u32),
        parts: &[IovaRange],
        user: u64,
    ) -> Result<Cid> {
        let mut sqe = Sqe::new(opcode.0, Cid(0), nsid);
        BlockRange::new(Lba(lba), Lbas(lbas)).context("no such range")?.write_to(&mut sqe);
        let at = (self.next % u64::from(self.depth())) as usize * AREA_BYTES;
        let mut area = BufferArea::new(&mut self.areas, at, AREA_BYTES);
        let sqe = describe(self.mode, parts, SEGMENT_BYTES, &mut area)?.put_into(sqe);
        self.next += 1;
        Ok(self.pair.post(&sqe, user)?)
    }

    /// Rings the doorbell once for all posted commands.
    pub fn ring(&mut self) {
        self.pair.update_tail();
    }

    /// Abandons a command.
    pub fn abandon(&mut self, cid: Cid) -> bool {
        self.pair.abandon(cid)
    }

    /// Returns the completions so far.
    pub fn reap(&mut self) -> Result<Vec<Completion>> {
        let mut done = Vec::new();
        self.pair.reap(u32::MAX, |completion| done.push(completion))?;
        Ok(done)
    }

    /// Waits for `number` completions.
    pub fn wait(&mut self, number: usize) -> Result<Vec<Completion>> {
        let since = Instant::now();
        let mut done = Vec::new();
        while done.len() < number {
            done.extend(self.reap()?);
            let have = done.len();
            ensure!(since.elapsed() < WATCHDOG, "{have} of {number} commands completed");
            thread::yield_now();
        }
        Ok(done)
    }

    /// Runs one command to completion; it must succeed.
    pub fn run(
        &mut self,
        opcode: NvmOpcode,
        nsid: Nsid,
        place: (u64, u32),
        parts: &[IovaRange],
    ) -> Result<()> {
        self.post(opcode, nsid, place, parts, 0)?;
        self.ring();
        let done = self.wait(1)?;
        ensure!(done[0].status.is_success(), "{opcode:?} at {place:?}: {}", done[0].status);
        Ok(())
    }

    /// Deletes the queue pair on the controller.
    pub fn give_back(self, controller: &mut Controller) -> Result<()> {
        let proof = quiesced(controller);
        drop(controller.reclaim(self.qid, &proof)?);
        Ok(())
    }
}

/// Allocates memory for a queue pair in the controller's own space.
pub fn own_memory(controller: &Controller, depth: u32) -> Result<QueueMemory> {
    let bus = Arc::clone(controller.bus());
    queue_memory(&crate::drive::memory(&*bus, queue_bytes(depth))?, depth)
}
