//! Queues, their doorbells and their interrupts (Base, "Queuing": submission and completion queues;
//! PCIe Transport, "Doorbell Stride").

use nvme_driver::Iova;
use nvme_spec::{cqe::Cqe, ids::Cid, status::Status};
use zerocopy::IntoBytes;

use super::{
    command::{CqeFault, Outcome, Ticket},
    events::ErrorEvent,
    logs::Logs,
    registers::Registers,
};
use crate::{
    Doorbells, EmuCounters, Interrupts,
    domain::{DmaAccess, DmaFault},
};

/// Status bit 13, More: the error log has an entry for the command.
const MORE: u16 = 1 << 13;

/// Location of a queue's entries.
#[derive(Debug)]
pub(super) struct Ring {
    base: u64,
    /// Pages of a non-contiguous queue; else empty.
    pages: Box<[u64]>,
    page_bytes: u64,
    entry_bytes: u64,
    /// Number of entries.
    pub size: u32,
}

impl Ring {
    pub(super) fn contiguous(base: u64, entry_bytes: u64, size: u32) -> Self {
        Self { base, pages: Box::default(), page_bytes: 0, entry_bytes, size }
    }

    pub(super) fn scattered(pages: Vec<u64>, page_bytes: u64, entry_bytes: u64, size: u32) -> Self {
        Self { base: 0, pages: pages.into(), page_bytes, entry_bytes, size }
    }

    /// Returns the address of entry `index`.
    #[inline]
    pub(super) fn at(&self, index: u32) -> Iova {
        let byte = u64::from(index) * self.entry_bytes;
        if self.pages.is_empty() {
            return Iova(self.base.wrapping_add(byte));
        }
        let page = self.pages[(byte / self.page_bytes) as usize];
        Iova(page.wrapping_add(byte % self.page_bytes))
    }

    /// Returns the index after `index`.
    #[inline]
    pub(super) fn after(&self, index: u32) -> u32 {
        if index + 1 == self.size { 0 } else { index + 1 }
    }

    /// Returns the number of steps forward from `from` to `to`.
    #[inline]
    pub(super) fn distance(&self, from: u32, to: u32) -> u32 {
        if to >= from { to - from } else { to + self.size - from }
    }
}

/// Identifiers of a queue's outstanding commands.
#[derive(Debug)]
pub(super) struct CidSet(Box<[u64]>);

impl CidSet {
    fn new() -> Self {
        Self(vec![0; 1 << 10].into())
    }

    /// Inserts `cid`. Returns `false` if it was present.
    #[inline]
    pub(super) fn insert(&mut self, cid: u16) -> bool {
        let word = &mut self.0[usize::from(cid >> 6)];
        let bit = 1 << (cid & 63);
        let fresh = *word & bit == 0;
        *word |= bit;
        fresh
    }

    #[inline]
    pub(super) fn remove(&mut self, cid: u16) {
        self.0[usize::from(cid >> 6)] &= !(1 << (cid & 63));
    }

    /// Returns an identifier that is not outstanding and, if possible, far from `cid`.
    pub(super) fn absent(&self, cid: u16) -> u16 {
        let has = |cid: u16| self.0[usize::from(cid >> 6)] & 1 << (cid & 63) != 0;
        let far = cid ^ 0x8000;
        (0..=u16::MAX).map(|step| far.wrapping_add(step)).find(|cid| !has(*cid)).unwrap_or(far)
    }
}

/// A submission queue.
#[derive(Debug)]
pub(super) struct SubmissionQueue {
    pub ring: Ring,
    pub cqid: u16,
    /// Next entry to fetch.
    pub head: u32,
    /// Last seen tail of the host.
    pub tail: u32,
    /// Last invalid doorbell value.
    pub bad_tail: Option<u32>,
    /// Commands fetched and not completed.
    pub outstanding: u32,
    pub cids: CidSet,
    /// Set while the queue is being deleted: nothing is fetched any more.
    pub deleting: bool,
    /// Set while the next entry waits for a completion slot.
    pub waiting: bool,
}

impl SubmissionQueue {
    pub(super) fn new(ring: Ring, cqid: u16) -> Self {
        Self {
            ring,
            cqid,
            head: 0,
            tail: 0,
            bad_tail: None,
            outstanding: 0,
            cids: CidSet::new(),
            deleting: false,
            waiting: false,
        }
    }

    /// Returns whether there are entries to fetch.
    #[inline]
    pub(super) fn ready(&self) -> bool {
        self.head != self.tail && !self.deleting
    }
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    pub ring: Ring,
    /// Next entry to write.
    pub tail: u32,
    /// First entry not consumed by the host, as last seen.
    pub head: u32,
    /// Last invalid doorbell value.
    pub bad_head: Option<u32>,
    /// Phase of the current pass.
    pub phase: bool,
    /// Entries reserved for commands inside the controller.
    pub reserved: u32,
    /// Vector to signal, if interrupts are enabled.
    pub vector: Option<u16>,
    /// Number of submission queues that complete here.
    pub users: u32,
    /// Set if an entry was posted since the vector was last signalled.
    pub signal: bool,
}

impl CompletionQueue {
    pub(super) fn new(ring: Ring, vector: Option<u16>) -> Self {
        Self {
            ring,
            tail: 0,
            head: 0,
            bad_head: None,
            phase: true,
            reserved: 0,
            vector,
            users: 0,
            signal: false,
        }
    }

    /// Returns the number of entries neither posted nor reserved. One entry always stays empty
    /// ("Full Queue").
    #[inline]
    pub(super) fn free(&self) -> u32 {
        let used = self.ring.distance(self.head, self.tail);
        (self.ring.size - 1).saturating_sub(used + self.reserved)
    }
}

/// All queues by identifier, with doorbells and interrupts; 0 are the admin queues.
#[derive(Debug)]
pub(super) struct Queues {
    sqs: Vec<Option<SubmissionQueue>>,
    cqs: Vec<Option<CompletionQueue>>,
    /// Identifiers of existing submission queues, ascending.
    active: Vec<u16>,
    /// Identifiers of existing completion queues, ascending.
    active_cqs: Vec<u16>,
    doorbells: Doorbells,
    interrupts: Interrupts,
    /// Completion queues with an interrupt to signal.
    signals: Vec<u16>,
    /// Vectors signalled while masked.
    withheld: u32,
    /// Position in the round robin of the submission queues.
    rr_index: usize,
    /// Next queue identifier to check for doorbells rung without a queue.
    unused_qid: u16,
}

impl Queues {
    pub(super) fn new(io_queues: u16, doorbells: Doorbells, interrupts: Interrupts) -> Self {
        let count = usize::from(io_queues) + 1;
        Self {
            sqs: (0..count).map(|_| None).collect(),
            cqs: (0..count).map(|_| None).collect(),
            active: Vec::with_capacity(count),
            active_cqs: Vec::with_capacity(count),
            doorbells,
            interrupts,
            signals: Vec::new(),
            withheld: 0,
            rr_index: 0,
            unused_qid: 0,
        }
    }

    #[inline]
    pub(super) fn sq(&mut self, qid: u16) -> Option<&mut SubmissionQueue> {
        self.sqs.get_mut(usize::from(qid))?.as_mut()
    }

    #[inline]
    pub(super) fn cq(&mut self, qid: u16) -> Option<&mut CompletionQueue> {
        self.cqs.get_mut(usize::from(qid))?.as_mut()
    }

    /// Returns the number of interrupt vectors.
    pub(super) fn vectors(&self) -> u16 {
        self.interrupts.count()
    }

    /// Returns whether any I/O queue exists.
    pub(super) fn any_io(&self) -> bool {
        self.sqs.iter().skip(1).any(Option::is_some) || self.cqs.iter().skip(1).any(Option::is_some)
    }

    /// Creates the admin queues that the registers describe; the doorbells start from 0.
    pub(super) fn add_admin(&mut self, registers: &Registers) {
        let sq_size = u32::from(registers.aqa.asqs_z()) + 1;
        let cq_size = u32::from(registers.aqa.acqs_z()) + 1;
        self.doorbells.clear_all();
        self.add_cq(0, CompletionQueue::new(Ring::contiguous(registers.acq, 16, cq_size), Some(0)));
        self.add_sq(0, SubmissionQueue::new(Ring::contiguous(registers.asq, 64, sq_size), 0));
    }

    pub(super) fn add_sq(&mut self, qid: u16, sq: SubmissionQueue) {
        if let Some(cq) = self.cq(sq.cqid) {
            cq.users += 1;
        }
        self.doorbells.clear_sq(qid);
        self.sqs[usize::from(qid)] = Some(sq);
        if let Err(place) = self.active.binary_search(&qid) {
            self.active.insert(place, qid);
        }
    }

    pub(super) fn add_cq(&mut self, qid: u16, cq: CompletionQueue) {
        self.doorbells.clear_cq(qid);
        self.cqs[usize::from(qid)] = Some(cq);
        if let Err(place) = self.active_cqs.binary_search(&qid) {
            self.active_cqs.insert(place, qid);
        }
    }

    pub(super) fn remove_sq(&mut self, qid: u16) {
        let gone = self.sqs.get_mut(usize::from(qid)).and_then(Option::take);
        if let Some(cq) = gone.and_then(|sq| self.cq(sq.cqid)) {
            cq.users -= 1;
        }
        self.active.retain(|active| *active != qid);
        self.doorbells.clear_sq(qid);
    }

    pub(super) fn remove_cq(&mut self, qid: u16) {
        if let Some(cq) = self.cqs.get_mut(usize::from(qid)) {
            *cq = None;
        }
        self.active_cqs.retain(|active| *active != qid);
        self.doorbells.clear_cq(qid);
    }

    /// Deletes all queues.
    pub(super) fn clear(&mut self) {
        self.sqs.iter_mut().for_each(|sq| *sq = None);
        self.cqs.iter_mut().for_each(|cq| *cq = None);
        self.active.clear();
        self.active_cqs.clear();
        self.signals.clear();
        self.withheld = 0;
        self.doorbells.clear_all();
    }

    /// Reads new doorbell values. Returns whether a queue has entries to fetch.
    pub(super) fn observe(&mut self, logs: &mut Logs) -> bool {
        let mut busy = false;
        for index in 0..self.active.len() {
            let qid = self.active[index];
            busy |= self.observe_tail(qid, logs);
        }
        for index in 0..self.active_cqs.len() {
            let cqid = self.active_cqs[index];
            self.observe_head(cqid, logs);
        }
        self.check_unused_doorbells(logs);
        busy
    }

    /// Reads the tail of `qid`. Returns whether the queue has entries to fetch.
    #[inline]
    fn observe_tail(&mut self, qid: u16, logs: &mut Logs) -> bool {
        let tail = self.doorbells.sq_tail(qid);
        let Some(sq) = self.sq(qid) else { return false };
        if tail == sq.tail {
            return sq.ready();
        }
        if tail < sq.ring.size {
            sq.tail = tail;
            sq.bad_tail = None;
            logs.counters.sq_doorbells += 1;
        } else if sq.bad_tail != Some(tail) {
            // "Asynchronous Event Request", error status: Invalid Doorbell Write Value.
            sq.bad_tail = Some(tail);
            logs.raise_error(ErrorEvent::InvalidDoorbellValue);
        }
        sq.ready()
    }

    /// Reads the head of `cqid`.
    #[inline]
    fn observe_head(&mut self, cqid: u16, logs: &mut Logs) {
        let head = self.doorbells.cq_head(cqid);
        let Some(cq) = self.cq(cqid) else { return };
        if head == cq.head {
            return;
        }
        // A head past the tail would free entries that were never posted.
        let posted = cq.ring.distance(cq.head, cq.tail);
        if head < cq.ring.size && cq.ring.distance(cq.head, head) <= posted {
            cq.head = head;
            cq.bad_head = None;
            logs.counters.cq_doorbells += 1;
        } else if cq.bad_head != Some(head) {
            cq.bad_head = Some(head);
            logs.raise_error(ErrorEvent::InvalidDoorbellValue);
        }
    }

    /// Checks the doorbells of one nonexistent queue, a different one each time.
    fn check_unused_doorbells(&mut self, logs: &mut Logs) {
        let count = self.sqs.len() as u16;
        self.unused_qid = if self.unused_qid + 1 >= count { 1 } else { self.unused_qid + 1 };
        let qid = self.unused_qid;
        let (sq, cq) = (self.sq(qid).is_none(), self.cq(qid).is_none());
        let mut invalid = false;
        if sq && self.doorbells.sq_tail(qid) != 0 {
            self.doorbells.clear_sq(qid);
            invalid = true;
        }
        if cq && self.doorbells.cq_head(qid) != 0 {
            self.doorbells.clear_cq(qid);
            invalid = true;
        }
        if invalid {
            // "Asynchronous Event Request", error status: Write to Invalid Doorbell Register.
            logs.raise_error(ErrorEvent::InvalidDoorbellRegister);
        }
    }

    /// Returns the number of submission queues.
    pub(super) fn submission_queues(&self) -> usize {
        self.active.len()
    }

    /// Returns the submission queue whose turn is next ("Round Robin Arbitration"). There must be
    /// one.
    #[inline]
    pub(super) fn next_turn(&mut self) -> u16 {
        self.rr_index = if self.rr_index + 1 >= self.active.len() { 0 } else { self.rr_index + 1 };
        self.active[self.rr_index]
    }

    /// Reserves a slot of the completion queue of `sqid`. Returns `false` if there is none.
    #[inline]
    pub(super) fn reserve(&mut self, sqid: u16, logs: &mut Logs) -> bool {
        let Some(cqid) = self.sq(sqid).map(|sq| sq.cqid) else { return false };
        if self.cq(cqid).is_some_and(|cq| cq.free() == 0) {
            // The host may have moved its head since this step began.
            self.observe_head(cqid, logs);
        }
        match self.cq(cqid) {
            Some(cq) if cq.free() > 0 => {
                cq.reserved += 1;
                true
            }
            _ => false,
        }
    }

    /// Returns the slot of `sqid`'s completion queue: the command waits without one.
    pub(super) fn unreserve(&mut self, sqid: u16) {
        let Some(cqid) = self.sq(sqid).map(|sq| sq.cqid) else { return };
        if let Some(cq) = self.cq(cqid) {
            cq.reserved -= 1;
        }
    }

    /// Drops a command: it will never complete, and its slot becomes free.
    pub(super) fn abandon(&mut self, ticket: Ticket) {
        self.unreserve(ticket.sqid);
        if let Some(sq) = self.sq(ticket.sqid) {
            sq.outstanding -= 1;
            sq.cids.remove(ticket.cid);
        }
    }

    /// Posts the completion of a command into the slot reserved for it.
    ///
    /// # Errors
    /// Fails if the domain refuses the memory of the completion queue.
    #[inline]
    pub(super) fn complete(
        &mut self,
        dma: &DmaAccess<'_>,
        ticket: Ticket,
        outcome: Outcome,
        counters: &mut EmuCounters,
    ) -> Result<(), DmaFault> {
        let more = if outcome.status.is_success() { 0 } else { MORE };
        let status = Status(outcome.status.0 | more);
        let Some(sq) = self.sq(ticket.sqid) else { return Ok(()) };
        let mut cqe =
            Cqe::new(outcome.dw0, sq.head as u16, ticket.sqid, Cid(ticket.cid), status, false);
        if ticket.tracked {
            sq.outstanding -= 1;
            sq.cids.remove(ticket.cid);
        }
        match ticket.cqe_fault {
            CqeFault::None | CqeFault::Duplicate | CqeFault::Phase => {}
            CqeFault::Cid => cqe.cid = sq.cids.absent(ticket.cid),
            CqeFault::Sqhd => cqe.sqhd = (sq.ring.size as u16).wrapping_add(7),
            CqeFault::Sqid => cqe.sqid = ticket.sqid.wrapping_add(1),
        }
        let cqid = sq.cqid;
        if let Some(cq) = self.cq(cqid) {
            cq.reserved -= 1;
        }
        let posted = self.post(dma, cqid, cqe, ticket.cqe_fault == CqeFault::Phase, counters);
        let again = ticket.cqe_fault == CqeFault::Duplicate;
        // The duplicate has no reserved slot; it must not overrun a full queue.
        if again && self.cq(cqid).is_some_and(|cq| cq.free() > 0) {
            return posted.and(self.post(dma, cqid, cqe, false, counters));
        }
        posted
    }

    /// Writes an entry: the dword with the phase last, so that a host which sees it sees all. The
    /// preceding dword is an atomic store too: a host may load both before it compares the phase.
    #[inline]
    fn post(
        &mut self,
        dma: &DmaAccess<'_>,
        cqid: u16,
        mut cqe: Cqe,
        stale: bool,
        counters: &mut EmuCounters,
    ) -> Result<(), DmaFault> {
        let Some(cq) = self.cq(cqid) else { return Ok(()) };
        let at = cq.ring.at(cq.tail);
        cqe.status_phase |= u16::from(cq.phase != stale);
        let queue = u32::from(cqe.sqhd) | u32::from(cqe.sqid) << 16;
        let command = u32::from(cqe.cid) | u32::from(cqe.status_phase) << 16;
        let written = dma
            .write(at, &cqe.as_bytes()[..8])
            .and_then(|()| dma.store_release32(at.offset(8), queue))
            .and_then(|()| dma.store_release32(at.offset(12), command));
        cq.tail = cq.ring.after(cq.tail);
        cq.phase ^= cq.tail == 0;
        if !cq.signal && cq.vector.is_some() {
            cq.signal = true;
            self.signals.push(cqid);
        }
        counters.completions += 1;
        counters.refused_dma += u64::from(written.is_err());
        written
    }

    /// Signals the vectors of queues with new entries, unless `masked`: once per step, however many
    /// entries.
    pub(super) fn signal(&mut self, masked: u32, counters: &mut EmuCounters) {
        while let Some(cqid) = self.signals.pop() {
            let Some(cq) = self.cq(cqid) else { continue };
            cq.signal = false;
            let Some(vector) = cq.vector else { continue };
            self.signal_vector(vector, masked, counters);
        }
    }

    fn signal_vector(&mut self, vector: u16, masked: u32, counters: &mut EmuCounters) {
        let bit = 1u32.checked_shl(vector.into()).unwrap_or(0);
        if masked & bit != 0 {
            self.withheld |= bit;
        } else if self.interrupts.raise(vector) {
            counters.interrupts += 1;
        }
    }

    /// Signals withheld vectors that INTMC has unmasked.
    pub(super) fn signal_withheld(&mut self, masked: u32, counters: &mut EmuCounters) {
        let now = self.withheld & !masked;
        self.withheld &= !now;
        for vector in (0..32u16).filter(|vector| now & 1 << vector != 0) {
            self.signal_vector(vector, masked, counters);
        }
    }
}
