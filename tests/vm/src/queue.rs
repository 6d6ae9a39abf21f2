//! A queue pair that a test drives itself, as an executor would.
#![allow(unsafe_code, reason = "a test that owns a queue says itself that nobody else uses it")]

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nvme_driver::descriptor::{BufferArea, describe};
use nvme_driver::platform::buffer::Buffer;
use nvme_driver::queue::{Completion, QueuePair};
use nvme_driver::{Controller, DescriptorMode, DmaSlice, IovaRange, QueueMemory, Quiesced};
use nvme_spec::ids::{Cid, Lba, Lbas, Nsid, QueueId};
use nvme_spec::nvm::{BlockRange, NvmOpcode};
use nvme_spec::sqe::Sqe;

/// Bytes of the descriptor area of an entry: more than 255 SGL entries make a chain.
const AREA_BYTES: usize = 16 << 10;
/// Bytes of a segment in it.
const SEGMENT_BYTES: u32 = 4096;

/// A queue pair and the descriptor areas of its entries.
pub struct Queue {
    pair: QueuePair,
    areas: Buffer,
    mode: DescriptorMode,
    qid: QueueId,
    next: u64,
}

/// Proof for the queues of a test. Its threads have ended whenever it asks for one.
pub fn quiesced(controller: &Controller) -> Quiesced {
    // SAFETY: queues are driven by the thread of the test that asks, and by nobody else.
    unsafe { Quiesced::assert(controller.grants().map(|grant| grant.epoch)) }
}

/// How much of one piece of memory a queue of `depth` needs, descriptor areas included.
pub fn queue_bytes(depth: u32) -> usize {
    let pages = |bytes: usize| bytes.next_multiple_of(4096);
    let depth = depth as usize;
    pages(depth * 64) + pages(depth * 16) + depth * AREA_BYTES
}

/// A queue pair's memory, cut from one piece.
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
    /// Makes a queue pair on the controller and takes it over.
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

    /// Writes a command into the queue; `user` comes back with its completion.
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

    /// One doorbell for everything that was posted.
    pub fn ring(&mut self) {
        self.pair.update_tail();
    }

    /// Nobody waits for this command any more.
    pub fn abandon(&mut self, cid: Cid) -> bool {
        self.pair.abandon(cid)
    }

    /// What has completed by now.
    pub fn reap(&mut self) -> Result<Vec<Completion>> {
        let mut done = Vec::new();
        self.pair.reap(u32::MAX, |completion| done.push(completion))?;
        Ok(done)
    }

    /// Waits for so many completions.
    pub fn wait(&mut self, number: usize, limit: Duration) -> Result<Vec<Completion>> {
        let until = Instant::now() + limit;
        let mut done = Vec::new();
        while done.len() < number {
            done.extend(self.reap()?);
            let have = done.len();
            ensure!(Instant::now() < until, "{have} of {number} commands completed in {limit:?}");
            thread::yield_now();
        }
        Ok(done)
    }

    /// One command from the doorbell to its completion, which must be a success.
    pub fn run(
        &mut self,
        opcode: NvmOpcode,
        nsid: Nsid,
        place: (u64, u32),
        parts: &[IovaRange],
    ) -> Result<()> {
        self.post(opcode, nsid, place, parts, 0)?;
        self.ring();
        let done = self.wait(1, Duration::from_secs(10))?;
        ensure!(done[0].status.is_success(), "{opcode:?} at {place:?}: {}", done[0].status);
        Ok(())
    }

    /// Ends it on the controller.
    pub fn give_back(self, controller: &mut Controller) -> Result<()> {
        let proof = quiesced(controller);
        drop(controller.reclaim(self.qid, &proof)?);
        Ok(())
    }
}

/// Memory for a queue pair from the controller's own space.
pub fn own_memory(controller: &Controller, depth: u32) -> Result<QueueMemory> {
    let bus = Arc::clone(controller.bus());
    queue_memory(&crate::drive::memory(&*bus, queue_bytes(depth))?, depth)
}
