//! What became of an I/O context, decoded from the kernel's 32-bit word.

use std::fmt;

use crate::abi;

/// What became of one I/O context, or of the worst part of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum IoStatus {
    /// Nothing failed.
    #[default]
    Ok,
    /// The controller completed the command with an error.
    Nvme(NvmeStatus),
    /// No completion in time. The device may still do the transfer until its queue was deleted or
    /// the controller reset.
    Timeout,
    /// Never given to the device, because the ring was stopped.
    Cancelled,
    /// The queue failed before the command completed. The device may still do the transfer until
    /// its queue was deleted or the controller reset.
    Fault,
    /// Never given to the device: the block, the file or the range is wrong.
    Invalid,
    /// Nothing was reported as failed, but not everything was reported as done: a defect of the
    /// kernel, which must not be taken for success.
    Incomplete,
    /// A word that no kernel of this version writes.
    Unknown(u32),
}

impl IoStatus {
    /// Decodes a word of a status array, or the high half of [`abi::Iocb::error`].
    #[must_use]
    pub fn decode(word: u32) -> Self {
        let code = word & 0x00ff_ffff;
        match (word & 0xff00_0000, code) {
            (0, 0) => Self::Ok,
            (abi::STATUS_NVME, 1..=0x7fff) => Self::Nvme(NvmeStatus(code as u16)),
            (abi::STATUS_TIMEOUT, _) => Self::Timeout,
            (abi::STATUS_CANCELLED, _) => Self::Cancelled,
            (abi::STATUS_FAULT, _) => Self::Fault,
            (abi::STATUS_INVALID, _) => Self::Invalid,
            _ => Self::Unknown(word),
        }
    }

    /// Whether nothing failed.
    #[must_use]
    pub fn is_ok(self) -> bool {
        self == Self::Ok
    }

    /// Whether the device may still write to or read from the memory of the transfer. It must not be
    /// used for anything else before the ring was stopped and the controller recovered.
    #[must_use]
    pub fn may_still_transfer(self) -> bool {
        matches!(self, Self::Timeout | Self::Fault | Self::Incomplete | Self::Unknown(_))
    }
}

impl fmt::Display for IoStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.write_str("done"),
            Self::Nvme(status) => write!(f, "the controller reported {status}"),
            Self::Timeout => f.write_str(
                "no completion in time; the device may still transfer until it is recovered",
            ),
            Self::Cancelled => f.write_str("cancelled before it reached the device"),
            Self::Fault => f.write_str(
                "the queue failed first; the device may still transfer until it is recovered",
            ),
            Self::Invalid => f.write_str("not sent: block, file or range is outside its bounds"),
            Self::Incomplete => {
                f.write_str("the kernel did less than it was asked, without an error")
            }
            Self::Unknown(word) => write!(f, "a status this version does not know ({word:#010x})"),
        }
    }
}

/// The status field of an NVMe completion without the phase bit: DNR (bit 14), More (13), Command
/// Retry Delay (12:11), Status Code Type (10:8), Status Code (7:0). NVMe Base 2.0, figure 92.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NvmeStatus(pub u16);

impl NvmeStatus {
    /// Status Code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0 as u8
    }

    /// Status Code Type.
    #[must_use]
    pub const fn code_type(self) -> u8 {
        (self.0 >> 8) as u8 & 7
    }

    /// Do Not Retry.
    #[must_use]
    pub const fn do_not_retry(self) -> bool {
        self.0 & 1 << 14 != 0
    }

    /// The specification's name of the codes that I/O commands usually meet.
    fn name(self) -> Option<&'static str> {
        Some(match (self.code_type(), self.code()) {
            (0, 0x01) => "Invalid Command Opcode",
            (0, 0x02) => "Invalid Field in Command",
            (0, 0x03) => "Command ID Conflict",
            (0, 0x04) => "Data Transfer Error",
            (0, 0x05) => "Aborted due to Power Loss Notification",
            (0, 0x06) => "Internal Error",
            (0, 0x07) => "Command Abort Requested",
            (0, 0x08) => "Aborted due to SQ Deletion",
            (0, 0x0b) => "Invalid Namespace or Format",
            (0, 0x0d) => "Invalid SGL Segment Descriptor",
            (0, 0x0e) => "Invalid Number of SGL Descriptors",
            (0, 0x0f) => "Data SGL Length Invalid",
            (0, 0x11) => "SGL Descriptor Type Invalid",
            (0, 0x13) => "Invalid PRP Offset",
            (0, 0x16) => "SGL Offset Invalid",
            (0, 0x20) => "Namespace is Write Protected",
            (0, 0x80) => "LBA Out of Range",
            (0, 0x81) => "Capacity Exceeded",
            (0, 0x82) => "Namespace Not Ready",
            (2, 0x80) => "Write Fault",
            (2, 0x81) => "Unrecovered Read Error",
            (2, 0x82) => "End-to-end Guard Check Error",
            (2, 0x85) => "Compare Failure",
            (2, 0x86) => "Access Denied",
            (2, 0x87) => "Deallocated or Unwritten Logical Block",
            (3, _) => "a path-related error",
            (7, _) => "a vendor-specific error",
            _ => return None,
        })
    }
}

impl fmt::Display for NvmeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name().unwrap_or("a status"))?;
        write!(f, " (SCT {:#x}, SC {:#04x}", self.code_type(), self.code())?;
        f.write_str(if self.do_not_retry() { ", do not retry)" } else { ")" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_decodes() {
        assert_eq!(IoStatus::decode(abi::STATUS_OK), IoStatus::Ok);
        let read_error = IoStatus::decode(abi::STATUS_NVME | 0x4281);
        assert_eq!(read_error, IoStatus::Nvme(NvmeStatus(0x4281)));
        assert_eq!(
            read_error.to_string(),
            "the controller reported Unrecovered Read Error (SCT 0x2, SC 0x81, do not retry)"
        );
        assert_eq!(IoStatus::decode(abi::STATUS_TIMEOUT), IoStatus::Timeout);
        assert_eq!(IoStatus::decode(abi::STATUS_CANCELLED), IoStatus::Cancelled);
        assert_eq!(IoStatus::decode(abi::STATUS_FAULT), IoStatus::Fault);
        assert_eq!(IoStatus::decode(abi::STATUS_INVALID), IoStatus::Invalid);
    }

    #[test]
    fn what_is_not_known_is_never_taken_for_success() {
        for word in [1, 0x7fff, abi::STATUS_NVME, abi::STATUS_NVME | 0x8000, 0xdead_beef] {
            assert_eq!(IoStatus::decode(word), IoStatus::Unknown(word), "{word:#x}");
            assert!(!IoStatus::decode(word).is_ok());
        }
    }

    #[test]
    fn only_what_never_reached_or_left_the_device_is_safe() {
        assert!(IoStatus::Timeout.may_still_transfer());
        assert!(IoStatus::Fault.may_still_transfer());
        for safe in [IoStatus::Ok, IoStatus::Cancelled, IoStatus::Invalid] {
            assert!(!safe.may_still_transfer());
        }
    }
}
