//! Commands of the admin queue (Base, "Admin Command Set").

use nvme_spec::{
    admin::{Abort, AdminOpcode, AsyncEventKind, FormatNvm, GetLogPage, LogPageId},
    ids::Nsid,
    log::{CriticalWarning, FirmwareSlotLog, SanitizeLog},
    sqe::Psdt,
    status::Status,
};
use zerocopy::IntoBytes;

use super::{
    Controller,
    command::{Flow, Outcome, Ticket, Wait},
    identify::ACL_Z,
    logs::{self, commands_page, put, supported_pages},
    namespace::LBA_SHIFTS,
    transfer::Request,
};
use crate::{domain::DmaAccess, media::MediaKind};

impl Controller {
    pub(super) fn run_admin(&mut self, request: &Request<'_>) -> Flow {
        let sqe = request.sqe;
        // "Common Command Format": with a memory-based transport, admin commands use PRPs.
        if sqe.fuse() != 0 || sqe.psdt() != Psdt::PRP {
            return Err(Status::INVALID_FIELD).into();
        }
        if let Some(answer) = self.storage.relay(request) {
            return answer.into();
        }
        let done = |()| Flow::Done(Outcome::OK);
        let dword = |dw0| Flow::Done(Outcome::dw0(dw0));
        let (sqs, cqs) = (self.features.submission_queues(), self.features.completion_queues());
        match AdminOpcode(sqe.opcode) {
            AdminOpcode::IDENTIFY => self.identify(request).map(done),
            AdminOpcode::CREATE_IO_CQ => {
                self.queues.create_cq(request, &self.registers, cqs).map(done)
            }
            AdminOpcode::CREATE_IO_SQ => {
                self.queues.create_sq(request, &self.registers, sqs, cqs).map(done)
            }
            AdminOpcode::DELETE_IO_CQ => self.queues.delete_cq(sqe).map(done),
            AdminOpcode::DELETE_IO_SQ => self.delete_io_sq(request),
            AdminOpcode::SET_FEATURES => self.set_features(request).map(dword),
            AdminOpcode::GET_FEATURES => {
                self.features.get(sqe, self.storage.namespaces.len()).map(dword)
            }
            AdminOpcode::ABORT => self.abort(request).map(dword),
            AdminOpcode::ASYNC_EVENT_REQUEST => self.async_event_request(request.ticket),
            AdminOpcode::GET_LOG_PAGE => self.get_log_page(request).map(done),
            AdminOpcode::FORMAT_NVM => self.format_nvm(request),
            // "Keep Alive": KAS is 0, and there is no timer to restart.
            AdminOpcode::KEEP_ALIVE => Ok(Flow::Done(Outcome::OK)),
            _ => Err(Status::INVALID_OPCODE),
        }
        .into()
    }

    fn identify(&self, request: &Request<'_>) -> Result<(), Status> {
        let faults = &self.faults.plan().identify;
        let page = self.identity.page(request.sqe, &self.storage, &self.rules, faults)?;
        request.deliver(&page, page.len() as u64)
    }

    fn set_features(&mut self, request: &Request<'_>) -> Result<u32, Status> {
        let alarm = self.features.temperature_alarm();
        let (namespaces, queues) = (self.storage.namespaces.len(), self.queues.any_io());
        let dw0 = self.features.set(request.sqe, namespaces, queues)?;
        // The composite temperature crossed a threshold.
        let crossed = !alarm && self.features.temperature_alarm();
        if crossed && self.features.wants_temperature_events() {
            self.logs.events.raise(AsyncEventKind::SMART, 1, LogPageId::SMART);
        }
        Ok(dw0)
    }

    fn get_log_page(&mut self, request: &Request<'_>) -> Result<(), Status> {
        let sqe = request.sqe;
        let command = GetLogPage::from_sqe(sqe);
        // LPA bit 0 is 0: no page is per namespace.
        if sqe.nsid != 0 && sqe.nsid() != Nsid::ALL {
            return Err(Status::INVALID_FIELD);
        }
        let mut page = [0u8; logs::PAGE];
        let placement = self.storage.placement.is_some();
        let len = match command.lid {
            LogPageId::SUPPORTED_LOG_PAGES => supported_pages(&mut page, placement),
            LogPageId::ERROR => self.logs.error_page(&mut page),
            LogPageId::SMART => {
                let alarm = self.features.temperature_alarm();
                let smart = self.logs.smart(request.now, alarm, self.storage.media_errors);
                put(&mut page, smart.as_bytes())
            }
            LogPageId::FIRMWARE_SLOT => {
                let mut log = FirmwareSlotLog { active: 1, ..FirmwareSlotLog::default() };
                log.revisions[0] = self.identity.firmware();
                put(&mut page, log.as_bytes())
            }
            LogPageId::CHANGED_NAMESPACES => self.logs.changed_page(&mut page),
            LogPageId::SANITIZE_STATUS => {
                let sstat = self.faults.plan().identify.sanitize;
                let sstat = sstat.ok_or(Status::INVALID_LOG_PAGE)?;
                // Half of it, for one in progress.
                let log = SanitizeLog { sprog: 0x8000, sstat, scdw10: 0 };
                put(&mut page, log.as_bytes())
            }
            LogPageId::COMMANDS_SUPPORTED => commands_page(&mut page, placement),
            LogPageId::FDP_CONFIGURATIONS => self.storage.fdp_page(&mut page, command.lsi)?,
            _ => return Err(Status::INVALID_LOG_PAGE),
        };
        // "Log Page Offset": a multiple of a dword, inside the page.
        if command.offset & 3 != 0 || command.offset > len as u64 {
            return Err(Status::INVALID_FIELD);
        }
        let bytes = (u64::from(command.numd_z) + 1) * 4;
        if bytes > request.rules.bytes_max {
            return Err(Status::INVALID_FIELD);
        }
        request.deliver(&page[command.offset as usize..len], bytes)?;
        if !command.rae {
            self.logs.events.acknowledge(command.lid);
            if command.lid == LogPageId::CHANGED_NAMESPACES {
                self.logs.clear_changed();
            }
        }
        Ok(())
    }

    /// "Delete I/O Submission Queue": aborts commands that have not begun. Completes after those
    /// that have begun, so that no DMA for the queue happens afterwards.
    fn delete_io_sq(&mut self, request: &Request<'_>) -> Result<Flow, Status> {
        let sqid = self.queues.begin_deletion(request.sqe)?;
        while let Some(ticket) = self.commands.take_delayed(sqid, None) {
            self.complete(request.dma, ticket, Outcome::failed(Status::ABORTED_SQ_DELETED));
        }
        Ok(Flow::Wait(Wait::Deletion { sqid }))
    }

    /// Completes deletions whose queues have no outstanding commands left.
    pub(super) fn finish_deletions(&mut self, dma: &DmaAccess<'_>) -> u32 {
        let mut count = 0;
        loop {
            let queues = &mut self.queues;
            let ended = |sqid| queues.sq(sqid).is_some_and(|sq| sq.outstanding == 0);
            let Some((ticket, sqid)) = self.commands.take_deletion(ended) else { return count };
            self.queues.remove_sq(sqid);
            self.complete(dma, ticket, Outcome::OK);
            count += 1;
        }
    }

    /// Aborts a command that is held and has not begun ("Abort command"). A command in progress on
    /// a medium cannot be stopped; one that is not found has completed or is still in its queue.
    fn abort(&mut self, request: &Request<'_>) -> Result<u32, Status> {
        // "Abort Command Limit Exceeded": more than ACL, which takes delayed commands.
        let waiting = self.commands.tickets().filter(|ticket| ticket.is_admin(AdminOpcode::ABORT));
        if waiting.count() > usize::from(ACL_Z) {
            return Err(Status::ABORT_LIMIT_EXCEEDED);
        }
        let Abort { sqid, cid } = Abort::from_sqe(request.sqe);
        let held = match self.commands.take_delayed(sqid.0, Some(cid)) {
            None if sqid.0 == 0 => self.take_event_request(cid),
            held => held,
        };
        if let Some(ticket) = held {
            self.complete(request.dma, ticket, Outcome::failed(Status::ABORTED_BY_REQUEST));
        }
        // Completion dword 0, bit 0: 1 = the command was not aborted.
        Ok(u32::from(held.is_none()))
    }

    fn async_event_request(&mut self, ticket: Ticket) -> Result<Flow, Status> {
        self.logs.events.hold(ticket)?;
        // It may wait forever, so it must not hold a completion slot.
        self.queues.unreserve(ticket.sqid);
        Ok(Flow::Held)
    }

    /// Takes the outstanding event request `cid`, if there is a completion slot for it.
    fn take_event_request(&mut self, cid: u16) -> Option<Ticket> {
        let ready = self.logs.events.holds(cid) && self.queues.reserve(0, &mut self.logs);
        if ready { self.logs.events.withdraw(cid) } else { None }
    }

    /// Completes requests with events, one per type until its log page is read.
    pub(super) fn report_events(&mut self, dma: &DmaAccess<'_>) -> u32 {
        let mut count = 0;
        while self.logs.events.waiting() && self.queues.reserve(0, &mut self.logs) {
            let Some((ticket, event)) = self.logs.events.take_report() else {
                self.queues.unreserve(0);
                break;
            };
            self.complete(dma, ticket, Outcome::dw0(event.to_dword()));
            count += 1;
        }
        count
    }

    /// Sets the SMART critical warnings.
    pub fn warn(&mut self, warnings: CriticalWarning) {
        self.logs.warn(warnings);
    }

    /// Raises an event for changed identify data of `nsid`.
    pub fn raise_namespace_changed(&mut self, nsid: u32) {
        self.logs.namespace_changed(nsid);
        if self.features.wants_namespace_notices() {
            let page = LogPageId::CHANGED_NAMESPACES;
            self.logs.events.raise(AsyncEventKind::NOTICE, 0, page);
        }
    }

    fn format_nvm(&mut self, request: &Request<'_>) -> Result<Flow, Status> {
        let nsid = request.sqe.nsid;
        let command = FormatNvm::from_sqe(request.sqe);
        let targets = self.storage.targets(nsid)?;
        // SES: cryptographic erase needs FNA bit 2; larger values are reserved.
        if command.ses > 1 {
            return Err(Status::INVALID_FIELD);
        }
        // "Invalid Format": an unlisted format, metadata, or protection information.
        let shift = LBA_SHIFTS.get(usize::from(command.lbaf)).copied();
        let shift = shift.ok_or(Status::INVALID_FORMAT)?;
        let namespaces = &mut self.storage.namespaces[targets.clone()];
        let listed = namespaces.iter().all(|namespace| namespace.can_format(shift));
        if !listed || command.mset != 0 || command.pi != 0 {
            return Err(Status::INVALID_FORMAT);
        }
        if namespaces.iter().any(|namespace| namespace.formatting) {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        // Commands in progress on the namespace: "the Format NVM command may be aborted".
        let inside = |nsid: u32| targets.contains(&(nsid.wrapping_sub(1) as usize));
        let touched = self
            .commands
            .tickets()
            .any(|&Ticket { sqid, nsid, .. }| sqid != 0 && (inside(nsid) || nsid == Nsid::ALL.0));
        if touched {
            return Err(Status::COMMAND_SEQUENCE_ERROR);
        }
        namespaces.iter_mut().for_each(|namespace| namespace.formatting = true);
        let bytes: Vec<u64> = namespaces.iter().map(|namespace| namespace.bytes()).collect();
        let operations = targets.zip(bytes);
        let operations = operations.map(|(at, bytes)| (at, MediaKind::Deallocate, 0, bytes));
        let mut flow = self.storage.start(request, operations);
        match &mut flow {
            Flow::Done(outcome) => {
                self.formatted(nsid, outcome.status.is_success().then_some(shift));
            }
            Flow::Wait(Wait::Media(operations)) => operations.format = Some(shift),
            _ => {}
        }
        Ok(flow)
    }

    /// Finishes a format: with blocks of `1 << shift` bytes, or with an error.
    pub(super) fn formatted(&mut self, nsid: u32, shift: Option<u8>) {
        let Ok(targets) = self.storage.targets(nsid) else { return };
        for index in targets {
            let namespace = &mut self.storage.namespaces[index];
            namespace.formatting = false;
            let Some(shift) = shift.filter(|shift| *shift != namespace.lba_shift) else { continue };
            namespace.format(shift);
            self.raise_namespace_changed(index as u32 + 1);
        }
    }
}
