//! Administration of a controller: logs, features, events, format, abort.

use nvme_spec::{
    admin::{
        Abort, AdminOpcode, AsyncEvent, AsyncEventKind, Cns, FeatureId, FeatureSelect, FormatNvm,
        GetFeatures, GetLogPage, LogPageId,
    },
    identify::{IdentifyController, IdentifyNamespace, Oacs},
    ids::{Cid, Nsid, QueueId},
    log::{CriticalWarning, ErrorLogEntry, FirmwareSlotLog, SmartLog},
    sqe::Sqe,
};
use zerocopy::FromBytes;

use crate::{
    admin::DATA_BYTES,
    controller::{Controller, State},
    error::{Error, FailCause},
    wait::health,
};

/// An event reported by a controller or its bus.
///
/// Death of a controller is not an event: [`Controller::poll_events`] fails instead.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ControllerEvent {
    /// An error that belongs to no command; the error log has details.
    Error {
        /// Type of error (Base, "Asynchronous Event Information - Error Status").
        info: u8,
    },
    /// The health of the controller changed.
    Health {
        /// Type of change (Base, "Asynchronous Event Information - SMART / Health Status").
        info: u8,
        /// Current critical warnings. With [`CriticalWarning::READ_ONLY`], writes fail from now on.
        warnings: CriticalWarning,
    },
    /// Namespaces appeared, went away or changed. [`Controller::namespaces`] is up to date.
    NamespacesChanged {
        /// The changed namespaces. Empty if there are too many to list.
        nsids: Vec<Nsid>,
        /// Queues whose grant no longer matches its namespace: the size or the LBA size changed, or
        /// it is gone. Stop their executor, recover, and grant them again.
        stale: Vec<QueueId>,
    },
    /// New firmware is being activated; commands may take longer.
    FirmwareActivating,
    /// The controller paused command processing (CSTS.PP).
    Paused,
    /// The controller processes commands again.
    Resumed,
    /// The platform wants the device back ([`crate::Bus::requested`]): shut it down and drop it.
    Requested,
    /// An uncorrectable PCIe error ([`crate::Bus::pcie_error`]): data may be lost. Stop the
    /// executors, reset the controller and check what is left.
    PcieError,
    /// Any other event.
    Other(AsyncEvent),
}

/// Asynchronous event configuration (feature 0Bh): all SMART warnings, and two notices of OAES:
/// changed namespaces (bit 8) and firmware activation (bit 9).
const EVENTS_SMART: u32 = 0x1F;
const EVENTS_NOTICES: u32 = 1 << 8 | 1 << 9;
/// Notice information values.
const NOTICE_NAMESPACES: u8 = 0;
const NOTICE_FIRMWARE: u8 = 1;

impl ControllerEvent {
    /// Returns the event's name, for interfaces in other languages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Error { .. } => "error",
            Self::Health { .. } => "health",
            Self::NamespacesChanged { .. } => "namespaces-changed",
            Self::FirmwareActivating => "firmware-activating",
            Self::Paused => "paused",
            Self::Resumed => "resumed",
            Self::Requested => "requested",
            Self::PcieError => "pcie-error",
            Self::Other(_) => "other",
        }
    }
}

impl Controller {
    /// Returns the Identify Controller data structure.
    ///
    /// # Errors
    /// Same as any admin command.
    pub fn identify_controller(&mut self) -> Result<IdentifyController, Error> {
        self.identify(Cns::CONTROLLER, Nsid(0))
    }

    /// Returns the Identify Namespace data structure.
    ///
    /// # Errors
    /// Same as any admin command.
    pub fn identify_namespace(&mut self, nsid: Nsid) -> Result<IdentifyNamespace, Error> {
        self.identify(Cns::NAMESPACE, nsid)
    }

    /// Returns the SMART / Health Information of the whole controller.
    ///
    /// # Errors
    /// Same as any admin command.
    pub fn smart_log(&mut self) -> Result<SmartLog, Error> {
        self.log_page(LogPageId::SMART, Nsid::ALL)
    }

    /// Returns the Firmware Slot Information log.
    ///
    /// # Errors
    /// Same as any admin command.
    pub fn firmware_slot_log(&mut self) -> Result<FirmwareSlotLog, Error> {
        self.log_page(LogPageId::FIRMWARE_SLOT, Nsid::ALL)
    }

    /// Returns the valid entries of the error log, newest first; at most 64 (one page).
    ///
    /// # Errors
    /// Same as any admin command.
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
        T::read_from_bytes(&bytes[..len]).map_err(|_| Error::Implausible {
            ctrl: self.id.clone(),
            what: format!("log page {lid} has a wrong size"),
        })
    }

    /// Reads `into.len()` bytes (a multiple of 4, at most 4096) of a log page from `offset` on,
    /// which clears the asynchronous event that refers to the page.
    ///
    /// # Errors
    /// Same as any admin command, and [`Error::Range`] for an unsupported length.
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
            return Err(Error::Range { ctrl: self.id.clone(), nsid, what });
        }
        let mut sqe = Sqe::new(AdminOpcode::GET_LOG_PAGE.0, Cid(0), nsid);
        let numd_z = (len / 4 - 1) as u32;
        GetLogPage { lid, numd_z, offset, ..Default::default() }.write_to(&mut sqe);
        self.admin_read_bytes("get log page", sqe, into)
    }

    /// Returns a feature's current value (completion dword 0).
    ///
    /// # Errors
    /// Same as any admin command.
    pub fn get_feature(&mut self, fid: FeatureId, nsid: Nsid) -> Result<u32, Error> {
        let mut sqe = Sqe::new(AdminOpcode::GET_FEATURES.0, Cid(0), nsid);
        GetFeatures { fid, select: FeatureSelect::CURRENT }.write_to(&mut sqe);
        Ok(self.admin_command("get features", sqe, self.options.admin_timeout)?.result)
    }

    /// Formats a namespace, which destroys all its data, and identifies the namespaces again.
    ///
    /// # Errors
    /// Same as any admin command. Returns [`Error::Unsupported`] without Format NVM, and
    /// [`Error::QueueState`] while a queue is granted, because the grant holds the old LBA size.
    pub fn format(&mut self, nsid: Nsid, format: FormatNvm) -> Result<(), Error> {
        if !self.info.admin_commands.contains(Oacs::FORMAT) {
            let (what, hint) = ("Format NVM".into(), "see OACS in identify controller");
            return Err(Error::Unsupported { ctrl: self.id.clone(), what, hint });
        }
        if let Some((&qid, _)) = self.queues.iter().find(|(_, q)| q.granted.is_some()) {
            let what = "is granted; reclaim() it before formatting".into();
            return Err(Error::QueueState { ctrl: self.id.clone(), qid, what });
        }
        let mut sqe = Sqe::new(AdminOpcode::FORMAT_NVM.0, Cid(0), nsid);
        format.write_to(&mut sqe);
        self.admin_command("format", sqe, self.options.format_timeout)?;
        self.rescan()
    }

    /// Asks the controller to abort a command and returns whether it reports success. The command
    /// itself completes on its own queue either way.
    ///
    /// # Errors
    /// Same as any admin command.
    pub fn abort(&mut self, sqid: QueueId, cid: Cid) -> Result<bool, Error> {
        let completion =
            self.admin_command("abort", abort_sqe(sqid, cid), self.options.admin_timeout)?;
        Ok(completion.result & 1 == 0)
    }

    /// Same as [`Controller::abort`] without waiting for the answer. Returns whether the request
    /// was sent: it is not while too many are unanswered.
    pub fn begin_abort(&mut self, sqid: QueueId, cid: Cid) -> bool {
        let admin = self.admin.as_mut().filter(|_| self.state == State::Ready);
        admin.is_some_and(|admin| admin.send(&abort_sqe(sqid, cid)))
    }

    pub(crate) fn enable_events(&mut self) -> Result<(), Error> {
        let value = EVENTS_SMART | (self.info.oaes & EVENTS_NOTICES);
        match self.set_feature(FeatureId::ASYNC_EVENT_CONFIG, Nsid(0), value) {
            Ok(_) => {}
            // Not worth failing for: the controller then uses its default configuration.
            Err(Error::Command { status, .. }) => {
                tracing::info!(ctrl = %self.id, %status, "events cannot be configured");
            }
            Err(error) => return Err(error),
        }
        if let Some(admin) = self.admin.as_mut() {
            admin.set_event_limit(self.info.event_limit);
            admin.request_events();
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
        let paused = match health(&*self.bus) {
            Ok(csts) => csts.pp() == 1,
            Err(dead) => return Err(self.dead(dead)),
        };
        let polled = self.admin.as_mut().map_or(Ok(()), |admin| admin.poll());
        if let Err(source) = polled {
            self.fail(FailCause::Misbehaved(source));
            return Err(Error::Misbehaved { ctrl: self.id.clone(), source });
        }
        let mut events = Vec::new();
        if std::mem::replace(&mut self.seen.paused, paused) != paused {
            events.push(if paused { ControllerEvent::Paused } else { ControllerEvent::Resumed });
        }
        if !self.seen.requested && self.bus.requested() {
            self.seen.requested = true;
            events.push(ControllerEvent::Requested);
        }
        if self.bus.pcie_error() {
            events.push(ControllerEvent::PcieError);
        }
        while let Some(dword) = self.admin.as_mut().and_then(|admin| admin.next_event()) {
            let event = AsyncEvent::from_dword(dword);
            if let Some(before) = self.warnings.allow(self.clock.now()) {
                tracing::warn!(
                    ctrl = %self.id, kind = %event.kind, info = event.info,
                    log_page = %event.log_page, suppressed = before, "asynchronous event"
                );
            }
            events.push(self.read_event(event)?);
        }
        if self.state == State::Ready
            && let Some(admin) = self.admin.as_mut()
        {
            admin.request_events();
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
}

/// State already reported by [`Controller::poll_events`].
#[derive(Debug, Default)]
pub(crate) struct Seen {
    paused: bool,
    requested: bool,
}

pub(crate) fn abort_sqe(sqid: QueueId, cid: Cid) -> Sqe {
    let mut sqe = Sqe::new(AdminOpcode::ABORT.0, Cid(0), Nsid(0));
    Abort { sqid, cid: cid.0 }.write_to(&mut sqe);
    sqe
}
