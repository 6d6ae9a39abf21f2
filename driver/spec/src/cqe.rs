//! The completion queue entry (Base, "Common Completion Queue Entry Format").

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{ids::Cid, status::Status};

/// Completion queue entry, 16 bytes. The last dword holds the phase and is written last.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C, align(16))]
pub struct Cqe {
    /// Command specific result.
    pub dw0: u32,
    /// Command specific result, high dword.
    pub dw1: u32,
    /// Submission queue head: entries before it have been fetched and may be reused.
    pub sqhd: u16,
    /// Submission queue of the command.
    pub sqid: u16,
    /// Command identifier.
    pub cid: u16,
    /// Phase in bit 0, status in bits 15:1.
    pub status_phase: u16,
}

const _: () = assert!(size_of::<Cqe>() == 16);

impl Cqe {
    /// Builds an entry.
    #[must_use]
    pub const fn new(
        result: u32,
        sqhd: u16,
        sqid: u16,
        cid: Cid,
        status: Status,
        phase: bool,
    ) -> Self {
        let status_phase = status.0 << 1 | phase as u16;
        Self { dw0: result, dw1: 0, sqhd, sqid, cid: cid.0, status_phase }
    }

    /// Returns the phase tag, which inverts with each pass of the controller through the queue.
    #[must_use]
    pub const fn phase(&self) -> bool {
        self.status_phase & 1 != 0
    }

    /// Returns the status field without the phase.
    #[must_use]
    pub const fn status(&self) -> Status {
        Status(self.status_phase >> 1)
    }

    /// Returns the command identifier.
    #[must_use]
    pub const fn cid(&self) -> Cid {
        Cid(self.cid)
    }
}
