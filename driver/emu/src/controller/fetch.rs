//! Doorbells, arbitration, and command fetch up to execution (Base, "Queuing", "Command
//! Arbitration"; PCIe Transport, "Doorbell Stride").

use nvme_driver::Nanos;
use nvme_spec::{sqe::Sqe, status::Status};
use zerocopy::IntoBytes;

use super::{
    Controller, Wait,
    admin::ErrorEvent,
    command::{CqeFault, Flow, Outcome, Ticket},
    faults::DeviceFault,
};
use crate::{
    domain::DmaAccess,
    media::{DataFault, MediaDone, MediaError},
};

impl Controller {
    /// Reads new doorbell values. Returns whether there may be work for this step.
    pub(super) fn observe_doorbells(&mut self, now: Nanos) -> bool {
        let mut busy = !self.finished.is_empty() || self.deletions > 0;
        busy |= self.delayed.iter().any(|(time, _)| *time <= now);
        for index in 0..self.queues.active.len() {
            let qid = self.queues.active[index];
            busy |= self.observe_tail(qid);
        }
        for index in 0..self.queues.active_cqs.len() {
            let cqid = self.queues.active_cqs[index];
            self.observe_head(cqid);
        }
        self.check_unused_doorbells();
        busy || self.events.waiting()
    }

    /// Reads the tail of `qid`. Returns whether the queue has entries to fetch.
    #[inline]
    fn observe_tail(&mut self, qid: u16) -> bool {
        let tail = self.doorbells.sq_tail(qid);
        let Some(sq) = self.queues.sq(qid) else { return false };
        if tail == sq.tail {
            return sq.ready();
        }
        if tail < sq.ring.size {
            sq.tail = tail;
            sq.bad_tail = None;
            self.counters.sq_doorbells += 1;
        } else if sq.bad_tail != Some(tail) {
            // "Asynchronous Event Request", error status: Invalid Doorbell Write Value.
            sq.bad_tail = Some(tail);
            self.raise_error(ErrorEvent::InvalidDoorbellValue);
        }
        self.queues.sq(qid).is_some_and(|sq| sq.ready())
    }

    /// Reads the head of `cqid`.
    #[inline]
    pub(super) fn observe_head(&mut self, cqid: u16) {
        let Some(cq) = self.queues.cq(cqid) else { return };
        let head = self.doorbells.cq_head(cqid);
        if head == cq.head {
            return;
        }
        // A head past the tail would free entries that were never posted.
        let posted = cq.ring.distance(cq.head, cq.tail);
        if head < cq.ring.size && cq.ring.distance(cq.head, head) <= posted {
            cq.head = head;
            cq.bad_head = None;
            self.counters.cq_doorbells += 1;
        } else if cq.bad_head != Some(head) {
            cq.bad_head = Some(head);
            self.raise_error(ErrorEvent::InvalidDoorbellValue);
        }
    }

    /// Checks the doorbells of one nonexistent queue, a different one each time.
    fn check_unused_doorbells(&mut self) {
        let count = self.queues.sqs.len() as u16;
        self.unused_qid = if self.unused_qid + 1 >= count { 1 } else { self.unused_qid + 1 };
        let qid = self.unused_qid;
        let (sq, cq) = (self.queues.sq(qid).is_none(), self.queues.cq(qid).is_none());
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
            self.raise_error(ErrorEvent::InvalidDoorbellRegister);
        }
    }

    /// Fetches up to `budget` commands, a burst from each queue in turn ("Round Robin
    /// Arbitration"), and returns their number.
    pub(super) fn fetch(&mut self, dma: &DmaAccess<'_>, now: Nanos, budget: u32) -> u32 {
        let burst = self.features.burst();
        let (mut left, mut idle) = (budget, 0);
        // Ends after a full round without fetches: each turn fetches or counts as idle.
        while left > 0 && idle < self.queues.active.len() && !self.halted() {
            self.rr_index =
                if self.rr_index + 1 >= self.queues.active.len() { 0 } else { self.rr_index + 1 };
            let qid = self.queues.active[self.rr_index];
            let fetched = self.fetch_from(dma, now, qid, burst.min(left));
            left -= fetched;
            idle = if fetched == 0 { idle + 1 } else { 0 };
        }
        budget - left
    }

    /// Returns whether fetching must stop.
    #[inline]
    fn halted(&self) -> bool {
        self.pending_fault.is_some() || self.lifecycle.fatal || self.lifecycle.draining()
    }

    #[inline]
    fn fetch_from(&mut self, dma: &DmaAccess<'_>, now: Nanos, qid: u16, limit: u32) -> u32 {
        let mut fetched = 0;
        while fetched < limit {
            if !self.queues.sq(qid).is_some_and(|sq| sq.ready()) {
                break;
            }
            // A completion slot first: an entry that cannot be completed stays in its queue.
            let reserved = self.reserve(qid);
            let Some(sq) = self.queues.sq(qid) else { break };
            if !reserved {
                self.counters.cq_full_waits += u64::from(!sq.waiting);
                sq.waiting = true;
                break;
            }
            sq.waiting = false;
            let mut sqe = Sqe::default();
            if dma.read(sq.ring.at(sq.head), sqe.as_mut_bytes()).is_err() {
                self.counters.refused_dma += 1;
                self.fail("a submission queue entry could not be read");
                break;
            }
            sq.head = sq.ring.after(sq.head);
            fetched += 1;
            self.begin(dma, now, qid, &sqe);
            if self.halted() {
                break;
            }
        }
        self.counters.batch_max = self.counters.batch_max.max(u64::from(fetched));
        fetched
    }

    /// Begins a fetched command.
    #[inline]
    fn begin(&mut self, dma: &DmaAccess<'_>, now: Nanos, qid: u16, sqe: &Sqe) {
        self.counters.commands += 1;
        self.counters.admin_commands += u64::from(qid == 0);
        let Some(sq) = self.queues.sq(qid) else { return };
        let tracked = sq.cids.insert(sqe.cid);
        sq.outstanding += u32::from(tracked);
        let mut ticket = Ticket {
            sqid: qid,
            cid: sqe.cid,
            nsid: sqe.nsid,
            opcode: sqe.opcode,
            cqe_fault: CqeFault::None,
            tracked,
        };
        if !tracked {
            // "Command ID Conflict": the identifier is in use in this queue.
            let flow = Flow::Done(Outcome::failed(Status::CID_CONFLICT));
            return self.conclude(dma, ticket, flow);
        }
        let mut fault = DataFault::None;
        if self.faulty {
            match self.inject(dma, now, &mut ticket, sqe) {
                Some(with) => fault = with,
                None => return,
            }
        }
        self.execute(dma, now, ticket, sqe, fault);
    }

    /// Executes a command and completes it unless it is pending.
    #[inline]
    pub(super) fn execute(
        &mut self,
        dma: &DmaAccess<'_>,
        now: Nanos,
        ticket: Ticket,
        sqe: &Sqe,
        fault: DataFault,
    ) {
        let changes = changes_medium(&ticket);
        if changes && self.pass_moment() {
            return;
        }
        let flow = if ticket.sqid == 0 {
            self.run_admin(dma, now, ticket, sqe)
        } else {
            self.run_io(dma, now, ticket, sqe, fault)
        };
        // It has taken effect or is in flight.
        if changes && self.pass_moment() {
            return;
        }
        self.conclude(dma, ticket, flow);
    }

    /// Takes finished media operations; holds no DMA access, so their memory may be freed.
    pub(super) fn poll_media(&mut self, now: Nanos) -> u32 {
        for namespace in &mut self.namespaces {
            // CSTS.CFS: nothing more happens until a reset.
            if self.lifecycle.fatal {
                namespace.cancel();
            }
            if namespace.in_flight() > 0 {
                namespace.poll(now, &mut self.done);
            }
        }
        let mut done = std::mem::take(&mut self.done);
        let count = done.len() as u32;
        for done in done.drain(..) {
            self.operation_done(done);
        }
        self.done = done;
        count
    }

    /// Accounts for an operation that a medium has ended.
    fn operation_done(&mut self, mut done: MediaDone) {
        done.sg_list.clear();
        self.spare.push(done.sg_list);
        let error = done.result.err();
        match &error {
            None | Some(MediaError::Copy(_)) => {}
            // Its commands end, each with its status; then the controller fails.
            Some(MediaError::GpuLost(_)) => self.pending_fault = Some(DeviceFault::GpuLost),
            Some(_) => self.logs.media_errors += 1,
        }
        let ticket = self.commands.get_mut(done.token).map(|command| command.ticket);
        if ticket.is_some_and(|ticket| changes_medium(&ticket)) && self.pass_moment() {
            return;
        }
        let Some(command) = self.commands.get_mut(done.token) else { return };
        let opcode = command.ticket.opcode;
        let Wait::Media { operations, failed, .. } = &mut command.wait else { return };
        *operations -= 1;
        if let Some(error) = error {
            failed.get_or_insert_with(|| super::io::status_of(opcode, &error));
        }
        if *operations == 0 {
            self.finished.push(done.token);
        }
    }

    /// Completes the commands whose media operations have ended.
    pub(super) fn settle(&mut self, dma: &DmaAccess<'_>) -> u32 {
        let mut count = 0;
        while let Some(token) = self.finished.pop() {
            let Some(command) = self.commands.remove(token) else { continue };
            let Wait::Media { failed, bytes, format, .. } = command.wait else { continue };
            if format.is_some() {
                self.formatted(command.ticket, format.filter(|_| failed.is_none()));
            }
            let outcome = match failed {
                Some(status) => Outcome::failed(status),
                None => Outcome { bytes, ..Outcome::OK },
            };
            self.complete(dma, command.ticket, outcome);
            count += 1;
        }
        count
    }

    /// Executes commands whose delay has passed, in order of their times.
    pub(super) fn run_delayed(&mut self, dma: &DmaAccess<'_>, now: Nanos) -> u32 {
        let mut count = 0;
        loop {
            let due = self.delayed.iter().enumerate().filter(|(_, (time, _))| *time <= now);
            let Some((index, _)) = due.min_by_key(|(_, entry)| **entry) else { return count };
            let (_, token) = self.delayed.swap_remove(index);
            let Some(command) = self.commands.remove(token) else { continue };
            let Wait::Delay { sqe } = command.wait else { continue };
            self.execute(dma, now, command.ticket, &sqe, DataFault::None);
            count += 1;
        }
    }
}

/// Returns whether the command can change the medium, so that a crash before it differs from one
/// after it: any command that does not only return data (bits 1:0 of the opcode 10b).
#[inline]
fn changes_medium(ticket: &Ticket) -> bool {
    ticket.sqid != 0 && ticket.opcode & 3 != 2
}
