//! Remarks on a drive for its owner, before it fails commands or is slow. They are made when a
//! controller is set up.

use std::fmt;

use nvme_spec::ids::Nsid;

/// A property of a drive, or a state that it is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remark {
    /// A sanitize operation is in progress, this far (Base 2.1, "Sanitize Status": SPROG).
    Sanitizing {
        /// Progress in percent.
        percent: u8,
    },
    /// The last sanitize operation failed.
    SanitizeFailed,
    /// A namespace is write protected (NSATTR bit 0).
    WriteProtected {
        /// The namespace.
        nsid: Nsid,
    },
    /// Autonomous power state transitions were on (feature 0Ch), and are off now.
    PowerTransitions,
    /// The drive prefers memory of the host for its tables (HMPRE).
    HostMemoryBuffer {
        /// Preferred size in bytes.
        bytes: u64,
    },
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sanitizing { percent } => write!(
                f,
                "it is being sanitized ({percent} % done) and fails reads and writes meanwhile; \
                 wait for its end (nvme sanitize-log)"
            ),
            Self::SanitizeFailed => f.write_str(
                "its last sanitize operation failed, after which it fails reads and writes; start \
                 another one, or have it leave that state (nvme sanitize)",
            ),
            Self::WriteProtected { nsid } => write!(
                f,
                "namespace {nsid} is write protected: writes fail; lift it (nvme set-feature, \
                 feature 84h), or open the store to be read"
            ),
            Self::PowerTransitions => f.write_str(
                "it was set to save power by itself (APST), which delays the first commands after \
                 a pause; that is switched off until its next reset",
            ),
            Self::HostMemoryBuffer { bytes } => write!(
                f,
                "it prefers {} MiB of the host's memory (HMB), which this driver does not lend: \
                 random reads are slower than with the kernel's driver",
                bytes >> 20
            ),
        }
    }
}
