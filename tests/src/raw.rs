//! A controller without a driver: commands are sent as the test wrote them, to provoke errors that
//! the driver would never cause.

use std::sync::Arc;

use anyhow::{Context, bail};
use nvme_driver::{
    Bus, Clock, DmaSlice, Nanos, Waiter,
    platform::{
        buffer::Buffer,
        ring::{CqRing, Doorbell, SqRing},
    },
};
use nvme_spec::{
    admin::{AdminOpcode, CreateIoCq, CreateIoSq, DeleteQueue},
    ids::{Cid, Nsid, QueueId},
    reg::{self, Aqa, Cc, Csts},
    sqe::Sqe,
    status::Status,
};

use crate::{conformance::Found, target::Target};

/// Entries of the admin queues.
pub const ADMIN_DEPTH: u32 = 32;
/// Entries of [`Raw::io`]'s queue.
const IO_DEPTH: u32 = 64;
/// Timeout for an answer. Only failures take that long.
const ANSWER: Nanos = Nanos::from_millis(5_000);
/// Time without a completion that counts as silence.
const SILENCE: Nanos = Nanos::from_millis(30);

/// A completion as the controller wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Command specific result.
    pub dw0: u32,
    /// Submission queue head pointer.
    pub sqhd: u16,
    /// Submission queue identifier.
    pub sqid: u16,
    /// Command identifier.
    pub cid: u16,
    /// Status of the command.
    pub status: Status,
}

/// A submission queue: its entries and doorbell.
#[derive(Debug)]
pub struct Sq {
    ring: SqRing,
    bell: Doorbell,
    depth: u32,
    tail: u32,
    next_cid: u16,
}

impl Sq {
    /// Writes a command with its own CID into the next entry.
    pub fn post_with(&mut self, sqe: &Sqe, cid: u16) {
        self.ring.write(self.tail, sqe, Cid(cid));
        self.tail = (self.tail + 1) % self.depth;
    }

    /// Same as [`Sq::post_with`], with a CID that no recent command of the queue has had.
    pub fn post(&mut self, sqe: &Sqe) -> u16 {
        let cid = self.next_cid;
        self.next_cid = self.next_cid.wrapping_add(1);
        self.post_with(sqe, cid);
        cid
    }

    /// Rings the doorbell with the tail.
    pub fn ring(&self) {
        self.bell.ring(self.tail);
    }

    /// Rings the doorbell with any value.
    pub fn ring_with(&self, value: u32) {
        self.bell.ring(value);
    }
}

/// A completion queue: its entries and doorbell.
#[derive(Debug)]
pub struct Cq {
    ring: CqRing,
    bell: Doorbell,
    depth: u32,
    /// Index of the next entry, free running.
    head: u32,
}

impl Cq {
    /// Takes the next entry, if there is one. Its slot is released by [`Cq::acknowledge`].
    pub fn take(&mut self) -> Option<Answer> {
        let dw3 = self.ring.load_dw3(self.head);
        let phase = dw3 >> 16 & 1 == 1;
        if phase != (self.head / self.depth).is_multiple_of(2) {
            return None;
        }
        let dw2 = self.ring.load(self.head, 2);
        let answer = Answer {
            dw0: self.ring.load(self.head, 0),
            sqhd: dw2 as u16,
            sqid: (dw2 >> 16) as u16,
            cid: dw3 as u16,
            status: Status((dw3 >> 17) as u16),
        };
        self.head += 1;
        Some(answer)
    }

    /// Releases the slots of all entries taken: rings the doorbell with the head.
    pub fn acknowledge(&self) {
        self.bell.ring(self.head % self.depth);
    }
}

/// Bus and clock, for waiting.
#[derive(Debug)]
struct Watch {
    bus: Arc<dyn Bus>,
    clock: Arc<dyn Clock>,
}

impl Watch {
    fn csts(&self) -> anyhow::Result<Csts> {
        Ok(Csts(self.bus.read32(reg::CSTS)?))
    }

    fn until(
        &self,
        span: Nanos,
        mut done: impl FnMut() -> anyhow::Result<bool>,
    ) -> anyhow::Result<bool> {
        let mut waiter = Waiter::new(&*self.clock, self.clock.now() + span);
        loop {
            if done()? {
                return Ok(true);
            }
            if !waiter.wait() {
                return Ok(false);
            }
        }
    }

    fn take(&self, cq: &mut Cq, span: Nanos) -> anyhow::Result<Option<Answer>> {
        let mut answer = None;
        let mut polls = 0u32;
        self.until(span, || {
            answer = cq.take();
            polls += 1;
            // A failed controller will not answer, but reading CSTS each time would be slow.
            Ok(answer.is_some() || polls.is_multiple_of(64) && self.csts()?.cfs() != 0)
        })?;
        if answer.is_some() {
            cq.acknowledge();
        }
        Ok(answer)
    }
}

/// An enabled controller and its admin queue.
#[derive(Debug)]
pub struct Raw<'a> {
    /// The controller under test.
    pub target: &'a Target,
    bus: Arc<dyn Bus>,
    watch: Watch,
    /// The admin submission queue.
    pub admin_sq: Sq,
    /// The admin completion queue.
    pub admin_cq: Cq,
    io: Option<(Sq, Cq)>,
}

impl<'a> Raw<'a> {
    /// Resets and enables the controller.
    pub fn enable(target: &'a Target) -> anyhow::Result<Self> {
        let raw = Self::prepare(target)?;
        raw.write_cc(raw.good_cc().with_en(1))?;
        raw.wait_ready(1)?;
        Ok(raw)
    }

    /// Resets the controller and writes AQA, ASQ and ACQ, but does not enable it.
    pub fn prepare(target: &'a Target) -> anyhow::Result<Self> {
        let (bus, clock) = (target.bus.clone(), target.clock.clone());
        bus.write32(reg::CC, 0)?;
        let sq = alloc(&*bus, ADMIN_DEPTH as usize * 64)?;
        let cq = alloc(&*bus, ADMIN_DEPTH as usize * 16)?;
        let (admin_sq, admin_cq) =
            (new_sq(&bus, 0, ADMIN_DEPTH, &sq)?, new_cq(&bus, 0, ADMIN_DEPTH, &cq)?);
        let watch = Watch { bus: bus.clone(), clock };
        let raw = Self { target, bus, watch, admin_sq, admin_cq, io: None };
        raw.wait_ready(0)?;
        raw.write_admin_queues(sq.iova().0, cq.iova().0)?;
        Ok(raw)
    }

    /// Writes AQA, ASQ and ACQ.
    pub fn write_admin_queues(&self, sq: u64, cq: u64) -> anyhow::Result<()> {
        let last = (ADMIN_DEPTH - 1) as u16;
        self.bus.write32(reg::AQA, Aqa(0).with_asqs_z(last).with_acqs_z(last).0)?;
        for (register, address) in [(reg::ASQ, sq), (reg::ACQ, cq)] {
            self.bus.write32(register, address as u32)?;
            self.bus.write32(register + 4, (address >> 32) as u32)?;
        }
        Ok(())
    }

    /// Returns a correct value of CC, but for EN.
    #[must_use]
    pub fn good_cc(&self) -> Cc {
        Cc(0).with_iosqes(6).with_iocqes(4)
    }

    /// Writes CC.
    pub fn write_cc(&self, cc: Cc) -> anyhow::Result<()> {
        Ok(self.bus.write32(reg::CC, cc.0)?)
    }

    /// Reads CSTS.
    pub fn csts(&self) -> anyhow::Result<Csts> {
        self.watch.csts()
    }

    /// Waits until CSTS.RDY is `ready`.
    pub fn wait_ready(&self, ready: u8) -> anyhow::Result<()> {
        let reached = self.until(ANSWER, || Ok(self.csts()?.rdy() == ready))?;
        if !reached {
            bail!("CSTS.RDY does not become {ready}: {:?}", self.csts()?);
        }
        Ok(())
    }

    /// Calls `done` until it returns true or `span` is over. Returns true in the former case.
    pub fn until(
        &self,
        span: Nanos,
        done: impl FnMut() -> anyhow::Result<bool>,
    ) -> anyhow::Result<bool> {
        self.watch.until(span, done)
    }

    /// Waits for the time `SILENCE`, in which nothing should happen.
    pub fn settle(&self) -> anyhow::Result<()> {
        self.until(SILENCE, || Ok(false)).map(drop)
    }

    /// Allocates `bytes` zeroed bytes, aligned to a page.
    pub fn alloc(&self, bytes: usize) -> anyhow::Result<Buffer> {
        buffer(alloc(&*self.bus, bytes)?)
    }

    /// Sends an admin command and waits for its completion.
    pub fn admin(&mut self, sqe: &Sqe) -> anyhow::Result<Found> {
        self.admin_sq.post(sqe);
        self.admin_sq.ring();
        self.admin_answer(ANSWER)
    }

    /// Same as [`Raw::admin`], but returns dword 0 of a successful completion.
    pub fn admin_result(&mut self, sqe: &Sqe) -> anyhow::Result<u32> {
        self.admin_sq.post(sqe);
        self.admin_sq.ring();
        let answer = self.admin_completion(ANSWER)?.context("no answer")?;
        if !answer.status.is_success() {
            bail!("{}", answer.status);
        }
        Ok(answer.dw0)
    }

    /// Waits up to 5 s (`ANSWER`) for the next admin completion.
    pub fn next_admin(&mut self) -> anyhow::Result<Found> {
        self.admin_answer(ANSWER)
    }

    /// Waits for the time `SILENCE`; returns [`Found::Silence`] if no admin completion came.
    pub fn admin_silence(&mut self) -> anyhow::Result<Found> {
        self.admin_answer(SILENCE)
    }

    fn admin_answer(&mut self, span: Nanos) -> anyhow::Result<Found> {
        Ok(match self.admin_completion(span)? {
            Some(answer) => Found::Status(answer.status.code()),
            None => self.silence()?,
        })
    }

    /// Waits up to `span` for the next admin completion.
    pub fn admin_completion(&mut self, span: Nanos) -> anyhow::Result<Option<Answer>> {
        self.watch.take(&mut self.admin_cq, span)
    }

    /// Waits up to `span` for the next completion of `cq`, and acknowledges it.
    pub fn take(&self, cq: &mut Cq, span: Nanos) -> anyhow::Result<Option<Answer>> {
        self.watch.take(cq, span)
    }

    /// Waits up to 5 s (`ANSWER`) for the next completion of `cq`, and acknowledges it.
    pub fn answer(&self, cq: &mut Cq) -> anyhow::Result<Answer> {
        self.take(cq, ANSWER)?.context("no answer")
    }

    /// Returns the result of a command without an answer: a fatal error or silence, by CSTS.CFS.
    pub fn silence(&self) -> anyhow::Result<Found> {
        Ok(if self.csts()?.cfs() == 0 { Found::Silence } else { Found::Fatal })
    }

    /// Creates a completion queue of `depth` entries in memory of its own.
    pub fn create_cq(&mut self, qid: u16, depth: u32) -> anyhow::Result<Cq> {
        let memory = alloc(&*self.bus, depth as usize * 16)?;
        let sqe = create_cq(qid, depth, memory.iova().0);
        self.expect_ok(&sqe).with_context(|| format!("completion queue {qid}"))?;
        new_cq(&self.bus, qid, depth, &memory)
    }

    /// Creates a submission queue of `depth` entries in memory of its own.
    pub fn create_sq(&mut self, qid: u16, cqid: u16, depth: u32) -> anyhow::Result<Sq> {
        let memory = alloc(&*self.bus, depth as usize * 64)?;
        let sqe = create_sq(qid, cqid, depth, memory.iova().0);
        self.expect_ok(&sqe).with_context(|| format!("submission queue {qid}"))?;
        new_sq(&self.bus, qid, depth, &memory)
    }

    /// Creates a queue pair in which both queues have the same identifier.
    pub fn create_pair(&mut self, qid: u16, depth: u32) -> anyhow::Result<(Sq, Cq)> {
        let cq = self.create_cq(qid, depth)?;
        Ok((self.create_sq(qid, qid, depth)?, cq))
    }

    /// Returns a handle of a submission queue that was created in `memory` by other means.
    pub fn sq_at(&self, qid: u16, depth: u32, memory: &DmaSlice) -> anyhow::Result<Sq> {
        new_sq(&self.bus, qid, depth, memory)
    }

    /// Returns a handle of a completion queue that was created in `memory` by other means.
    pub fn cq_at(&self, qid: u16, depth: u32, memory: &DmaSlice) -> anyhow::Result<Cq> {
        new_cq(&self.bus, qid, depth, memory)
    }

    /// Sends an admin command that must succeed for the case to have a meaning.
    pub fn expect_ok(&mut self, sqe: &Sqe) -> anyhow::Result<()> {
        match self.admin(sqe)? {
            Found::OK => Ok(()),
            found => bail!("opcode {:#04x} ended with {found:?}", sqe.opcode),
        }
    }

    /// Sends a command to an I/O queue, created by the first call, and waits for its completion.
    pub fn io(&mut self, sqe: &Sqe) -> anyhow::Result<Found> {
        let (mut sq, mut cq) = match self.io.take() {
            Some(pair) => pair,
            None => self.create_pair(1, IO_DEPTH)?,
        };
        let cid = sq.post(sqe);
        sq.ring();
        let answer = self.take(&mut cq, ANSWER)?;
        self.io = Some((sq, cq));
        Ok(match answer {
            Some(answer) if answer.cid == cid => Found::Status(answer.status.code()),
            Some(_) => Found::Wrong("completion of another command"),
            None => self.silence()?,
        })
    }

    /// Rings a doorbell by its index. Its queue need not exist.
    pub fn ring_doorbell(&self, index: u32, value: u32) -> anyhow::Result<()> {
        Doorbell::new(&self.bus, index).context("no such doorbell")?.ring(value);
        Ok(())
    }
}

/// Allocates memory that the controller can access.
fn alloc(bus: &dyn Bus, bytes: usize) -> anyhow::Result<DmaSlice> {
    Ok(DmaSlice::whole(bus.dma().alloc(bytes)?)?)
}

/// Makes a buffer of memory.
pub fn buffer(memory: DmaSlice) -> anyhow::Result<Buffer> {
    Buffer::new(memory).context("memory that this process cannot reach")
}

fn new_sq(bus: &Arc<dyn Bus>, qid: u16, depth: u32, memory: &DmaSlice) -> anyhow::Result<Sq> {
    let bell = Doorbell::new(bus, 2 * u32::from(qid)).context("no doorbell")?;
    Ok(Sq {
        ring: SqRing::new(memory.clone(), depth).map_err(anyhow::Error::msg)?,
        bell,
        depth,
        tail: 0,
        next_cid: 100,
    })
}

fn new_cq(bus: &Arc<dyn Bus>, qid: u16, depth: u32, memory: &DmaSlice) -> anyhow::Result<Cq> {
    let bell = Doorbell::new(bus, 2 * u32::from(qid) + 1).context("no doorbell")?;
    Ok(Cq {
        ring: CqRing::new(memory.clone(), depth).map_err(anyhow::Error::msg)?,
        bell,
        depth,
        head: 0,
    })
}

/// Makes an admin command without a namespace.
#[must_use]
pub fn admin(opcode: AdminOpcode) -> Sqe {
    Sqe::new(opcode.0, Cid(0), Nsid(0))
}

/// Makes Create I/O Completion Queue, contiguous and without interrupts.
#[must_use]
pub fn create_cq(qid: u16, depth: u32, at: u64) -> Sqe {
    let mut sqe = admin(AdminOpcode::CREATE_IO_CQ).with_prps(at, 0);
    let qsize_z = depth.wrapping_sub(1) as u16;
    CreateIoCq { qid: QueueId(qid), qsize_z, contiguous: true, ..Default::default() }
        .write_to(&mut sqe);
    sqe
}

/// Makes Create I/O Submission Queue, contiguous.
#[must_use]
pub fn create_sq(qid: u16, cqid: u16, depth: u32, at: u64) -> Sqe {
    let mut sqe = admin(AdminOpcode::CREATE_IO_SQ).with_prps(at, 0);
    let qsize_z = depth.wrapping_sub(1) as u16;
    let cqid = QueueId(cqid);
    CreateIoSq { qid: QueueId(qid), qsize_z, contiguous: true, cqid, ..Default::default() }
        .write_to(&mut sqe);
    sqe
}

/// Makes Delete I/O Submission or Completion Queue.
#[must_use]
pub fn delete_queue(opcode: AdminOpcode, qid: u16) -> Sqe {
    let mut sqe = admin(opcode);
    DeleteQueue { qid: QueueId(qid) }.write_to(&mut sqe);
    sqe
}
