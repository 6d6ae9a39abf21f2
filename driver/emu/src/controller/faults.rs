//! Application of the fault plan to commands.

use nvme_driver::Nanos;
use nvme_spec::{
    nvm::{BlockRange, NvmOpcode},
    sqe::Sqe,
    status::Status,
};

use super::{
    Controller,
    command::{Command, CqeFault, Outcome, Ticket, Wait},
};
use crate::{
    domain::DmaAccess,
    fault::{CommandView, FaultAction, FaultHit},
    media::DataFault,
};

/// A fault of the whole device, applied once no memory is being accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DeviceFault {
    PowerLoss,
    Gone,
    GpuLost,
}

impl Controller {
    /// Injects the plan's faults for a command. Returns `None` if that ended the command.
    pub(super) fn inject(
        &mut self,
        dma: &DmaAccess<'_>,
        now: Nanos,
        ticket: &mut Ticket,
        sqe: &Sqe,
    ) -> Option<DataFault> {
        let Some(hit) = self.faults.decide(&view(ticket, sqe)) else {
            return Some(DataFault::None);
        };
        self.counters.faults += 1;
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
                self.abandon(*ticket);
                return None;
            }
            FaultAction::Delay { ns } => {
                let wait = Wait::Delay { sqe: Box::new(*sqe) };
                let token = self.commands.insert(Command { ticket: *ticket, wait });
                self.delayed.push((now + Nanos(ns), token));
                return None;
            }
            FaultAction::PowerLoss => {
                self.pending_fault = Some(DeviceFault::PowerLoss);
                return None;
            }
            FaultAction::Gone => {
                self.pending_fault = Some(DeviceFault::Gone);
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
            | FaultAction::CorruptRead => return Some(self.data_fault(ticket, sqe, hit)),
        }
        Some(DataFault::None)
    }

    /// Returns the data fault of `hit`, if it applies to the command.
    fn data_fault(&self, ticket: &Ticket, sqe: &Sqe, hit: FaultHit) -> DataFault {
        let Some(namespace) = self.namespaces.get(sqe.nsid.wrapping_sub(1) as usize) else {
            return DataFault::None;
        };
        let bytes = u64::from(BlockRange::from_sqe(sqe).lbas().0) << namespace.lba_shift;
        match (NvmOpcode(ticket.opcode), hit.action) {
            (NvmOpcode::WRITE, FaultAction::TornWrite) => {
                let unit = namespace.tear_bytes();
                DataFault::Torn { keep_bytes: hit.roll % bytes.div_ceil(unit) * unit }
            }
            (NvmOpcode::WRITE, FaultAction::MisdirectedWrite { lba_delta }) => {
                let delta = i128::from(lba_delta) << namespace.lba_shift;
                DataFault::Misdirected { delta_bytes: i64::try_from(delta).unwrap_or(i64::MAX) }
            }
            (NvmOpcode::READ, FaultAction::CorruptRead) => DataFault::Corrupt { seed: hit.roll },
            _ => DataFault::None,
        }
    }

    /// Drops a command: it will never complete, and its slot becomes free.
    fn abandon(&mut self, ticket: Ticket) {
        self.unreserve(ticket.sqid);
        if let Some(sq) = self.queues.sq(ticket.sqid) {
            sq.outstanding -= 1;
            sq.cids.remove(ticket.cid);
        }
    }

    /// Applies the pending fault of the device.
    pub(super) fn apply_device_fault(&mut self, now: Nanos) -> u32 {
        match self.pending_fault.take() {
            None => return 0,
            Some(DeviceFault::PowerLoss) => self.power_loss(now),
            Some(DeviceFault::Gone) => self.unplug(),
            Some(DeviceFault::GpuLost) => self.fail("a GPU whose memory it moves data to is lost"),
        }
        1
    }
}

/// Returns the properties of a command that rules match on.
fn view(ticket: &Ticket, sqe: &Sqe) -> CommandView {
    let admin = ticket.sqid == 0;
    let ranged = matches!(
        NvmOpcode(sqe.opcode),
        NvmOpcode::READ | NvmOpcode::WRITE | NvmOpcode::COMPARE | NvmOpcode::WRITE_ZEROES
    );
    let range = BlockRange::from_sqe(sqe);
    CommandView {
        admin,
        opcode: sqe.opcode,
        nsid: sqe.nsid,
        qid: ticket.sqid,
        lbas: (!admin && ranged).then(|| (range.slba, u64::from(range.lbas().0))),
    }
}
