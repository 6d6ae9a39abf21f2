//! Abort (Base, "Abort command").

use nvme_spec::{
    admin::{Abort, AdminOpcode},
    sqe::Sqe,
    status::Status,
};

use super::{
    super::{
        Controller,
        command::{Flow, Outcome, Wait},
        complete::definite,
    },
    identify::ACL_Z,
};
use crate::domain::DmaAccess;

impl Controller {
    /// Aborts a command that is held and has not begun. A command in progress on a medium cannot be
    /// stopped; one that is not found has completed or is still in its queue.
    pub(super) fn abort(&mut self, dma: &DmaAccess<'_>, sqe: &Sqe) -> Result<Flow, Status> {
        // "Abort Command Limit Exceeded": more than ACL, which takes delayed commands.
        let waiting = |(_, command): &(u64, &_)| Self::is_admin(command, AdminOpcode::ABORT);
        let tickets = self.commands.iter().map(|(token, command)| (token, &command.ticket));
        if tickets.filter(waiting).count() > usize::from(ACL_Z) {
            return Err(Status::ABORT_LIMIT_EXCEEDED);
        }
        let Abort { sqid, cid } = Abort::from_sqe(sqe);
        let held = self.commands.iter().find(|(_, command)| {
            let ticket = &command.ticket;
            ticket.sqid == sqid.0 && ticket.cid == cid && matches!(command.wait, Wait::Delay { .. })
        });
        let aborted = match held.map(|(token, _)| token) {
            Some(token) => self.end_held(dma, token, Status::ABORTED_BY_REQUEST),
            None => sqid.0 == 0 && self.abort_event_request(dma, cid),
        };
        // Completion dword 0, bit 0: 1 = the command was not aborted.
        Ok(Flow::Done(Outcome::dw0(u32::from(!aborted))))
    }

    /// Completes a delayed command without executing it.
    pub(super) fn end_held(&mut self, dma: &DmaAccess<'_>, token: u64, status: Status) -> bool {
        let Some(command) = self.commands.remove(token) else { return false };
        self.delayed.retain(|(_, held)| *held != token);
        self.complete(dma, command.ticket, Outcome::failed(definite(status)));
        true
    }
}
