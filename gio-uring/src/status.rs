//! Outcome of an I/O context, decoded from the kernel's 32-bit word.

use std::fmt;

use nvme_spec::status::Status;

use crate::abi;

/// Outcome of one I/O context, or the worst outcome within an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum IoStatus {
    /// Nothing failed.
    #[default]
    Ok,
    /// The controller completed the command with an error.
    Nvme(Status),
    /// No completion in time. The device may still perform the transfer until its queue is deleted
    /// or the controller reset.
    Timeout,
    /// Never submitted to the device, because the ring was stopped.
    Cancelled,
    /// The queue failed before the command completed. The device may still perform the transfer
    /// until its queue is deleted or the controller reset.
    Fault,
    /// Never submitted to the device: the block, file or range is out of bounds.
    Invalid,
    /// The data read does not match its checksum. The transfer itself has ended.
    Checksum,
    /// No failure was reported, but not all objects were reported as transferred: a defect of the
    /// kernel, which must not be treated as success.
    Incomplete,
    /// A code that no kernel of this version writes.
    Unknown(u32),
}

impl IoStatus {
    /// Decodes a word of a status array, or the high half of [`abi::Iocb::error`].
    #[must_use]
    pub fn decode(word: u32) -> Self {
        let code = word & 0x00ff_ffff;
        match (word & 0xff00_0000, code) {
            (0, 0) => Self::Ok,
            (abi::STATUS_NVME, 1..=0x7fff) => Self::Nvme(Status(code as u16)),
            (abi::STATUS_TIMEOUT, _) => Self::Timeout,
            (abi::STATUS_CANCELLED, _) => Self::Cancelled,
            (abi::STATUS_FAULT, _) => Self::Fault,
            (abi::STATUS_INVALID, _) => Self::Invalid,
            (abi::STATUS_CHECKSUM, _) => Self::Checksum,
            _ => Self::Unknown(word),
        }
    }

    /// Returns true for [`IoStatus::Ok`].
    #[must_use]
    pub fn is_ok(self) -> bool {
        self == Self::Ok
    }

    /// Returns true if the device may still access the memory of the transfer. The memory must not
    /// be reused before the ring was stopped and the controller recovered.
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
            Self::Checksum => f.write_str("read, but its bytes differ from what was written"),
            Self::Incomplete => {
                f.write_str("the kernel did less than it was asked, without an error")
            }
            Self::Unknown(word) => write!(f, "a status this version does not know ({word:#010x})"),
        }
    }
}

#[cfg(test)]
mod tests;
