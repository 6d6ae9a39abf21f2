//! Asynchronous events (Base, "Asynchronous Event Request command").

use std::collections::VecDeque;

use nvme_spec::{
    admin::{AsyncEvent, AsyncEventKind, LogPageId},
    log::CriticalWarning,
    status::Status,
};

use super::{
    super::{
        Controller,
        command::{Flow, Outcome, Ticket},
    },
    identify::AERL_Z,
};
use crate::domain::DmaAccess;

/// Events kept while no request is outstanding; more are dropped, but the log pages report them.
const PENDING_MAX: usize = 16;

/// Error events unrelated to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum ErrorEvent {
    InvalidDoorbellRegister,
    InvalidDoorbellValue,
}

/// Outstanding requests and pending events.
#[derive(Debug, Default)]
pub(in super::super) struct Events {
    requests: VecDeque<Ticket>,
    pending: VecDeque<AsyncEvent>,
    /// Bit set of types reported and not yet cleared by reading their log page.
    masked: u8,
}

impl Events {
    /// Returns whether an event can be reported now.
    #[inline]
    pub(in super::super) fn waiting(&self) -> bool {
        !self.requests.is_empty() && self.reportable().is_some()
    }

    fn reportable(&self) -> Option<usize> {
        self.pending.iter().position(|event| self.masked & 1 << event.kind.0 == 0)
    }

    fn raise(&mut self, event: AsyncEvent) {
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

    /// Drops all requests and events, for a reset.
    pub(in super::super) fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Controller {
    pub(super) fn async_event_request(&mut self, ticket: Ticket) -> Result<Flow, Status> {
        if self.events.requests.len() > usize::from(AERL_Z) {
            return Err(Status::AER_LIMIT_EXCEEDED);
        }
        // It may wait forever, so it must not hold a completion slot.
        self.unreserve(ticket.sqid);
        self.events.requests.push_back(ticket);
        Ok(Flow::Pending)
    }

    /// Completes requests with events, one per type until its log page is read.
    pub(in super::super) fn report_events(&mut self, dma: &DmaAccess<'_>) -> u32 {
        let mut count = 0;
        while self.events.waiting() && self.reserve(0) {
            let event = self.events.reportable().and_then(|at| self.events.pending.remove(at));
            let (Some(event), Some(ticket)) = (event, self.events.requests.pop_front()) else {
                self.unreserve(0);
                break;
            };
            self.events.masked |= 1 << event.kind.0;
            self.complete(dma, ticket, Outcome::dw0(event.to_dword()));
            count += 1;
        }
        count
    }

    /// Aborts the outstanding request `cid`.
    pub(super) fn abort_event_request(&mut self, dma: &DmaAccess<'_>, cid: u16) -> bool {
        let place = self.events.requests.iter().position(|ticket| ticket.cid == cid);
        let Some(place) = place else { return false };
        if !self.reserve(0) {
            return false;
        }
        let Some(ticket) = self.events.requests.remove(place) else { return false };
        self.complete(dma, ticket, Outcome::failed(Status::ABORTED_BY_REQUEST));
        true
    }

    /// Raises an error event unrelated to a command; these are always reported.
    #[cold]
    pub(in super::super) fn raise_error(&mut self, event: ErrorEvent) {
        self.logs.doorbell_failed();
        let kind = AsyncEventKind::ERROR;
        self.events.raise(AsyncEvent { kind, info: event as u8, log_page: LogPageId::ERROR });
    }

    /// Raises an event for a composite temperature that crossed a threshold.
    pub(super) fn raise_temperature(&mut self) {
        if self.features.wants_temperature_events() {
            let kind = AsyncEventKind::SMART;
            self.events.raise(AsyncEvent { kind, info: 1, log_page: LogPageId::SMART });
        }
    }

    /// Sets the SMART critical warnings.
    pub fn warn(&mut self, warnings: CriticalWarning) {
        self.logs.warnings = warnings;
        let kind = AsyncEventKind::SMART;
        self.events.raise(AsyncEvent { kind, info: 0, log_page: LogPageId::SMART });
    }

    /// Raises an event for changed identify data of `nsid`.
    pub fn raise_namespace_changed(&mut self, nsid: u32) {
        self.logs.namespace_changed(nsid);
        if self.features.wants_namespace_notices() {
            let (kind, log_page) = (AsyncEventKind::NOTICE, LogPageId::CHANGED_NAMESPACES);
            self.events.raise(AsyncEvent { kind, info: 0, log_page });
        }
    }
}
