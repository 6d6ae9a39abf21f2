//! The fault plan, applied to commands.

use nvme_driver::Nanos;
use nvme_spec::{
    nvm::{BlockRange, NvmOpcode},
    sqe::Sqe,
    status::Status,
};

use super::{
    Controller,
    command::{Command, Outcome, Spoil, Ticket, Wait},
};
use crate::{
    domain::DmaAccess,
    fault::{CommandView, FaultAction, FaultHit},
    media::Twist,
};

/// What happens to the whole device, once no memory is being accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Misfortune {
    PowerLoss,
    Gone,
}

impl Controller {
    /// Asks the plan about a command. `None`: the command has been dealt with.
    pub(super) fn strike(
        &mut self,
        dma: &DmaAccess<'_>,
        now: Nanos,
        ticket: &mut Ticket,
        sqe: &Sqe,
    ) -> Option<Twist> {
        let Some(hit) = self.faults.decide(&view(ticket, sqe)) else {
            return Some(Twist::None);
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
                let status = Status(code).code();
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
                self.misfortune = Some(Misfortune::PowerLoss);
                return None;
            }
            FaultAction::Gone => {
                self.misfortune = Some(Misfortune::Gone);
                return None;
            }
            FaultAction::FatalStatus => {
                self.fail("the fault plan says so");
                return None;
            }
            FaultAction::Duplicate => ticket.spoil = Spoil::Duplicate,
            FaultAction::WrongCid => ticket.spoil = Spoil::Cid,
            FaultAction::WrongPhase => ticket.spoil = Spoil::Phase,
            FaultAction::WrongSqhd => ticket.spoil = Spoil::Sqhd,
            FaultAction::WrongSqid => ticket.spoil = Spoil::Sqid,
            FaultAction::TornWrite
            | FaultAction::MisdirectedWrite { .. }
            | FaultAction::CorruptRead => return Some(self.twist(ticket, sqe, hit)),
        }
        Some(Twist::None)
    }

    /// The data fault of `hit`, if the command is one that it can befall.
    fn twist(&self, ticket: &Ticket, sqe: &Sqe, hit: FaultHit) -> Twist {
        let Some(namespace) = self.namespaces.get(sqe.nsid.wrapping_sub(1) as usize) else {
            return Twist::None;
        };
        let bytes = u64::from(BlockRange::from_sqe(sqe).lbas().0) << namespace.lba_shift;
        match (NvmOpcode(ticket.opcode), hit.action) {
            (NvmOpcode::WRITE, FaultAction::TornWrite) => {
                let unit = namespace.tear_bytes();
                Twist::Torn { keep_bytes: hit.roll % bytes.div_ceil(unit) * unit }
            }
            (NvmOpcode::WRITE, FaultAction::MisdirectedWrite { lba_delta }) => {
                let delta = i128::from(lba_delta) << namespace.lba_shift;
                Twist::Misdirected { delta_bytes: i64::try_from(delta).unwrap_or(i64::MAX) }
            }
            (NvmOpcode::READ, FaultAction::CorruptRead) => Twist::Corrupt { seed: hit.roll },
            _ => Twist::None,
        }
    }

    /// Forgets a command: it will never complete, and its slot goes to others.
    fn abandon(&mut self, ticket: Ticket) {
        self.unreserve(ticket.sqid);
        if let Some(sq) = self.queues.sq(ticket.sqid) {
            sq.outstanding -= 1;
            sq.cids.remove(ticket.cid);
        }
    }

    /// Lets happen what a fault had in store for the device.
    pub(super) fn suffer(&mut self, now: Nanos) -> u32 {
        match self.misfortune.take() {
            None => return 0,
            Some(Misfortune::PowerLoss) => self.power_loss(now),
            Some(Misfortune::Gone) => self.unplug(),
        }
        1
    }
}

/// What the plan may look at.
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
