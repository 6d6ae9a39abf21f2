//! Log pages (Base, "Log Page Information").

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

bitflags::bitflags! {
    /// SMART critical warnings.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct CriticalWarning: u8 {
        /// Available spare is below the threshold.
        const SPARE = 1;
        /// A temperature threshold was crossed.
        const TEMPERATURE = 1 << 1;
        /// Reliability is degraded.
        const RELIABILITY = 1 << 2;
        /// All media is read-only.
        const READ_ONLY = 1 << 3;
        /// The volatile memory backup failed.
        const BACKUP_FAILED = 1 << 4;
        /// The persistent memory region is read-only or unreliable.
        const PMR = 1 << 5;
        const _ = !0;
    }
}

/// SMART / Health Information, 512 bytes.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SmartLog {
    /// Critical warnings, see [`CriticalWarning`].
    pub critical_warning: u8,
    /// Composite temperature in kelvins, little-endian.
    pub composite_temperature: [u8; 2],
    /// Available spare in percent.
    pub available_spare: u8,
    /// Threshold of the available spare in percent.
    pub available_spare_threshold: u8,
    /// Estimate of consumed life, in percent; may exceed 100.
    pub percentage_used: u8,
    /// Endurance group critical warning summary.
    pub endurance_group_warning: u8,
    /// Reserved.
    pub reserved7: [u8; 25],
    /// Data units read, in 1,000 units of 512 bytes.
    pub data_units_read: [u8; 16],
    /// Data units written, in 1,000 units of 512 bytes.
    pub data_units_written: [u8; 16],
    /// Host read commands.
    pub host_reads: [u8; 16],
    /// Host write commands.
    pub host_writes: [u8; 16],
    /// Controller busy time in minutes.
    pub busy_minutes: [u8; 16],
    /// Power cycles.
    pub power_cycles: [u8; 16],
    /// Power-on hours.
    pub power_on_hours: [u8; 16],
    /// Unsafe shutdowns.
    pub unsafe_shutdowns: [u8; 16],
    /// Media and data integrity errors.
    pub media_errors: [u8; 16],
    /// Error log entries over the controller's lifetime.
    pub error_log_entries: [u8; 16],
    /// Minutes above the warning temperature.
    pub warning_temperature_minutes: u32,
    /// Minutes above the critical temperature.
    pub critical_temperature_minutes: u32,
    /// Temperature sensors in kelvins; 0 = not present.
    pub sensors: [u16; 8],
    /// Reserved.
    pub reserved216: [u8; 296],
}

const _: () = assert!(size_of::<SmartLog>() == 512);
const _: () = assert!(core::mem::offset_of!(SmartLog, data_units_read) == 32);
const _: () = assert!(core::mem::offset_of!(SmartLog, sensors) == 200);

impl Default for SmartLog {
    fn default() -> Self {
        zerocopy::FromZeros::new_zeroed()
    }
}

impl SmartLog {
    /// Returns the critical warnings.
    #[must_use]
    pub const fn warnings(&self) -> CriticalWarning {
        CriticalWarning::from_bits_retain(self.critical_warning)
    }

    /// Returns the composite temperature in kelvins.
    #[must_use]
    pub const fn temperature_kelvin(&self) -> u16 {
        u16::from_le_bytes(self.composite_temperature)
    }
}

/// Error Information log entry, 64 bytes.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ErrorLogEntry {
    /// Count of all errors over the controller's lifetime; 0 = invalid entry.
    pub error_count: u64,
    /// Submission queue.
    pub sqid: u16,
    /// Command identifier.
    pub cid: u16,
    /// Status field with the phase bit, in the format of a completion.
    pub status_phase: u16,
    /// Byte and bit of the parameter in error.
    pub parameter_location: u16,
    /// First LBA in error.
    pub lba: u64,
    /// Namespace.
    pub nsid: u32,
    /// Vendor specific information available.
    pub vendor_info: u8,
    /// Transport type.
    pub transport: u8,
    /// Command set indicator and opcode.
    pub csi_opcode: [u8; 2],
    /// Command specific information.
    pub command_specific: u64,
    /// Transport specific information.
    pub transport_specific: u16,
    /// Reserved.
    pub reserved42: [u8; 22],
}

const _: () = assert!(size_of::<ErrorLogEntry>() == 64);

impl Default for ErrorLogEntry {
    fn default() -> Self {
        zerocopy::FromZeros::new_zeroed()
    }
}

open_enum! {
    /// State of the last sanitize operation (SSTAT bits 2:0).
    SanitizeState: u8 {
        /// There was none.
        NEVER = 0,
        /// It succeeded.
        SUCCEEDED = 1,
        /// It is in progress.
        IN_PROGRESS = 2,
        /// It failed.
        FAILED = 3,
    }
}

/// Sanitize Status, without the estimates: the first 8 bytes.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SanitizeLog {
    /// Progress, as a fraction of 65,536; FFFFh if none is in progress.
    pub sprog: u16,
    /// Status; see [`SanitizeLog::state`].
    pub sstat: u16,
    /// CDW10 of the command that started it.
    pub scdw10: u32,
}

impl SanitizeLog {
    /// Returns the state of the last sanitize operation.
    #[must_use]
    pub const fn state(&self) -> SanitizeState {
        SanitizeState(self.sstat as u8 & 7)
    }
}

/// Firmware Slot Information, 512 bytes.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FirmwareSlotLog {
    /// Active slot in bits 2:0, slot for the next reset in bits 6:4.
    pub active: u8,
    /// Reserved.
    pub reserved1: [u8; 7],
    /// Revisions of slots 1 to 7, ASCII.
    pub revisions: [[u8; 8]; 7],
    /// Reserved.
    pub reserved64: [u8; 448],
}

const _: () = assert!(size_of::<FirmwareSlotLog>() == 512);

impl Default for FirmwareSlotLog {
    fn default() -> Self {
        zerocopy::FromZeros::new_zeroed()
    }
}
