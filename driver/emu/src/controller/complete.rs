//! Completions and their interrupts.

use nvme_spec::{admin::AdminOpcode, cqe::Cqe, ids::Cid, nvm::NvmOpcode, status::Status};
use zerocopy::IntoBytes;

use super::{
    Controller,
    command::{CqeFault, Flow, Outcome, Ticket},
};
use crate::domain::DmaAccess;

/// Status bit 13, More: the error log has an entry for the command.
const MORE: u16 = 1 << 13;

/// Sets Do Not Retry on a `status` that would recur.
pub(super) fn definite(status: Status) -> Status {
    match status {
        Status::DATA_TRANSFER_ERROR
        | Status::INTERNAL_ERROR
        | Status::ABORTED_BY_REQUEST
        | Status::ABORTED_SQ_DELETED
        | Status::FORMAT_IN_PROGRESS
        | Status::UNRECOVERED_READ_ERROR
        | Status::WRITE_FAULT => status,
        _ => status.with_dnr(),
    }
}

impl Controller {
    /// Completes a finished command; leaves a pending one.
    #[inline]
    pub(super) fn conclude(&mut self, dma: &DmaAccess<'_>, ticket: Ticket, flow: Flow) {
        if let Flow::Done(mut outcome) = flow {
            if !outcome.status.is_success() {
                self.counters.refused_dma +=
                    u64::from(outcome.status == Status::DATA_TRANSFER_ERROR);
                outcome.status = definite(outcome.status);
            }
            self.complete(dma, ticket, outcome);
        }
    }

    /// Posts the completion of a command into the slot reserved for it.
    #[inline]
    pub(super) fn complete(&mut self, dma: &DmaAccess<'_>, ticket: Ticket, outcome: Outcome) {
        let mut status = outcome.status;
        if status.is_success() {
            self.count_success(ticket, outcome.bytes);
        } else {
            self.counters.errors += 1;
            self.logs.command_failed(ticket, status);
            status = Status(status.0 | MORE);
        }
        let Some(sq) = self.queues.sq(ticket.sqid) else { return };
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
        if let Some(cq) = self.queues.cq(cqid) {
            cq.reserved -= 1;
        }
        self.post(dma, cqid, cqe, ticket.cqe_fault == CqeFault::Phase);
        let again = ticket.cqe_fault == CqeFault::Duplicate;
        // The duplicate has no reserved slot; it must not overrun a full queue.
        if again && self.queues.cq(cqid).is_some_and(|cq| cq.free() > 0) {
            self.post(dma, cqid, cqe, false);
        }
    }

    /// Writes an entry: the dword with the phase last, so that a host which sees it sees all. The
    /// preceding dword is an atomic store too: a host may load both before it compares the phase.
    #[inline]
    fn post(&mut self, dma: &DmaAccess<'_>, cqid: u16, mut cqe: Cqe, stale: bool) {
        let Some(cq) = self.queues.cq(cqid) else { return };
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
        self.counters.completions += 1;
        if written.is_err() {
            self.counters.refused_dma += 1;
            self.fail("a completion queue entry could not be written");
        }
    }

    fn count_success(&mut self, ticket: Ticket, bytes: u64) {
        let counters = &mut self.counters;
        if ticket.sqid == 0 {
            return;
        }
        match NvmOpcode(ticket.opcode) {
            NvmOpcode::READ => {
                counters.reads += 1;
                counters.bytes_read += bytes;
            }
            NvmOpcode::WRITE => {
                counters.writes += 1;
                counters.bytes_written += bytes;
            }
            NvmOpcode::FLUSH => counters.flushes += 1,
            _ => {}
        }
    }

    /// Reserves a slot of the completion queue of `sqid`. Returns `false` if there is none.
    #[inline]
    pub(super) fn reserve(&mut self, sqid: u16) -> bool {
        let Some(cqid) = self.queues.sq(sqid).map(|sq| sq.cqid) else { return false };
        if self.queues.cq(cqid).is_some_and(|cq| cq.free() == 0) {
            // The host may have moved its head since this step began.
            self.observe_head(cqid);
        }
        match self.queues.cq(cqid) {
            Some(cq) if cq.free() > 0 => {
                cq.reserved += 1;
                true
            }
            _ => false,
        }
    }

    /// Returns the slot of `sqid`'s completion queue: the command waits without one.
    pub(super) fn unreserve(&mut self, sqid: u16) {
        let Some(cqid) = self.queues.sq(sqid).map(|sq| sq.cqid) else { return };
        if let Some(cq) = self.queues.cq(cqid) {
            cq.reserved -= 1;
        }
    }

    /// Signals the vectors of queues with new entries: once per step, however many entries.
    pub(super) fn signal(&mut self) {
        while let Some(cqid) = self.signals.pop() {
            let Some(cq) = self.queues.cq(cqid) else { continue };
            cq.signal = false;
            let Some(vector) = cq.vector else { continue };
            self.signal_vector(vector);
        }
    }

    fn signal_vector(&mut self, vector: u16) {
        let bit = 1u32.checked_shl(vector.into()).unwrap_or(0);
        if self.registers.masked & bit != 0 {
            self.withheld |= bit;
        } else if self.interrupts.raise(vector) {
            self.counters.interrupts += 1;
        }
    }

    /// Signals withheld vectors that INTMC has unmasked.
    pub(super) fn signal_withheld(&mut self) {
        let now = self.withheld & !self.registers.masked;
        self.withheld &= !now;
        for vector in (0..32u16).filter(|vector| now & 1 << vector != 0) {
            self.signal_vector(vector);
        }
    }

    /// Returns whether the command is the admin command `which`.
    pub(super) fn is_admin(ticket: &Ticket, which: AdminOpcode) -> bool {
        ticket.sqid == 0 && AdminOpcode(ticket.opcode) == which
    }
}
