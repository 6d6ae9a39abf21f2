//! Format NVM (Base, "Format NVM command").

use nvme_driver::Nanos;
use nvme_spec::{admin::FormatNvm, ids::Nsid, sqe::Sqe, status::Status};

use super::super::{
    Controller,
    command::{Flow, Ticket, Wait},
    namespace::LBA_SHIFTS,
};
use crate::media::MediaKind;

impl Controller {
    pub(super) fn format_nvm(
        &mut self,
        now: Nanos,
        ticket: Ticket,
        sqe: &Sqe,
    ) -> Result<Flow, Status> {
        let command = FormatNvm::from_sqe(sqe);
        let targets = self.targets(sqe.nsid).ok_or(Status::INVALID_NAMESPACE)?;
        // SES: cryptographic erase needs FNA bit 2; larger values are reserved.
        if command.ses > 1 {
            return Err(Status::INVALID_FIELD);
        }
        // "Invalid Format": an unlisted format, metadata, or protection information.
        let shift = LBA_SHIFTS.get(usize::from(command.lbaf)).copied();
        let shift = shift.ok_or(Status::INVALID_FORMAT)?;
        let listed = self.namespaces[targets.clone()].iter().all(|ns| ns.can_format(shift));
        if !listed || command.mset != 0 || command.pi != 0 {
            return Err(Status::INVALID_FORMAT);
        }
        if self.namespaces[targets.clone()].iter().any(|namespace| namespace.formatting) {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        // Commands in progress on the namespace: "the Format NVM command may be aborted".
        let inside = |nsid: u32| targets.contains(&(nsid.wrapping_sub(1) as usize));
        let touched = self.commands.iter().any(|(_, other)| {
            let Ticket { sqid, nsid, .. } = other.ticket;
            sqid != 0 && (inside(nsid) || nsid == Nsid::ALL.0)
        });
        if touched {
            return Err(Status::COMMAND_SEQUENCE_ERROR);
        }
        let operations: Vec<_> = targets
            .clone()
            .map(|index| (index, MediaKind::Deallocate, 0, self.namespaces[index].bytes()))
            .collect();
        self.namespaces[targets].iter_mut().for_each(|namespace| namespace.formatting = true);
        let token = self.commands.next_token();
        let flow = self.run_operations(now, ticket, operations.into_iter());
        match (&flow, self.commands.get_mut(token)) {
            (Flow::Done(outcome), _) => {
                let shift = outcome.status.is_success().then_some(shift);
                self.formatted(ticket, shift);
            }
            (Flow::Pending, Some(command)) => {
                if let Wait::Media { format, .. } = &mut command.wait {
                    *format = Some(shift);
                }
            }
            (Flow::Pending, None) => {}
        }
        Ok(flow)
    }

    /// Finishes a format: with blocks of `1 << shift` bytes, or with an error.
    pub(in super::super) fn formatted(&mut self, ticket: Ticket, shift: Option<u8>) {
        let Some(targets) = self.targets(ticket.nsid) else { return };
        for index in targets {
            let namespace = &mut self.namespaces[index];
            namespace.formatting = false;
            let Some(shift) = shift.filter(|shift| *shift != namespace.lba_shift) else { continue };
            namespace.format(shift);
            self.raise_namespace_changed(index as u32 + 1);
        }
    }

    /// Returns the indices of the namespaces that `nsid` selects.
    fn targets(&self, nsid: u32) -> Option<std::ops::Range<usize>> {
        if nsid == Nsid::ALL.0 {
            return Some(0..self.namespaces.len());
        }
        let index = nsid.wrapping_sub(1) as usize;
        (index < self.namespaces.len()).then(|| index..index + 1)
    }
}
