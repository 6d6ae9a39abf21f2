//! Asynchronous events (Base, "Asynchronous Event Request command").

use std::collections::VecDeque;

use nvme_spec::{
    admin::{AsyncEvent, AsyncEventKind, LogPageId},
    status::Status,
};

use super::{command::Ticket, identify::AERL_Z};

/// Events kept while no request is outstanding; more are dropped, but the log pages report them.
const PENDING_MAX: usize = 16;

/// Error events unrelated to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ErrorEvent {
    InvalidDoorbellRegister,
    InvalidDoorbellValue,
}

/// Outstanding requests and pending events.
#[derive(Debug, Default)]
pub(super) struct Events {
    requests: VecDeque<Ticket>,
    pending: VecDeque<AsyncEvent>,
    /// Bit set of types reported and not yet cleared by reading their log page.
    masked: u8,
}

impl Events {
    /// Returns whether an event can be reported now.
    #[inline]
    pub(super) fn waiting(&self) -> bool {
        !self.requests.is_empty() && self.reportable().is_some()
    }

    fn reportable(&self) -> Option<usize> {
        self.pending.iter().position(|event| self.masked & 1 << event.kind.0 == 0)
    }

    /// Queues an event; its log page has the details.
    pub(super) fn raise(&mut self, kind: AsyncEventKind, info: u8, log_page: LogPageId) {
        let event = AsyncEvent { kind, info, log_page };
        if self.pending.len() < PENDING_MAX && !self.pending.contains(&event) {
            self.pending.push_back(event);
        }
    }

    /// Clears the events of a log page that was read, and unmasks their types.
    pub(super) fn acknowledge(&mut self, page: LogPageId) {
        let kind = match page {
            LogPageId::ERROR => AsyncEventKind::ERROR,
            LogPageId::SMART => AsyncEventKind::SMART,
            LogPageId::CHANGED_NAMESPACES => AsyncEventKind::NOTICE,
            _ => return,
        };
        self.masked &= !(1 << kind.0);
        self.pending.retain(|event| event.log_page != page);
    }

    /// Holds a request until there is an event.
    pub(super) fn hold(&mut self, ticket: Ticket) -> Result<(), Status> {
        if self.requests.len() > usize::from(AERL_Z) {
            return Err(Status::AER_LIMIT_EXCEEDED);
        }
        self.requests.push_back(ticket);
        Ok(())
    }

    /// Takes a request and the event to complete it with: one per type until its log page is read.
    pub(super) fn take_report(&mut self) -> Option<(Ticket, AsyncEvent)> {
        let place = self.reportable()?;
        let ticket = self.requests.pop_front()?;
        let event = self.pending.remove(place)?;
        self.masked |= 1 << event.kind.0;
        Some((ticket, event))
    }

    /// Returns whether the request `cid` is outstanding.
    pub(super) fn holds(&self, cid: u16) -> bool {
        self.requests.iter().any(|ticket| ticket.cid == cid)
    }

    /// Takes the outstanding request `cid`, which an Abort ends.
    pub(super) fn withdraw(&mut self, cid: u16) -> Option<Ticket> {
        let place = self.requests.iter().position(|ticket| ticket.cid == cid)?;
        self.requests.remove(place)
    }

    /// Drops all requests and events, for a reset.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
