//! Log pages (Base, "Get Log Page command").

use std::collections::VecDeque;

use nvme_driver::Nanos;
use nvme_spec::{
    admin::{AdminOpcode, GetLogPage, LogPageId},
    ids::Nsid,
    log::{CriticalWarning, ErrorLogEntry, FirmwareSlotLog, SmartLog},
    nvm::NvmOpcode,
    sqe::Sqe,
    status::Status,
};
use zerocopy::IntoBytes;

use super::{
    super::{
        Controller,
        command::{Flow, Ticket},
    },
    features::TEMPERATURE,
    identify::ELPE_Z,
};
use crate::domain::DmaAccess;

/// Bytes of the largest page.
const PAGE: usize = 4096;
/// Entries of the error log.
const ERRORS_MAX: usize = ELPE_Z as usize + 1;
/// One hour in nanoseconds.
const HOUR: u64 = 3_600_000_000_000;

/// Data of the log pages. Resets do not clear it.
#[derive(Debug)]
pub(in super::super) struct Logs {
    /// Newest first.
    errors: VecDeque<ErrorLogEntry>,
    error_count: u64,
    changed: Vec<u32>,
    /// Operations that failed on media.
    pub media_errors: u64,
    power_cycles: u64,
    unsafe_shutdowns: u64,
    /// Critical warnings other than those derived from thresholds.
    pub(super) warnings: CriticalWarning,
}

impl Default for Logs {
    fn default() -> Self {
        Self {
            errors: VecDeque::with_capacity(ERRORS_MAX),
            error_count: 0,
            changed: Vec::new(),
            media_errors: 0,
            power_cycles: 1,
            unsafe_shutdowns: 0,
            warnings: CriticalWarning::empty(),
        }
    }
}

impl Logs {
    /// Records a command that completed with an error.
    #[cold]
    pub(in super::super) fn command_failed(&mut self, ticket: Ticket, status: Status) {
        self.push(ErrorLogEntry {
            sqid: ticket.sqid,
            cid: ticket.cid,
            status_phase: status.0 << 1,
            nsid: ticket.nsid,
            csi_opcode: [0, ticket.opcode],
            ..ErrorLogEntry::default()
        });
    }

    /// Records a doorbell error, which belongs to no command.
    pub(super) fn doorbell_failed(&mut self) {
        self.push(ErrorLogEntry { sqid: 0xffff, cid: 0xffff, ..ErrorLogEntry::default() });
    }

    fn push(&mut self, entry: ErrorLogEntry) {
        self.error_count += 1;
        self.errors.truncate(ERRORS_MAX - 1);
        let error_count = self.error_count;
        // The byte of the command in error is not recorded.
        self.errors.push_front(ErrorLogEntry { error_count, parameter_location: 0xffff, ..entry });
    }

    pub(super) fn namespace_changed(&mut self, nsid: u32) {
        if let Err(place) = self.changed.binary_search(&nsid) {
            self.changed.insert(place, nsid);
        }
    }

    pub(in super::super) fn unsafe_shutdown(&mut self) {
        self.unsafe_shutdowns += 1;
    }

    pub(in super::super) fn power_cycle(&mut self) {
        self.power_cycles += 1;
    }
}

impl Controller {
    pub(super) fn get_log_page(
        &mut self,
        dma: &DmaAccess<'_>,
        now: Nanos,
        sqe: &Sqe,
    ) -> Result<Flow, Status> {
        let command = GetLogPage::from_sqe(sqe);
        // LPA bit 0 is 0: no page is per namespace.
        if sqe.nsid != 0 && sqe.nsid() != Nsid::ALL {
            return Err(Status::INVALID_FIELD);
        }
        let mut page = [0u8; PAGE];
        let len = match command.lid {
            LogPageId::SUPPORTED_LOG_PAGES => supported_pages(&mut page, self.placement.is_some()),
            LogPageId::ERROR => self.error_page(&mut page),
            LogPageId::SMART => put(&mut page, self.smart(now).as_bytes()),
            LogPageId::FIRMWARE_SLOT => {
                let mut log = FirmwareSlotLog { active: 1, ..FirmwareSlotLog::default() };
                log.revisions[0] = self.identity.firmware();
                put(&mut page, log.as_bytes())
            }
            LogPageId::CHANGED_NAMESPACES => self.changed_page(&mut page),
            LogPageId::COMMANDS_SUPPORTED => commands_page(&mut page, self.placement.is_some()),
            LogPageId::FDP_CONFIGURATIONS => self.fdp_page(&mut page, command.lsi)?,
            _ => return Err(Status::INVALID_LOG_PAGE),
        };
        // "Log Page Offset": a multiple of a dword, inside the page.
        if command.offset & 3 != 0 || command.offset > len as u64 {
            return Err(Status::INVALID_FIELD);
        }
        let bytes = (u64::from(command.numd_z) + 1) * 4;
        if bytes > self.transfer_bytes_max {
            return Err(Status::INVALID_FIELD);
        }
        let flow = self.deliver(dma, sqe, &page[command.offset as usize..len], bytes)?;
        if !command.rae {
            self.events.acknowledge(command.lid);
            if command.lid == LogPageId::CHANGED_NAMESPACES {
                self.logs.changed.clear();
            }
        }
        Ok(flow)
    }

    fn smart(&self, now: Nanos) -> SmartLog {
        let (counters, logs) = (&self.counters, &self.logs);
        let wide = |value: u64| u128::from(value).to_le_bytes();
        // In thousands of 512 bytes, rounded up.
        let units = |bytes: u64| wide(bytes.div_ceil(512_000));
        let warning = if self.features.temperature_alarm() {
            CriticalWarning::TEMPERATURE
        } else {
            CriticalWarning::empty()
        };
        SmartLog {
            critical_warning: (warning | logs.warnings).bits(),
            composite_temperature: TEMPERATURE.to_le_bytes(),
            available_spare: 100,
            available_spare_threshold: 10,
            data_units_read: units(counters.bytes_read),
            data_units_written: units(counters.bytes_written),
            host_reads: wide(counters.reads),
            host_writes: wide(counters.writes),
            power_cycles: wide(logs.power_cycles),
            power_on_hours: wide(now.0 / HOUR),
            unsafe_shutdowns: wide(logs.unsafe_shutdowns),
            media_errors: wide(logs.media_errors),
            error_log_entries: wide(logs.error_count),
            ..SmartLog::default()
        }
    }

    fn error_page(&self, page: &mut [u8; PAGE]) -> usize {
        const ENTRY: usize = size_of::<ErrorLogEntry>();
        for (place, entry) in page.chunks_exact_mut(ENTRY).zip(&self.logs.errors) {
            place.copy_from_slice(entry.as_bytes());
        }
        ERRORS_MAX * ENTRY
    }

    fn changed_page(&self, page: &mut [u8; PAGE]) -> usize {
        let changed = &self.logs.changed;
        // Overflow is marked by the first entry, "Changed Attached Namespace List".
        let list = if changed.len() > PAGE / 4 { &[u32::MAX][..] } else { &changed[..] };
        put(page, list.as_bytes());
        PAGE
    }
}

fn put(page: &mut [u8; PAGE], bytes: &[u8]) -> usize {
    page[..bytes.len()].copy_from_slice(bytes);
    bytes.len()
}

/// "Supported Log Pages": a dword per page, bit 0 = supported.
fn supported_pages(page: &mut [u8; PAGE], placement: bool) -> usize {
    page[4 * usize::from(LogPageId::FDP_CONFIGURATIONS.0)] = placement.into();
    for lid in [
        LogPageId::SUPPORTED_LOG_PAGES,
        LogPageId::ERROR,
        LogPageId::SMART,
        LogPageId::FIRMWARE_SLOT,
        LogPageId::CHANGED_NAMESPACES,
        LogPageId::COMMANDS_SUPPORTED,
    ] {
        page[4 * usize::from(lid.0)] = 1;
    }
    1024
}

/// "Commands Supported and Effects": a dword per opcode, admin commands first.
fn commands_page(page: &mut [u8; PAGE], placement: bool) -> usize {
    const SUPPORTED: u8 = 1;
    const CHANGES_DATA: u8 = 1 << 1;
    const CHANGES_NAMESPACE: u8 = 1 << 2;
    for opcode in [
        AdminOpcode::DELETE_IO_SQ,
        AdminOpcode::CREATE_IO_SQ,
        AdminOpcode::GET_LOG_PAGE,
        AdminOpcode::DELETE_IO_CQ,
        AdminOpcode::CREATE_IO_CQ,
        AdminOpcode::IDENTIFY,
        AdminOpcode::ABORT,
        AdminOpcode::SET_FEATURES,
        AdminOpcode::GET_FEATURES,
        AdminOpcode::ASYNC_EVENT_REQUEST,
        AdminOpcode::KEEP_ALIVE,
    ] {
        page[4 * usize::from(opcode.0)] = SUPPORTED;
    }
    page[4 * usize::from(AdminOpcode::FORMAT_NVM.0)] = SUPPORTED | CHANGES_DATA | CHANGES_NAMESPACE;
    for (opcode, effects) in [
        (NvmOpcode::FLUSH, SUPPORTED),
        (NvmOpcode::READ, SUPPORTED),
        (NvmOpcode::WRITE, SUPPORTED | CHANGES_DATA),
        (NvmOpcode::WRITE_ZEROES, SUPPORTED | CHANGES_DATA),
        (NvmOpcode::DATASET_MANAGEMENT, SUPPORTED | CHANGES_DATA),
        (NvmOpcode::IO_MANAGEMENT_RECEIVE, if placement { SUPPORTED } else { 0 }),
    ] {
        page[1024 + 4 * usize::from(opcode.0)] = effects;
    }
    PAGE
}
