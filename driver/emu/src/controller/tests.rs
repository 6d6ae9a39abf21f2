//! A raw host against the controller: it writes entries by hand, rings doorbells and checks the
//! completions, so it can also do things that no driver would.
#![allow(unsafe_code, reason = "rings doorbells by address")]

mod admin;
mod allocations;
mod arbitration;
#[path = "../../../host/tests/emulated/choices.rs"]
mod choices;
mod commands;
mod copies;
mod events;
mod faults;
mod garbage;
#[path = "../../tests/gpu/mod.rs"]
mod gpu;
mod lifecycle;
mod placement;
mod queues;
mod reset;
mod sgl;
mod speed;
mod walkers;

use std::sync::Arc;

use nvme_driver::{DmaMemory, DmaSpace, Iova, Nanos, platform::mmio};
use nvme_spec::{
    admin::{AdminOpcode, CreateIoCq, CreateIoSq, Identify},
    cqe::Cqe,
    ids::{Cid, Lba, Lbas, Nsid, QueueId},
    nvm::{BlockRange, NvmOpcode},
    reg::{self, Aqa, Cc, Csts},
    sqe::Sqe,
    status::Status,
};
use zerocopy::{FromBytes, IntoBytes};

use super::Controller;
use crate::{
    Doorbells, EmuConfig, EmuDomain, FaultAction, FaultPlan, FaultRule, FaultWhen, Interrupts,
    MemoryMedia, Progress,
};

/// Entries of the admin queues.
const ADMIN_ENTRIES: u32 = 8;
/// Bytes of a page, and of most buffers.
const PAGE: usize = 4096;

/// Host-side state of a queue pair.
struct HostQueue {
    sq: Arc<dyn DmaMemory>,
    cq: Arc<dyn DmaMemory>,
    sq_entries: u32,
    cq_entries: u32,
    tail: u32,
    head: u32,
    phase: bool,
}

/// The host.
struct Host {
    controller: Controller,
    domain: Arc<EmuDomain>,
    bells: Doorbells,
    interrupts: Interrupts,
    now: Nanos,
    /// Indexed by queue identifier.
    queues: Vec<Option<HostQueue>>,
    cid: u16,
    media: MemoryMedia,
}

fn media(bytes: u64) -> MemoryMedia {
    MemoryMedia::new(bytes).unwrap()
}

fn config(media: &MemoryMedia) -> EmuConfig {
    EmuConfig { io_queues_max: 4, mqes: 64, vectors: 5, ..EmuConfig::new("emu0") }
        .namespace(media.clone(), 512)
}

/// Returns a plan with one rule for every `opcode` command on I/O queues.
fn plan(opcode: NvmOpcode, then: FaultAction) -> FaultPlan {
    let when = FaultWhen { admin: Some(false), opcode: Some(opcode.0), ..FaultWhen::default() };
    FaultPlan { seed: 7, rules: vec![FaultRule::new(when, then)], ..FaultPlan::default() }
}

impl Host {
    /// Returns a powered-on, disabled host with one namespace of 1 MiB in blocks of 512 bytes.
    fn off(change: impl FnOnce(EmuConfig) -> EmuConfig) -> Self {
        Self::off_in(EmuDomain::new("test"), change)
    }

    fn off_in(domain: Arc<EmuDomain>, change: impl FnOnce(EmuConfig) -> EmuConfig) -> Self {
        let media = media(1 << 20);
        let config = change(config(&media));
        let bells = Doorbells::new(config.io_queues_max, config.dstrd).unwrap();
        let interrupts = Interrupts::new(config.vectors);
        let queues = (0..=config.io_queues_max).map(|_| None).collect();
        let controller = Controller::new(config, domain.clone(), bells.clone(), interrupts.clone());
        let now = Nanos(0);
        Self { controller, domain, bells, interrupts, now, queues, cid: 0, media }
    }

    /// Creates a host with an enabled controller that has only admin queues.
    fn enabled(change: impl FnOnce(EmuConfig) -> EmuConfig) -> Self {
        let mut host = Self::off(change);
        host.enable(ADMIN_ENTRIES, ADMIN_ENTRIES);
        assert_eq!(host.csts().rdy(), 1);
        host
    }

    /// Creates a host with an enabled controller and I/O queue pair 1 of 16 entries.
    fn ready(change: impl FnOnce(EmuConfig) -> EmuConfig) -> Self {
        let mut host = Self::enabled(change);
        host.create_pair(1, 16, 16);
        host
    }

    fn plain() -> Self {
        Self::ready(|config| config)
    }

    fn alloc(&self, len: usize) -> Arc<dyn DmaMemory> {
        self.domain.alloc(len).unwrap()
    }

    fn write(&self, iova: Iova, bytes: &[u8]) {
        self.domain.access().write(iova, bytes).unwrap();
    }

    fn read(&self, iova: Iova, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.domain.access().read(iova, &mut bytes).unwrap();
        bytes
    }

    fn csts(&mut self) -> Csts {
        Csts(self.controller.read32(reg::CSTS, self.now))
    }

    fn set(&mut self, offset: u32, value: u32) {
        self.controller.write32(offset, value, self.now);
    }

    fn set64(&mut self, offset: u32, value: u64) {
        self.set(offset, value as u32);
        self.set(offset + 4, (value >> 32) as u32);
    }

    fn good_cc() -> Cc {
        Cc::default().with_en(1).with_iosqes(6).with_iocqes(4)
    }

    /// Sets up the admin queues and enables the controller.
    fn enable(&mut self, sq_entries: u32, cq_entries: u32) {
        let queue = self.host_queue(sq_entries, cq_entries);
        let aqa =
            Aqa::default().with_asqs_z(sq_entries as u16 - 1).with_acqs_z(cq_entries as u16 - 1);
        self.set(reg::AQA, aqa.0);
        self.set64(reg::ASQ, at(&queue.sq).0);
        self.set64(reg::ACQ, at(&queue.cq).0);
        self.queues.iter_mut().for_each(|queue| *queue = None);
        self.queues[0] = Some(queue);
        self.set(reg::CC, Self::good_cc().0);
    }

    fn disable(&mut self) {
        self.set(reg::CC, 0);
        self.queues.iter_mut().for_each(|queue| *queue = None);
    }

    fn host_queue(&self, sq_entries: u32, cq_entries: u32) -> HostQueue {
        HostQueue {
            sq: self.alloc(sq_entries as usize * 64),
            cq: self.alloc(cq_entries as usize * 16),
            sq_entries,
            cq_entries,
            tail: 0,
            head: 0,
            phase: true,
        }
    }

    /// Creates pair `qid` and expects success.
    fn create_pair(&mut self, qid: u16, sq_entries: u32, cq_entries: u32) {
        let queue = self.host_queue(sq_entries, cq_entries);
        let cq = create_cq(qid, cq_entries as u16 - 1, at(&queue.cq));
        assert_eq!(self.admin(cq).status(), Status::SUCCESS);
        let sq = create_sq(qid, sq_entries as u16 - 1, qid, at(&queue.sq));
        assert_eq!(self.admin(sq).status(), Status::SUCCESS);
        self.queues[usize::from(qid)] = Some(queue);
    }

    fn queue(&mut self, qid: u16) -> &mut HostQueue {
        self.queues[usize::from(qid)].as_mut().unwrap()
    }

    /// Writes an entry with a fresh identifier without ringing the doorbell.
    fn post(&mut self, qid: u16, sqe: Sqe) -> u16 {
        self.cid = self.cid.wrapping_add(1);
        let cid = self.cid;
        self.post_as(qid, Sqe { cid, ..sqe });
        cid
    }

    fn post_as(&mut self, qid: u16, sqe: Sqe) {
        let queue = self.queue(qid);
        let slot = at(&queue.sq).offset(u64::from(queue.tail) * 64);
        queue.tail = (queue.tail + 1) % queue.sq_entries;
        self.write(slot, sqe.as_bytes());
    }

    fn ring_sq(&mut self, qid: u16) {
        let tail = self.queue(qid).tail;
        self.store_bell(2 * qid, tail);
    }

    fn ring_cq(&mut self, qid: u16) {
        let head = self.queue(qid).head;
        self.store_bell(2 * qid + 1, head);
    }

    /// Stores any value to doorbell `index`.
    fn store_bell(&self, index: u16, value: u32) {
        let page = self.bells.page();
        let offset = usize::from(index) * page.stride() as usize;
        assert!(offset + 4 <= page.len());
        // SAFETY: inside the page, as asserted; doorbells are only accessed as whole dwords.
        unsafe { mmio::store_release32(page.host().byte_add(offset), value) };
    }

    fn step(&mut self) -> Progress {
        self.controller.step(self.now, 64)
    }

    /// Takes the next completion, if there is one, without ringing the doorbell.
    fn reap(&mut self, qid: u16) -> Option<Cqe> {
        let queue = self.queue(qid);
        let (slot, phase) = (at(&queue.cq).offset(u64::from(queue.head) * 16), queue.phase);
        let cqe = Cqe::read_from_bytes(&self.read(slot, 16)).unwrap();
        if cqe.phase() != phase {
            return None;
        }
        let queue = self.queue(qid);
        queue.head = (queue.head + 1) % queue.cq_entries;
        queue.phase ^= queue.head == 0;
        Some(cqe)
    }

    /// Takes all completions and rings once if there are any.
    fn reap_all(&mut self, qid: u16) -> Vec<Cqe> {
        let found: Vec<Cqe> = std::iter::from_fn(|| self.reap(qid)).collect();
        if !found.is_empty() {
            self.ring_cq(qid);
        }
        found
    }

    /// Posts, rings and steps without expecting a completion.
    fn send(&mut self, qid: u16, sqe: Sqe) -> u16 {
        let cid = self.post(qid, sqe);
        self.ring_sq(qid);
        self.step();
        cid
    }

    /// Posts, rings and steps, and expects exactly this command's completion.
    fn run(&mut self, qid: u16, sqe: Sqe) -> Cqe {
        let cid = self.send(qid, sqe);
        let found = self.reap_all(qid);
        assert_eq!(found.len(), 1, "{found:?} for {sqe:?}");
        assert_eq!((found[0].cid, found[0].sqid), (cid, qid));
        found[0]
    }

    fn admin(&mut self, sqe: Sqe) -> Cqe {
        self.run(0, sqe)
    }

    /// Runs an I/O command on queue 1 and returns its status without retry hints.
    fn io(&mut self, sqe: Sqe) -> Status {
        self.run(1, sqe).status().code()
    }

    fn admin_status(&mut self, sqe: Sqe) -> Status {
        self.admin(sqe).status().code()
    }

    /// Returns an identify structure.
    fn identify(&mut self, cns: u8, nsid: u32) -> Result<Vec<u8>, Status> {
        let page = self.alloc(PAGE);
        let mut sqe = command(AdminOpcode::IDENTIFY, nsid).with_prps(at(&page).0, 0);
        Identify { cns: nvme_spec::admin::Cns(cns), ..Default::default() }.write_to(&mut sqe);
        match self.admin_status(sqe) {
            Status::SUCCESS => Ok(self.read(at(&page), PAGE)),
            status => Err(status),
        }
    }

    /// Returns bytes of the medium.
    fn stored(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.media.peek(offset, &mut bytes).unwrap();
        bytes
    }
}

fn at(memory: &Arc<dyn DmaMemory>) -> Iova {
    memory.segments()[0].iova
}

fn command(opcode: AdminOpcode, nsid: u32) -> Sqe {
    Sqe::new(opcode.0, Cid(0), Nsid(nsid))
}

fn nvm(opcode: NvmOpcode, lba: u64, lbas: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode.0, Cid(0), Nsid(1));
    BlockRange::new(Lba(lba), Lbas(lbas)).unwrap().write_to(&mut sqe);
    sqe
}

fn create_cq(qid: u16, qsize_z: u16, at: Iova) -> Sqe {
    let mut sqe = command(AdminOpcode::CREATE_IO_CQ, 0).with_prps(at.0, 0);
    let vector = qid;
    CreateIoCq { qid: QueueId(qid), qsize_z, contiguous: true, interrupts: true, vector }
        .write_to(&mut sqe);
    sqe
}

fn create_sq(qid: u16, qsize_z: u16, cqid: u16, at: Iova) -> Sqe {
    let mut sqe = command(AdminOpcode::CREATE_IO_SQ, 0).with_prps(at.0, 0);
    let cqid = QueueId(cqid);
    CreateIoSq { qid: QueueId(qid), qsize_z, contiguous: true, priority: 0, cqid }
        .write_to(&mut sqe);
    sqe
}

/// Generates bytes that differ between nearby positions.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed).collect()
}
