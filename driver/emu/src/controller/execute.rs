//! Fetching, execution and completion of commands (Base, "Command Arbitration").

use nvme_driver::Nanos;
use nvme_spec::{sqe::Sqe, status::Status};
use zerocopy::IntoBytes;

use super::{
    Controller,
    command::{CqeFault, Flow, Outcome, Ticket},
    faults::{DeviceFault, data_fault},
    transfer::Request,
};
use crate::{
    domain::DmaAccess,
    fault::FaultAction,
    media::{DataFault, MediaDone, MediaError},
};

/// Sets Do Not Retry on a `status` that would recur.
fn definite(status: Status) -> Status {
    match status {
        Status::DATA_TRANSFER_ERROR
        | Status::INTERNAL_ERROR
        | Status::FORMAT_IN_PROGRESS
        | Status::UNRECOVERED_READ_ERROR
        | Status::WRITE_FAULT => status,
        _ => status.with_dnr(),
    }
}

impl Controller {
    /// Fetches up to `budget` commands, a burst from each queue in turn ("Round Robin
    /// Arbitration"), and returns their number.
    pub(super) fn fetch(&mut self, dma: &DmaAccess<'_>, now: Nanos, budget: u32) -> u32 {
        let burst = self.features.burst();
        let (mut left, mut idle) = (budget, 0);
        // Ends after a full round without fetches: each turn fetches or counts as idle.
        while left > 0 && idle < self.queues.submission_queues() && !self.halted() {
            let qid = self.queues.next_turn();
            let fetched = self.fetch_from(dma, now, qid, burst.min(left));
            left -= fetched;
            idle = if fetched == 0 { idle + 1 } else { 0 };
        }
        budget - left
    }

    /// Returns whether fetching must stop.
    #[inline]
    fn halted(&self) -> bool {
        self.faults.pending.is_some() || self.lifecycle.fatal || self.lifecycle.draining()
    }

    #[inline]
    fn fetch_from(&mut self, dma: &DmaAccess<'_>, now: Nanos, qid: u16, limit: u32) -> u32 {
        let mut fetched = 0;
        while fetched < limit {
            if !self.queues.sq(qid).is_some_and(|sq| sq.ready()) {
                break;
            }
            // A completion slot first: an entry that cannot be completed stays in its queue.
            let reserved = self.queues.reserve(qid, &mut self.logs);
            let Some(sq) = self.queues.sq(qid) else { break };
            if !reserved {
                self.logs.counters.cq_full_waits += u64::from(!sq.waiting);
                sq.waiting = true;
                break;
            }
            sq.waiting = false;
            let mut sqe = Sqe::default();
            if dma.read(sq.ring.at(sq.head), sqe.as_mut_bytes()).is_err() {
                self.logs.counters.refused_dma += 1;
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
        let counters = &mut self.logs.counters;
        counters.batch_max = counters.batch_max.max(u64::from(fetched));
        fetched
    }

    /// Begins a fetched command.
    #[inline]
    fn begin(&mut self, dma: &DmaAccess<'_>, now: Nanos, qid: u16, sqe: &Sqe) {
        self.logs.counters.commands += 1;
        self.logs.counters.admin_commands += u64::from(qid == 0);
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
            return self.refuse(dma, ticket, Status::CID_CONFLICT);
        }
        if let Some(fault) = self.inject(dma, now, &mut ticket, sqe) {
            self.execute(dma, now, ticket, sqe, fault);
        }
    }

    /// Injects the plan's faults for a command. Returns `None` if that ended the command.
    #[inline]
    fn inject(
        &mut self,
        dma: &DmaAccess<'_>,
        now: Nanos,
        ticket: &mut Ticket,
        sqe: &Sqe,
    ) -> Option<DataFault> {
        let Some(hit) = self.faults.decide(ticket, sqe) else { return Some(DataFault::None) };
        self.logs.counters.faults += 1;
        tracing::debug!(
            ctrl = self.identity.id(),
            qid = ticket.sqid,
            cid = ticket.cid,
            rule = hit.rule,
            action = ?hit.action,
            "fault"
        );
        match hit.action {
            FaultAction::Status { code, dnr } => {
                let status = Status(code & 0x1fff);
                let status = if dnr { status.with_dnr() } else { status };
                self.complete(dma, *ticket, Outcome::failed(status));
                return None;
            }
            FaultAction::Drop => {
                self.queues.abandon(*ticket);
                return None;
            }
            FaultAction::Delay { ns } => {
                self.commands.delay(now + Nanos(ns), *ticket, sqe);
                return None;
            }
            FaultAction::PowerLoss => {
                self.faults.pending = Some(DeviceFault::PowerLoss);
                return None;
            }
            FaultAction::Gone => {
                self.faults.pending = Some(DeviceFault::Gone);
                return None;
            }
            FaultAction::LinkLoss { ns } => {
                self.faults.pending = Some(DeviceFault::LinkLoss(Nanos(ns)));
                return None;
            }
            FaultAction::FatalStatus => {
                self.fail("the fault plan says so");
                return None;
            }
            FaultAction::Duplicate => ticket.cqe_fault = CqeFault::Duplicate,
            FaultAction::WrongCid => ticket.cqe_fault = CqeFault::Cid,
            FaultAction::WrongPhase => ticket.cqe_fault = CqeFault::Phase,
            FaultAction::WrongSqhd => ticket.cqe_fault = CqeFault::Sqhd,
            FaultAction::WrongSqid => ticket.cqe_fault = CqeFault::Sqid,
            FaultAction::TornWrite
            | FaultAction::MisdirectedWrite { .. }
            | FaultAction::CorruptRead => {
                let namespace = self.storage.active(sqe.nsid).ok();
                let fault = namespace.map(|namespace| data_fault(namespace, sqe, hit));
                return Some(fault.unwrap_or_default());
            }
        }
        Some(DataFault::None)
    }

    /// Executes a command, and completes it unless it waits.
    #[inline]
    fn execute(
        &mut self,
        dma: &DmaAccess<'_>,
        now: Nanos,
        ticket: Ticket,
        sqe: &Sqe,
        fault: DataFault,
    ) {
        let changes = ticket.changes_medium();
        if changes && self.faults.pass_moment() {
            return;
        }
        let (rules, token) = (self.rules, self.commands.next_token());
        let write_through = self.features.write_through();
        let request = Request { dma, rules, now, ticket, sqe, token, fault, write_through };
        let flow = match ticket.sqid {
            0 => self.run_admin(&request),
            _ => self.storage.run(&request),
        };
        let outcome = match flow {
            Flow::Done(outcome) => Some(outcome),
            Flow::Wait(wait) => {
                self.commands.insert(ticket, wait);
                None
            }
            Flow::Held => None,
        };
        // It has taken effect or is in flight.
        if changes && self.faults.pass_moment() {
            return;
        }
        match outcome {
            Some(outcome) if outcome.status.is_success() => self.complete(dma, ticket, outcome),
            Some(outcome) => self.refuse(dma, ticket, outcome.status),
            None => {}
        }
    }

    /// Completes a command that was refused or failed as it was executed.
    #[cold]
    fn refuse(&mut self, dma: &DmaAccess<'_>, ticket: Ticket, status: Status) {
        self.logs.counters.refused_dma += u64::from(status == Status::DATA_TRANSFER_ERROR);
        self.complete(dma, ticket, Outcome::failed(definite(status)));
    }

    /// Posts the completion of a command.
    #[inline]
    pub(super) fn complete(&mut self, dma: &DmaAccess<'_>, ticket: Ticket, outcome: Outcome) {
        if outcome.status.is_success() {
            self.logs.command_succeeded(ticket, outcome.bytes);
        } else {
            self.logs.command_failed(ticket, outcome.status);
        }
        if self.queues.complete(dma, ticket, outcome, &mut self.logs.counters).is_err() {
            self.fail("a completion queue entry could not be written");
        }
    }

    /// Takes finished media operations; holds no DMA access, so their memory may be freed.
    pub(super) fn poll_media(&mut self, now: Nanos) -> u32 {
        // CSTS.CFS: nothing more happens until a reset.
        if self.lifecycle.fatal {
            self.storage.cancel();
        }
        let mut done = self.storage.poll(now);
        let count = done.len() as u32;
        for done in done.drain(..) {
            self.operation_done(done);
        }
        self.storage.keep(done);
        count
    }

    /// Accounts for an operation that a medium has ended.
    fn operation_done(&mut self, done: MediaDone) {
        self.storage.release(done.sg_list);
        match &done.result {
            Ok(()) | Err(MediaError::Copy(_)) => {}
            // Its commands end, each with its status; then the controller fails.
            Err(MediaError::GpuLost(_)) => self.faults.pending = Some(DeviceFault::GpuLost),
            Err(_) => self.storage.media_errors += 1,
        }
        let ticket = self.commands.ticket(done.token);
        if ticket.is_some_and(|ticket| ticket.changes_medium()) && self.faults.pass_moment() {
            return;
        }
        self.commands.operation_done(done.token, done.result.as_ref().err());
    }

    /// Completes the commands whose media operations have ended.
    pub(super) fn settle(&mut self, dma: &DmaAccess<'_>) -> u32 {
        let mut count = 0;
        while let Some((ticket, operations)) = self.commands.take_finished() {
            let failed = operations.failed;
            if let Some(shift) = operations.format {
                self.formatted(ticket.nsid, failed.is_none().then_some(shift));
            }
            let outcome = match failed {
                Some(status) => Outcome::failed(status),
                None => Outcome { bytes: operations.bytes, ..Outcome::OK },
            };
            self.complete(dma, ticket, outcome);
            count += 1;
        }
        count
    }

    /// Executes commands whose delay has passed, in order of their times.
    pub(super) fn run_delayed(&mut self, dma: &DmaAccess<'_>, now: Nanos) -> u32 {
        let mut count = 0;
        while let Some((ticket, sqe)) = self.commands.take_due(now) {
            self.execute(dma, now, ticket, &sqe, DataFault::None);
            count += 1;
        }
        count
    }
}
