//! Creation and deletion of I/O queues (PCIe Transport, "Create I/O Completion Queue" etc.).

use nvme_driver::Iova;
use nvme_spec::{
    admin::{CreateIoCq, CreateIoSq, DeleteQueue},
    sqe::Sqe,
    status::Status,
};

use super::{
    queues::{CompletionQueue, Queues, Ring, SubmissionQueue},
    registers::Registers,
    transfer::{Request, Sink, prp},
};
use crate::domain::DmaFault;

impl Queues {
    /// Executes a Create I/O Completion Queue; identifiers up to `qid_max` were granted.
    pub(super) fn create_cq(
        &mut self,
        request: &Request<'_>,
        registers: &Registers,
        qid_max: u16,
    ) -> Result<(), Status> {
        let command = CreateIoCq::from_sqe(request.sqe);
        let qid = command.qid.0;
        // "Create I/O Completion Queue" has a status for each of these, in this order.
        if qid == 0 || qid > qid_max || self.cq(qid).is_some() {
            return Err(Status::INVALID_QUEUE_ID);
        }
        if command.vector >= self.vectors() {
            return Err(Status::INVALID_INTERRUPT_VECTOR);
        }
        let ring = ring(request, registers, command.qsize_z, command.contiguous, 16)?;
        let vector = command.interrupts.then_some(command.vector);
        self.add_cq(qid, CompletionQueue::new(ring, vector));
        Ok(())
    }

    /// Executes a Create I/O Submission Queue; identifiers up to `qid_max` were granted, and
    /// completion queues up to `cqid_max`.
    pub(super) fn create_sq(
        &mut self,
        request: &Request<'_>,
        registers: &Registers,
        qid_max: u16,
        cqid_max: u16,
    ) -> Result<(), Status> {
        let command = CreateIoSq::from_sqe(request.sqe);
        let (qid, cqid) = (command.qid.0, command.cqid.0);
        if qid == 0 || qid > qid_max || self.sq(qid).is_some() {
            return Err(Status::INVALID_QUEUE_ID);
        }
        // "Create I/O Submission Queue", CQID: the admin queue or a number out of range is an
        // invalid identifier; a queue that was not created is an invalid completion queue.
        if cqid == 0 || cqid > cqid_max {
            return Err(Status::INVALID_QUEUE_ID);
        }
        if self.cq(cqid).is_none() {
            return Err(Status::COMPLETION_QUEUE_INVALID);
        }
        let ring = ring(request, registers, command.qsize_z, command.contiguous, 64)?;
        self.add_sq(qid, SubmissionQueue::new(ring, cqid));
        Ok(())
    }

    /// Executes a Delete I/O Completion Queue.
    pub(super) fn delete_cq(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let qid = DeleteQueue::from_sqe(sqe).qid.0;
        match self.cq(qid) {
            Some(cq) if qid != 0 => {
                // "Delete I/O Completion Queue": its submission queues must be deleted first.
                if cq.users > 0 {
                    return Err(Status::INVALID_QUEUE_DELETION);
                }
            }
            _ => return Err(Status::INVALID_QUEUE_ID),
        }
        self.remove_cq(qid);
        Ok(())
    }

    /// Begins a Delete I/O Submission Queue, so that nothing more is fetched. Returns the queue.
    pub(super) fn begin_deletion(&mut self, sqe: &Sqe) -> Result<u16, Status> {
        let qid = DeleteQueue::from_sqe(sqe).qid.0;
        match self.sq(qid) {
            Some(sq) if qid != 0 && !sq.deleting => sq.deleting = true,
            _ => return Err(Status::INVALID_QUEUE_ID),
        }
        Ok(qid)
    }
}

/// Returns the memory of a new queue.
fn ring(
    request: &Request<'_>,
    registers: &Registers,
    qsize_z: u16,
    contiguous: bool,
    entry_bytes: u64,
) -> Result<Ring, Status> {
    // CC.IOSQES and CC.IOCQES must be set before the first I/O queue is created.
    let cc = registers.cc;
    if (entry_bytes == 64 && cc.iosqes() != 6) || (entry_bytes == 16 && cc.iocqes() != 4) {
        return Err(Status::COMMAND_SEQUENCE_ERROR);
    }
    // "Invalid Queue Size": fewer than two entries, or more than CAP.MQES.
    let size = u32::from(qsize_z) + 1;
    if size < 2 || size > registers.queue_entries_max() {
        return Err(Status::INVALID_QUEUE_SIZE);
    }
    let (base, page) = (request.sqe.dptr.prp1, request.rules.page_bytes);
    if base & (page - 1) != 0 {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    if contiguous {
        return Ok(Ring::contiguous(base, entry_bytes, size));
    }
    // PC clear while CAP.CQR is set is an invalid field; otherwise PRP1 is a list.
    if registers.cap.cqr() == 1 {
        return Err(Status::INVALID_FIELD);
    }
    let mut pages = Pages(Vec::new());
    prp::walk_list(request.dma, page, base, u64::from(size) * entry_bytes, &mut pages)?;
    Ok(Ring::scattered(pages.0, page, entry_bytes, size))
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
