//! Completion status (Base, "Status Field Definition").

use core::fmt;

/// The 15 status bits of a completion without the phase: SC 7:0, SCT 10:8, CRD 12:11, M 13, DNR 14.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct Status(pub u16);

const DNR: u16 = 1 << 14;
const CODE: u16 = 0x7ff;

impl Status {
    /// Creates a status of type `sct` and code `sc`.
    #[must_use]
    pub const fn new(sct: u8, sc: u8) -> Self {
        Self((sct as u16) << 8 | sc as u16)
    }

    /// Returns the status code type.
    #[must_use]
    pub const fn sct(self) -> u8 {
        (self.0 >> 8) as u8 & 7
    }

    /// Returns the status code.
    #[must_use]
    pub const fn sc(self) -> u8 {
        self.0 as u8
    }

    /// Returns the Do Not Retry bit.
    #[must_use]
    pub const fn dnr(self) -> bool {
        self.0 & DNR != 0
    }

    /// Returns the Command Retry Delay: the number of the delay time to wait (1 to 3), or 0.
    #[must_use]
    pub const fn crd(self) -> u8 {
        (self.0 >> 11) as u8 & 3
    }

    /// Returns whether a retry of the same command may help: it failed, Do Not Retry is clear, and
    /// the host did not abort it.
    #[must_use]
    pub const fn may_retry(self) -> bool {
        !self.is_success() && !self.dnr() && !self.was_aborted()
    }

    /// Returns whether the host ended the command: with an Abort, or by deleting its queue.
    #[must_use]
    pub const fn was_aborted(self) -> bool {
        let code = self.code().0;
        code == Self::ABORTED_BY_REQUEST.0 || code == Self::ABORTED_SQ_DELETED.0
    }

    /// Returns whether the data of a read is lost, as far as the controller knows: a media or data
    /// integrity error (status code type 2h), or LBAs that the namespace does not have.
    #[must_use]
    pub const fn is_loss(self) -> bool {
        self.sct() == 2 || self.code().0 == Self::LBA_OUT_OF_RANGE.0
    }

    /// Returns the More bit: the error log has more details.
    #[must_use]
    pub const fn more(self) -> bool {
        self.0 & 1 << 13 != 0
    }

    /// Returns this status with Do Not Retry set.
    #[must_use]
    pub const fn with_dnr(self) -> Self {
        Self(self.0 | DNR)
    }

    /// Returns only type and code, for comparisons.
    #[must_use]
    pub const fn code(self) -> Self {
        Self(self.0 & CODE)
    }

    /// Returns whether the command succeeded, ignoring retry hints.
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.0 & CODE == 0
    }
}

macro_rules! statuses {
    ($($(#[$meta:meta])* $name:ident = $sct:literal, $sc:literal, $text:literal;)*) => {
        impl Status {
            $(
                #[doc = concat!($text, ".")]
                pub const $name: Self = Self::new($sct, $sc);
            )*

            /// Returns the specification's name of the code, if it is known.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.code() {
                    $(Self::$name => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

statuses! {
    SUCCESS = 0, 0x00, "Successful Completion";
    INVALID_OPCODE = 0, 0x01, "Invalid Command Opcode";
    INVALID_FIELD = 0, 0x02, "Invalid Field in Command";
    CID_CONFLICT = 0, 0x03, "Command ID Conflict";
    DATA_TRANSFER_ERROR = 0, 0x04, "Data Transfer Error";
    ABORTED_POWER_LOSS = 0, 0x05, "Commands Aborted due to Power Loss Notification";
    INTERNAL_ERROR = 0, 0x06, "Internal Error";
    ABORTED_BY_REQUEST = 0, 0x07, "Command Abort Requested";
    ABORTED_SQ_DELETED = 0, 0x08, "Command Aborted due to SQ Deletion";
    ABORTED_FAILED_FUSED = 0, 0x09, "Command Aborted due to Failed Fused Command";
    ABORTED_MISSING_FUSED = 0, 0x0a, "Command Aborted due to Missing Fused Command";
    INVALID_NAMESPACE = 0, 0x0b, "Invalid Namespace or Format";
    COMMAND_SEQUENCE_ERROR = 0, 0x0c, "Command Sequence Error";
    INVALID_SGL_SEGMENT_DESCRIPTOR = 0, 0x0d, "Invalid SGL Segment Descriptor";
    INVALID_SGL_DESCRIPTOR_COUNT = 0, 0x0e, "Invalid Number of SGL Descriptors";
    DATA_SGL_LENGTH_INVALID = 0, 0x0f, "Data SGL Length Invalid";
    METADATA_SGL_LENGTH_INVALID = 0, 0x10, "Metadata SGL Length Invalid";
    SGL_DESCRIPTOR_TYPE_INVALID = 0, 0x11, "SGL Descriptor Type Invalid";
    INVALID_CMB_USE = 0, 0x12, "Invalid Use of Controller Memory Buffer";
    INVALID_PRP_OFFSET = 0, 0x13, "PRP Offset Invalid";
    ATOMIC_WRITE_UNIT_EXCEEDED = 0, 0x14, "Atomic Write Unit Exceeded";
    OPERATION_DENIED = 0, 0x15, "Operation Denied";
    SGL_OFFSET_INVALID = 0, 0x16, "SGL Offset Invalid";
    HOST_ID_INCONSISTENT = 0, 0x18, "Host Identifier Inconsistent Format";
    KEEP_ALIVE_EXPIRED = 0, 0x19, "Keep Alive Timer Expired";
    ABORTED_PREEMPT = 0, 0x1b, "Command Aborted due to Preempt and Abort";
    SANITIZE_FAILED = 0, 0x1c, "Sanitize Failed";
    SANITIZE_IN_PROGRESS = 0, 0x1d, "Sanitize In Progress";
    SGL_DATA_BLOCK_GRANULARITY_INVALID = 0, 0x1e, "SGL Data Block Granularity Invalid";
    COMMAND_NOT_SUPPORTED_IN_CMB = 0, 0x1f, "Command Not Supported for Queue in CMB";
    NAMESPACE_WRITE_PROTECTED = 0, 0x20, "Namespace is Write Protected";
    COMMAND_INTERRUPTED = 0, 0x21, "Command Interrupted";
    TRANSIENT_TRANSPORT_ERROR = 0, 0x22, "Transient Transport Error";
    FDP_DISABLED = 0, 0x29, "Flexible Data Placement Disabled";
    LBA_OUT_OF_RANGE = 0, 0x80, "LBA Out of Range";
    CAPACITY_EXCEEDED = 0, 0x81, "Capacity Exceeded";
    NAMESPACE_NOT_READY = 0, 0x82, "Namespace Not Ready";
    RESERVATION_CONFLICT = 0, 0x83, "Reservation Conflict";
    FORMAT_IN_PROGRESS = 0, 0x84, "Format In Progress";
    COMPLETION_QUEUE_INVALID = 1, 0x00, "Completion Queue Invalid";
    INVALID_QUEUE_ID = 1, 0x01, "Invalid Queue Identifier";
    INVALID_QUEUE_SIZE = 1, 0x02, "Invalid Queue Size";
    ABORT_LIMIT_EXCEEDED = 1, 0x03, "Abort Command Limit Exceeded";
    AER_LIMIT_EXCEEDED = 1, 0x05, "Asynchronous Event Request Limit Exceeded";
    INVALID_FIRMWARE_SLOT = 1, 0x06, "Invalid Firmware Slot";
    INVALID_FIRMWARE_IMAGE = 1, 0x07, "Invalid Firmware Image";
    INVALID_INTERRUPT_VECTOR = 1, 0x08, "Invalid Interrupt Vector";
    INVALID_LOG_PAGE = 1, 0x09, "Invalid Log Page";
    INVALID_FORMAT = 1, 0x0a, "Invalid Format";
    INVALID_QUEUE_DELETION = 1, 0x0c, "Invalid Queue Deletion";
    FEATURE_NOT_SAVEABLE = 1, 0x0d, "Feature Identifier Not Saveable";
    FEATURE_NOT_CHANGEABLE = 1, 0x0e, "Feature Not Changeable";
    FEATURE_NOT_NAMESPACE_SPECIFIC = 1, 0x0f, "Feature Not Namespace Specific";
    CONFLICTING_ATTRIBUTES = 1, 0x80, "Conflicting Attributes";
    INVALID_PROTECTION_INFORMATION = 1, 0x81, "Invalid Protection Information";
    READ_ONLY_RANGE = 1, 0x82, "Attempted Write to Read Only Range";
    COMMAND_SIZE_LIMIT_EXCEEDED = 1, 0x83, "Command Size Limit Exceeded";
    ZONE_BOUNDARY_ERROR = 1, 0xb8, "Zone Boundary Error";
    ZONE_IS_FULL = 1, 0xb9, "Zone Is Full";
    ZONE_IS_READ_ONLY = 1, 0xba, "Zone Is Read Only";
    ZONE_IS_OFFLINE = 1, 0xbb, "Zone Is Offline";
    ZONE_INVALID_WRITE = 1, 0xbc, "Zone Invalid Write";
    TOO_MANY_ACTIVE_ZONES = 1, 0xbd, "Too Many Active Zones";
    TOO_MANY_OPEN_ZONES = 1, 0xbe, "Too Many Open Zones";
    INVALID_ZONE_STATE_TRANSITION = 1, 0xbf, "Invalid Zone State Transition";
    WRITE_FAULT = 2, 0x80, "Write Fault";
    UNRECOVERED_READ_ERROR = 2, 0x81, "Unrecovered Read Error";
    GUARD_CHECK_ERROR = 2, 0x82, "End-to-end Guard Check Error";
    APPLICATION_TAG_CHECK_ERROR = 2, 0x83, "End-to-end Application Tag Check Error";
    REFERENCE_TAG_CHECK_ERROR = 2, 0x84, "End-to-end Reference Tag Check Error";
    COMPARE_FAILURE = 2, 0x85, "Compare Failure";
    ACCESS_DENIED = 2, 0x86, "Access Denied";
    DEALLOCATED_OR_UNWRITTEN = 2, 0x87, "Deallocated or Unwritten Logical Block";
    INTERNAL_PATH_ERROR = 3, 0x00, "Internal Path Error";
    ASYMMETRIC_ACCESS_PERSISTENT_LOSS = 3, 0x01, "Asymmetric Access Persistent Loss";
    ASYMMETRIC_ACCESS_INACCESSIBLE = 3, 0x02, "Asymmetric Access Inaccessible";
    ASYMMETRIC_ACCESS_TRANSITION = 3, 0x03, "Asymmetric Access Transition";
    CONTROLLER_PATHING_ERROR = 3, 0x60, "Controller Pathing Error";
    HOST_PATHING_ERROR = 3, 0x70, "Host Pathing Error";
    HOST_ABORTED = 3, 0x71, "Command Aborted By Host";
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}/{:02x}h", self.sct(), self.sc())?;
        f.write_str(" ")?;
        f.write_str(self.name().unwrap_or("unknown status"))?;
        if self.dnr() {
            f.write_str(" (do not retry)")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Status({self})")
    }
}
