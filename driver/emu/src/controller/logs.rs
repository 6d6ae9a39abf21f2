//! Counters and log pages (Base, "Get Log Page command"), and the events that refer to them.

use std::collections::VecDeque;

use nvme_driver::Nanos;
use nvme_spec::{
    admin::{AdminOpcode, AsyncEventKind, LogPageId},
    log::{CriticalWarning, ErrorLogEntry, SmartLog},
    nvm::NvmOpcode,
    status::Status,
};
use zerocopy::IntoBytes;

use super::{
    command::Ticket,
    events::{ErrorEvent, Events},
    features::TEMPERATURE,
    identify::ELPE_Z,
};
use crate::EmuCounters;

/// Bytes of the largest page.
pub(super) const PAGE: usize = 4096;
/// Entries of the error log.
const ERRORS_MAX: usize = ELPE_Z as usize + 1;
/// One hour in nanoseconds.
const HOUR: u64 = 3_600_000_000_000;

/// Data of the log pages, which resets do not clear, and the events that refer to it.
#[derive(Debug)]
pub(super) struct Logs {
    pub counters: EmuCounters,
    pub events: Events,
    /// Newest first.
    errors: VecDeque<ErrorLogEntry>,
    error_count: u64,
    changed: Vec<u32>,
    power_cycles: u64,
    unsafe_shutdowns: u64,
    /// Critical warnings other than those derived from thresholds.
    warnings: CriticalWarning,
}

impl Default for Logs {
    fn default() -> Self {
        Self {
            counters: EmuCounters::default(),
            events: Events::default(),
            errors: VecDeque::with_capacity(ERRORS_MAX),
            error_count: 0,
            changed: Vec::new(),
            power_cycles: 1,
            unsafe_shutdowns: 0,
            warnings: CriticalWarning::empty(),
        }
    }
}

impl Logs {
    /// Records a command that completed with an error.
    #[cold]
    pub(super) fn command_failed(&mut self, ticket: Ticket, status: Status) {
        self.counters.errors += 1;
        self.push(ErrorLogEntry {
            sqid: ticket.sqid,
            cid: ticket.cid,
            status_phase: status.0 << 1,
            nsid: ticket.nsid,
            csi_opcode: [0, ticket.opcode],
            ..ErrorLogEntry::default()
        });
    }

    /// Counts a command that completed without error.
    pub(super) fn command_succeeded(&mut self, ticket: Ticket, bytes: u64) {
        let counters = &mut self.counters;
        if ticket.sqid == 0 {
            return;
        }
        match NvmOpcode(ticket.opcode) {
            NvmOpcode::READ => {
                counters.reads += 1;
                counters.bytes_read += bytes;
            }
            NvmOpcode::WRITE => {
                counters.writes += 1;
                counters.bytes_written += bytes;
            }
            NvmOpcode::FLUSH => counters.flushes += 1,
            _ => {}
        }
    }

    /// Records a doorbell error, which belongs to no command and is always reported.
    #[cold]
    pub(super) fn raise_error(&mut self, event: ErrorEvent) {
        self.push(ErrorLogEntry { sqid: 0xffff, cid: 0xffff, ..ErrorLogEntry::default() });
        self.events.raise(AsyncEventKind::ERROR, event as u8, LogPageId::ERROR);
    }

    /// Sets the SMART critical warnings.
    pub(super) fn warn(&mut self, warnings: CriticalWarning) {
        self.warnings = warnings;
        self.events.raise(AsyncEventKind::SMART, 0, LogPageId::SMART);
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

    pub(super) fn unsafe_shutdown(&mut self) {
        self.unsafe_shutdowns += 1;
    }

    pub(super) fn power_cycle(&mut self) {
        self.power_cycles += 1;
    }

    /// Forgets the changed namespaces, whose list was read.
    pub(super) fn clear_changed(&mut self) {
        self.changed.clear();
    }

    /// Builds the SMART log; `alarm` is set if the temperature is outside its thresholds.
    pub(super) fn smart(&self, now: Nanos, alarm: bool, media_errors: u64) -> SmartLog {
        let counters = &self.counters;
        let wide = |value: u64| u128::from(value).to_le_bytes();
        // In thousands of 512 bytes, rounded up.
        let units = |bytes: u64| wide(bytes.div_ceil(512_000));
        let warning = if alarm { CriticalWarning::TEMPERATURE } else { CriticalWarning::empty() };
        SmartLog {
            critical_warning: (warning | self.warnings).bits(),
            composite_temperature: TEMPERATURE.to_le_bytes(),
            available_spare: 100,
            available_spare_threshold: 10,
            data_units_read: units(counters.bytes_read),
            data_units_written: units(counters.bytes_written),
            host_reads: wide(counters.reads),
            host_writes: wide(counters.writes),
            power_cycles: wide(self.power_cycles),
            power_on_hours: wide(now.0 / HOUR),
            unsafe_shutdowns: wide(self.unsafe_shutdowns),
            media_errors: wide(media_errors),
            error_log_entries: wide(self.error_count),
            ..SmartLog::default()
        }
    }

    pub(super) fn error_page(&self, page: &mut [u8; PAGE]) -> usize {
        const ENTRY: usize = size_of::<ErrorLogEntry>();
        for (place, entry) in page.chunks_exact_mut(ENTRY).zip(&self.errors) {
            place.copy_from_slice(entry.as_bytes());
        }
        ERRORS_MAX * ENTRY
    }

    pub(super) fn changed_page(&self, page: &mut [u8; PAGE]) -> usize {
        let changed = &self.changed;
        // Overflow is marked by the first entry, "Changed Attached Namespace List".
        let list = if changed.len() > PAGE / 4 { &[u32::MAX][..] } else { &changed[..] };
        put(page, list.as_bytes());
        PAGE
    }
}

/// Copies `bytes` to the page. Returns their number.
pub(super) fn put(page: &mut [u8; PAGE], bytes: &[u8]) -> usize {
    page[..bytes.len()].copy_from_slice(bytes);
    bytes.len()
}

/// "Supported Log Pages": a dword per page, bit 0 = supported.
pub(super) fn supported_pages(page: &mut [u8; PAGE], placement: bool) -> usize {
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
pub(super) fn commands_page(page: &mut [u8; PAGE], placement: bool) -> usize {
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
