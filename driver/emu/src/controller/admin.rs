//! Commands of the admin queue (Base, "Admin Command Set").

mod abort;
mod events;
mod features;
mod format;
mod identify;
mod logs;
mod queues;

use nvme_driver::Nanos;
use nvme_spec::{
    admin::AdminOpcode,
    nvm::Direction,
    sqe::{Psdt, Sqe},
    status::Status,
};

pub(super) use self::{
    events::{ErrorEvent, Events},
    features::Features,
    identify::Identity,
    logs::Logs,
};
use super::{
    Controller,
    command::{Flow, Outcome, Ticket},
    transfer::{self, Deliver},
};
use crate::domain::DmaAccess;

impl Controller {
    pub(super) fn run_admin(
        &mut self,
        dma: &DmaAccess<'_>,
        now: Nanos,
        ticket: Ticket,
        sqe: &Sqe,
    ) -> Flow {
        // "Common Command Format": with a memory-based transport, admin commands use PRPs.
        if sqe.fuse() != 0 || sqe.psdt() != Psdt::PRP {
            return Err(Status::INVALID_FIELD).into();
        }
        match AdminOpcode(sqe.opcode) {
            AdminOpcode::IDENTIFY => self.identify(dma, sqe),
            AdminOpcode::CREATE_IO_CQ => self.create_io_cq(dma, sqe),
            AdminOpcode::CREATE_IO_SQ => self.create_io_sq(dma, sqe),
            AdminOpcode::DELETE_IO_CQ => self.delete_io_cq(sqe),
            AdminOpcode::DELETE_IO_SQ => self.delete_io_sq(dma, ticket, sqe),
            AdminOpcode::SET_FEATURES => self.set_features(sqe),
            AdminOpcode::GET_FEATURES => self.get_features(sqe),
            AdminOpcode::ABORT => self.abort(dma, sqe),
            AdminOpcode::ASYNC_EVENT_REQUEST => self.async_event_request(ticket),
            AdminOpcode::GET_LOG_PAGE => self.get_log_page(dma, now, sqe),
            AdminOpcode::FORMAT_NVM => self.format_nvm(now, ticket, sqe),
            // "Keep Alive": KAS is 0, and there is no timer to restart.
            AdminOpcode::KEEP_ALIVE => Ok(Flow::Done(Outcome::OK)),
            _ => Err(Status::INVALID_OPCODE),
        }
        .into()
    }

    /// Copies `from` to the host, followed by zeroes up to `len` bytes.
    pub(super) fn deliver(
        &self,
        dma: &DmaAccess<'_>,
        sqe: &Sqe,
        from: &[u8],
        len: u64,
    ) -> Result<Flow, Status> {
        let mut deliver = Deliver { dma, from };
        transfer::walk(dma, &self.rules, sqe, Direction::Read, len, &mut deliver)?;
        Ok(Flow::Done(Outcome::OK))
    }
}
