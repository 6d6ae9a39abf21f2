//! A controller without a driver: commands as the test wrote them, so that errors can be provoked
//! which the driver would never cause.

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
/// How long an answer may take. Only failures take that long.
const ANSWER: Nanos = Nanos::from_millis(5_000);
/// How long nothing must happen before it counts as silence.
const SILENCE: Nanos = Nanos::from_millis(30);

/// A completion as it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Command specific result.
    pub dw0: u32,
    /// Submission queue head.
    pub sqhd: u16,
    /// Submission queue.
    pub sqid: u16,
    /// Command.
    pub cid: u16,
    /// How it ended.
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

    /// The same with a CID that no other command of the queue has had lately.
    pub fn post(&mut self, sqe: &Sqe) -> u16 {
        let cid = self.next_cid;
        self.next_cid = self.next_cid.wrapping_add(1);
        self.post_with(sqe, cid);
        cid
    }

    /// Tells the controller.
    pub fn ring(&self) {
        self.bell.ring(self.tail);
    }

    /// Rings with a value that is not the tail.
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
    /// Free running.
    head: u32,
}

impl Cq {
    /// The next entry, if there is one. Its slot is not given back before [`Cq::acknowledge`].
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

    /// Gives all slots taken back to the controller.
    pub fn acknowledge(&self) {
        self.bell.ring(self.head % self.depth);
    }
}

/// What waiting takes.
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
            // A failed controller will not answer, but asking each time would slow down the rest.
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
    /// What is being tested.
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

    /// Resets the controller and tells it where the admin queues are, but does not enable it.
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

    /// CC as it should be, but for EN.
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

    /// Calls `done` until it says so or `span` is over; whether it did.
    pub fn until(
        &self,
        span: Nanos,
        done: impl FnMut() -> anyhow::Result<bool>,
    ) -> anyhow::Result<bool> {
        self.watch.until(span, done)
    }

    /// Lets time pass in which nothing should happen.
    pub fn settle(&self) -> anyhow::Result<()> {
        self.until(SILENCE, || Ok(false)).map(drop)
    }

    /// `bytes` zeroed bytes, aligned to a page.
    pub fn alloc(&self, bytes: usize) -> anyhow::Result<Buffer> {
        buffer(alloc(&*self.bus, bytes)?)
    }

    /// Sends an admin command and waits for its end.
    pub fn admin(&mut self, sqe: &Sqe) -> anyhow::Result<Found> {
        self.admin_sq.post(sqe);
        self.admin_sq.ring();
        self.admin_answer(ANSWER)
    }

    /// The same, and its result if it was a success.
    pub fn admin_result(&mut self, sqe: &Sqe) -> anyhow::Result<u32> {
        self.admin_sq.post(sqe);
        self.admin_sq.ring();
        let answer = self.admin_completion(ANSWER)?.context("no answer")?;
        if !answer.status.is_success() {
            bail!("{}", answer.status);
        }
        Ok(answer.dw0)
    }

    /// The next admin completion, waiting for as long as an answer may take.
    pub fn next_admin(&mut self) -> anyhow::Result<Found> {
        self.admin_answer(ANSWER)
    }

    /// Whether the admin queue stays silent.
    pub fn admin_silence(&mut self) -> anyhow::Result<Found> {
        self.admin_answer(SILENCE)
    }

    fn admin_answer(&mut self, span: Nanos) -> anyhow::Result<Found> {
        Ok(match self.admin_completion(span)? {
            Some(answer) => Found::Status(answer.status.code()),
            None => self.silence()?,
        })
    }

    /// The next admin completion within `span`.
    pub fn admin_completion(&mut self, span: Nanos) -> anyhow::Result<Option<Answer>> {
        self.watch.take(&mut self.admin_cq, span)
    }

    /// The next completion of `cq` that comes in time, acknowledged.
    pub fn take(&self, cq: &mut Cq, span: Nanos) -> anyhow::Result<Option<Answer>> {
        self.watch.take(cq, span)
    }

    /// The next completion of `cq`, waiting for as long as an answer may take.
    pub fn answer(&self, cq: &mut Cq) -> anyhow::Result<Answer> {
        self.take(cq, ANSWER)?.context("no answer")
    }

    /// What no answer means.
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

    /// A pair of the same identifier.
    pub fn create_pair(&mut self, qid: u16, depth: u32) -> anyhow::Result<(Sq, Cq)> {
        let cq = self.create_cq(qid, depth)?;
        Ok((self.create_sq(qid, qid, depth)?, cq))
    }

    /// Handles for queues in memory that the controller was told about in another way.
    pub fn sq_at(&self, qid: u16, depth: u32, memory: &DmaSlice) -> anyhow::Result<Sq> {
        new_sq(&self.bus, qid, depth, memory)
    }

    /// As [`Raw::sq_at`].
    pub fn cq_at(&self, qid: u16, depth: u32, memory: &DmaSlice) -> anyhow::Result<Cq> {
        new_cq(&self.bus, qid, depth, memory)
    }

    /// An admin command whose failure makes the case pointless.
    pub fn expect_ok(&mut self, sqe: &Sqe) -> anyhow::Result<()> {
        match self.admin(sqe)? {
            Found::OK => Ok(()),
            found => bail!("opcode {:#04x} ended with {found:?}", sqe.opcode),
        }
    }

    /// Sends a command to an I/O queue, made with the first one, and waits for its end.
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

    /// Rings a doorbell by its index, whether its queue exists or not.
    pub fn ring_doorbell(&self, index: u32, value: u32) -> anyhow::Result<()> {
        Doorbell::new(&self.bus, index).context("no such doorbell")?.ring(value);
        Ok(())
    }
}

/// Memory that the controller reaches.
fn alloc(bus: &dyn Bus, bytes: usize) -> anyhow::Result<DmaSlice> {
    Ok(DmaSlice::whole(bus.dma().alloc(bytes)?)?)
}

/// The same as a buffer.
pub fn buffer(memory: DmaSlice) -> anyhow::Result<Buffer> {
    Buffer::new(memory).context("memory that this process cannot reach")
}

fn new_sq(bus: &Arc<dyn Bus>, qid: u16, depth: u32, memory: &DmaSlice) -> anyhow::Result<Sq> {
    let bell = Doorbell::new(bus, 2 * u32::from(qid)).context("no doorbell")?;
    Ok(Sq { ring: SqRing::new(memory.clone(), depth)?, bell, depth, tail: 0, next_cid: 100 })
}

fn new_cq(bus: &Arc<dyn Bus>, qid: u16, depth: u32, memory: &DmaSlice) -> anyhow::Result<Cq> {
    let bell = Doorbell::new(bus, 2 * u32::from(qid) + 1).context("no doorbell")?;
    Ok(Cq { ring: CqRing::new(memory.clone(), depth)?, bell, depth, head: 0 })
}

/// An admin command for no namespace.
#[must_use]
pub fn admin(opcode: AdminOpcode) -> Sqe {
    Sqe::new(opcode.0, Cid(0), Nsid(0))
}

/// Create I/O Completion Queue, contiguous and without interrupts.
#[must_use]
pub fn create_cq(qid: u16, depth: u32, at: u64) -> Sqe {
    let mut sqe = admin(AdminOpcode::CREATE_IO_CQ).with_prps(at, 0);
    let qsize_z = depth.wrapping_sub(1) as u16;
    CreateIoCq { qid: QueueId(qid), qsize_z, contiguous: true, ..Default::default() }
        .write_to(&mut sqe);
    sqe
}

/// Create I/O Submission Queue, contiguous.
#[must_use]
pub fn create_sq(qid: u16, cqid: u16, depth: u32, at: u64) -> Sqe {
    let mut sqe = admin(AdminOpcode::CREATE_IO_SQ).with_prps(at, 0);
    let qsize_z = depth.wrapping_sub(1) as u16;
    let cqid = QueueId(cqid);
    CreateIoSq { qid: QueueId(qid), qsize_z, contiguous: true, cqid, ..Default::default() }
        .write_to(&mut sqe);
    sqe
}

/// Delete I/O Submission or Completion Queue.
#[must_use]
pub fn delete_queue(opcode: AdminOpcode, qid: u16) -> Sqe {
    let mut sqe = admin(opcode);
    DeleteQueue { qid: QueueId(qid) }.write_to(&mut sqe);
    sqe
}
