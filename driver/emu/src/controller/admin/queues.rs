//! Creation and deletion of I/O queues (PCIe Transport, "Create I/O Completion Queue" etc.).

use nvme_driver::Iova;
use nvme_spec::{
    admin::{CreateIoCq, CreateIoSq, DeleteQueue},
    sqe::Sqe,
    status::Status,
};

use super::super::{
    Controller,
    command::{Command, Flow, Outcome, Ticket, Wait},
    queues::{CompletionQueue, Ring, SubmissionQueue},
    transfer::{Sink, prp},
};
use crate::domain::{DmaAccess, DmaFault};

impl Controller {
    pub(super) fn create_io_cq(&mut self, dma: &DmaAccess<'_>, sqe: &Sqe) -> Result<Flow, Status> {
        let command = CreateIoCq::from_sqe(sqe);
        let qid = command.qid.0;
        // "Create I/O Completion Queue" has a status for each of these, in this order.
        if qid == 0 || qid > self.features.completion_queues() || self.queues.cq(qid).is_some() {
            return Err(Status::INVALID_QUEUE_ID);
        }
        if command.vector >= self.interrupts.count() {
            return Err(Status::INVALID_INTERRUPT_VECTOR);
        }
        let ring = self.ring(dma, sqe, command.qsize_z, command.contiguous, 16)?;
        let vector = command.interrupts.then_some(command.vector);
        self.doorbells.clear_cq(qid);
        self.queues.add_cq(qid, CompletionQueue::new(ring, vector));
        Ok(Flow::Done(Outcome::OK))
    }

    pub(super) fn create_io_sq(&mut self, dma: &DmaAccess<'_>, sqe: &Sqe) -> Result<Flow, Status> {
        let command = CreateIoSq::from_sqe(sqe);
        let (qid, cqid) = (command.qid.0, command.cqid.0);
        if qid == 0 || qid > self.features.submission_queues() || self.queues.sq(qid).is_some() {
            return Err(Status::INVALID_QUEUE_ID);
        }
        // "Create I/O Submission Queue", CQID: the admin queue or a number out of range is an
        // invalid identifier; a queue that was not created is an invalid completion queue.
        if cqid == 0 || cqid > self.features.completion_queues() {
            return Err(Status::INVALID_QUEUE_ID);
        }
        if self.queues.cq(cqid).is_none() {
            return Err(Status::COMPLETION_QUEUE_INVALID);
        }
        let ring = self.ring(dma, sqe, command.qsize_z, command.contiguous, 64)?;
        self.doorbells.clear_sq(qid);
        self.queues.add_sq(qid, SubmissionQueue::new(ring, cqid));
        Ok(Flow::Done(Outcome::OK))
    }

    /// Returns the memory of a new queue.
    fn ring(
        &self,
        dma: &DmaAccess<'_>,
        sqe: &Sqe,
        qsize_z: u16,
        contiguous: bool,
        entry_bytes: u64,
    ) -> Result<Ring, Status> {
        // CC.IOSQES and CC.IOCQES must be set before the first I/O queue is created.
        let cc = self.registers.cc;
        if (entry_bytes == 64 && cc.iosqes() != 6) || (entry_bytes == 16 && cc.iocqes() != 4) {
            return Err(Status::COMMAND_SEQUENCE_ERROR);
        }
        // "Invalid Queue Size": fewer than two entries, or more than CAP.MQES.
        let size = u32::from(qsize_z) + 1;
        if size < 2 || size > self.registers.queue_entries_max() {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        let (base, page) = (sqe.dptr.prp1, self.rules.page_bytes);
        if base & (page - 1) != 0 {
            return Err(Status::INVALID_PRP_OFFSET);
        }
        if contiguous {
            return Ok(Ring::contiguous(base, entry_bytes, size));
        }
        // PC clear while CAP.CQR is set is an invalid field; otherwise PRP1 is a list.
        if self.registers.cap.cqr() == 1 {
            return Err(Status::INVALID_FIELD);
        }
        let mut pages = Pages(Vec::new());
        prp::walk_list(dma, page, base, u64::from(size) * entry_bytes, &mut pages)?;
        Ok(Ring::scattered(pages.0, page, entry_bytes, size))
    }

    pub(super) fn delete_io_cq(&mut self, sqe: &Sqe) -> Result<Flow, Status> {
        let qid = DeleteQueue::from_sqe(sqe).qid.0;
        match self.queues.cq(qid) {
            Some(cq) if qid != 0 => {
                // "Delete I/O Completion Queue": its submission queues must be deleted first.
                if cq.users > 0 {
                    return Err(Status::INVALID_QUEUE_DELETION);
                }
            }
            _ => return Err(Status::INVALID_QUEUE_ID),
        }
        self.queues.remove_cq(qid);
        self.doorbells.clear_cq(qid);
        Ok(Flow::Done(Outcome::OK))
    }

    /// "Delete I/O Submission Queue": aborts commands that have not begun. Completes after those
    /// that have begun, so that no DMA for the queue happens afterwards.
    pub(super) fn delete_io_sq(
        &mut self,
        dma: &DmaAccess<'_>,
        ticket: Ticket,
        sqe: &Sqe,
    ) -> Result<Flow, Status> {
        let qid = DeleteQueue::from_sqe(sqe).qid.0;
        match self.queues.sq(qid) {
            Some(sq) if qid != 0 && !sq.deleting => sq.deleting = true,
            _ => return Err(Status::INVALID_QUEUE_ID),
        }
        let held = |(_, token): &(_, u64)| {
            let command = self.commands.get_mut(*token)?;
            (command.ticket.sqid == qid).then_some(*token)
        };
        let tokens: Vec<u64> = self.delayed.iter().filter_map(held).collect();
        for token in tokens {
            self.end_held(dma, token, Status::ABORTED_SQ_DELETED);
        }
        self.deletions += 1;
        self.commands.insert(Command { ticket, wait: Wait::Deletion { sqid: qid } });
        Ok(Flow::Pending)
    }

    /// Completes deletions whose queues have no outstanding commands left.
    pub(in super::super) fn finish_deletions(&mut self, dma: &DmaAccess<'_>) -> u32 {
        let mut count = 0;
        while self.deletions > 0 {
            let queues = &mut self.queues;
            let ready = self.commands.iter().find_map(|(token, command)| match command.wait {
                Wait::Deletion { sqid } if queues.sq(sqid)?.outstanding == 0 => Some((token, sqid)),
                _ => None,
            });
            let Some((token, sqid)) = ready else { break };
            self.queues.remove_sq(sqid);
            self.doorbells.clear_sq(sqid);
            self.deletions -= 1;
            if let Some(command) = self.commands.remove(token) {
                self.complete(dma, command.ticket, Outcome::OK);
            }
            count += 1;
        }
        count
    }
}

/// Collects the pages of a queue.
struct Pages(Vec<u64>);

impl Sink for Pages {
    fn data(&mut self, iova: Iova, _len: usize) -> Result<(), DmaFault> {
        self.0.push(iova.0);
        Ok(())
    }

    fn hole(&mut self, _len: usize) {}
}
