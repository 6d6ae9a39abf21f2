//! What an operator asks a controller: logs, features, events, format, abort.

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

/// Something a controller reported by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ControllerEvent {
    /// An error that belongs to no command; the error log has more.
    Error {
        /// What kind (Base, "Asynchronous Event Information - Error Status").
        info: u8,
    },
    /// Its health changed.
    Health {
        /// What kind (Base, "Asynchronous Event Information - SMART / Health Status").
        info: u8,
        /// The critical warnings now.
        warnings: CriticalWarning,
    },
    /// Namespaces appeared, went away or changed; [`Controller::rescan`] looks at them again.
    NamespacesChanged {
        /// Which. Empty when there are too many to list.
        nsids: Vec<Nsid>,
    },
    /// New firmware is being activated; commands may take longer.
    FirmwareActivating,
    /// Anything else.
    Other(AsyncEvent),
}

/// Asynchronous event configuration (feature 0Bh): all SMART warnings; the notices of OAES that
/// this driver knows: changed namespaces (bit 8) and firmware activation (bit 9).
const EVENTS_SMART: u32 = 0x1F;
const EVENTS_NOTICES: u32 = 1 << 8 | 1 << 9;
/// Notice information values.
const NOTICE_NAMESPACES: u8 = 0;
const NOTICE_FIRMWARE: u8 = 1;

impl Controller {
    /// Identify Controller as it is on the wire.
    ///
    /// # Errors
    /// As any admin command.
    pub fn identify_controller(&mut self) -> Result<IdentifyController, Error> {
        self.identify(Cns::CONTROLLER, Nsid(0))
    }

    /// Identify Namespace as it is on the wire.
    ///
    /// # Errors
    /// As any admin command.
    pub fn identify_namespace(&mut self, nsid: Nsid) -> Result<IdentifyNamespace, Error> {
        self.identify(Cns::NAMESPACE, nsid)
    }

    /// SMART / Health Information of the whole controller.
    ///
    /// # Errors
    /// As any admin command.
    pub fn smart_log(&mut self) -> Result<SmartLog, Error> {
        self.log_page(LogPageId::SMART, Nsid::ALL)
    }

    /// Firmware Slot Information.
    ///
    /// # Errors
    /// As any admin command.
    pub fn firmware_slot_log(&mut self) -> Result<FirmwareSlotLog, Error> {
        self.log_page(LogPageId::FIRMWARE_SLOT, Nsid::ALL)
    }

    /// The valid entries of the error log, newest first; at most the 64 that fit in one page.
    ///
    /// # Errors
    /// As any admin command.
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

    /// Reads `into.len()` bytes (a multiple of 4, at most 4096) of a log page from `offset` on, and
    /// thereby clears the asynchronous event that points to it.
    ///
    /// # Errors
    /// As any admin command; [`Error::Range`] for another length.
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

    /// A feature's current value (completion dword 0).
    ///
    /// # Errors
    /// As any admin command.
    pub fn get_feature(&mut self, fid: FeatureId, nsid: Nsid) -> Result<u32, Error> {
        let mut sqe = Sqe::new(AdminOpcode::GET_FEATURES.0, Cid(0), nsid);
        GetFeatures { fid, select: FeatureSelect::CURRENT }.write_to(&mut sqe);
        Ok(self.admin_command("get features", sqe, self.options.admin_timeout)?.result)
    }

    /// Formats a namespace: all its data is lost. The namespaces are looked at again afterwards.
    ///
    /// # Errors
    /// As any admin command; [`Error::Unsupported`] when there is no Format NVM;
    /// [`Error::QueueState`] while a queue is granted, as its grant names the old LBA size.
    pub fn format(&mut self, nsid: Nsid, format: FormatNvm) -> Result<(), Error> {
        if !self.info.admin_commands.contains(Oacs::FORMAT) {
            let (what, hint) = ("Format NVM".into(), "see OACS in identify controller");
            return Err(Error::Unsupported { ctrl: self.id.clone(), what, hint });
        }
        if let Some((&qid, _)) = self.queues.iter().find(|(_, q)| q.granted) {
            let what = "is granted; reclaim() it before formatting".into();
            return Err(Error::QueueState { ctrl: self.id.clone(), qid, what });
        }
        let mut sqe = Sqe::new(AdminOpcode::FORMAT_NVM.0, Cid(0), nsid);
        format.write_to(&mut sqe);
        self.admin_command("format", sqe, self.options.format_timeout)?;
        self.rescan()
    }

    /// Asks the controller to abort a command. Whether it says that it did; the command itself
    /// completes on its own queue either way.
    ///
    /// # Errors
    /// As any admin command.
    pub fn abort(&mut self, sqid: QueueId, cid: Cid) -> Result<bool, Error> {
        let completion =
            self.admin_command("abort", abort_sqe(sqid, cid), self.options.admin_timeout)?;
        Ok(completion.result & 1 == 0)
    }

    pub(crate) fn enable_events(&mut self) -> Result<(), Error> {
        let value = EVENTS_SMART | (self.info.oaes & EVENTS_NOTICES);
        match self.set_feature(FeatureId::ASYNC_EVENT_CONFIG, Nsid(0), value) {
            Ok(_) => {}
            // Not worth failing for: the controller then reports what it likes.
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

    /// Looks whether the controller is alive and what it has reported since the last time. Does
    /// not wait for anything but the log pages that clear what it reported.
    ///
    /// # Errors
    /// [`Error::Gone`] or [`Error::Fatal`] when it is not well, which moves it to Failed; else as
    /// any admin command.
    pub fn poll_events(&mut self) -> Result<Vec<ControllerEvent>, Error> {
        self.usable()?;
        if let Err(dead) = health(&*self.bus) {
            return Err(self.dead(dead));
        }
        let polled = self.admin.as_mut().map_or(Ok(()), |admin| admin.poll());
        if let Err(source) = polled {
            self.fail(FailCause::Misbehaved(source));
            return Err(Error::Misbehaved { ctrl: self.id.clone(), source });
        }
        let mut events = Vec::new();
        while let Some(dword) = self.admin.as_mut().and_then(|admin| admin.next_event()) {
            let event = AsyncEvent::from_dw0(dword);
            if let Some(before) = self.warnings.allow(self.clock.now()) {
                tracing::warn!(
                    ctrl = %self.id, kind = %event.kind, info = event.info,
                    log_page = %event.log_page, suppressed = before, "asynchronous event"
                );
            }
            events.push(self.look_at(event)?);
        }
        if self.state == State::Ready
            && let Some(admin) = self.admin.as_mut()
        {
            admin.request_events();
        }
        Ok(events)
    }

    /// Reads the log page an event points to: the controller reports nothing more of the kind
    /// until that was done.
    fn look_at(&mut self, event: AsyncEvent) -> Result<ControllerEvent, Error> {
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
                Ok(ControllerEvent::NamespacesChanged { nsids })
            }
            AsyncEventKind::NOTICE if info == NOTICE_FIRMWARE => {
                self.firmware_slot_log()?;
                Ok(ControllerEvent::FirmwareActivating)
            }
            _ => Ok(ControllerEvent::Other(event)),
        }
    }
}

pub(crate) fn abort_sqe(sqid: QueueId, cid: Cid) -> Sqe {
    let mut sqe = Sqe::new(AdminOpcode::ABORT.0, Cid(0), Nsid(0));
    Abort { sqid, cid: cid.0 }.write_to(&mut sqe);
    sqe
}
