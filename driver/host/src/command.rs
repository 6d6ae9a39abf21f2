//! Admin commands: submission, retries, recovery from timeouts; identify, logs, features, events,
//! format, abort.

use nvme_spec::{
    admin::{
        AdminOpcode, AsyncEvent, AsyncEventKind, Cns, FeatureId, FormatNvm, GetFeatures,
        GetLogPage, Identify, LogPageId, SetFeatures,
    },
    identify::{ActiveNamespaces, CommandSet, IdentifyNamespace, NamespaceDescriptors, Oacs},
    ids::{Cid, Nsid, QueueId},
    log::{ErrorLogEntry, FirmwareSlotLog, SanitizeLog, SanitizeState, SmartLog},
    reg::Version,
    sqe::Sqe,
};
use zerocopy::FromBytes;

use crate::{
    admin::{AdminFault, DATA_BYTES, abort_sqe},
    clock::{Nanos, wait_until},
    controller::Controller,
    error::{CommandId, Error, FailCause, TimeoutOutcome},
    event::ControllerEvent,
    namespace::{NamespaceError, NamespaceInfo, Namespaces},
    queue::Completion,
    remark::Remark,
    state::State,
    wait::{health, retry_delay},
};

/// Most namespaces identified; further ones are ignored.
const NAMESPACES_MAX: usize = 4096;

/// Asynchronous event configuration (feature 0Bh): all SMART warnings, and two notices of OAES:
/// changed namespaces (bit 8) and firmware activation (bit 9).
const EVENTS_SMART: u32 = 0x1F;
const EVENTS_NOTICES: u32 = 1 << 8 | 1 << 9;
/// Notice information values.
const NOTICE_NAMESPACES: u8 = 0;
const NOTICE_FIRMWARE: u8 = 1;
/// Autonomous Power State Transition Enable, in the value of its feature.
const APSTE: u32 = 1;

impl Controller {
    /// Sends an admin command and waits for it. Retries it if the status allows.
    pub(crate) fn admin_command(
        &mut self,
        what: &'static str,
        sqe: Sqe,
    ) -> Result<Completion, Error> {
        self.admin_within(what, sqe, self.options.admin_timeout)
    }

    fn admin_within(
        &mut self,
        what: &'static str,
        sqe: Sqe,
        timeout: Nanos,
    ) -> Result<Completion, Error> {
        for attempt in 0.. {
            let error = match self.admin_once(what, &sqe, timeout) {
                Err(error @ Error::Command { .. }) => error,
                result => return result,
            };
            let status = error.status().unwrap_or_default();
            let Some(delay) = retry_delay(status, self.info.crdt, attempt) else {
                return Err(error);
            };
            tracing::debug!(ctrl = %self.port.id, what, %status, attempt, "sent again");
            wait_until(&*self.port.clock, self.port.clock.now() + delay, || false);
        }
        unreachable!("the number of attempts is limited")
    }

    /// Sends an admin command once. Misbehavior of the controller moves it to Failed.
    fn admin_once(
        &mut self,
        what: &'static str,
        sqe: &Sqe,
        timeout: Nanos,
    ) -> Result<Completion, Error> {
        self.usable()?;
        let env = self.port.env(self.info.pause_max);
        let mut done = self.admin.execute(env, sqe, timeout);
        if let Err(AdminFault::Timeout(cid)) = done {
            tracing::warn!(ctrl = %self.port.id, what, cid = cid.0, "not answered in time");
            // During set-up there is no recovery here: set-up itself fails.
            if self.state == State::Ready {
                done = self.admin.end_late(&self.port, env, &self.options, sqe, cid);
            }
        }
        let (ctrl, nsid, qid) = (self.port.id.clone(), sqe.nsid(), QueueId::ADMIN);
        let id = |cid| Box::new(CommandId { ctrl, what, nsid, qid, cid, range: None });
        let late = |command, outcome| Error::Timeout { command, waited: timeout, outcome };
        Err(match done {
            Ok(completion) if completion.status.is_success() => return Ok(completion),
            Ok(Completion { cid, status, .. }) => Error::Command { command: id(cid), status },
            Err(AdminFault::Dead(dead)) => self.dead(dead),
            Err(AdminFault::Device(source)) => self.misbehaved(source),
            Err(AdminFault::Ended(cid, outcome)) => late(id(cid), outcome),
            Err(AdminFault::Timeout(cid)) => late(id(cid), self.reset_late(what)),
            Err(AdminFault::Full) => late(id(Cid(0xFFFF)), self.reset_late(what)),
        })
    }

    /// Resets a ready controller because the admin command `what` is late. During set-up, only
    /// reports the failure.
    fn reset_late(&mut self, what: &'static str) -> TimeoutOutcome {
        if self.state == State::Ready {
            let cause = FailCause::AdminTimeout { what };
            tracing::error!(ctrl = %self.port.id, %cause, "resetting the controller");
            if self.reset_controller().is_ok() {
                return TimeoutOutcome::ControllerReset;
            }
            self.fail(cause);
        }
        TimeoutOutcome::ControllerFailed
    }

    /// Runs an admin command that returns at most one page of data.
    pub(crate) fn admin_read(
        &mut self,
        what: &'static str,
        sqe: Sqe,
        into: &mut [u8],
    ) -> Result<(), Error> {
        let sqe = self.admin.with_data(sqe, &[]).map_err(|source| self.port.dma(source))?;
        self.admin_command(what, sqe)?;
        self.admin.read_data(into).map_err(|source| self.port.dma(source))
    }

    /// Returns an Identify data structure in its wire format.
    pub(crate) fn identify<T: FromBytes>(&mut self, cns: Cns, nsid: Nsid) -> Result<T, Error> {
        let mut sqe = Sqe::new(AdminOpcode::IDENTIFY.0, Cid(0), nsid);
        Identify { cns, ..Default::default() }.write_to(&mut sqe);
        let mut bytes = [0u8; DATA_BYTES];
        self.admin_read("identify", sqe, &mut bytes)?;
        let parsed = T::read_from_prefix(&bytes).map(|(value, _)| value);
        parsed.map_err(|_| self.port.implausible("identify data is too short".into()))
    }

    /// Sets a feature and returns completion dword 0.
    pub fn set_feature(&mut self, fid: FeatureId, nsid: Nsid, value: u32) -> Result<u32, Error> {
        let mut sqe = Sqe::new(AdminOpcode::SET_FEATURES.0, Cid(0), nsid);
        SetFeatures { fid, save: false, value }.write_to(&mut sqe);
        Ok(self.admin_command("set features", sqe)?.result)
    }

    /// Announces that the host honors retry delays (ACRE); a controller reports none before that
    /// (Base, "Host Behavior Support").
    pub(crate) fn enable_retry_delays(&mut self) -> Result<(), Error> {
        if self.info.crdt == [0; 3] {
            return Ok(());
        }
        let sqe = Sqe::new(AdminOpcode::SET_FEATURES.0, Cid(0), Nsid(0));
        let sqe = self.admin.with_data(sqe, &[1]);
        let mut sqe = sqe.map_err(|source| self.port.dma(source))?;
        let fid = FeatureId::HOST_BEHAVIOR_SUPPORT;
        SetFeatures { fid, ..Default::default() }.write_to(&mut sqe);
        match self.admin_command("set features", sqe) {
            // Not worth failing for: the controller then reports no delays.
            Ok(_) | Err(Error::Command { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns the Identify Namespace data structure.
    pub fn identify_namespace(&mut self, nsid: Nsid) -> Result<IdentifyNamespace, Error> {
        self.identify(Cns::NAMESPACE, nsid)
    }

    /// Returns the SMART / Health Information of the whole controller.
    pub fn smart_log(&mut self) -> Result<SmartLog, Error> {
        self.log_page(LogPageId::SMART, Nsid::ALL)
    }

    /// Returns the Firmware Slot Information log.
    pub fn firmware_slot_log(&mut self) -> Result<FirmwareSlotLog, Error> {
        self.log_page(LogPageId::FIRMWARE_SLOT, Nsid::ALL)
    }

    /// Returns the valid entries of the error log, newest first; at most 64 (one page).
    pub fn error_log(&mut self) -> Result<Vec<ErrorLogEntry>, Error> {
        const ENTRY: usize = size_of::<ErrorLogEntry>();
        let entries = (self.info.error_log_entries as usize).min(DATA_BYTES / ENTRY);
        let mut bytes = vec![0u8; entries * ENTRY];
        self.log_bytes(LogPageId::ERROR, Nsid::ALL, 0, &mut bytes)?;
        let entries =
            bytes.chunks_exact(ENTRY).filter_map(|b| ErrorLogEntry::read_from_bytes(b).ok());
        Ok(entries.filter(|entry| entry.error_count != 0).collect())
    }

    fn log_page<T: FromBytes>(&mut self, lid: LogPageId, nsid: Nsid) -> Result<T, Error> {
        let mut bytes = [0u8; DATA_BYTES];
        let len = size_of::<T>().min(DATA_BYTES);
        self.log_bytes(lid, nsid, 0, &mut bytes[..len])?;
        T::read_from_bytes(&bytes[..len])
            .map_err(|_| self.port.implausible(format!("log page {lid} has a wrong size")))
    }

    /// Reads `into.len()` bytes (a multiple of 4, at most 4096) of a log page from `offset` on,
    /// which clears the asynchronous event that refers to the page.
    ///
    /// # Errors
    /// Returns [`Error::Range`] for an unsupported length.
    pub fn log_bytes(
        &mut self,
        lid: LogPageId,
        nsid: Nsid,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), Error> {
        let len = into.len();
        if len == 0 || len > DATA_BYTES || !len.is_multiple_of(4) {
            let what = format!("a log read of {len} bytes; 4 to {DATA_BYTES}, in dwords, work");
            return Err(self.port.range(nsid, what));
        }
        let mut sqe = Sqe::new(AdminOpcode::GET_LOG_PAGE.0, Cid(0), nsid);
        let numd_z = (len / 4 - 1) as u32;
        GetLogPage { lid, numd_z, offset, ..Default::default() }.write_to(&mut sqe);
        self.admin_read("get log page", sqe, into)
    }

    /// Formats a namespace, which destroys all its data, and identifies the namespaces again.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] without Format NVM, and [`Error::QueueState`] while a queue
    /// is granted, because the grant holds the old LBA size.
    pub fn format(&mut self, nsid: Nsid, format: FormatNvm) -> Result<(), Error> {
        if !self.info.admin_commands.contains(Oacs::FORMAT) {
            return Err(self.port.unsupported("Format NVM", "see OACS in identify controller"));
        }
        self.refuse_granted("is granted; reclaim() it before formatting")?;
        let mut sqe = Sqe::new(AdminOpcode::FORMAT_NVM.0, Cid(0), nsid);
        format.write_to(&mut sqe);
        self.admin_within("format", sqe, self.options.format_timeout)?;
        self.rescan()
    }

    /// Asks the controller to abort a command and returns whether it reports success. The command
    /// itself completes on its own queue either way.
    pub fn abort(&mut self, sqid: QueueId, cid: Cid) -> Result<bool, Error> {
        let completion = self.admin_command("abort", abort_sqe(sqid, cid))?;
        Ok(completion.result & 1 == 0)
    }

    /// Same as [`Controller::abort`] without waiting for the answer. Returns whether the request
    /// was sent: it is not while too many are unanswered.
    pub fn begin_abort(&mut self, sqid: QueueId, cid: Cid) -> bool {
        let queue = self.admin.queue.as_mut().filter(|_| self.state == State::Ready);
        queue.is_some_and(|queue| queue.send(&abort_sqe(sqid, cid)))
    }

    pub(crate) fn enable_events(&mut self) -> Result<(), Error> {
        let value = EVENTS_SMART | (self.info.oaes & EVENTS_NOTICES);
        match self.set_feature(FeatureId::ASYNC_EVENT_CONFIG, Nsid(0), value) {
            Ok(_) => {}
            // Not worth failing for: the controller then uses its default configuration.
            Err(Error::Command { status, .. }) => {
                tracing::info!(ctrl = %self.port.id, %status, "events cannot be configured");
            }
            Err(error) => return Err(error),
        }
        if let Some(queue) = self.admin.queue.as_mut() {
            queue.set_event_limit(self.info.event_limit);
            queue.request_events();
        }
        Ok(())
    }

    /// Checks that the controller is alive and returns its events since the last call. Without
    /// events this costs one register read. It waits only for the log pages that clear the reported
    /// events.
    ///
    /// # Errors
    /// Returns [`Error::Gone`] (removed, link lost: registers read as all ones), [`Error::Fatal`]
    /// (CSTS.CFS) or [`Error::Misbehaved`] if the controller died, which moves it to Failed;
    /// [`Error::Failed`] if it had failed before; and the errors of any admin command.
    pub fn poll_events(&mut self) -> Result<Vec<ControllerEvent>, Error> {
        self.usable()?;
        let health = health(&*self.port.bus);
        // Before the register is judged: the platform takes the link down to recover from the
        // error, and brings it back.
        if self.port.bus.pcie_error() {
            self.seen.pcie_error = true;
            return Ok(vec![ControllerEvent::PcieError]);
        }
        let paused = match health {
            Ok(csts) => csts.pp() == 1,
            Err(dead) => return Err(self.dead(dead)),
        };
        let polled = self.admin.queue.as_mut().map_or(Ok(()), |queue| queue.poll());
        polled.map_err(|source| self.misbehaved(source))?;
        let mut events = Vec::new();
        if std::mem::replace(&mut self.seen.paused, paused) != paused {
            events.push(if paused { ControllerEvent::Paused } else { ControllerEvent::Resumed });
        }
        if !self.seen.requested && self.port.bus.requested() {
            self.seen.requested = true;
            events.push(ControllerEvent::Requested);
        }
        while let Some(dword) = self.admin.queue.as_mut().and_then(|queue| queue.next_event()) {
            let event = AsyncEvent::from_dword(dword);
            if let Some(before) = self.warnings.allow(self.port.clock.now()) {
                tracing::warn!(
                    ctrl = %self.port.id, kind = %event.kind, info = event.info,
                    log_page = %event.log_page, suppressed = before, "asynchronous event"
                );
            }
            events.push(self.read_event(event)?);
        }
        if self.state == State::Ready
            && let Some(queue) = self.admin.queue.as_mut()
        {
            queue.request_events();
        }
        Ok(events)
    }

    /// Reads the log page that an event refers to: the controller masks events of that kind until
    /// then.
    fn read_event(&mut self, event: AsyncEvent) -> Result<ControllerEvent, Error> {
        let info = event.info;
        match event.kind {
            AsyncEventKind::ERROR => {
                self.error_log()?;
                Ok(ControllerEvent::Error { info })
            }
            AsyncEventKind::SMART => {
                let warnings = self.smart_log()?.warnings();
                Ok(ControllerEvent::Health { info, warnings })
            }
            AsyncEventKind::NOTICE if info == NOTICE_NAMESPACES => {
                let mut bytes = [0u8; DATA_BYTES];
                self.log_bytes(LogPageId::CHANGED_NAMESPACES, Nsid::ALL, 0, &mut bytes)?;
                let nsids =
                    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                let nsids = nsids.take_while(|n| *n != 0 && *n != u32::MAX).map(Nsid).collect();
                self.rescan()?;
                Ok(ControllerEvent::NamespacesChanged { nsids, stale: self.stale_grants() })
            }
            AsyncEventKind::NOTICE if info == NOTICE_FIRMWARE => {
                self.firmware_slot_log()?;
                Ok(ControllerEvent::FirmwareActivating)
            }
            _ => {
                // Pages that cannot be read (vendor specific, unsupported) keep the event masked.
                match self.log_bytes(event.log_page, Nsid::ALL, 0, &mut [0; 512]) {
                    Ok(()) | Err(Error::Command { .. }) => Ok(ControllerEvent::Other(event)),
                    Err(error) => Err(error),
                }
            }
        }
    }

    /// Looks at what [`Remark`] has, and notes and reports it. Switches autonomous power state
    /// transitions off.
    pub(crate) fn look(&mut self) -> Result<(), Error> {
        let mut remarks = Vec::new();
        if self.info.can_sanitize {
            let log = self.log_page::<SanitizeLog>(LogPageId::SANITIZE_STATUS, Nsid::ALL);
            match optional(log)?.map(|log| (log.state(), log.sprog)) {
                Some((SanitizeState::IN_PROGRESS, done)) => {
                    let percent = (u32::from(done) * 100 / 0x1_0000) as u8;
                    remarks.push(Remark::Sanitizing { percent });
                }
                Some((SanitizeState::FAILED, _)) => remarks.push(Remark::SanitizeFailed),
                _ => {}
            }
        }
        let protected = self.namespaces.usable.iter().filter(|space| space.is_write_protected);
        remarks.extend(protected.map(|space| Remark::WriteProtected { nsid: space.nsid }));
        if self.info.has_power_transitions && optional(self.stop_naps())? == Some(true) {
            remarks.push(Remark::PowerTransitions);
        }
        if self.info.host_memory_bytes > 0 {
            remarks.push(Remark::HostMemoryBuffer { bytes: self.info.host_memory_bytes });
        }
        for remark in &remarks {
            tracing::warn!(ctrl = %self.port.id, "{remark}");
        }
        self.info.remarks = remarks;
        Ok(())
    }

    /// Returns the current value of a feature of the controller (completion dword 0).
    ///
    /// # Errors
    /// Returns the errors of any admin command.
    pub fn feature(&mut self, fid: FeatureId) -> Result<u32, Error> {
        // Some features have data, too.
        let sqe = Sqe::new(AdminOpcode::GET_FEATURES.0, Cid(0), Nsid(0));
        let mut sqe = self.admin.with_data(sqe, &[]).map_err(|source| self.port.dma(source))?;
        GetFeatures { fid, ..Default::default() }.write_to(&mut sqe);
        Ok(self.admin_command("get features", sqe)?.result)
    }

    /// Switches autonomous power state transitions off, and power state 0 on, without saving it
    /// (Base 2.1, "Autonomous Power State Transition"). Returns whether they were on.
    fn stop_naps(&mut self) -> Result<bool, Error> {
        let fid = FeatureId::AUTONOMOUS_POWER_STATE_TRANSITION;
        if self.feature(fid)? & APSTE == 0 {
            return Ok(false);
        }
        // The data is a table of idle times, all zeroes.
        let set = Sqe::new(AdminOpcode::SET_FEATURES.0, Cid(0), Nsid(0));
        let mut set = self.admin.with_data(set, &[]).map_err(|source| self.port.dma(source))?;
        SetFeatures { fid, save: false, value: 0 }.write_to(&mut set);
        self.admin_command("set features", set)?;
        self.set_feature(FeatureId::POWER_MANAGEMENT, Nsid(0), 0)?;
        Ok(true)
    }

    /// Identifies the namespaces again. [`Controller::poll_events`] calls this when the controller
    /// reports a change.
    pub fn rescan(&mut self) -> Result<(), Error> {
        self.usable()?;
        let nsids = self.active_namespaces()?;
        let mut found = Namespaces::default();
        for nsid in nsids {
            let checked = self.check_namespace(nsid)?;
            match checked {
                Ok(info) => found.usable.push(info),
                Err(why) => {
                    let ctrl = &self.port.id;
                    tracing::warn!(%ctrl, nsid = nsid.0, %why, "namespace not usable");
                    found.refused.push((nsid, why));
                }
            }
        }
        self.namespaces = found;
        // During set-up the queue that this needs does not exist yet.
        if self.host.is_some() { self.discover_placement() } else { Ok(()) }
    }

    fn check_namespace(
        &mut self,
        nsid: Nsid,
    ) -> Result<Result<NamespaceInfo, NamespaceError>, Error> {
        let csi = self.command_set(nsid)?;
        if csi != CommandSet::NVM {
            return Ok(Err(NamespaceError::CommandSet { csi }));
        }
        match self.identify_namespace(nsid) {
            Ok(data) => Ok(NamespaceInfo::check(nsid, &data)),
            Err(Error::Command { status, .. }) => Ok(Err(NamespaceError::Identify { status })),
            Err(error) => Err(error),
        }
    }

    /// Returns the I/O command set of a namespace. Identify Namespace does not have it: a zoned
    /// namespace looks ordinary there. The list of descriptors was added in version 1.3.
    fn command_set(&mut self, nsid: Nsid) -> Result<CommandSet, Error> {
        if self.port.caps.version < Version::new(1, 3, 0) {
            return Ok(CommandSet::NVM);
        }
        match self.identify::<NamespaceDescriptors>(Cns::NAMESPACE_DESCRIPTORS, nsid) {
            Ok(list) => Ok(list.command_set()),
            // Some controllers lack it nevertheless; those have no other command set.
            Err(Error::Command { .. }) => Ok(CommandSet::NVM),
            Err(error) => Err(error),
        }
    }

    fn active_namespaces(&mut self) -> Result<Vec<Nsid>, Error> {
        if self.port.caps.version < Version::new(1, 1, 0) {
            // Version 1.0 has no list; all identifiers up to NN are valid.
            return Ok((1..=self.info.nn.min(NAMESPACES_MAX as u32)).map(Nsid).collect());
        }
        let mut found: Vec<Nsid> = Vec::new();
        loop {
            let (before, after) = (found.len(), found.last().copied().unwrap_or(Nsid(0)));
            let list: ActiveNamespaces = self.identify(Cns::ACTIVE_NAMESPACES, after)?;
            for &nsid in list.nsids.iter().take_while(|n| **n != 0) {
                let last = found.last().copied().unwrap_or(Nsid(0));
                if nsid <= last.0 || nsid >= 0xFFFF_FFFE {
                    let what = format!("namespace {nsid} follows {last} in its ascending list");
                    return Err(self.port.implausible(what));
                }
                found.push(Nsid(nsid));
                if found.len() == NAMESPACES_MAX {
                    return Ok(found);
                }
            }
            // Count, not last entry: a malformed page may have a last entry but no first one.
            if found.len() - before < list.nsids.len() {
                return Ok(found);
            }
        }
    }
}

/// Returns `None` for what a controller refuses: it is not worth failing for.
fn optional<T>(result: Result<T, Error>) -> Result<Option<T>, Error> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error @ Error::Command { .. }) => {
            tracing::debug!(%error, "not known");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
